"""What can happen to a job that is rehearsed: each fault with what it does and undoes, and what it needs.

`FAULTS` lists all, in the order in which they are tried. A fault knows nothing of the command line or of a scheduler,
so that tests cause the same ones in agents that they have started themselves. Those of a network, a disk or the memory
need root. If one cannot be caused, the table says why.
"""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final, Protocol, TypeAlias

from muster._shared import processes
from muster.cli.rehearse.journal import Journal, Undo, stopped


class Moment(str, Enum):
    """When a fault happens. The step is chosen by the seed."""

    FIRST = "first"
    """In the first step: the workers run, and none has done a step."""
    BETWEEN = "between"
    """At a step in the middle, after the first checkpoint."""
    CHECKPOINT = "checkpoint"
    """While a checkpoint is written."""
    END = "end"
    """Within the last steps."""


class NodeSetting(str, Enum):
    """Where the nodes of a run are."""

    ORDINARY = "ordinary"
    """Processes of this machine, in a folder of it. Only this one can be made without root."""
    NETNS = "namespaces"
    """Each in a network namespace of its own."""
    SMALL_DISK = "small disk"
    """The run's folder is a small file system in memory."""
    OWN_DISK = "own disk"
    """The run's folder is a file system of its own, which can be frozen."""
    CGROUP = "cgroup"
    """Processes of this machine. A cgroup limits the memory of one."""


class NotPossibleError(Exception):
    """The fault cannot be caused in this job, or on this machine. The message says why."""


class Scene(Protocol):
    """The job, as a fault sees it."""

    rank: int
    """The global rank that the fault happens to."""
    node: int
    """The index of the node that it happens to, if that is not given: not node 0."""
    nodes: int
    journal: Journal
    disk: Path
    """The folder with the run's checkpoints and logs."""

    def find_worker(self, rank: int) -> int:
        """Return the process of a global rank.

        Raises:
            NotPossibleError: it does not run.
        """
        ...

    def find_agent(self, node: int) -> int:
        """Return the agent's process of a node. Raises as `find_worker`."""
        ...

    def cut(self, node: int) -> AbstractContextManager[None]:
        """Cut a node off the network of the others, for as long as the context lasts."""
        ...

    def has_all_workers(self) -> bool:
        """Return whether all ranks run that are known to."""
        ...

    def count_steps(self, rank: int) -> int:
        """Return how many steps a global rank has done."""
        ...

    @property
    def longest_step_s(self) -> float:
        """The longest time between two steps of this run so far."""
        ...


Course: TypeAlias = Generator[float, None, None]
"""The course of a fault: each item is how many seconds it leaves the job alone before it goes on.

It ends when the fault is over. If it is closed before, it undoes what it has done.
"""
FOR_EVER = float("inf")


@dataclass(frozen=True)
class Fault:
    """One kind of fault."""

    name: str
    title: str
    """What happens, in a few words."""
    cause: Callable[[Scene], Course]
    live_signal: tuple[str, int] | None = None
    """What gets which signal in a job that runs: "rank", "agent" or "node". None: it cannot be caused there.

    Of a node it is the process that the scheduler has started.
    """
    moments: tuple[Moment, ...] = (Moment.BETWEEN,)
    least_nodes: int = 1
    needs_hang_watch: bool = False
    """The job ends its attempt only if it has a hang timeout."""
    setting: NodeSetting = NodeSetting.ORDINARY
    is_quick: bool = False
    """`--quick` tries it: no hang must be noticed first."""


def at_once(act: Callable[[Scene], None]) -> Callable[[Scene], Course]:
    """Return the course of a fault that is over when it has been caused."""

    def cause(scene: Scene) -> Course:
        act(scene)
        yield from ()

    return cause


def send(pid: int, signum: int) -> None:
    """Send a signal.

    Raises:
        NotPossibleError: the process has ended.
    """
    try:
        os.kill(pid, signum)
    except ProcessLookupError as error:
        raise NotPossibleError(f"process {pid} had ended before") from error


def _signal(target: str, signum: int) -> tuple[Callable[[Scene], Course], tuple[str, int]]:
    """Return `cause` and `live_signal` of a fault that is a signal."""

    def find(scene: Scene) -> int:
        if target == "rank":
            return scene.find_worker(scene.rank)
        agent = scene.find_agent(scene.node)
        return agent if target == "agent" else find_guard(agent)

    return at_once(lambda scene: send(find(scene), signum)), (target, signum)


def _stop(scene: Scene) -> Course:
    """Stop the rank. It goes on at the end at the latest."""
    pid = scene.find_worker(scene.rank)
    with scene.journal.keep(stopped(pid)):
        send(pid, signal.SIGSTOP)
        yield FOR_EVER


_STILL_S = 0.5
"""While another rank is stopped, one that has done no step for this long beyond the longest step waits for it."""
_LOOKS = 40


def _stop_in_collective(scene: Scene) -> Course:
    """Stop the rank where it waits for another one."""
    other = 1 if scene.rank == 0 else 0
    pid, other_pid = scene.find_worker(scene.rank), scene.find_worker(other)
    if not scene.count_steps(scene.rank):
        raise NotPossibleError("a rank that has done no step may be anywhere: name another moment")
    with scene.journal.keep(stopped(other_pid)):
        send(other_pid, signal.SIGSTOP)
        for _ in range(_LOOKS):
            before = scene.count_steps(scene.rank)
            yield scene.longest_step_s + _STILL_S
            if scene.count_steps(scene.rank) == before:
                break
        else:
            raise NotPossibleError("ranks do not wait for each other: the script has no collective in its steps")
        with scene.journal.keep(stopped(pid)):
            send(pid, signal.SIGSTOP)
            send(other_pid, signal.SIGCONT)
            yield FOR_EVER


_PIECE_S = 0.02
SLOW_S = 10.0


def _slow_down(scene: Scene) -> Course:
    """Stop the rank again and again, until the time is over or it has ended."""
    pid = scene.find_worker(scene.rank)
    with scene.journal.keep(stopped(pid)):
        for count in range(int(SLOW_S / _PIECE_S)):
            try:
                send(pid, signal.SIGCONT if count % 2 else signal.SIGSTOP)
            except NotPossibleError:
                return  # the script has ended
            yield _PIECE_S


def _kill_loader(scene: Scene) -> None:
    """Kill one of the loaders of a rank, or of another one if it has none."""
    for worker in _list_workers(scene):
        loaders = [pid for pid in processes.list_descendants(worker) if _is_loader(pid, worker)]
        if loaders:
            send(loaders[-1], signal.SIGKILL)
            return
    raise NotPossibleError("no rank has a process that loads its data (a DataLoader with num_workers)")


def _list_workers(scene: Scene) -> Iterator[int]:
    yield scene.find_worker(scene.rank)
    with contextlib.suppress(NotPossibleError):
        yield from map(scene.find_worker, itertools.count())


def _is_loader(pid: int, worker: int) -> bool:
    """Return whether `multiprocessing` has started it for the program: forked, spawned, or forked by its fork server.

    The server itself and the resource tracker have other words.
    """
    command = processes.read_command(pid)
    if b"multiprocessing.forkserver" in command:
        stat = processes.read_stat(pid)
        return stat is not None and processes.read_command(int(stat[1])) == command
    return b"--multiprocessing-fork" in command or command == processes.read_command(worker) != b""


def find_guard(agent_pid: int) -> int:
    """Return the process that a scheduler has started for a node: the parent of its agent.

    Raises:
        NotPossibleError: the agent has ended.
    """
    stat = processes.read_stat(agent_pid)
    if stat is None:
        raise NotPossibleError(f"agent {agent_pid} had ended before")
    return int(stat[1])


def kill_nodes(*agent_pids: int) -> None:
    """Kill the guard of each agent first, so that nothing tidies up, then all that is below it.

    Raises:
        NotPossibleError: an agent has ended.
    """
    for guard in map(find_guard, agent_pids):
        processes.send_signal([guard, *processes.list_descendants(guard)], signal.SIGKILL)


def _lose(choose: Callable[[Scene], Iterable[int]]) -> Callable[[Scene], Course]:
    return at_once(lambda scene: kill_nodes(*map(scene.find_agent, choose(scene))))


def _cut_for(seconds: float) -> Callable[[Scene], Course]:
    """Return the course of a node that is cut off for a while. It is lost after 5 s of silence."""

    def cause(scene: Scene) -> Course:
        with scene.cut(scene.node):
            yield seconds

    return cause


FULL_S = 5.0
_FULL_LOOK_S = 0.1
_PIECE = bytes(1 << 16)


def _fill_disk(scene: Scene) -> Course:
    """Fill what is left of the run's own disk."""
    path = scene.disk / "filler"
    try:
        with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
            while file.write(_PIECE):
                pass
        for _ in range(int(FULL_S / _FULL_LOOK_S)):
            yield _FULL_LOOK_S
            if not scene.has_all_workers():
                break  # longer ones use up the restarts
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)


_FROZEN_S = 0.9
_THAWED_S = 0.1


def _slow_disk_down(scene: Scene) -> Course:
    """Freeze and thaw the run's own file system."""
    path = str(scene.disk)
    for _ in range(int(SLOW_S / (_FROZEN_S + _THAWED_S))):
        with scene.journal.keep(Undo("thaw", (path,))):
            done = subprocess.run(["fsfreeze", "--freeze", path], capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise NotPossibleError(f"its file system cannot be frozen: {done.stderr.strip()}")
            yield _FROZEN_S
        yield _THAWED_S


_LIMIT_BYTES: Final = 64 << 20
_PLACES: Final = (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max"))
"""The places of version 1 and 2."""
_EATER: Final = """
open(sys.argv[1], "w").write("0")
held = []
while os.getppid() == int(sys.argv[2]):
    held.append(bytearray(b"1") * (1 << 20))
    time.sleep(0.001)
"""
_LIMIT_S = 20.0


def _take_memory(scene: Scene) -> Course:
    """Let the memory of the rank's cgroup run out."""
    pid = scene.find_worker(scene.rank)
    mount, name = next(((mount, name) for mount, name in _PLACES if os.path.exists(f"{mount}/cgroup.procs")), ("", ""))
    if not mount:
        raise NotPossibleError("it needs a cgroup with a limit of memory")
    folder = Path(mount, f"muster-rehearsal-{os.getpid()}")
    with scene.journal.keep(Undo("cgroup", (str(folder),))):
        try:
            folder.mkdir()
            (folder / name).write_text(str(_LIMIT_BYTES))
            Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
            (folder / "cgroup.procs").write_text(str(pid))
        except OSError as error:
            raise NotPossibleError(f"no cgroup with a limit of memory: {error.filename}: {error.strerror}") from error
        with contextlib.suppress(OSError):  # version 2 with swap
            (folder / "memory.swap.max").write_text("0")
        eater = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _EATER, str(folder / "cgroup.procs"), str(os.getpid())]
        )
        try:
            for _ in range(int(_LIMIT_S / 0.05)):
                yield 0.05
                if not os.path.exists(f"/proc/{pid}/exe"):
                    return
            raise NotPossibleError(f"the kernel killed no process in {_LIMIT_S:g} s")
        finally:
            with contextlib.suppress(ProcessLookupError):
                eater.kill()
            eater.wait()


_ALL: Final = (
    Fault("rank-killed", "a rank is killed (SIGKILL)", *_signal("rank", signal.SIGKILL), tuple(Moment), is_quick=True),
    # SIGINT raises it in the main thread of any Python program.
    Fault("rank-raises", "a rank raises KeyboardInterrupt", *_signal("rank", signal.SIGINT)),
    Fault("rank-crashes", "a rank crashes (SIGSEGV)", *_signal("rank", signal.SIGSEGV)),
    Fault("rank-stopped", "a rank hangs outside a collective", _stop, needs_hang_watch=True),
    Fault("rank-stopped-in-collective", "a rank hangs in a collective", _stop_in_collective, needs_hang_watch=True),
    Fault("rank-slow", "a rank has half a core for 10 s", _slow_down),
    Fault("loader-killed", "a DataLoader worker is killed (SIGKILL)", at_once(_kill_loader)),
    # The guard gets what a scheduler sends to a node that it wants back.
    Fault("preempted", "a node is preempted (SIGTERM)", *_signal("node", signal.SIGTERM), is_quick=True),
    Fault("node0-lost", "node 0 is lost", _lose(lambda _: (0,)), moments=(Moment.BETWEEN, Moment.END), is_quick=True),
    Fault(
        "node-lost", "another node is lost, and comes back", _lose(lambda at: (at.node,)), least_nodes=2, is_quick=True
    ),
    Fault(
        "agent-killed",
        "an agent is killed (SIGKILL)",
        *_signal("agent", signal.SIGKILL),
        (Moment.BETWEEN, Moment.CHECKPOINT),
        is_quick=True,
    ),
    Fault("app-restarted", "all nodes are lost at once", _lose(lambda scene: range(scene.nodes)), is_quick=True),
    Fault("network-cut", "a node's network is cut for 3 s", _cut_for(3.0), least_nodes=2, setting=NodeSetting.NETNS),
    Fault("network-lost", "a node's network is cut for 12 s", _cut_for(12.0), least_nodes=2, setting=NodeSetting.NETNS),
    Fault("disk-full", "the disk is full for up to 5 s", _fill_disk, setting=NodeSetting.SMALL_DISK),
    Fault("disk-slow", "the disk is slow for 10 s", _slow_disk_down, setting=NodeSetting.OWN_DISK),
    Fault("out-of-memory", "a rank runs out of memory (cgroup)", _take_memory, setting=NodeSetting.CGROUP),
)
FAULTS: Final[Mapping[str, Fault]] = {fault.name: fault for fault in _ALL}
"""All faults, in the order in which they are tried."""
