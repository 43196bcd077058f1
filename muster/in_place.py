"""Runs a script's `main` again in the same process when the round has ended. `muster.worker.in_place` loads it.

The agent's half is `muster.agent.features.in_place`. The process listens at the abstract socket `muster-<pid>` and says
so in its slot of the status page; then the agent connects. When the round ends, the agent asks the process to leave it.
A thread of this module then makes the main thread leave `main`:

- It signals the main thread every 0.2 s. The handler raises an exception, but only while `main` is on the stack and
  nothing uninterrupted runs. Code of the script may swallow it, so it comes again.
- A wait inside torch does not return to Python. So the thread shuts connections: that to the store at once, those to
  other hosts after 0.3 s, and all of the process group after 1 s. Mostly nothing of this is needed, because a process
  that was killed, or has left, has closed its own.

If `main` raises an error that the loss of another rank explains, the process waits for the agent's word. Having left
`main`, it destroys the process groups, says so, and waits until the agent starts it as a worker of the next round, with
new variables and streams. Then it calls `main` again. A process that the agent starts as a spare waits there before its
first call.
"""

import contextlib
import functools
import gc
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, Final, NamedTuple, ParamSpec, TypeVar

from muster._shared.contract import Env, has_feature

P = ParamSpec("P")
R = TypeVar("R")

_PEER = struct.Struct("3i")
_MESSAGE_BYTES: Final = 1 << 20
_SIGNAL_EVERY_S: Final = 0.2
_OTHER_HOSTS_S: Final = 0.3
_ALL_S: Final = 1.0
_WORD_LIMIT_S: Final = 5.0
"""How long an error that another rank's loss explains waits for the agent's word. Then it is the script's own."""
_LOST_PEER: Final = ("gloo", "NCCL", "onnection", "peer", "ocket", "TCPStore", "Broken pipe")
"""What texts of torch's errors have when another process of the group is gone."""

_WHOLE: Final = (("torch.utils.data.dataloader", "__init__"), ("multiprocessing.process", "start"))
"""Functions that nothing interrupts, by module: a process that is just started would belong to nobody, and live on."""

_BOUND: Final = (
    ("torch.utils.data.distributed", "DistributedSampler", "__iter__", "make the sampler in main"),
    ("muster.data", "Sampler", "read", "make the sampler in main"),
    ("torch.distributed.fsdp", "FSDPModule", "__call__", "call fully_shard in main, on a new module"),
    ("torch.distributed.device_mesh", "DeviceMesh", "get_group", "make the mesh in main"),
)
"""Objects that belong to one rank and world size: module, class, a method without which they cannot be used, advice."""


class LeaveRound(BaseException):
    """Raised in the main thread so that `main` ends. It is no `Exception`: a script's own handlers let it pass."""


class Slot(NamedTuple):
    """What `muster.worker` does with this rank's slot of the status page."""

    is_managed: Callable[[], bool]
    note_stays: Callable[[bool], None]
    """Says whether this process can leave its round and take part in the next one."""
    look_again: Callable[[], None]
    """Looks for the slot of another round at the next call."""
    say: Callable[[str], None]
    """Prints a line."""


def decorate(main: Callable[P, R], slot: Slot) -> Callable[P, R]:
    """Return what `worker.in_place` returns."""

    @functools.wraps(main)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        process = _find_process(slot)
        return main(*args, **kwargs) if process is None else process.run(main, args, kwargs)

    return run


def _find_process(slot: Slot) -> "Process | None":
    """Return what runs `main` here; None if it is called once, as without muster."""
    if os.environ.get(Env.SPARE) != "1" and not slot.is_managed():
        return None
    why = _find_obstacle()
    if why:
        if os.environ.get("RANK", "0") == "0":
            slot.say(f"in_place: {why}: main is called once, and a restart starts the process again")
        return None
    return Process(slot)


def _find_obstacle() -> str:
    if not has_feature("in_place", os.environ):
        return "this agent cannot keep workers"
    if threading.current_thread() is not threading.main_thread():
        return "only the main thread can be made to leave main"
    if Process.known is not None:
        return "another main runs in place already"
    groups: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if groups is not None and groups.is_initialized():
        return "a process group exists already (init_process_group belongs into main)"
    if _find_program() is None:
        return "this process was not started as a worker of a script"
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return "it is not used with GPUs, because it never ran with NCCL"
    return ""


def _find_program() -> "dict[str, Any] | None":
    """Return the names of the module that runs this script (`agent.workers.program`), which is no import of it."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  # it is not in `sys.modules`
    while frame is not None:
        if "muster_frames" in frame.f_globals and "renew" in frame.f_globals:
            return frame.f_globals
        frame = frame.f_back
    return None


class Process:
    """This process, through several rounds."""

    known: "Process | None" = None
    """The one whose `main` runs."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._is_waiting = False
        """Whether this process waits for its next round."""
        self._program = _find_program() or {}
        self._run_code = Process.run.__code__
        self._main_thread = threading.main_thread()
        self._signum = signal.SIGRTMAX - 6
        self._is_inside = False
        """Whether `main` may be on the stack."""
        self.is_leaving = False
        self.uninterrupted = 0
        """How many `uninterrupted` blocks the main thread is in."""
        self._told = threading.Event()
        """Set when the agent asks to leave."""
        self._started: threading.Event = threading.Event()
        """Set when the agent has sent what the next round's worker is."""
        self._start: dict[str, Any] = {}
        self._start_fds: list[int] = []
        self._own_names: frozenset[str] = frozenset()
        """The variables that the agent has set for the last start."""
        self._known: frozenset[int] = frozenset()
        """The sockets that existed before `main`, by inode."""
        self._link: socket.socket | None = None
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(f"\0muster-{os.getpid()}")
            listener.listen(1)
            self._listener = listener.dup()
        self._thread = threading.Thread(target=self._serve, name="muster-in-place", daemon=True)

    def run(self, main: Callable[..., R], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> R:
        """Call `main` until it returns, or raises what is its own."""
        Process.known = self
        self._thread.start()
        signal.signal(self._signum, self._on_signal)
        if os.environ.get(Env.SPARE) == "1":
            self._wait_for_start()
        try:
            while True:
                self._slot.note_stays(True)
                gc.freeze()
                self._known = frozenset(_list_sockets())
                self._is_inside = True
                try:
                    if not self.is_leaving:
                        return main(*args, **kwargs)
                except LeaveRound:
                    pass
                except Exception as error:
                    self._is_inside = False
                    if not self._is_explained(error):
                        raise
                    _forget_error(error)
                finally:
                    self._is_inside = False
                self._leave()
                place = _read_place()
                self._wait_for_start()
                if _read_place() != place:
                    refuse_bound(place)
        finally:
            self._slot.note_stays(False)
            self._close()

    def _close(self) -> None:
        """End the thread, so that nothing of this is left when the process ends."""
        Process.known = None
        for one in (self._listener, self._link):
            if one is not None:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        if self._link is not None:
            self._link.close()

    def _is_explained(self, error: Exception) -> bool:
        """Return whether the end of the round explains an error of `main`; wait for the agent's word if it may."""
        if self.is_leaving:
            return True
        if not isinstance(error, RuntimeError) or not any(part in str(error) for part in _LOST_PEER):
            return False
        return self._told.wait(_WORD_LIMIT_S)

    # -- the thread -------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Do what the agent says. Its end ends this process, by the signal that its death sends."""
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:  # `_close`
                return
            pid, uid, _gid = _PEER.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
            if pid == os.getppid() and uid == os.geteuid():
                break
            link.close()
        self._listener.close()
        self._link = link
        while True:
            try:
                message, fds, _flags, _address = socket.recv_fds(link, _MESSAGE_BYTES, 2)
            except OSError:
                message = b""
            if not message:
                if self._is_waiting:
                    os._exit(0)  # the next round starts another process
                return
            told = json.loads(message)
            if "leave" in told:
                self.is_leaving = True
                self._told.set()
                threading.Thread(target=self._press, name="muster-leave", daemon=True).start()
            else:
                self._start, self._start_fds = told["start"], fds
                self.is_leaving = False  # here: the agent may already say that this round has ended, too
                self._told.clear()
                self._started.set()

    def _press(self) -> None:
        """Make the main thread leave `main`."""
        began_s = time.monotonic()
        _shut(port=os.environ.get("MASTER_PORT"), known=self._known)
        while self.is_leaving and self._is_inside:
            with contextlib.suppress(ProcessLookupError):
                signal.pthread_kill(self._main_thread.ident or 0, self._signum)
            time.sleep(_SIGNAL_EVERY_S)
            passed_s = time.monotonic() - began_s
            if passed_s > _OTHER_HOSTS_S and self.is_leaving and self._is_inside and not self.uninterrupted:
                # Shutting the write side, or all connections at once, made gloo lose wake-ups now and then.
                _shut(known=self._known, only_others=passed_s < _ALL_S)

    def _on_signal(self, _signum: int, frame: FrameType | None) -> None:
        if not (self.is_leaving and self._is_inside) or self.uninterrupted:
            return
        below: FrameType | None = None
        while frame is not None and frame.f_code is not self._run_code:
            if (frame.f_globals.get("__name__"), frame.f_code.co_name) in _WHOLE:
                return  # the next signal comes soon
            below, frame = frame, frame.f_back
        if frame is not None and below is not None:
            _shut(known=self._known, whole=True)  # what `main` destroys while it ends waits for nobody
            raise LeaveRound

    # -- between two rounds -----------------------------------------------------------------------------------------

    def _leave(self) -> None:
        """Release what belongs to the round, and say that this process has left it."""
        for name in ("last_exc", "last_type", "last_value", "last_traceback"):
            if hasattr(sys, name):
                delattr(sys, name)
        snapshots: Any = sys.modules.get("muster.snapshots")
        if snapshots is not None:
            snapshots.end_round()
        _shut(known=self._known, whole=True)
        _destroy_groups()
        _flush()
        for number in (1, 2):  # what is printed from now on belongs to the next round
            fd = os.memfd_create("muster-output")
            os.dup2(fd, number)
            os.close(fd)
        self._is_waiting = True
        if self._link is not None:
            self._link.send(b"left")
        gc.collect()  # of what `main` has made, because the rest is frozen: an old DDP keeps its buckets

    def _wait_for_start(self) -> None:
        self._is_waiting = True
        self._started.wait()
        self._is_waiting = False
        start, fds = self._start, self._start_fds
        self._started.clear()
        _flush()
        for number, fd in zip((1, 2), fds, strict=True):
            printed = os.pread(number, os.fstat(number).st_size, 0)
            os.dup2(fd, number)
            os.close(fd)
            with contextlib.suppress(OSError):
                while printed:
                    printed = printed[os.write(number, printed) :]
        for name in self._own_names - start["env"].keys():
            os.environ.pop(name, None)
        os.environ.update(start["env"])
        self._own_names = frozenset(start["env"])
        os.environ.pop(Env.SPARE, None)
        self._slot.look_again()
        self._program["renew"](start["error_file"], start["stack_file"], start["crash_file"])


@contextlib.contextmanager
def pass_uninterrupted() -> Iterator[None]:
    """See `worker.uninterrupted`."""
    process = Process.known
    if process is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    process.uninterrupted += 1
    try:
        yield
    finally:
        process.uninterrupted -= 1
    if process.is_leaving and not process.uninterrupted:
        raise LeaveRound


def _destroy_groups() -> None:
    """Make torch as if it had never had a process group."""
    groups: Any = sys.modules.get("torch.distributed.distributed_c10d")
    with contextlib.suppress(Exception):
        if groups is not None and groups.is_initialized():
            groups.destroy_process_group()
        if groups is not None:
            groups._world.group_count = 0  # noqa: SLF001  # an interrupted init has counted: keys in the store have it


def _read_place() -> tuple[str, str]:
    return os.environ["RANK"], os.environ["WORLD_SIZE"]


def refuse_bound(place: tuple[str, str]) -> None:
    """Let what was made before, for another rank or world size, raise an error when it is used.

    It would be wrong without an error: a sampler would return the samples of the old world, and a mesh, which finds its
    groups by their names, would use those of the new round.
    """
    kinds: list[tuple[type, str, str]] = [
        (getattr(sys.modules[module], name), method, advice)
        for module, name, method, advice in _BOUND
        if module in sys.modules
    ]
    known: dict[type, type | None] = {}
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()  # what a warm worker has got from its template
    for each in gc.get_objects():
        own = type(each)
        if own not in known:
            found = [(method, advice) for kind, method, advice in kinds if issubclass(own, kind)]
            known[own] = _derive_refusing(own, *found[0], place) if found else None
        refusing = known[own]
        if refusing is not None:
            each.__class__ = refusing
            each._muster_bound = _read_bound(each)  # noqa: SLF001  # our own
    if is_frozen:
        gc.freeze()  # its end would take 2 s


def _read_bound(sampler: object) -> list[object]:
    return [getattr(sampler, name, None) for name in ("num_replicas", "rank", "_world_size", "_rank")]


def _derive_refusing(own: type, method: str, advice: str, place: tuple[str, str]) -> type:
    def refuse(self: Any, *args: object, **kwargs: object) -> object:
        if _read_bound(self) == self._muster_bound:  # the script has not set them anew
            now = " of ".join(_read_place())
            raise RuntimeError(f"{own.__name__} was made for rank {' of '.join(place)}, this is rank {now}: {advice}")
        return getattr(own, method)(self, *args, **kwargs)

    return type(own.__name__, (own,), {"__module__": own.__module__, method: refuse})


def _forget_error(error: BaseException) -> None:
    """Drop the frames of an error, which hold the process group."""
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__ = None
        seen = seen.__context__


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _list_sockets() -> dict[int, int]:
    """Return the descriptors of this process's sockets, by inode."""
    found: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:["):
                found[int(target[8:-1])] = int(name)
    return found


def _shut(*, known: frozenset[int], port: str | None = None, only_others: bool = False, whole: bool = False) -> None:
    """Shut connections that were made since `main` began.

    Never a listening socket: gloo would end the process.

    Args:
        known: the sockets from before.
        port: only those to this port; None: to any.
        only_others: only those to other hosts.
        whole: both directions. Otherwise only reading, which ends a wait of gloo's most surely.
    """
    for inode, fd in _list_sockets().items():
        if inode in known:
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as one:
            if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
                continue
            peer = one.getpeername()
            if port is not None and str(peer[1]) != port:
                continue
            if only_others and peer[0] == one.getsockname()[0]:
                continue
            one.shutdown(socket.SHUT_RDWR if whole else socket.SHUT_RD)
