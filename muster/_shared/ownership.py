"""Whether a folder and all above it are this user's, because what its files say is started with this user's rights.

Another user must be unable to put a folder of its own in the place of one on the way. So each of them, and each link,
belongs to this user or to root, and no other user can write to it, with three exceptions:

- A folder with the sticky bit, as /tmp has it: only the owner of an entry can rename it there.
- Below a folder that others cannot enter, it does not matter who could write.
- A group that has no members but this user and root. Many systems give each user one, and let it write by default.

In a user namespace root is shown as another user, so the owner of `/` counts as root. Some file systems show our own
files as another user's (NFS with root_squash). The owner that they give to a file that we make there counts as this
user.
"""

import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

_LINKS_LIMIT = 40
"""As the kernel's."""


def make_folders(path: Path, mode: int) -> None:
    """Make what is missing of a path, with one mode whatever the umask allows: a folder that all can write is unsafe.

    Raises:
        OSError: it cannot be made.
    """
    if path.is_dir():
        return
    make_folders(path.parent, mode)
    path.mkdir(mode=mode, exist_ok=True)


def check_folder(folder: Path, advice: str, files: Sequence[Path] = ()) -> None:
    """Refuse a folder that another user owns, can write to, or can replace.

    Args:
        folder: an absolute path. What does not exist is not looked at, and what is above it is.
        advice: what to do, for the error.
        files: files and folders below it that must be ours, too.

    Raises:
        PermissionError: names the folder, the user, and what to do. Or a folder cannot be entered.
    """
    ours = {os.geteuid(), 0}
    trusted = ours | {os.lstat("/").st_uid}
    is_closed = False
    try:
        for path, status in _walk(str(folder)):
            if status.st_uid not in trusted:
                ours |= _find_shown(folder)
                trusted |= ours
            is_closed = _check(path, status, trusted, advice, is_closed=is_closed)
    except FileNotFoundError:
        return
    _check(path, status, ours, advice, is_closed=is_closed)  # only above it is the owner of `/` enough
    for file in files:
        with suppress(FileNotFoundError):
            status = file.lstat()
            if status.st_uid not in ours:
                ours |= _find_shown(folder)
            _check(str(file), status, ours, advice, is_closed=is_closed)


def _walk(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """Return each folder and each link on the way to a path, the path itself included.

    Raises:
        OSError: it does not exist, or its links have no end.
    """
    at, rest, links = "/", path.split("/")[::-1], 0
    yield at, os.lstat(at)
    while rest:
        name = rest.pop()
        if name in ("", "."):
            continue
        below = os.path.dirname(at) if name == ".." else f"{at.rstrip('/')}/{name}"
        status = os.lstat(below)
        yield below, status
        if not stat.S_ISLNK(status.st_mode):
            at = below
            continue
        links += 1
        if links > _LINKS_LIMIT:
            raise FileNotFoundError(below)
        target = os.readlink(below)
        rest += target.split("/")[::-1]
        at = "/" if target.startswith("/") else at


def _check(path: str, status: os.stat_result, owners: set[int], advice: str, *, is_closed: bool) -> bool:
    """Check one folder, link or file. Return whether it, or one above it, keeps other users out."""
    if status.st_uid not in owners:
        raise PermissionError(f"{path} belongs to {_name_user(status.st_uid)}, not to you: {advice}")
    mode = status.st_mode
    if stat.S_ISLNK(mode):
        return False  # its target may lie elsewhere
    if is_closed:
        return True
    others = _name_writers(status)
    if others and not (stat.S_ISDIR(mode) and mode & stat.S_ISVTX):
        todo = f"run `chmod go-w {path}`, or {advice}" if status.st_uid == os.geteuid() else advice
        raise PermissionError(f"{others} can write to {path}: {todo}")
    return stat.S_ISDIR(mode) and not mode & (stat.S_IXGRP | stat.S_IXOTH)


def _find_shown(folder: Path) -> set[int]:
    """Return the owner that the file system shows for what this process makes there.

    Empty if it cannot make anything.
    """
    with suppress(OSError), tempfile.TemporaryFile(dir=folder if folder.is_dir() else folder.parent) as file:
        return {os.fstat(file.fileno()).st_uid}
    return set()


def _name_writers(status: os.stat_result) -> str:
    """Return which users other than this one and root can write. "": none."""
    if status.st_mode & stat.S_IWOTH:
        return "every user"
    if not status.st_mode & stat.S_IWGRP or _is_private(status.st_gid):
        return ""
    return f"group {_name_group(status.st_gid)}"


def _is_private(gid: int) -> bool:
    """Return whether a group has no members but this user and root."""
    import grp  # rarely needed
    import pwd

    mine = {"root"}
    with suppress(KeyError):
        mine.add(pwd.getpwuid(os.geteuid()).pw_name)
    try:
        group = grp.getgrgid(gid)
    except KeyError:  # of a volume, in a container
        return not any(user.pw_gid == gid and user.pw_name not in mine for user in pwd.getpwall())
    if not mine.issuperset(group.gr_mem):
        return False
    # A user's own group has its name; listing users may be slow.
    return group.gr_name in mine or all(user.pw_name in mine for user in pwd.getpwall() if user.pw_gid == gid)


def _name_user(uid: int) -> str:
    import pwd

    with suppress(KeyError):
        return f"user {pwd.getpwuid(uid).pw_name} ({uid})"
    return f"user {uid}"


def _name_group(gid: int) -> str:
    import grp

    with suppress(KeyError):
        return grp.getgrgid(gid).gr_name
    return str(gid)
