"""A real cgroup with a memory limit, how a command is started in it, and which cgroups a rehearsal left."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import wait_until

from muster.agent.workers.memory import find_memory_cgroup


@contextlib.contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[Path]:
    """A memory cgroup below this process's own; skips the test where none can be made. Its processes are the test's."""
    parent = find_memory_cgroup("/proc")
    if parent is None:
        pytest.skip("no memory cgroup is mounted")
    folder = Path(parent.folders[0], f"muster-test-{os.getpid()}")
    name = {1: "memory.limit_in_bytes", 2: "memory.max"}[parent.version]
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"cannot make a memory cgroup: {error}")
    try:
        (folder / name).write_text(str(limit_bytes))
    except OSError as error:
        folder.rmdir()
        pytest.skip(f"cannot limit a memory cgroup: {error}")
    try:
        yield folder
    finally:
        wait_until(lambda: not (folder / "cgroup.procs").read_text(), what="an empty cgroup")
        folder.rmdir()


def join(folder: Path, *argv: str) -> list[str]:
    """The command that runs another one in the cgroup."""
    code = "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid())); os.execv(sys.argv[2], sys.argv[2:])"
    return [sys.executable, "-I", "-S", "-c", code, str(folder / "cgroup.procs"), *argv]


def list_rehearsal_cgroups() -> list[str]:
    """The cgroups of rehearsals. `os.walk` skips a cgroup that another program removes, `Path.glob` raises."""
    return [
        os.path.join(folder, name)
        for folder, names, _ in os.walk("/sys/fs/cgroup")
        for name in names
        if name.startswith("muster-rehearsal-")
    ]
