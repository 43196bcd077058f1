"""What a program that runs on a node, and the process here that stands for the node, have in common.

The program arrives as a text, for any Python, and nothing of muster need be installed there: it imports this module,
which goes before it, and the standard library.
"""

import contextlib
import os
import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path

FRAME = struct.Struct("!cI")
"""Kind, which is no newline, and the length of what follows."""
GROWING = ("events.jsonl",)
REPLACED = ("status.json", "report.json", "checkpoint.json")
"""Files of an agent's run that are copied; `_shared.contract.LogNames`."""
ERROR_NAME = "error.json"
_PROGRAM = """\
import sys, types
sys.modules[{name!r}] = types.ModuleType({name!r})
exec({own!r}, sys.modules[{name!r}].__dict__)
{source}
{call}
"""


@cache
def build_program(path: str, call: str) -> str:
    """Return the source of a program with this module.

    Args:
        path: of the program.
        call: its last line.
    """
    own, source = Path(__file__).read_text(), Path(path).read_text()
    return _PROGRAM.format(name=__name__, own=own, source=source, call=call)


def pack(kind: bytes, content: bytes = b"") -> bytes:
    """Return a frame."""
    return FRAME.pack(kind, len(content)) + content


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield (kind, content) of the frames that are complete; newlines between them are skipped."""
        self._rest += data
        while len(rest := self._rest.lstrip(b"\n")) >= FRAME.size:
            kind, length = FRAME.unpack_from(rest)
            end = FRAME.size + length
            if len(rest) < end:
                return
            self._rest = rest[end:]
            yield kind, rest[FRAME.size : end]


def pack_file(kind: bytes, name: str, content: bytes) -> bytes:
    """Return a frame with a file, or with what has been added to one that grows: `keep_file` is the other side."""
    mode = "a" if os.path.basename(name) in GROWING else "w"
    return pack(kind, f"{name}\0{mode}\0".encode() + content)


def keep_file(content: bytes, replica_dir: str, role_dir: str) -> tuple[str, int]:
    """Write what `pack_file` has packed. Returns its name, and how much a file that grows has grown.

    Args:
        content: of the frame.
        replica_dir: folder of what is the replica's.
        role_dir: folder of what is in the folder of the agent's run.
    """
    told, mode, data = content.split(b"\0", 2)
    name = told.decode()
    parts = name.split("/")
    if ".." in parts or len(parts) > 2 or parts[-1] not in (*GROWING, *REPLACED, ERROR_NAME):
        return name, 0
    path = Path(replica_dir if len(parts) == 1 else role_dir, *parts)
    with contextlib.suppress(OSError):  # a full disk costs what people see, and not the replica
        path.parent.mkdir(parents=True, exist_ok=True)
        if mode == b"a":
            with path.open("ab") as file:
                file.write(data)
            return name, len(data)
        made = path.with_name(f".{path.name}.{os.getpid()}")
        made.write_bytes(data)
        made.replace(path)
    return name, 0
