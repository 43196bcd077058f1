"""A rank is in a cgroup whose memory runs out, and the kernel kills it.

A second process of the cgroup takes the memory. The kernel prefers the rank, which is named first to be killed.
"""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from muster.cli.rehearse.faults.fault import Course, Fault, NotPossibleError, Scene
from muster.cli.rehearse.journal import Undo

_LIMIT_BYTES: Final = 64 << 20
_PLACES: Final = (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max"))
"""The places of version 1 and 2."""
_EATER: Final = """
import os, sys, time
open(sys.argv[1], "w").write("0")
held = []
while os.getppid() == int(sys.argv[2]):
    held.append(bytearray(b"1") * (1 << 20))
    time.sleep(0.001)
"""
_LIMIT_S = 20.0


def cause(scene: Scene) -> Course:
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


FAULT = Fault(
    name="out-of-memory",
    title="a rank runs out of memory (cgroup)",
    holds="All ranks start again in place, from the last checkpoint.",
    cause=cause,
)
