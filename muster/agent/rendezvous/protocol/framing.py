"""Frames on a stream. Pure: bytes in, messages out; the sockets are in `transport`.

A frame is a 4-byte big-endian length and that many bytes of JSON, never pickle: any process that can reach the port may
write to it. With a job token both sides prove that they hold it before anything else is read, and every later frame
carries a MAC over its number and content, so that a changed, replayed, dropped or reordered frame is detected::

    client  {"hello": 1, "auth": true}
    server  {"nonce": s}
    client  {"nonce": c, "mac": HMAC(token, "client" c s)}
    server  {"mac": HMAC(token, "server" c s)}
    both    MAC(direction's key, number + payload) + payload ...

The newcomer proves first, so a process that only connects gets nothing with which it could try tokens offline. Without
a token the handshake is only the hello. Its number is `contract.FORMAT`.
"""

import json
import struct

Frame = dict[str, object]
"""The content of a frame: a JSON object that is not validated."""

HEADER_BYTES = 4
MAC_BYTES = 32
HANDSHAKE_LIMIT_BYTES = 1024
"""Limit for a frame before the handshake is complete."""
UNAUTHENTICATED_LIMIT_BYTES = 64 * 1024
"""Limit for a frame without a token, until its sender is a member."""
FRAME_LIMIT_BYTES = 16 * 1024 * 1024
"""Large enough for the job's report with the stacks of thousands of ranks."""


class ProtocolError(Exception):
    """The other side does not follow the protocol, or could not prove the job token. `str()` says which."""


class RefusalError(ProtocolError):
    """The handshake was refused by either side, because the two nodes differ in token or format."""


_decode = json.JSONDecoder().decode


def decode_json(payload: bytes) -> Frame:
    """Parse a JSON object.

    Raises:
        ProtocolError: the data are not one.
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
        """Add received bytes."""
        self._buffer += data

    def next_payload(self) -> bytes | None:
        """Return the next complete payload; None until all of it was received.

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

    def take_rest(self) -> bytes:
        """Take the bytes after the last complete payload."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        return rest


def build_frame(payload: bytes) -> bytes:
    """Return a frame, which is length and payload."""
    return struct.pack(">I", len(payload)) + payload
