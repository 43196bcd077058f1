"""A rank stands still outside a collective, so that the others wait for it in the next one."""

import signal

from muster.cli.rehearse.faults.fault import FOR_EVER, Course, Fault, Scene
from muster.cli.rehearse.faults.signals import send
from muster.cli.rehearse.journal import stopped


def cause(scene: Scene) -> Course:
    """Stop the rank. It goes on at the end at the latest."""
    pid = scene.find_worker(scene.rank)
    with scene.journal.keep(stopped(pid)):
        send(pid, signal.SIGSTOP)
        yield FOR_EVER


FAULT = Fault(
    name="rank-stopped",
    title="a rank hangs outside a collective",
    holds="The hang is reported with the rank that keeps the others waiting, and all ranks start again.",
    cause=cause,
    needs_hang_watch=True,
)
