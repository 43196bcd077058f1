"""Processes that cannot be killed: a frozen cgroup (version 1) keeps its own until it is thawed, SIGKILL or not."""

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from harness import skip_or_fail, wait_until

_MOUNT = Path("/sys/fs/cgroup/freezer")


class Freezer:
    """One cgroup of the freezer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def freeze(self, pid: int) -> None:
        """Freeze this process; returns once it is."""
        (self._folder / "cgroup.procs").write_text(str(pid))
        state = self._folder / "freezer.state"
        state.write_text("FROZEN")
        wait_until(lambda: state.read_text().strip() == "FROZEN", what="the process is frozen")

    def thaw(self) -> None:
        """Let its processes go on: those that were killed end now."""
        (self._folder / "freezer.state").write_text("THAWED")


@contextlib.contextmanager
def make_freezer() -> Iterator[Freezer]:
    """Make a freezer; skips the test where there is none: with cgroup version 2, frozen processes can be killed."""
    if not (_MOUNT / "cgroup.procs").exists() or not os.access(_MOUNT, os.W_OK):
        skip_or_fail("freezer", "needs root and the freezer of cgroup version 1")
    folder = _MOUNT / f"muster-test-{uuid.uuid4().hex}"
    folder.mkdir()
    freezer = Freezer(folder)
    try:
        yield freezer
    finally:
        freezer.thaw()
        wait_until(lambda: not (folder / "cgroup.procs").read_text(), what="the frozen processes have ended")
        folder.rmdir()
