"""Reads files and JSON that anything may have written: a worker, a container, another user, an older version.

`codec.salvage` makes records of it. This module also keeps a link in folders where others may write.
"""

import contextlib
import errno
import json
import os
import stat
from typing import Final

from muster._shared.contract import LogNames

_JSON_DEPTH: Final = 50
_PIECE_BYTES: Final = 1 << 20
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


def parse_json(text: str | bytes) -> object:
    """Parse what a worker, a container or an older agent has written: anything may stand there.

    Raises:
        ValueError: it is no JSON, or is nested deeper than what we write: what prints it would end in RecursionError.
    """
    try:
        content: object = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    count = text.count(b"{") + text.count(b"[") if isinstance(text, bytes) else text.count("{") + text.count("[")
    if count > _JSON_DEPTH and _is_deep(content, _JSON_DEPTH):
        raise ValueError("nested too deeply")
    return content


def _is_deep(content: object, levels: int) -> bool:
    parts = content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()
    return bool(parts) and (levels == 0 or any(_is_deep(part, levels - 1) for part in parts))


def read_regular(path: str, limit_bytes: int, start_bytes: int = 0) -> bytes:
    """Return the bytes of a file from an offset on. A negative offset counts from its end.

    Raises:
        OSError: it cannot be read, or it is not a regular file: a named pipe would block.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", path)
        file.seek(max(0, found.st_size + start_bytes) if start_bytes < 0 else start_bytes)
        pieces: list[bytes] = []
        while limit_bytes > 0 and (
            piece := file.read(min(limit_bytes, _PIECE_BYTES))
        ):  # `read` allocates its whole limit
            pieces.append(piece)
            limit_bytes -= len(piece)
        return b"".join(pieces)


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
