"""Faults of one rank."""

import contextlib
import itertools
import signal
from collections.abc import Callable, Iterator

from muster._shared import processes
from muster.cli.rehearse.faults.fault import FOR_EVER, Course, Fault, Moment, NotPossibleError, Scene, at_once, send
from muster.cli.rehearse.journal import stopped


def _signal_rank(signum: int) -> Callable[[Scene], Course]:
    return at_once(lambda scene: send(scene.find_worker(scene.rank), signum))


KILLED = Fault(
    name="rank-killed",
    title="a rank is killed (SIGKILL)",
    holds="All ranks start again in place, from the last checkpoint.",
    cause=_signal_rank(signal.SIGKILL),
    moments=tuple(Moment),
)
"""As the kernel does when memory runs out."""

RAISES = Fault(
    name="rank-raises",
    title="a rank raises KeyboardInterrupt",
    holds="The report names the rank and the line. All ranks start again in place, from the last checkpoint.",
    cause=_signal_rank(signal.SIGINT),
)
"""SIGINT raises it in the main thread of any Python program."""

CRASHES = Fault(
    name="rank-crashes",
    title="a rank crashes (SIGSEGV)",
    holds="All ranks start again in place, from the last checkpoint.",
    cause=_signal_rank(signal.SIGSEGV),
)
"""As a fault in a library does."""


def _stop(scene: Scene) -> Course:
    """Stop the rank. It goes on at the end at the latest."""
    pid = scene.find_worker(scene.rank)
    with scene.journal.keep(stopped(pid)):
        send(pid, signal.SIGSTOP)
        yield FOR_EVER


STOPPED = Fault(
    name="rank-stopped",
    title="a rank hangs outside a collective",
    holds="The hang is reported with the rank that keeps the others waiting, and all ranks start again.",
    cause=_stop,
    needs_hang_watch=True,
)


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


STOPPED_IN_COLLECTIVE = Fault(
    name="rank-stopped-in-collective",
    title="a rank hangs in a collective",
    holds="The hang is reported, and all ranks start again.",
    cause=_stop_in_collective,
    needs_hang_watch=True,
)


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


SLOW = Fault(
    name="rank-slow",
    title="a rank has half a core for 10 s",
    holds="The job goes on without a restart, as slowly as that rank.",
    cause=_slow_down,
)


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
    command = _read_command(pid)
    if b"multiprocessing.forkserver" in command:
        stat = processes.read_stat(pid)
        return stat is not None and _read_command(int(stat[1])) == command
    return b"--multiprocessing-fork" in command or command == _read_command(worker) != b""


def _read_command(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


LOADER_KILLED = Fault(
    name="loader-killed",
    title="a DataLoader worker is killed (SIGKILL)",
    holds="The rank fails or starts the worker again, and the job goes on from the last checkpoint.",
    cause=at_once(_kill_loader),
)
