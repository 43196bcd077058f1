"""A rank raises an exception: KeyboardInterrupt, which SIGINT raises in the main thread of any Python program."""

import signal

from muster.cli.rehearse.faults.fault import Course, Fault, Scene
from muster.cli.rehearse.faults.signals import send


def cause(scene: Scene) -> Course:
    """Let the rank raise."""
    send(scene.find_worker(scene.rank), signal.SIGINT)
    yield from ()


FAULT = Fault(
    name="rank-raises",
    title="a rank raises KeyboardInterrupt",
    holds="The report names the rank and the line. All ranks start again in place, from the last checkpoint.",
    cause=cause,
)
