"""Copies what a real run wrote into the checkout, with what differs from machine to machine replaced by marks.

A folder becomes `files/` and `manifest.txt`. Git keeps neither pipes nor empty folders nor modes; the manifest does,
one line each: the mode, the kind (d folder, f file, p named pipe, l link), the path, and a link's target. Sockets are
left out: nobody listens on them any more.
"""

import os
import re
import stat
from pathlib import Path

GOLDEN = Path(__file__).resolve().parents[1]
VERSION = "19df633"
DATA = GOLDEN / VERSION

FIRST_PID = 4100001
_PID = re.compile(r'("pid": )([1-9]\d*)')
_TICKS = re.compile(r'("start_ticks": )"\d+"')


class Marks:
    """What is replaced by what.

    Pids become numbers counted from `FIRST_PID`, and their start times "1", which no process has.
    """

    def __init__(self, **values: str) -> None:
        self._values = {value: f"@{name}@" for name, value in values.items()}
        self._pids: dict[str, int] = {}

    def add(self, text: str, mark: str) -> None:
        """Also replace this."""
        self._values[text] = mark

    def apply(self, text: str) -> str:
        """The text with marks in it; the longest names go first, for one may be the beginning of another."""
        for value in sorted(self._values, key=len, reverse=True):
            text = re.sub(rf"(?<![\w]){re.escape(value)}(?![\w])", lambda _, v=value: self._values[v], text)
        text = _PID.sub(lambda match: f"{match[1]}{self._pids.setdefault(match[2], FIRST_PID + len(self._pids))}", text)
        return _TICKS.sub(r'\1"1"', text)


def save_tree(source: Path, target: Path, marks: Marks, *, leave_out: tuple[str, ...] = ()) -> None:
    """Write `manifest.txt` and `files/` below `target`.

    Empty files, and those in `leave_out`, are in the manifest only.
    """
    lines = []
    for folder, folders, files in os.walk(source):
        folders.sort()
        links = [name for name in folders if Path(folder, name).is_symlink()]
        for name in sorted([*folders, *files]):
            path = Path(folder, name)
            if stat.S_ISSOCK(path.lstat().st_mode):
                continue
            known_as = marks.apply(str(path.relative_to(source)))
            lines.append(_describe(path, known_as, marks))
            if lines[-1].split()[1] == "f" and name not in leave_out and path.stat().st_size > 0:
                _save_file(path, target / "files" / known_as, marks)
        folders[:] = [name for name in folders if name not in links]
    target.mkdir(parents=True, exist_ok=True)
    (target / "manifest.txt").write_text("\n".join(lines) + "\n")


def _describe(path: Path, known_as: str, marks: Marks) -> str:
    mode = path.lstat().st_mode
    kind = next(letter for letter, test in _KINDS.items() if test(mode))
    link = f" -> {marks.apply(os.readlink(path))}" if kind == "l" else ""
    return f"{stat.S_IMODE(mode):04o} {kind} {known_as}{link}"


_KINDS = {"l": stat.S_ISLNK, "d": stat.S_ISDIR, "f": stat.S_ISREG, "p": stat.S_ISFIFO}


def _save_file(path: Path, target: Path, marks: Marks) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    content = path.read_bytes()
    if path.suffix not in (".times", ".gz"):  # binary
        content = marks.apply(content.decode()).encode()
    target.write_bytes(content)
