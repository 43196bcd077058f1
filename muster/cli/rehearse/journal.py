"""What has to be undone. It is on disk before it is done, so that after `kill -9` the next rehearsal undoes it.

An undo is a name of `UNDO` and words, so that another process can carry it out. Each may be carried out twice, and does
nothing if nothing is left to undo.

    with journal.keep(Undo("continue", (pid, start_ticks))):
        os.kill(pid, signal.SIGSTOP)
        ...                                  # however this ends, the process goes on
"""

import contextlib
import errno
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from muster._shared import processes
from muster._shared.foreign_files import parse_json, read_regular
from muster.schedulers.supervision.app_folder import ProcessId

_LIMIT_BYTES: Final = 1 << 20
_DYING_S: Final = 5.0
"""How long a killed process may take to leave its cgroup."""


@dataclass(frozen=True)
class Undo:
    """One thing to undo."""

    kind: str
    """A name of `UNDO`."""
    argv: tuple[str, ...]


class Journal:
    """The journal of one rehearsal. It is a context manager. When it ends, everything is undone."""

    def __init__(self, folder: Path) -> None:
        """Begin an empty one.

        Args:
            folder: of the journals of this user. It is made if it is missing.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = folder / f"{os.getpid()}.json"
        self._owner = ProcessId.of(os.getpid())
        self._open: list[Undo] = []

    @contextlib.contextmanager
    def keep(self, undo: Undo) -> Iterator[None]:
        """Write down what has to be undone, and undo it at the end of the block."""
        self._open.append(undo)
        self._write()
        try:
            yield
        finally:
            carry_out(undo)
            self._open.remove(undo)
            self._write()

    def __enter__(self) -> "Journal":  # noqa: PYI034  # typing.Self is Python 3.11
        return self

    def __exit__(self, *_exc: object) -> None:
        for undo in reversed(self._open):
            carry_out(undo)
        self._path.unlink(missing_ok=True)

    def _write(self) -> None:
        content = {"owner": self._owner and asdict(self._owner), "undo": [asdict(each) for each in self._open]}
        with tempfile.NamedTemporaryFile("w", dir=self._path.parent, delete=False) as file:
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(file.name, self._path)


def undo_dead(folder: Path) -> list[str]:
    """Undo what rehearsals have left that were killed. Return a line for each that had left something."""
    lines = []
    for path in sorted(folder.glob("*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            content: Any = parse_json(read_regular(str(path), _LIMIT_BYTES))
            owner = content["owner"] and ProcessId(**content["owner"])
            if owner and owner.is_alive():
                continue
            undone = [Undo(each["kind"], tuple(each["argv"])) for each in content["undo"]]
            for undo in reversed(undone):
                carry_out(undo)
            path.unlink()
            if undone:
                what = ", ".join(" ".join((undo.kind, *undo.argv)) for undo in undone)
                lines.append(f"an earlier rehearsal was killed; undone: {what}")
    return lines


def carry_out(undo: Undo) -> None:
    """Undo it. What is gone already is no error."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        UNDO[undo.kind](*undo.argv)


def stopped(pid: int) -> Undo:
    """Return the undo of a SIGSTOP.

    Raises:
        ProcessLookupError: there is no such process.
    """
    process = ProcessId.of(pid)
    if process is None:
        raise ProcessLookupError(pid)
    return Undo("continue", (str(pid), process.start_ticks))


def _continue(pid: str, start_ticks: str) -> None:
    if ProcessId(pid=int(pid), start_ticks=start_ticks).is_alive():
        processes.send_signal([int(pid)], signal.SIGCONT)


def _remove_cgroup(path: str) -> None:
    """Move its processes to the group above it, and remove it: one with processes, also dying ones, is busy."""
    folder = Path(path)
    until_s = time.monotonic() + _DYING_S
    while True:
        for pid in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):  # it has ended
                (folder.parent / "cgroup.procs").write_text(pid)
        try:
            folder.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > until_s:
                raise
            time.sleep(0.05)
        else:
            return


def _run(*command: str) -> None:
    subprocess.run(command, capture_output=True, check=True)


UNDO: Final[Mapping[str, Callable[..., None]]] = {
    "continue": _continue,
    "namespace": partial(_run, "ip", "netns", "del"),
    "unmount": partial(_run, "umount", "--lazy"),
    "thaw": partial(_run, "fsfreeze", "--unfreeze"),
    "cgroup": _remove_cgroup,
}
