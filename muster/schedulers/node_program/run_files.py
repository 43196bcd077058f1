"""The files of an agent's run on a node, which are copied to the app's folder here. Both sides of it.

It is also sent to nodes, as a part of the program. Standard library only.
"""

import contextlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from muster.schedulers.node_program.frames import Kind, pack

_FILE_LIMIT_BYTES = 1 << 23
"""For one frame. Of a file that only grows the next one has more."""
_NAMES_LIMIT = 1000
GROWING = ("events.jsonl",)
REPLACED = ("status.json", "report.json", "checkpoint.json")
"""Files of an agent's run that are copied; `_shared.contract.LogNames`."""
ERROR_NAME = "error.json"


class ChangedFiles:
    """The files of an agent's run, and the replica's error file, as frames: `keep_file` is the other side.

    Args:
        folder: has the error file, and in `log` what the agent writes.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._seen: dict[str, tuple[int, int]] = {}
        self._sent: Mapping[str, int] = {}

    def rewind(self, received: Mapping[str, int]) -> None:
        """Send what the other side lacks of files that grow: its disk was full, or another connection had it.

        Args:
            received: bytes that it has.
        """
        for name, count in self._sent.items():
            if received.get(name, 0) < count:
                self._seen.pop(name, None)
        self._sent = received

    def read(self) -> bytes:
        """Return frames with what was written since the last call."""
        frames = b""
        for path in [*self._folder.glob("log/*/*"), self._folder / ERROR_NAME]:
            name = "/".join(path.relative_to(self._folder).parts[1:]) or ERROR_NAME
            if path.name not in (*GROWING, *REPLACED) and name != ERROR_NAME:
                continue
            begin = self._sent.get(name, 0) if path.name in GROWING else -1
            with contextlib.suppress(OSError):
                status = path.stat()
                if not stat.S_ISREG(status.st_mode):
                    continue
                if self._seen.get(name) == (mark := (status.st_mtime_ns, status.st_size)):
                    continue
                with path.open("rb") as file:
                    file.seek(max(0, begin))
                    content = file.read(_FILE_LIMIT_BYTES)
                if begin < 0 or len(content) < _FILE_LIMIT_BYTES:
                    self._seen[name] = mark
                if begin >= 0:
                    content = content[: content.rfind(b"\n") + 1]  # other nodes write to the same file
                    self._sent = {**self._sent, name: begin + len(content)}
                frames += pack(Kind.FILE, f"{name}\0{begin}\0".encode() + content)
        return frames


def keep_file(content: bytes, replica_dir: str, role_dir: str, kept: dict[str, int]) -> None:
    """Write what `ChangedFiles` has packed.

    Args:
        content: of the frame.
        replica_dir: folder of what is the replica's.
        role_dir: folder of what is in the folder of the agent's run.
        kept: how many bytes are here of each file that grows. What does not follow them comes again.
    """
    told, begin, data = content.split(b"\0", 2)
    name = told.decode()
    parts = name.split("/")
    if ".." in parts or len(parts) > 2 or parts[-1] not in (*GROWING, *REPLACED, ERROR_NAME):
        return
    if len(kept) >= _NAMES_LIMIT and name not in kept:
        return
    count = kept.setdefault(name, 0)
    path = Path(replica_dir if len(parts) == 1 else role_dir, *parts)
    with contextlib.suppress(OSError):  # a full disk costs what people see, and not the replica
        path.parent.mkdir(parents=True, exist_ok=True)
        if parts[-1] not in GROWING:
            made = path.with_name(f".{path.name}.{os.getpid()}")
            made.write_bytes(data)
            made.replace(path)
        elif int(begin) == count:
            with path.open("ab", buffering=0) as file:
                while data:
                    kept[name] += (written := file.write(data))
                    data = data[written:]
