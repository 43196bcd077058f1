"""The template: a Python process that has imported what the program will import, and forks workers from itself.

Runs `program.main`; `serve` returns in each worker, in the interpreter's outermost frames, with what `program.run`
needs. The life of a worker::

    template --fork--> midwife --fork--> worker (parked)      the midwife ends, so the worker becomes the agent's child
    agent    --------- release, over a socket of its own ---> worker runs the program

Control is a SOCK_SEQPACKET pair, one JSON object per message; from the agent {"fork": n} with n sockets attached, to
the agent {"ready": {...}}, {"unsafe": reason}, {"notice": text}, {"asked": n, "forked": [pids], "error": text}. A
release is one byte with three descriptors: a memory file with JSON, standard output, standard error. End of file ends
everybody.
"""

import ctypes
import errno
import gc
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from muster.agent.workers.warm import fork_safety, forked_worker
from muster.agent.workers.warm.import_sites import ImportSite, ImportSites, import_in_place
from muster.agent.workers.warm.preload import choose_modules

Launch = tuple[str, str, int, str, str, list[str]]
"""kind, error file, stack signal, stack file, target, arguments."""

_MESSAGE_BYTES: Final = 65536
_LINE_CHARACTERS: Final = 500
_MOST_SOCKETS: Final = 250
"""SCM_MAX_FD is 253."""
_PR_SET_PDEATHSIG: Final = 1
_NEVER: Final = 1_000_003
"""So many objects stay after hardly any import; no module sets just this, and one that multiplies it can."""


def serve(
    argv: list[str],
    *,
    prepare_main: Callable[[str, str, list[str]], None],
    rename_process: Callable[[list[str]], None],
) -> Launch:
    """Import, then fork on demand; returns only in a worker that has been released, everything about it set.

    Args:
        argv: control descriptor, the agent's pid, --preload, and the program's kind, target and arguments.
        prepare_main: as in `workers.program`, which imports this module.
        rename_process: likewise.
    """
    control_fd, agent_pid, words, kind, target, *args = argv
    control = socket.socket(fileno=int(control_fd))
    control.set_inheritable(False)
    _end_with(int(agent_pid))
    rename_process(["muster-template", target])
    path_before = len(sys.path)
    prepare_main(kind, target, args)
    first_folder = sys.path[0] if len(sys.path) > path_before else None
    modules = _import_all(control, words, kind, target)
    _tell(control, ready={"modules": modules, "has_torch": "torch" in sys.modules, "pid": os.getpid()})
    parked = _fork_on_demand(control, int(agent_pid))
    control.close()
    release = _await_release(parked)
    if first_folder in sys.path:
        sys.path.remove(first_folder)
    forked_worker.become_worker(release)
    spec = release.spec
    return spec["kind"], spec["error_file"], spec["stack_signum"], spec["stack_file"], spec["target"], spec["args"]


def _end_with(agent_pid: int) -> None:
    """Die when the agent dies. Setting the signal first closes the gap in which its death would go unnoticed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != agent_pid:
        os._exit(1)


def _tell(control: socket.socket, **message: Any) -> None:
    control.send(json.dumps(message).encode())


# -- imports ----------------------------------------------------------------------------------------------------------


def _import_all(control: socket.socket, words: str, kind: str, target: str) -> list[str]:
    """Import what was asked for and settle memory for forking; ends the process when forking cannot be safe."""
    known = fork_safety.list_descriptors()
    thresholds = _pause_collections()
    preload = choose_modules(words, kind=kind, target=target)
    if preload.notice:
        _tell(control, notice=preload.notice)
    places = ImportSites(kind, target)
    hidden = places.find_hidden()  # before anything of the program's is imported
    if hidden is not None:
        _give_up(control, f"the program imports {hidden}, and another module of that name is loaded already")
    imported = []
    for name in preload.modules:
        trouble = _import(name, places.find(name))
        if trouble is None:
            imported.append(name)
            continue
        _tell(control, notice=f"cannot preload {name}: {trouble.line}; left to the workers")
        if trouble.partial:
            _give_up(control, f"the import of {name} failed half-way")
    _resume_collections(thresholds)
    reason = fork_safety.find_hazard(known)
    if reason is not None:
        _give_up(control, reason)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    # What exists now is never looked at by a collection again, so its pages stay shared with the workers.
    gc.freeze()
    return imported


def _pause_collections() -> tuple[int, int, int]:
    """No automatic collection until `_resume_collections`: they are a seventh of what importing torch takes.

    By the threshold, not by `gc.disable`, so that a module that switches the collector off is still obeyed.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(_NEVER, *thresholds[1:])
    return thresholds


def _resume_collections(thresholds: tuple[int, int, int]) -> None:
    """As before, unless a module has set thresholds of its own."""
    if gc.get_threshold() == (_NEVER, *thresholds[1:]):
        gc.set_threshold(*thresholds)


@dataclass(frozen=True, kw_only=True)
class _Trouble:
    """Why an import failed."""

    line: str
    partial: bool
    """Parts of it may be in `sys.modules`, and trying again would not be what a fresh process does."""


def _import(name: str, place: ImportSite) -> _Trouble | None:
    """Import by name; a module that does not exist leaves nothing behind, any other failure may."""
    try:
        import_in_place(name, place)
    except BaseException as error:  # noqa: BLE001  # whatever a user's module raises, SystemExit too, is theirs
        absent = isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}.")
        line = f"{type(error).__name__}: {error}".splitlines()[0][:_LINE_CHARACTERS]
        return _Trouble(line=line, partial=not absent)
    return None


def _give_up(control: socket.socket, reason: str) -> None:
    _tell(control, unsafe=reason)
    os._exit(0)


# -- forking ----------------------------------------------------------------------------------------------------------


def _fork_on_demand(control: socket.socket, agent_pid: int) -> socket.socket:
    """Answer the agent's requests; returns in a worker, with the socket its release will come by."""
    while True:
        message, fds, _flags, _address = socket.recv_fds(control, _MESSAGE_BYTES, _MOST_SOCKETS)
        if not message:
            os._exit(0)  # the agent has closed its end; exit handlers are the workers' business
        sockets = [socket.socket(fileno=fd) for fd in fds]
        if len(sockets) < (requested := json.loads(message)["fork"]):  # the kernel drops what there is no room for
            for one in sockets:
                one.close()
            _tell(
                control, asked=requested, forked=[], error=f"cannot fork: {os.strerror(errno.EMFILE)}", duration_s=0.0
            )
            continue
        reason = fork_safety.find_hazard_now()
        if reason is not None:
            _give_up(control, reason)
        parked = _fork_batch(control, sockets, agent_pid)
        if parked is not None:
            return parked
        for one in sockets:
            one.close()


def _fork_batch(control: socket.socket, sockets: list[socket.socket], agent_pid: int) -> socket.socket | None:
    """Fork one worker per socket by way of a midwife. None in the template; in a worker, its socket."""
    pids_read, pids_write = os.pipe()
    go_read, go_write = os.pipe()
    began_s = time.monotonic()
    try:
        midwife = os.fork()
    except OSError as error:
        for fd in (pids_read, pids_write, go_read, go_write):
            os.close(fd)
        _tell(control, asked=len(sockets), forked=[], error=f"cannot fork: {error.strerror}", duration_s=0.0)
        return None
    if midwife == 0:
        os.close(pids_read)
        os.close(go_write)
        own = _deliver(sockets, pids_write)
        _await_birth(go_read, agent_pid)
        for one in sockets:
            if one is not own:
                one.close()
        return own
    os.close(pids_write)
    os.close(go_read)
    with os.fdopen(pids_read, "rb") as pipe:
        answer = json.loads(pipe.read() or b'{"forked": [], "error": "the forking process died"}')
    # Only when the midwife has been waited for have its children become the agent's.
    os.waitpid(midwife, 0)
    os.close(go_write)
    _tell(control, asked=len(sockets), **answer, duration_s=time.monotonic() - began_s)
    return None


def _deliver(sockets: list[socket.socket], pids_write: int) -> socket.socket:
    """The midwife: fork, report and end. Returns in a worker."""
    pids: list[int] = []
    error = ""
    for one in sockets:
        try:
            pid = os.fork()
        except OSError as trouble:
            error = f"cannot fork: {trouble.strerror}"
            break
        if pid == 0:
            os.close(pids_write)
            return one
        pids.append(pid)
    try:
        os.write(pids_write, json.dumps({"forked": pids, "error": error}).encode())
    finally:
        os._exit(0)


def _await_birth(go_read: int, agent_pid: int) -> None:
    """Wait until this worker is the agent's child; only then may the death signal be set."""
    os.read(go_read, 1)
    os.close(go_read)
    _end_with(agent_pid)


def _await_release(parked: socket.socket) -> forked_worker.Release:
    """Sleep until the agent says what to be."""
    message, fds, _flags, _address = socket.recv_fds(parked, 1, 3)
    if not message or len(fds) != 3:
        os._exit(0)  # not needed after all
    parked.close()
    with os.fdopen(fds[0], "rb") as file:
        file.seek(0)
        spec = json.load(file)
    return forked_worker.Release(spec=spec, stdout_fd=fds[1], stderr_fd=fds[2])
