"""Where a node imports the agent from: unpacks the bundle once per node and user, so that nothing is compiled twice.

Python keeps no compiled form of what it imports from a zip, and compiling the agent takes as long as all the rest of
its start. This file travels in the bundle beside `__main__`, which calls `find_root` at every start: it imports little.

The folder is the user's own and no other user can write to it. It appears whole, by a rename. Where none can be made
the agent runs from the zip.
"""

import os
import stat
import sys

_TEMPORARY = "unfinished"


def find_root(bundle: str, digest: str, total_bytes: int) -> str:
    """Find the folder to import from, and make it if necessary; the bundle itself when none can be used.

    Args:
        bundle: path of the zip.
        digest: names its content.
        total_bytes: sum of its sources' sizes.
    """
    if sys.dont_write_bytecode:  # the user wants no compiled files: then a folder is no better than the zip
        return bundle
    for base in _list_bases():
        try:
            folder = os.path.join(base, digest)
            os.makedirs(base, mode=0o700, exist_ok=True)
            if not _is_private(base):
                continue
            # After a power failure files may be empty.
            if not os.path.isdir(folder) or _sum_sizes(folder) != total_bytes:
                _unpack(bundle, folder)
            _lock(folder)
        except OSError:
            continue
        return folder
    return bundle


def _list_bases() -> "list[str]":
    """The node's own disk first: a home folder may be on the network."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    temporary = os.environ.get("TMPDIR") or "/tmp"  # noqa: S108  # private, see _is_private
    return [os.path.join(temporary, f"muster-{os.geteuid()}"), os.path.join(cache, "muster")]


def _is_private(folder: str) -> bool:
    """Whether it is a folder (no link) of this user that no other can write to."""
    status = os.lstat(folder)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _sum_sizes(folder: str) -> int:
    total = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".py"):
                total += entry.stat().st_size
            elif entry.name != "__pycache__":
                total += _sum_sizes(entry.path)
    return total


def _unpack(bundle: str, folder: str) -> None:
    """Unpack beside `folder`, then rename; another agent may do the same at the same time.

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
    """Hold the folder while this process and its forks live: systemd-tmpfiles removes nothing from a locked one."""
    import fcntl

    opened = os.open(folder, os.O_RDONLY)
    try:
        fd = fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, 3)  # 0 to 2 may be closed: they are the workers'
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    finally:
        os.close(opened)
