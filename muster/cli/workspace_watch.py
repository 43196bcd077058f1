"""Which files of a workspace have changed: those that would travel with a job, by the packer's own rules.

The kernel only wakes it up (inotify). Then all files are looked at, so that nothing depends on what events say. If
there are no events, on a network file system or without room for more watches, it looks from time to time.

A run may write into its workspace, which must not start it again. What appears while it runs counts as its output,
unless it is Python. So does a file that has changed at the same time after the start of three runs.
"""

import fnmatch
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from muster.schedulers.supervision.file_watch import Watch
from muster.schedulers.workspace.packing import BundleError, walk_workspace

_LOOK_S: Final = 60.0
_LOOK_WITHOUT_EVENTS_S: Final = 2.0
_REST: Final = 50
"""Without events, it rests for this many times the duration of a look."""
_TEMPORARY: Final = (
    *("*~", ".*.sw?", ".sw?", "4913", ".#*", "#*#", "*.tmp", ".goutputstream-*", "___jb_*___"),
    *(".*.kate-swp", ".~lock.*", "*.pyc", ".nfs*", ".DS_Store"),
)
"""Files of editors, and what Python and file systems write by themselves."""
_NOT_WATCHED: Final = ("__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".ipynb_checkpoints", ".muster")
_SAME_TIMES: Final = 3
_SAME_S: Final = 1.0
_SOURCE: Final = ".py"


class WorkspaceWatch:
    """Looks at a workspace. It is a context manager.

    Args:
        root: the folder.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files: dict[str, tuple[int, int, int]] = {}
        self._folders: list[str] = []
        self._events: Watch | None = None
        self._looked_s = self._began_s = self._took_s = 0.0
        self._outputs: set[str] = set()
        self._delays: list[tuple[str, float]] = []
        """What has ended the last runs, and how long after their start."""

    def __enter__(self) -> "WorkspaceWatch":  # noqa: PYI034  # typing.Self is Python 3.11
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._events is not None:
            self._events.close()

    def begin_run(self) -> None:
        """Take the files as they are: a run starts with them."""
        self._began_s = time.monotonic()
        self._follow()
        self._files = self._look() or self._files

    def end_run(self, name: str) -> str:
        """Note which file has ended a run. Returns it if it is not watched any more, else "".

        Args:
            name: the first of `find_changes`.
        """
        self._delays = [*self._delays, (name, self._looked_s - self._began_s)][-_SAME_TIMES:]
        delays = [each for other, each in self._delays if other == name]
        is_same = len(delays) == _SAME_TIMES and max(delays) - min(delays) <= _SAME_S
        if not is_same or name.endswith(_SOURCE):
            return ""
        self._outputs.add(name)
        return name

    def wait(self, limit_s: float) -> bool:
        """Wait for something that may be a change. False: nothing has happened within the limit."""
        assert self._events is not None  # noqa: S101  # a run has begun
        if self._events.is_active and self._events.has_changed(limit_s):
            return True
        if not self._events.is_active:
            time.sleep(limit_s)
        now_s = time.monotonic()
        pause_s = max(_LOOK_WITHOUT_EVENTS_S, _REST * self._took_s)
        return now_s - self._looked_s > (_LOOK_S if self._events.is_active else pause_s)

    def find_changes(self, *, is_running: bool) -> list[str]:
        """Return the files that have changed since the run began, in order. What it has written itself is left out."""
        found = self._look()
        if found is None:
            return []
        if is_running:
            self._outputs |= {name for name in found if name not in self._files and not name.endswith(_SOURCE)}
        names = [name for name in found if found[name] != self._files.get(name)]
        names += [name for name in self._files if name not in found]
        changed = sorted(name for name in names if name not in self._outputs)
        if names and not changed:
            self._files = found
            self._follow()  # there may be new folders
        return changed

    def _look(self) -> dict[str, tuple[int, int, int]] | None:
        """Look at all files. None: a folder went while it was read."""
        self._looked_s = time.monotonic()
        found: dict[str, tuple[int, int, int]] = {}
        folders = [""]
        try:
            for relative in walk_workspace(self._root):
                parts = relative.split("/")
                if any(part in _NOT_WATCHED for part in parts) or is_temporary(parts[-1]):
                    continue
                try:
                    status = (self._root / relative).lstat()
                except OSError:
                    continue
                if stat.S_ISDIR(status.st_mode):
                    folders.append(relative)
                else:
                    found[relative] = (status.st_mtime_ns, status.st_size, status.st_ino)
        except BundleError:
            return None
        self._took_s = time.monotonic() - self._looked_s
        if folders != self._folders:
            self._folders = folders
            self._follow()
        return found

    def _follow(self) -> None:
        """Get events of all folders that are known."""
        if self._events is not None:
            self._events.close()
        self._events = Watch(*(self._root / name for name in self._folders or [""]), all_changes=True)


def is_temporary(name: str) -> bool:
    """Return whether a file is one that an editor keeps for a moment."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in _TEMPORARY)


def describe_changes(changes: Sequence[str]) -> str:
    """Name the first file, and how many there are."""
    more = f", and {len(changes) - 1} more" if len(changes) > 1 else ""
    return f"{changes[0]} has changed{more}"
