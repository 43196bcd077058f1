"""What the agent sends to the program that drives it; `driven` describes the messages."""

import contextlib
import json
import os
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from muster.agent.runtime.event_log import EventRecord

_SEND_LIMIT_S = 10.0
"""How long a stopped caller, which does not read, may delay the end."""


def encode_message(message: dict[str, object]) -> bytes:
    """Return one message as a line."""
    return json.dumps(message, default=str).encode() + b"\n"


def send_message(control_fd: int, **message: object) -> None:
    """Send one message, or nothing if the caller is gone. This may block: call it only at the start and the end."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(control_fd)) as control:
        control.settimeout(_SEND_LIMIT_S)
        control.sendall(b"\n" + encode_message(message))  # a record may have been cut off


def send_error(control_fd: int, line: str, code: int) -> int:
    """Send why the agent cannot start or continue; return the exit code."""
    send_message(control_fd, error=line, code=int(code))
    return int(code)


class ControlSink:
    """Sends the event log's records to the caller (see `event_log.EventSink`).

    A stopped caller does not read. Then the socket fills, and whole records are dropped. Nothing here may delay the
    agent, and the outcome does not depend on records.
    """

    def __init__(self, control_fd: int) -> None:
        self._socket: socket.socket | None = socket.socket(fileno=os.dup(control_fd))
        self._rest = b""

    def write(self, record: "EventRecord") -> None:
        """See `EventSink`."""
        self._send()
        if not self._rest:
            self._rest = encode_message({"record": record.to_json()})
            self._send()

    def _send(self) -> None:
        try:
            while self._socket is not None and self._rest:
                self._rest = self._rest[self._socket.send(self._rest, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            return
        except OSError:
            self.close()

    def close(self) -> None:
        """See `EventSink`."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
