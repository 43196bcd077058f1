"""Reads files and JSON that anything may have written: a worker, a container, another user, an older version.

`codec.salvage` makes records of it.
"""

import errno
import json
import os
import stat
from typing import Final

_JSON_DEPTH: Final = 50


def parse_json(text: str | bytes) -> object:
    """Parse what a worker, a container or an older agent has written: anything may stand there.

    Raises:
        ValueError: it is no JSON, or is nested deeper than what we write: what prints it would end in RecursionError.
    """
    try:
        content: object = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if _is_deep(content, _JSON_DEPTH):
        raise ValueError("nested too deeply")
    return content


def _is_deep(content: object, levels: int) -> bool:
    parts = content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()
    return bool(parts) and (levels == 0 or any(_is_deep(part, levels - 1) for part in parts))


def read_regular(path: str, limit_bytes: int, start_bytes: int = 0) -> bytes:
    """The bytes of a file from an offset on; a negative one counts from its end.

    Raises:
        OSError: it cannot be read, or it is no regular file: a named pipe would block.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", path)
        file.seek(max(0, found.st_size + start_bytes) if start_bytes < 0 else start_bytes)
        return file.read(limit_bytes)
