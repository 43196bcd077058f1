"""Forks workers: the part of a template's process that answers the agent's requests, and its messages.

`template` describes the protocol.

An intermediate process forks the workers of one request. It is itself forked before that request, while nothing else
happens, so a restart waits for one fork less. It holds only page tables, and ends with the template.
"""

import ctypes
import errno
import json
import os
import posix
import signal
import socket
import time
from collections.abc import Callable
from typing import Final, NoReturn, TypedDict, final

from muster._shared.records import record
from muster.agent.workers.spec import WorkerSpec
from muster.agent.workers.warm import fork_safety

_MESSAGE_BYTES: Final = 65536
_MAX_SOCKETS: Final = 250
"""SCM_MAX_FD is 253."""
_AHEAD_AFTER_S: Final = 0.1
"""How long after a request the next one's intermediate is forked: the workers' own start comes first."""
_PR_SET_PDEATHSIG: Final = 1


@final
class BringsTorch(TypedDict):
    """Whether the coming imports include torch."""

    brings_torch: bool


@final
class Importing(TypedDict):
    """The module that the template begins to import."""

    importing: str


class Imported(TypedDict):
    """The state of the template after all imports."""

    modules: list[str]
    pid: int
    memory: dict[str, int]
    """See `template._read_memory`."""


@final
class Ready(TypedDict):
    """The template can fork."""

    ready: Imported


@final
class Forked(TypedDict):
    """The template has forked, or could not."""

    asked: int
    forked: list[int]
    """Process ids."""
    error: str
    """Why there are fewer than requested; "" if there are not."""
    duration_s: float


@final
class TemplateNotice(TypedDict):
    """One line for the console."""

    notice: str


@final
class Unsafe(TypedDict):
    """Why no worker may be forked; the template ends."""

    unsafe: str


@final
class WaitsHeld(TypedDict):
    """What was imported; it waits for its program."""

    held: list[str]
    import_s: float


@final
class Refused(TypedDict):
    """Why this is not the program's template; it ends, and another one may be."""

    refused: str


TemplateMessage = WaitsHeld | Refused | BringsTorch | Importing | Ready | Forked | TemplateNotice | Unsafe
"""What a template sends to the agent."""


def exit_with_agent(agent_pid: int) -> None:
    """Have the kernel kill this process when the agent dies, then check whether the agent had already died."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != agent_pid:
        os._exit(1)


def send(control: socket.socket, message: TemplateMessage) -> None:
    """Send one message to the agent."""
    control.send(json.dumps(message).encode())


def exit_unsafe(control: socket.socket, reason: str) -> NoReturn:
    """End the template because no worker may be forked."""
    send(control, {"unsafe": reason})
    os._exit(0)


@record
class _Ahead:
    """An intermediate that is forked before it is needed and waits for the sockets of its workers."""

    pid: int
    socket: socket.socket


def fork_on_demand(
    control: socket.socket, agent_pid: int, hand_out: "Callable[[list[socket.socket]], Forked | None] | None" = None
) -> socket.socket:
    """Answer the agent's requests, and return in a worker, with the socket that will receive its release.

    Args:
        control: to the agent.
        agent_pid: the workers' parent.
        hand_out: gives the sockets to workers that were forked before any request, if there are so many. None means
            that there are none, and intermediates are forked ahead.
    """
    ahead: _Ahead | None = None
    is_due = hand_out is None
    while True:
        control.settimeout(_AHEAD_AFTER_S if is_due else None)
        try:
            message, fds, _flags, _address = socket.recv_fds(control, _MESSAGE_BYTES, _MAX_SOCKETS)
        except TimeoutError:
            control.settimeout(None)
            is_due = False  # once per request: the obstacle may persist
            forked = _fork_ahead(control, agent_pid)
            if isinstance(forked, socket.socket):
                return forked
            ahead = forked
            continue
        if not message:
            os._exit(0)  # agent gone; exit handlers are for workers
        sockets = [socket.socket(fileno=fd) for fd in fds]
        if len(sockets) < (requested := json.loads(message)["fork"]):  # descriptors beyond the limit are dropped
            for one in sockets:
                one.close()
            send(control, _build_failed(requested, OSError(errno.EMFILE, os.strerror(errno.EMFILE))))
            continue
        reason = fork_safety.find_hazard_now()
        if reason is not None:
            exit_unsafe(control, reason)
        handed_out = None if hand_out is None else hand_out(sockets)
        answer = handed_out or fork_batch(sockets, agent_pid, ahead)
        ahead, is_due = None, hand_out is None
        if isinstance(answer, socket.socket):
            return answer
        send(control, answer)
        for one in sockets:
            one.close()


def _fork_ahead(control: socket.socket, agent_pid: int) -> "_Ahead | socket.socket | None":
    """Fork the next request's intermediate, which is a third of the forks' time. Return its socket in a worker.

    None means that it cannot be forked. The next request then forks its own or reports why not.
    """
    if fork_safety.find_hazard_now() is not None:
        return None
    template_pid = os.getpid()
    try:
        ours, theirs = socket.socketpair()
    except OSError:  # no descriptors left
        return None
    try:
        pid = posix.fork()
    except OSError:
        pid = -1
    if pid:
        theirs.close()
        if pid > 0:
            return _Ahead(pid=pid, socket=ours)
        ours.close()
        return None
    control.close()
    ours.close()
    exit_with_agent(template_pid)
    message, fds, _flags, _address = socket.recv_fds(theirs, 1, _MAX_SOCKETS + 2)
    theirs.close()
    if not message:
        os._exit(0)  # template ended
    pids_write, go_read, *rest = fds
    return _be_intermediate([socket.socket(fileno=fd) for fd in rest], pids_write, go_read, agent_pid)


def fork_batch(sockets: list[socket.socket], agent_pid: int, ahead: _Ahead | None = None) -> "socket.socket | Forked":
    """Fork one worker per socket through an intermediate.

    In a worker, return its socket; otherwise, return what was forked.
    """
    try:
        pids_read, pids_write, go_read, go_write = *os.pipe(), *os.pipe()
    except OSError as error:
        return _build_failed(len(sockets), error)
    began_s = time.monotonic()
    intermediate = _hand_over(ahead, [pids_write, go_read, *(one.fileno() for one in sockets)])
    try:
        intermediate = intermediate or posix.fork()  # `os.fork` may be a debugger's
    except OSError as error:
        for fd in (pids_read, pids_write, go_read, go_write):
            os.close(fd)
        return _build_failed(len(sockets), error)
    if intermediate == 0:
        os.close(pids_read)
        os.close(go_write)
        return _be_intermediate(sockets, pids_write, go_read, agent_pid)
    os.close(pids_write)
    os.close(go_read)
    with os.fdopen(pids_read, "rb") as pipe:
        answer = json.loads(pipe.read() or b'{"forked": [], "error": "the forking process died"}')
    # The children become the agent's only once the intermediate is reaped.
    os.waitpid(intermediate, 0)
    os.close(go_write)
    duration_s = time.monotonic() - began_s
    return {"asked": len(sockets), "forked": answer["forked"], "error": answer["error"], "duration_s": duration_s}


def _hand_over(ahead: _Ahead | None, fds: list[int]) -> int:
    """Have an intermediate fork, and return its process id; 0 if it has ended."""
    if ahead is None:
        return 0
    with ahead.socket:
        try:
            socket.send_fds(ahead.socket, [b"!"], fds)
        except OSError:
            os.waitpid(ahead.pid, 0)
            return 0
    return ahead.pid


def _be_intermediate(sockets: list[socket.socket], pids_write: int, go_read: int, agent_pid: int) -> socket.socket:
    """Fork the workers and exit; return in each worker, as the agent's child."""
    own = _fork_workers(sockets, pids_write)
    _wait_for_adoption(go_read, agent_pid)
    for one in sockets:
        if one is not own:
            one.close()
    return own


def _build_failed(asked: int, error: OSError) -> Forked:
    return {"asked": asked, "forked": [], "error": f"cannot fork: {error.strerror}", "duration_s": 0.0}


def _fork_workers(sockets: list[socket.socket], pids_write: int) -> socket.socket:
    """Fork in the intermediate, report the process ids and exit. Return in a worker."""
    pids: list[int] = []
    error = ""
    for one in sockets:
        try:
            pid = os.fork()
        except OSError as failure:
            error = f"cannot fork: {failure.strerror}"
            break
        if pid == 0:
            os.close(pids_write)
            return one
        pids.append(pid)
    try:
        os.write(pids_write, json.dumps({"forked": pids, "error": error}).encode())
    finally:
        os._exit(0)


def _wait_for_adoption(go_read: int, agent_pid: int) -> None:
    """Wait until this worker is the agent's child; only then may the death signal be set."""
    os.read(go_read, 1)
    os.close(go_read)
    exit_with_agent(agent_pid)


def wait_for_release(parked: socket.socket, rename_process: Callable[[list[str]], None]) -> WorkerSpec:
    """Sleep until the agent says which worker to become. Never return in the store's process."""
    message, fds, _flags, _address = socket.recv_fds(parked, 4, 3)
    if not message:
        os._exit(0)
    if len(message) > 1 and fds:
        from muster.agent.workers.warm import store

        rename_process(["muster-store"])
        store.serve(parked, fds[0])
    if len(fds) != 3:
        os._exit(1)  # dropped beyond the limit: no program can start
    parked.close()
    with os.fdopen(fds[0], "rb") as file:
        file.seek(0)
        return WorkerSpec.from_json(file.read(), stdout_fd=fds[1], stderr_fd=fds[2])
