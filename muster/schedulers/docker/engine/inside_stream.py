"""The connection to a command in a container.

Source: Docker's Engine API, "Start an exec instance", stream format.
"""

import contextlib
import struct
from typing import Any, Final

from muster.schedulers.node_program.pipe import NodePipe, find_last_line, pump_pipe

_HEADER: Final = struct.Struct(">BxxxL")
"""Number of the stream, three bytes of padding, length of what follows."""
_ERRORS: Final = 2
_ERRORS_BYTES: Final = 4000
_CHUNK_BYTES: Final = 1 << 16


class InsideStream:
    """The input and output of a command.

    Args:
        opened: what the SDK's `exec_start(..., socket=True)` has returned.
        early: see `take_early`.
    """

    def __init__(self, opened: Any, early: bytes) -> None:
        self._opened = opened
        self.connection: Any = getattr(opened, "_sock", opened)
        self.connection.settimeout(None)
        self._rest = b""
        self._errors = b""
        self.first = self._add(early)
        """The standard output that came before the first `receive`."""

    def receive(self) -> bytes | None:
        """Read some of the standard output. None: it has ended."""
        data = self.connection.recv(_CHUNK_BYTES)
        return self._add(data) if data else None

    def _add(self, data: bytes) -> bytes:
        self._rest += data
        output = b""
        while len(self._rest) >= _HEADER.size:
            number, length = _HEADER.unpack_from(self._rest)
            end = _HEADER.size + length
            if len(self._rest) < end:
                break
            content, self._rest = self._rest[_HEADER.size : end], self._rest[end:]
            if number == _ERRORS:
                self._errors = (self._errors + content)[-_ERRORS_BYTES:]
            else:
                output += content
        return output

    def send(self, data: bytes) -> None:
        """Write to its standard input."""
        self.connection.sendall(data)

    def pump(self) -> NodePipe:
        """Carry the bytes of the command in both directions from now on, in threads."""
        return pump_pipe(
            self.connection,
            first=self.first,
            receive=self.receive,
            send=self.send,
            close=self.close,
            explain=self.explain,
        )

    def close(self) -> None:
        """Close the connection: the standard input ends."""
        response = getattr(self._opened, "_response", None)
        for each in (response, self._opened, self.connection):  # the last to close closes the descriptor
            with contextlib.suppress(OSError):
                if each is not None:
                    each.close()

    def read_errors(self) -> str:
        """Return the end of the standard error."""
        return self._errors.decode(errors="replace")

    def explain(self) -> str:
        """Return the last line of the standard error."""
        return find_last_line(self._errors)
