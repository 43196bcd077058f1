"""Reads files and JSON that anything may have written: a worker, a container, another user.

`codec.salvage` makes records of it. This module also keeps a link in folders where others may write.
"""

import contextlib
import errno
import json
import math
import os
import stat
import time
from collections.abc import Iterator
from typing import Final

from muster._shared.contract import LogNames
from muster._shared.processes import wait_readable

_JSON_DEPTH: Final = 50
_PIECE_BYTES: Final = 1 << 20
WHOLE_LIMIT_BYTES: Final = 4 << 20
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


def parse_json(text: str | bytes) -> object:
    """Parse what a worker or a container has written: anything may stand there.

    Raises:
        ValueError: it is no JSON, or is nested deeper than what we write: what prints it would end in RecursionError.
    """
    try:
        content: object = json.loads(text)
        if _has_long_number(text):
            content = json.loads(text, parse_int=_parse_int)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    count = text.count(b"{") + text.count(b"[") if isinstance(text, bytes) else text.count("{") + text.count("[")
    if count > _JSON_DEPTH and _is_deep(content, _JSON_DEPTH):
        raise ValueError("nested too deeply")
    return content


def _has_long_number(text: str | bytes) -> bool:
    import re  # the agent's start needs none

    return re.search(rb"[0-9]{300}", text if isinstance(text, bytes) else text.encode(errors="replace")) is not None


def _parse_int(text: str) -> int:
    if not math.isfinite(float(text)):  # it could not be compared with a time, or shown
        raise ValueError("a number is too large")
    return int(text)


def _is_deep(content: object, levels: int) -> bool:
    parts = content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()
    return bool(parts) and (levels == 0 or any(_is_deep(part, levels - 1) for part in parts))


def read_whole(
    path: str | os.PathLike[str],
    limit_bytes: int = WHOLE_LIMIT_BYTES,
    *,
    pipe_limit_s: float = 0.0,
) -> bytes:
    """Return the bytes of a file that is to be read as a whole.

    Args:
        path: of the file.
        limit_bytes: the most that it may have.
        pipe_limit_s: how long to wait for what is written, if it is a pipe, such as a shell's `<(command)`. 0: it
            must be no pipe.

    Raises:
        OSError: see `read_regular`. Or it is larger.
    """
    if pipe_limit_s and stat.S_ISFIFO(os.stat(path).st_mode):
        content = _read_pipe(path, limit_bytes + 1, pipe_limit_s)
    else:
        content = read_regular(path, limit_bytes + 1)
    if len(content) > limit_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {limit_bytes} bytes", os.fspath(path))
    return content


def _read_pipe(path: str | os.PathLike[str], limit_bytes: int, limit_s: float) -> bytes:
    until_s = time.monotonic() + limit_s
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as file:
        content = b""
        while len(content) < limit_bytes:
            if not wait_readable(file.fileno(), until_s - time.monotonic()):
                raise OSError(errno.ETIMEDOUT, f"it is a pipe that no process has written and closed in {limit_s:g} s")
            piece = file.read(_PIECE_BYTES)
            if not piece:
                break
            content += piece
        return content


def read_regular(
    path: str | os.PathLike[str],
    limit_bytes: int,
    start_bytes: int = 0,
    *,
    follows: bool = True,
) -> bytes:
    """Return the bytes of a file from an offset on. A negative offset counts from its end.

    The end of a file begins where only a hole follows, as `truncate` makes it, whatever its size is.

    Args:
        path: of the file.
        limit_bytes: the most that is read.
        start_bytes: where to begin.
        follows: it may be a symbolic link.

    Raises:
        OSError: it cannot be read, or it is not a regular file: a named pipe would block.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follows else os.O_NOFOLLOW))
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
        start_bytes = max(0, found.st_size + start_bytes) if start_bytes < 0 else start_bytes
        if start_bytes < found.st_size and not _has_data(fd, start_bytes):
            return b""
        file.seek(start_bytes)
        pieces: list[bytes] = []
        while limit_bytes > 0 and (
            piece := file.read(min(limit_bytes, _PIECE_BYTES))
        ):  # `read` allocates its whole limit
            pieces.append(piece)
            limit_bytes -= len(piece)
        return b"".join(pieces)


def _has_data(fd: int, start_bytes: int) -> bool:
    try:
        os.lseek(fd, start_bytes, os.SEEK_DATA)
    except OSError as error:
        return error.errno != errno.ENXIO
    return True


def walk_files(folder: str | os.PathLike[str]) -> Iterator["os.DirEntry[str]"]:
    """Return what is in a folder at any depth and is no folder. What cannot be listed is left out.

    Without recursion, which has a limit: `os.walk` and `rglob` end in RecursionError where a folder is very deep.
    """
    folders = [os.fspath(folder)]
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    yield entry


# -- the newest job, or run ------------------------------------------------------------------------------------------


def link_latest(parent: str, target: str) -> None:
    """Let `latest` name a path, if it is missing, or a link of this user.

    Beside the folders of jobs it names the newest of them. In `--log-dir` it names the newest attempt of the newest
    run: programs find runs there as `DIR/*/attempt_0`, as torchrun's, and would find one twice if it named its folder.

    The folder may be shared with other users, as `-cfg log_dir=/tmp` is. Nothing that another user owns is followed or
    replaced: a link of another user stays, and where every user could put one into its place, none is made.

    Args:
        parent: the folder of the link. If it cannot be made, there is no link, which is for people only.
        target: a path from there.
    """
    with contextlib.suppress(OSError):
        mode = os.stat(parent).st_mode
        if mode & _OTHERS_WRITE and not mode & stat.S_ISVTX:  # sticky: only owners replace entries
            return
        link = os.path.join(parent, LogNames.LATEST)
        if not _is_ours(link):
            with contextlib.suppress(FileExistsError):
                os.symlink(target, link)
            return
        made = f"{link}.{os.getpid()}"
        os.symlink(target, made)
        try:
            os.replace(made, link)  # atomic for readers
        except OSError:
            os.unlink(made)


def unlink_latest(parent: str, target: str) -> None:
    """Remove `latest` if it is a link of this user that names a path, which is removed."""
    with contextlib.suppress(OSError):
        link = os.path.join(parent, LogNames.LATEST)
        if _is_ours(link) and os.readlink(link) == target:
            os.unlink(link)


def _is_ours(link: str) -> bool:
    try:
        status = os.lstat(link)
    except FileNotFoundError:
        return False
    return stat.S_ISLNK(status.st_mode) and status.st_uid == os.geteuid()
