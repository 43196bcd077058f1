"""A rank is killed by SIGKILL, as the kernel does when memory runs out."""

import signal

from muster.cli.rehearse.faults.fault import Course, Fault, Moment, Scene
from muster.cli.rehearse.faults.signals import send


def cause(scene: Scene) -> Course:
    """Kill the rank."""
    send(scene.find_worker(scene.rank), signal.SIGKILL)
    yield from ()


FAULT = Fault(
    name="rank-killed",
    title="a rank is killed (SIGKILL)",
    holds="All ranks start again in place, from the last checkpoint.",
    cause=cause,
    moments=tuple(Moment),
)
