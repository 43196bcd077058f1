"""The disk with the checkpoints and logs is slow: it stands still for nine tenths of the time."""

import subprocess

from muster.cli.rehearse.faults.fault import Course, Fault, NotPossibleError, Place, Scene
from muster.cli.rehearse.journal import Undo

SECONDS = 10.0
_FROZEN_S = 0.9
_THAWED_S = 0.1


def cause(scene: Scene) -> Course:
    """Freeze and thaw the run's own file system."""
    path = str(scene.disk)
    for _ in range(int(SECONDS / (_FROZEN_S + _THAWED_S))):
        with scene.journal.keep(Undo("thaw", (path,))):
            done = subprocess.run(["fsfreeze", "--freeze", path], capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise NotPossibleError(f"its file system cannot be frozen: {done.stderr.strip()}")
            yield _FROZEN_S
        yield _THAWED_S


FAULT = Fault(
    name="disk-slow",
    title="the disk is slow for 10 s",
    holds="The job goes on without a restart: a disk that stands still does not look like a lost node.",
    cause=cause,
    place=Place.OWN_DISK,
)
