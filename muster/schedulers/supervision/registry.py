"""Finds apps again by their id: per user and scheduler a folder of links to the apps' folders.

    <state>/muster/<scheduler>/<app id> -> <log_dir>/<session>/<app id>

<state> is $XDG_STATE_HOME, else ~/.local/state; where neither can be written, /tmp/muster-<uid>. Nothing is removed
by itself: `torchx delete` removes one app, removing an app's folder by hand is fine too, and so is removing all of it.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from muster.schedulers.supervision.app_folder import AppFolder


def find_state_dir(env: Mapping[str, str]) -> Path:
    """The user's folder for what muster keeps; made when missing, readable by the user only.

    Args:
        env: the environment, for XDG_STATE_HOME and HOME.
    """
    choices = []
    if env.get("XDG_STATE_HOME", "").startswith("/"):  # the XDG specification: ignore relative paths
        choices.append(Path(env["XDG_STATE_HOME"]) / "muster")
    if env.get("HOME", "").startswith("/"):
        choices.append(Path(env["HOME"]) / ".local" / "state" / "muster")
    for path in choices:
        with contextlib.suppress(OSError):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if os.access(path, os.W_OK | os.X_OK):
                return path
    return _create_fallback_dir()


def _create_fallback_dir() -> Path:
    """A folder below /tmp, which must be ours: someone else could have made it first."""
    path = Path(tempfile.gettempdir()) / f"muster-{os.geteuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if status.st_uid != os.geteuid() or path.is_symlink() or status.st_mode & 0o077:
        raise PermissionError(f"{path} must belong to user {os.geteuid()} alone; set XDG_STATE_HOME")
    return path


class AppRegistry:
    """The apps one user submitted to one scheduler on this machine."""

    def __init__(self, state_dir: Path, scheduler: str) -> None:
        self._dir = state_dir / scheduler

    def add(self, app_id: str, folder: Path) -> None:
        """Remember where an app's folder is.

        Raises:
            FileExistsError: the id is taken.
        """
        self._dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self._dir / app_id).symlink_to(folder.absolute())

    def find(self, app_id: str) -> Path | None:
        """The app's folder, or None: never known, deleted, or its folder is gone."""
        if not app_id or "/" in app_id or app_id in (".", ".."):
            return None
        folder = self._read_link(self._dir / app_id)
        return folder if folder is not None and AppFolder(folder).spec_file.is_file() else None

    def __iter__(self) -> Iterator[str]:
        """Ids of all apps whose folder is there, oldest first."""
        try:
            links = [entry for entry in os.scandir(self._dir) if entry.is_symlink()]
        except FileNotFoundError:
            return
        for link in sorted(links, key=lambda entry: entry.stat(follow_symlinks=False).st_mtime_ns):
            if self.find(link.name) is not None:
                yield link.name

    def remove(self, app_id: str) -> None:
        """Forget an app; not knowing it is fine."""
        (self._dir / app_id).unlink(missing_ok=True)

    @staticmethod
    def _read_link(link: Path) -> Path | None:
        try:
            return Path(os.readlink(link))
        except OSError:
            return None
