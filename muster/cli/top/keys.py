"""Translates the bytes that a terminal sends for pressed keys into names. Pure.

Sources: ECMA-48 and xterm's control sequences (https://invisible-island.net/xterm/ctlseqs/ctlseqs.html), "PC-Style
Function Keys". tmux and screen send the same.
"""

import codecs
import re
from collections.abc import Mapping
from typing import Final

ESCAPE: Final = "escape"
ENTER: Final = "enter"
BACKSPACE: Final = "backspace"

_NAMES: Final[Mapping[str, str]] = {
    "A": "up",
    "B": "down",
    "C": "right",
    "D": "left",
    "H": "home",
    "F": "end",
    "1~": "home",
    "4~": "end",
    "5~": "page up",
    "6~": "page down",
    "7~": "home",
    "8~": "end",
    "\r": ENTER,
    "\n": ENTER,
    "\x7f": BACKSPACE,
    "\x08": BACKSPACE,
    "\x1b": ESCAPE,
}
"""Of control characters, and of what follows the beginning of a sequence."""
_KEY: Final = re.compile(r"\x1b[\[O]([^@-~]{0,12}[@-~])|\x1b(?![\[O]|\Z)|[^\x1b]", re.DOTALL)
"""A whole key. Of a sequence whose rest has not come yet there is none."""


class KeyParser:
    """Holds the beginning of a sequence until the rest has come."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore")
        self._rest = ""

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
        self._rest += self._decoder.decode(data)
        keys: list[str] = []
        while found := _KEY.match(self._rest):
            self._rest = self._rest[found.end() :]
            text = found[1] or found[0]
            is_text = found[1] is None and (text.isprintable() or text == "\t")
            keys.append(text if is_text else _NAMES.get(text, ""))
        return [key for key in keys if key]

    def flush(self) -> list[str]:
        """Return what is left as it is: nothing has followed it in time, so Escape was a key of its own."""
        rest, self._rest = self._rest, ""
        return [ESCAPE] if rest else []
