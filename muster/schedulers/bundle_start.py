"""Where a node imports the agent from: unpacks the bundle once per node and user, so that nothing is compiled twice.

Python keeps no compiled form of what it imports from a zip, and compiling the agent takes as long as all the rest of
its start. This file travels in the bundle beside `__main__`, which calls `find_import_folder` at every start. So it
imports little.

The folder is the user's own, and no other user can write to it or put another one in its place, because what lies there
runs with this user's rights. It appears whole, by a rename. If none can be made, the agent runs from the zip. The
process that unpacks a version removes those unused for longest. Each process that runs from a folder holds a lock on
it, and `python -m muster prune` lists the folders without one.
"""

import os
import stat
import sys

TYPE_CHECKING = False  # `typing` takes time to import
if TYPE_CHECKING:
    from collections.abc import Iterator

_TEMPORARY = "unfinished"
_TEMPORARY_AGE_S = 3600.0
"""A folder that has been unfinished for so long belongs to an agent that was killed."""

_KEPT = 4
"""Versions that stay for jobs to come, besides those that jobs run from."""


def find_import_folder(bundle: str, digest: str, total_bytes: int) -> str:
    """Find the folder to import from, and make it if necessary. Return the bundle itself if none can be used.

    Args:
        bundle: path of the zip.
        digest: names its content.
        total_bytes: sum of its sources' sizes.
    """
    if sys.dont_write_bytecode:  # then the zip is as good
        return bundle
    for base in find_bases(makes=True):
        folder = os.path.join(base, digest)
        try:
            # Files may be empty after a power failure.
            if not os.path.isdir(folder) or _sum_sizes(folder) != total_bytes:
                _unpack(bundle, folder)
                _remove_old(base, folder)
            _lock(folder)
        except (OSError, ImportError):  # no descriptor is left
            continue
        return folder
    return bundle


def find_bases(makes: bool = False) -> "Iterator[str]":
    """Find where folders are: nothing else may be read or removed, whatever another user has put in such a place.

    Args:
        makes: make those that are not there.
    """
    for path in _list_places():
        try:
            if makes:
                os.makedirs(path, mode=0o700, exist_ok=True)
            base = _find_base(path)
        except OSError:
            continue
        if base is not None:
            yield base


def _list_places() -> "list[str]":
    """Return where folders may be. The node's own disk first: a home folder may be on the network."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    temporary = os.environ.get("TMPDIR") or "/tmp"  # noqa: S108  # private, see _is_private
    return [os.path.join(temporary, f"muster-{os.geteuid()}"), os.path.join(cache, "muster")]


def _find_base(path: str) -> "str | None":
    """Return a place without links above it; None if another user could have made it or can change what lies there.

    Raises:
        OSError: there is none.
    """
    base = os.path.realpath(os.path.dirname(path)) + "/" + os.path.basename(path)
    return base if _is_private(base) and _is_kept(base) else None


def _is_private(folder: str) -> bool:
    """Return whether it is a folder (no link) of this user that no other can write to."""
    status = os.lstat(folder)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _is_kept(folder: str) -> bool:
    """Return whether no other user can rename it, or a folder above it. Its path has no links above it.

    It is as `muster._shared.ownership`, which imports too much, but simpler: if the answer is no, the next place is
    used, or the zip.
    """
    # In a user namespace the owner of `/` is root.
    trusted = (os.geteuid(), 0, os.lstat("/").st_uid)
    # A pod's users are all this job's.
    is_alone = "KUBERNETES_SERVICE_HOST" in os.environ
    while not is_alone and folder != "/":
        folder = os.path.dirname(folder)
        status = os.lstat(folder)
        if status.st_uid not in trusted or (status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX):
            return False
    return True


def _sum_sizes(folder: str) -> int:
    total = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_dir():
                total += entry.stat().st_size
            elif entry.name != "__pycache__":
                total += _sum_sizes(entry.path)
    return total


def _unpack(bundle: str, folder: str) -> None:
    """Unpack beside `folder`, then rename. Another agent may do the same at the same time.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    import shutil
    import tempfile
    import zipfile

    temporary = tempfile.mkdtemp(prefix=f"{_TEMPORARY}-", dir=os.path.dirname(folder))
    try:
        with zipfile.ZipFile(bundle) as archive:
            archive.extractall(temporary, [name for name in archive.namelist() if name.startswith("muster/")])
        try:
            os.rename(temporary, folder)
        except OSError:
            if _sum_sizes(folder) == _sum_sizes(temporary):  # another agent was first
                return
            os.rename(folder, os.path.join(temporary, _TEMPORARY))
            os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _lock(folder: str) -> None:
    """Hold the folder while this process and its forks live, and note its use.

    systemd-tmpfiles and `remove_unused` remove nothing from a locked one.

    Raises:
        OSError: it is being removed, or has been.
    """
    import fcntl

    opened = os.open(folder, os.O_RDONLY)
    try:
        fd = fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, 3)  # 0 to 2 may be closed, the workers'
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(fd), os.stat(folder)):
            raise FileNotFoundError(folder)
        os.utime(fd)
    finally:
        os.close(opened)


# -- old versions -----------------------------------------------------------------------------------------------------


def _remove_old(base: str, newest: str) -> None:
    """Remove all but the versions that were used last. What cannot be removed stays: the agent must start."""
    import contextlib

    others = [each for each in list_unpacked(base) if each[1] != newest]
    finished = sorted(each for each in others if not os.path.basename(each[1]).startswith(_TEMPORARY))
    for each in [*finished[: -(_KEPT - 1)], *(other for other in others if other not in finished)]:
        with contextlib.suppress(OSError):
            remove_unused(each[1])


def list_unpacked(base: str) -> "list[tuple[float, str]]":
    """List (wall-clock seconds of the last use, path) of the versions in a folder, and of what killed agents left."""
    import time

    found = []
    try:
        with os.scandir(base) as entries:
            for entry in entries:
                used_s = entry.stat(follow_symlinks=False).st_mtime
                is_version = len(entry.name) == 32 and not entry.name.strip("0123456789abcdef")
                is_left = entry.name.startswith(f"{_TEMPORARY}-") and used_s < time.time() - _TEMPORARY_AGE_S
                if (is_version or is_left) and entry.is_dir(follow_symlinks=False):
                    found.append((used_s, entry.path))
    except OSError:
        return []
    return found


def remove_unused(folder: str) -> None:
    """Remove a version. A job that needs it again unpacks it again.

    Raises:
        OSError: it cannot be removed.
        BlockingIOError: a process uses it.
    """
    import fcntl
    import shutil

    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Renamed first: other agents find all or nothing.
        gone = os.path.join(os.path.dirname(folder), f"{_TEMPORARY}-{os.getpid()}-{os.path.basename(folder)}")
        os.rename(folder, gone)
        shutil.rmtree(gone)
    finally:
        os.close(fd)


def is_used(folder: str) -> bool:
    """Return whether a process runs from it."""
    import fcntl

    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
