"""Frames on a stream, and proof of who sent them. Pure: bytes in, messages out; the sockets are in `network`.

A frame is a 4-byte big-endian length and that many bytes of JSON, never pickle: whoever can reach the port may write
to it. With a job token both sides prove that they hold it before anything else is read, and every later frame carries
a MAC over its number and content, so that nothing can be changed, replayed, dropped or reordered unnoticed::

    client  {"hello": 1, "auth": true, "nonce": c}
    server  {"nonce": s, "mac": HMAC(token, "server" c s)}
    client  {"mac": HMAC(token, "client" c s)}
    both    MAC(direction's key, number + payload) + payload ...

Without a token the hello alone opens the stream.
"""

import json
import struct
from typing import Any

Message = dict[str, Any]

HEADER_BYTES = 4
MAC_BYTES = 32
HANDSHAKE_LIMIT_BYTES = 1024
"""A stranger's frame may not be longer."""
FRAME_LIMIT_BYTES = 16 * 1024 * 1024
"""A job's whole report with the stacks of thousands of ranks fits."""
VERSION = 2


class ProtocolError(Exception):
    """The other side does not speak our language, or is not who it must be. `str()` says which."""


_encode = json.JSONEncoder(separators=(",", ":")).encode  # `dumps` with separators makes an encoder every time
_decode = json.JSONDecoder().decode


class Broadcast:
    """What a message to many says to all of them: encoded once, however many there are."""

    def __init__(self, common: Message) -> None:
        self.common = common
        self._text = ""

    def address(self, **own: Any) -> Message:
        """The message with what it says to one of them."""
        return AddressedCopy(self, own)

    def encode(self, own: Message) -> bytes:
        """Like `encode_json` of both parts together."""
        self._text = self._text or _encode(self.common)
        return (f"{self._text[:-1]},{_encode(own)[1:]}" if own else self._text).encode()


class AddressedCopy(dict[str, Any]):
    """One member's message of a circular; a message like any other to whoever reads it. Never changed."""

    def __init__(self, circular: Broadcast, own: Message) -> None:
        super().__init__(circular.common, **own)
        self._circular = circular
        self._own = own

    def encode(self) -> bytes:
        """Like `encode_json`."""
        return self._circular.encode(self._own)


def encode_json(message: Message) -> bytes:
    """Compact UTF-8 JSON."""
    return message.encode() if isinstance(message, AddressedCopy) else _encode(message).encode()


def decode_json(payload: bytes) -> Message:
    """A JSON object, nothing else.

    Raises:
        WireError: it is not one.
    """
    try:
        message = _decode(payload.decode())
    except (ValueError, RecursionError) as error:
        raise ProtocolError("a frame was not JSON") from error
    if not isinstance(message, dict):
        raise ProtocolError("a frame was not a JSON object")
    return message


class FrameReader:
    """Cuts a stream into payloads."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Add bytes as they came."""
        self._buffer += data

    def next_payload(self) -> bytes | None:
        """The next whole payload, None until it has come.

        Raises:
            WireError: a frame announces more bytes than allowed. Nothing of that size is ever buffered.
        """
        if len(self._buffer) < HEADER_BYTES:
            return None
        (size,) = struct.unpack_from(">I", self._buffer)
        if size > self.limit_bytes:
            raise ProtocolError(f"a frame of {size} bytes, at most {self.limit_bytes} are allowed")
        end = HEADER_BYTES + size
        if len(self._buffer) < end:
            return None
        payload = bytes(self._buffer[HEADER_BYTES:end])
        del self._buffer[:end]
        return payload


def build_frame(payload: bytes) -> bytes:
    """Length and payload."""
    return struct.pack(">I", len(payload)) + payload
