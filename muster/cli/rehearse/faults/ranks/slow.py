"""A rank gets half a core: it is stopped for half of the time, in short pieces."""

import signal

from muster.cli.rehearse.faults.fault import Course, Fault, NotPossibleError, Scene
from muster.cli.rehearse.faults.signals import send
from muster.cli.rehearse.journal import stopped

_PIECE_S = 0.02
SECONDS = 10.0


def cause(scene: Scene) -> Course:
    """Stop the rank again and again, until the time is over or it has ended."""
    pid = scene.find_worker(scene.rank)
    with scene.journal.keep(stopped(pid)):
        for count in range(int(SECONDS / _PIECE_S)):
            try:
                send(pid, signal.SIGCONT if count % 2 else signal.SIGSTOP)
            except NotPossibleError:
                return  # the script has ended
            yield _PIECE_S


FAULT = Fault(
    name="rank-slow",
    title="a rank has half a core for 10 s",
    holds="The job goes on without a restart, as slowly as that rank.",
    cause=cause,
)
