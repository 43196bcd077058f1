"""Translates the bytes that a terminal sends for pressed keys into names. Pure.

Sources: ECMA-48 and xterm's control sequences (https://invisible-island.net/xterm/ctlseqs/ctlseqs.html), "PC-Style
Function Keys". tmux and screen send the same.
"""

from collections.abc import Mapping
from typing import Final

ESCAPE: Final = "escape"
ENTER: Final = "enter"
BACKSPACE: Final = "backspace"

_SEQUENCES: Final[Mapping[bytes, str]] = {
    b"[A": "up",
    b"[B": "down",
    b"[C": "right",
    b"[D": "left",
    b"[H": "home",
    b"[F": "end",
    b"[1~": "home",
    b"[4~": "end",
    b"[5~": "page up",
    b"[6~": "page down",
    b"[7~": "home",
    b"[8~": "end",
}
_CONTROLS: Final[Mapping[str, str]] = {"\r": ENTER, "\n": ENTER, "\x7f": BACKSPACE, "\x08": BACKSPACE}
_MOST_BYTES: Final = 16
"""A sequence is shorter. What is longer is none."""


class KeyParser:
    """Holds the beginning of a sequence until the rest has come."""

    def __init__(self) -> None:
        self._rest = b""

    @property
    def is_waiting(self) -> bool:
        """Whether what has come may be the beginning of a sequence: an Escape, or more."""
        return bool(self._rest)

    def parse(self, data: bytes) -> list[str]:
        """Return the keys that are complete.

        Args:
            data: as it was read.

        Returns:
            A character each, or a name such as "up" or "enter".
        """
        self._rest += data
        keys: list[str] = []
        while self._rest:
            size, key = _parse_first(self._rest)
            if size == 0:
                break
            self._rest = self._rest[size:]
            if key:
                keys.append(key)
        return keys

    def flush(self) -> list[str]:
        """Return what is left as it is: nothing has followed it in time, so Escape was a key of its own."""
        rest, self._rest = self._rest, b""
        return [ESCAPE] if rest[:1] == b"\x1b" else []


def _parse_first(data: bytes) -> tuple[int, str]:
    """Return how many bytes the first key has, and its name. (0, ""): the rest has not come yet."""
    if data[:1] == b"\x1b":
        return _parse_sequence(data)
    for size in range(1, 5):
        try:
            character = data[:size].decode()
        except UnicodeDecodeError as error:
            if "unexpected end" in error.reason and size >= len(data):
                return 0, ""
            continue
        return size, _CONTROLS.get(character, character if character.isprintable() or character == "\t" else "")
    return 1, ""


def _parse_sequence(data: bytes) -> tuple[int, str]:
    if len(data) == 1:
        return 0, ""
    if data[1:2] not in (b"[", b"O"):
        return 1, ESCAPE
    for at in range(2, min(len(data), _MOST_BYTES)):
        if 0x40 <= data[at] <= 0x7E:
            name = _SEQUENCES.get(b"[" + data[2 : at + 1], "")
            return at + 1, name
    return (0, "") if len(data) < _MOST_BYTES else (len(data), "")
