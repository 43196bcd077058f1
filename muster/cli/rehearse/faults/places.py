"""Faults of what a job needs around it: the network of a node, the disk with checkpoints and logs, and the memory.

They need root. If one cannot be caused, the table says why.
"""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from muster.cli.rehearse.faults.fault import Course, Fault, Moment, NotPossibleError, Place, Scene
from muster.cli.rehearse.journal import Undo

CUT_SHORT_S = 3.0
"""Less than the 5 s of silence after which a node is lost."""


def _cut_for_a_while(scene: Scene) -> Course:
    """Cut the node off for a while."""
    with scene.cut(scene.node):
        yield CUT_SHORT_S


CUT_SHORT = Fault(
    name="network-cut",
    title="a node's network is cut for 3 s",
    holds="The job stands still for as long, and goes on without a restart.",
    cause=_cut_for_a_while,
    least_nodes=2,
    place=Place.NAMESPACES,
)


CUT_LONG_S = 12.0
"""More than the 5 s of silence after which a node is lost."""


def _cut_off(scene: Scene) -> Course:
    """Cut the node off until the others have given it up."""
    with scene.cut(scene.node):
        yield CUT_LONG_S


CUT_LONG = Fault(
    name="network-lost",
    title="a node's network is cut for 12 s",
    holds="The workers of the node are killed; the node joins again, and all ranks start again.",
    cause=_cut_off,
    least_nodes=2,
    place=Place.NAMESPACES,
)


FULL_S = 5.0
_FULL_LOOK_S = 0.1
_PIECE = bytes(1 << 16)


def _fill_disk(scene: Scene) -> Course:
    """Fill what is left of the run's own disk."""
    path = scene.disk / "filler"
    try:
        with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
            while file.write(_PIECE):
                pass
        for _ in range(int(FULL_S / _FULL_LOOK_S)):
            yield _FULL_LOOK_S
            if not scene.has_all_workers():
                break  # longer ones use up the restarts
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)


DISK_FULL = Fault(
    name="disk-full",
    title="the disk is full for up to 5 s",
    holds="A script that handles the error, or fails and starts again, goes on from a complete checkpoint.",
    cause=_fill_disk,
    moments=(Moment.BETWEEN,),
    place=Place.SMALL_DISK,
)


SLOW_S = 10.0
_FROZEN_S = 0.9
_THAWED_S = 0.1


def _slow_disk_down(scene: Scene) -> Course:
    """Freeze and thaw the run's own file system."""
    path = str(scene.disk)
    for _ in range(int(SLOW_S / (_FROZEN_S + _THAWED_S))):
        with scene.journal.keep(Undo("thaw", (path,))):
            done = subprocess.run(["fsfreeze", "--freeze", path], capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise NotPossibleError(f"its file system cannot be frozen: {done.stderr.strip()}")
            yield _FROZEN_S
        yield _THAWED_S


DISK_SLOW = Fault(
    name="disk-slow",
    title="the disk is slow for 10 s",
    holds="The job goes on without a restart: a disk that stands still does not look like a lost node.",
    cause=_slow_disk_down,
    place=Place.OWN_DISK,
)


_LIMIT_BYTES: Final = 64 << 20
_PLACES: Final = (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max"))
"""The places of version 1 and 2."""
_EATER: Final = """
open(sys.argv[1], "w").write("0")
held = []
while os.getppid() == int(sys.argv[2]):
    held.append(bytearray(b"1") * (1 << 20))
    time.sleep(0.001)
"""
_LIMIT_S = 20.0


def _take_memory(scene: Scene) -> Course:
    """Let the memory of the rank's cgroup run out."""
    pid = scene.find_worker(scene.rank)
    mount, name = next(((mount, name) for mount, name in _PLACES if os.path.exists(f"{mount}/cgroup.procs")), ("", ""))
    if not mount or os.geteuid() != 0:
        raise NotPossibleError("it needs root, and a cgroup with a limit of memory")
    folder = Path(mount, f"muster-rehearsal-{os.getpid()}")
    with scene.journal.keep(Undo("cgroup", (str(folder),))):
        try:
            folder.mkdir()
            (folder / name).write_text(str(_LIMIT_BYTES))
            Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
            (folder / "cgroup.procs").write_text(str(pid))
        except OSError as error:
            raise NotPossibleError(f"no cgroup with a limit of memory: {error.filename}: {error.strerror}") from error
        with contextlib.suppress(OSError):  # version 2 with swap
            (folder / "memory.swap.max").write_text("0")
        eater = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _EATER, str(folder / "cgroup.procs"), str(os.getpid())]
        )
        try:
            for _ in range(int(_LIMIT_S / 0.05)):
                yield 0.05
                if not os.path.exists(f"/proc/{pid}/exe"):
                    return
            raise NotPossibleError(f"the kernel killed no process in {_LIMIT_S:g} s")
        finally:
            with contextlib.suppress(ProcessLookupError):
                eater.kill()
            eater.wait()


OUT_OF_MEMORY = Fault(
    name="out-of-memory",
    title="a rank runs out of memory (cgroup)",
    holds="All ranks start again in place, from the last checkpoint.",
    cause=_take_memory,
)
