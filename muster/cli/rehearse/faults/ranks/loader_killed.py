"""A process that loads data for a rank is killed."""

import contextlib
import itertools
import signal
from collections.abc import Iterator

from muster._shared import processes
from muster.cli.rehearse.faults.fault import Course, Fault, NotPossibleError, Scene
from muster.cli.rehearse.faults.signals import send


def cause(scene: Scene) -> Course:
    """Kill one of the loaders of a rank, or of another one if it has none."""
    for worker in _list_workers(scene):
        loaders = [pid for pid in processes.list_descendants(worker) if _is_loader(pid, worker)]
        if loaders:
            send(loaders[-1], signal.SIGKILL)
            yield from ()
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


FAULT = Fault(
    name="loader-killed",
    title="a DataLoader worker is killed (SIGKILL)",
    holds="The rank fails or starts the worker again, and the job goes on from the last checkpoint.",
    cause=cause,
)
