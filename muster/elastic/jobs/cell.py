"""A job's output in a notebook: lines go to the cell in the order in which they came, progress bars into one display.

The agent marks the state of each progress bar, once a second (see `contract.Env.LIVE_BARS`). Rows of a stream cannot
be drawn again in a notebook, so the bars of all ranks share one display, which is updated in place.
"""

import codecs
import re
import sys
from importlib import import_module
from typing import Any, TextIO

_MARK = "\r"
_PREFIX = re.compile(r"\[[^\[\]]*\]:")
"""The prefix of a rank, such as `[default0]:`. Lines with a prefix of the user's own share one row."""


def is_cell(stream: object) -> bool:
    """Return whether what is written to the stream appears in a notebook's cell."""
    module = sys.modules.get("ipykernel.iostream")
    return module is not None and isinstance(stream, module.OutStream)


class CellOutput:
    """Prints the job's standard output and standard error together, in their order."""

    def __init__(self, stream: TextIO) -> None:
        """Write to `stream`, which is the cell's."""
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""
        self._rows: dict[str, str] = {}
        """The state of each bar that is not done, by its prefix."""
        self._display: Any = None

    def write(self, data: bytes) -> None:
        """Print the complete lines, and show the bars as they are now."""
        text = self._rest + self._decoder.decode(data)
        *lines, self._rest = text.split("\n")
        plain = [line for line in lines if not line.startswith(_MARK)]
        if plain:
            self._stream.write("\n".join(plain) + "\n")
            self._stream.flush()
        if len(plain) < len(lines):
            self._show([line[1:] for line in lines if line.startswith(_MARK)])

    def _show(self, states: list[str]) -> None:
        for state in states:
            found = _PREFIX.match(state)
            key = found[0] if found else ""
            if state[len(key) :].strip():
                self._rows[key] = state.rstrip()
            else:
                self._rows.pop(key, None)
        content = {"text/plain": "\n".join(self._rows[key] for key in sorted(self._rows))}
        if self._display is not None:
            self._display.update(content, raw=True)
        elif self._rows:
            display: Any = import_module("IPython.display").display  # a notebook has it
            self._display = display(content, raw=True, display_id=True)

    def close(self) -> None:
        """Print what came without an end of line. No bar is left."""
        if self._rest:
            self.write(b"\n")
        if self._rows:
            self._show(list(self._rows))
