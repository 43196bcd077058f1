"""The disk with the checkpoints and logs is full for a while."""

import contextlib
import os

from muster.cli.rehearse.faults.fault import Course, Fault, Moment, Place, Scene

SECONDS = 5.0
_LOOK_S = 0.1
_PIECE = bytes(1 << 16)


def cause(scene: Scene) -> Course:
    """Fill what is left of the run's own disk."""
    path = scene.disk / "filler"
    try:
        with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
            while file.write(_PIECE):
                pass
        for _ in range(int(SECONDS / _LOOK_S)):
            yield _LOOK_S
            if not scene.has_all_workers():
                break  # longer ones use up the restarts
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)


FAULT = Fault(
    name="disk-full",
    title="the disk is full for up to 5 s",
    holds="A script that handles the error, or fails and starts again, goes on from a complete checkpoint.",
    cause=cause,
    moments=(Moment.BETWEEN,),
    place=Place.SMALL_DISK,
)
