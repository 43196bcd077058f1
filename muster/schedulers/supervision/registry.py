"""Finds apps by their id: per user and scheduler a folder of links to the apps' folders.

    <state>/muster/<scheduler>/<app id> -> <log_dir>/<session>/<app id>

<state> is $XDG_STATE_HOME, else ~/.local/state. If neither is writable, it is /tmp/muster-<uid>. Nothing is removed
automatically: `muster delete` removes one app, and a user may remove an app's folder, or all of it, by hand.

What lies in these folders is started with this user's rights, so `_shared.ownership` looks before anything is read.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from muster._shared.foreign_files import read_whole
from muster._shared.ownership import check_folder, make_folders
from muster.schedulers.errors import UnsafeFolderError
from muster.schedulers.supervision.app_folder import AppFolder, may_hold_app, write_text

_LOG_DIR_ADVICE = "choose a folder of your own with -cfg log_dir=FOLDER, on Slurm with -cfg job_dir=FOLDER"
_STATE_ADVICE = "set XDG_STATE_HOME to a folder of your own"

_LAST: Final = "last"


def find_state_dir(env: Mapping[str, str]) -> Path:
    """Return the user's folder for muster's state. It is created if missing, readable by the user only.

    Args:
        env: the environment, for XDG_STATE_HOME and HOME.

    Raises:
        UnsafeFolderError: another user could change or replace it.
    """
    choices = []
    if env.get("XDG_STATE_HOME", "").startswith("/"):  # the XDG specification ignores relative paths
        choices.append(Path(env["XDG_STATE_HOME"]) / "muster")
    if env.get("HOME", "").startswith("/"):
        choices.append(Path(env["HOME"]) / ".local" / "state" / "muster")
    for path in choices:
        with contextlib.suppress(OSError):
            make_folders(path, 0o700)
        if os.access(path, os.W_OK | os.X_OK):
            with _translate_refusal():
                check_folder(path, _STATE_ADVICE)
            return path
    return _create_fallback_dir()


def _create_fallback_dir() -> Path:
    """Create a folder in /tmp. Another user could have created it first."""
    path = Path(tempfile.gettempdir()) / f"muster-{os.geteuid()}"
    with _translate_refusal():
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        check_folder(path, _STATE_ADVICE)
    return path


class AppRegistry:
    """The apps one user submitted to one scheduler on this machine."""

    def __init__(self, state_dir: Path, scheduler: str) -> None:
        self._dir = state_dir / scheduler

    def add(self, app_id: str, folder: Path) -> None:
        """Record where an app's folder is.

        Raises:
            FileExistsError: the id is in use.
        """
        self._dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self._dir / app_id).symlink_to(folder.absolute())

    def open(self, app_id: str) -> AppFolder | None:
        """Return the app's folder, or None if the id is unknown, the app deleted or its folder gone.

        Raises:
            UnsafeFolderError: another user could change or replace it.
        """
        if not app_id or "/" in app_id or app_id in (".", ".."):
            return None
        path = self._read_link(self._dir / app_id)
        if path is None:
            return None
        folder = self.check(path)
        return folder if folder.spec_file.is_file() else None

    @staticmethod
    def check(path: Path) -> AppFolder:
        """See that an app's folder, and what a supervisor is started from, is this user's. Return the folder.

        Raises:
            UnsafeFolderError: another user could change or replace it.
        """
        with _translate_refusal():
            folder = AppFolder(path)
            check_folder(path, _LOG_DIR_ADVICE, (folder.state_dir, folder.spec_file, folder.private_file))
        return folder

    def __iter__(self) -> Iterator[str]:
        """Return the ids of all apps whose folder exists, oldest first, with those that `open` refuses."""
        try:
            links = [entry for entry in os.scandir(self._dir) if entry.is_symlink()]
        except FileNotFoundError:
            return
        for link in sorted(links, key=lambda entry: entry.stat(follow_symlinks=False).st_mtime_ns):
            path = self._read_link(Path(link.path))
            if path is not None and may_hold_app(path):
                yield link.name

    def find_newest(self) -> tuple[int, str] | None:
        """Return when the newest app was added, in wall-clock nanoseconds, and its id. None: there is none."""
        app_id = next(reversed([*self]), None)
        if app_id is None:
            return None
        with contextlib.suppress(OSError):  # deleted since
            return (self._dir / app_id).lstat().st_mtime_ns, app_id
        return None

    def find_added_s(self, app_id: str) -> float | None:
        """Return when an app was added, in wall-clock seconds. None: it is not there (any more)."""
        with contextlib.suppress(OSError):
            return (self._dir / app_id).lstat().st_mtime
        return None

    def remove(self, app_id: str) -> None:
        """Remove an app's entry if there is one."""
        (self._dir / app_id).unlink(missing_ok=True)

    @staticmethod
    def _read_link(link: Path) -> Path | None:
        try:
            return Path(os.readlink(link))
        except OSError:
            return None


def record_last_remote(state_dir: Path, scheduler: str, app_id: str) -> None:
    """Record the app that this user has submitted last to a scheduler that keeps no state on this machine."""
    folder = state_dir / scheduler
    folder.mkdir(mode=0o700, exist_ok=True)
    write_text(folder / _LAST, app_id)


def find_last_remote(state_dir: Path, scheduler: str) -> tuple[int, str] | None:
    """Return when that was, in wall-clock nanoseconds, and the app's id. None: never."""
    try:
        path = state_dir / scheduler / _LAST
        return path.stat().st_mtime_ns, read_whole(path).decode()
    except (OSError, ValueError):
        return None


@contextlib.contextmanager
def _translate_refusal() -> Iterator[None]:
    """Make it an error that TorchX's command line prints as one line."""
    try:
        yield
    except PermissionError as error:
        raise UnsafeFolderError(str(error)) from error
    except OSError as error:  # the name is too long, or a file is on the way
        raise UnsafeFolderError(f"{error.filename}: {error.strerror}") from error
