"""A rank crashes as a fault in a library does."""

import signal

from muster.cli.rehearse.faults.fault import Course, Fault, Scene
from muster.cli.rehearse.faults.signals import send


def cause(scene: Scene) -> Course:
    """Let the rank crash."""
    send(scene.find_worker(scene.rank), signal.SIGSEGV)
    yield from ()


FAULT = Fault(
    name="rank-crashes",
    title="a rank crashes (SIGSEGV)",
    holds="All ranks start again in place, from the last checkpoint.",
    cause=cause,
)
