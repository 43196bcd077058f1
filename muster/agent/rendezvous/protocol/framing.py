"""Frames on a stream. Pure: bytes in, messages out; the sockets are in `transport`.

A frame is a 4-byte big-endian length and that many bytes of JSON, never pickle: any process that can reach the port may
write to it. With a job token both sides prove that they hold it before anything else is read, and every later frame
carries a MAC over its number and content, so that a changed, replayed, dropped or reordered frame is detected::

    client  {"hello": 1, "auth": true, "nonce": c}
    server  {"nonce": s, "mac": HMAC(token, "server" c s)}
    client  {"mac": HMAC(token, "client" c s)}
    both    MAC(direction's key, number + payload) + payload ...

Without a token the handshake is the hello alone.
"""

import json
import struct
from typing import Any

Message = dict[str, Any]

HEADER_BYTES = 4
MAC_BYTES = 32
HANDSHAKE_LIMIT_BYTES = 1024
"""Limit for a frame before the handshake is complete."""
FRAME_LIMIT_BYTES = 16 * 1024 * 1024
"""The job's report with the stacks of thousands of ranks fits."""
VERSION = 3


class ProtocolError(Exception):
    """The other side does not follow the protocol, or could not prove the job token. `str()` says which."""


_encode = json.JSONEncoder(separators=(",", ":")).encode  # `dumps` with separators makes an encoder every time
_decode = json.JSONDecoder().decode


class Broadcast:
    """The common part of a message to many members, encoded only once."""

    def __init__(self, common: Message) -> None:
        self.common = common
        self._text = ""

    def build_copy(self, **own: Any) -> Message:
        """The message to one member: the common part and its own fields."""
        return AddressedCopy(self, own)

    def encode(self, own: Message) -> bytes:
        """Like `encode_json` of both parts together."""
        self._text = self._text or _encode(self.common)
        return (f"{self._text[:-1]},{_encode(own)[1:]}" if own else self._text).encode()


class AddressedCopy(dict[str, Any]):
    """One member's copy of a broadcast. It reads like any other message; never changed."""

    def __init__(self, broadcast: Broadcast, own: Message) -> None:
        super().__init__(broadcast.common, **own)
        self._broadcast = broadcast
        self._own = own

    def encode(self) -> bytes:
        """Like `encode_json`."""
        return self._broadcast.encode(self._own)


def encode_json(message: Message) -> bytes:
    """Compact UTF-8 JSON."""
    return message.encode() if isinstance(message, AddressedCopy) else _encode(message).encode()


def decode_json(payload: bytes) -> Message:
    """Parse a JSON object.

    Raises:
        ProtocolError: it is not one.
    """
    try:
        message = _decode(payload.decode())
    except (ValueError, RecursionError) as error:
        raise ProtocolError("a frame is not JSON") from error
    if not isinstance(message, dict):
        raise ProtocolError("a frame is not a JSON object")
    return message


class FrameReader:
    """Cuts a stream into payloads."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._buffer = bytearray()

    def add(self, data: bytes) -> None:
        """Add bytes as received."""
        self._buffer += data

    def next_payload(self) -> bytes | None:
        """The next complete payload; None until all of it was received.

        Raises:
            ProtocolError: a frame is longer than allowed. Such a frame is never buffered.
        """
        if len(self._buffer) < HEADER_BYTES:
            return None
        (size,) = struct.unpack_from(">I", self._buffer)
        if size > self.limit_bytes:
            raise ProtocolError(f"a frame of {size} bytes is too long: at most {self.limit_bytes} bytes are allowed")
        end = HEADER_BYTES + size
        if len(self._buffer) < end:
            return None
        payload = bytes(self._buffer[HEADER_BYTES:end])
        del self._buffer[:end]
        return payload


def build_frame(payload: bytes) -> bytes:
    """A frame: length and payload."""
    return struct.pack(">I", len(payload)) + payload
