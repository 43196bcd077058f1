"""A rank stands still inside a collective.

Another rank is stopped first: the rank then waits for it in the next collective, is stopped there, and the other one
goes on.
"""

import signal

from muster.cli.rehearse.faults.fault import FOR_EVER, Course, Fault, NotPossibleError, Scene
from muster.cli.rehearse.faults.signals import send
from muster.cli.rehearse.journal import stopped

_STILL_S = 0.5
"""While another rank is stopped, one that has done no step for this long beyond the longest step waits for it."""
_LOOKS = 40


def cause(scene: Scene) -> Course:
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


FAULT = Fault(
    name="rank-stopped-in-collective",
    title="a rank hangs in a collective",
    holds="The hang is reported, and all ranks start again.",
    cause=cause,
    needs_hang_watch=True,
)
