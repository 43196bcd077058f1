"""A link that has left the loop. A thread sends and receives large amounts on it by blocking calls.

Both ends have proved the job's token in the handshake of the link. A dictionary is sent with a MAC, like every message.
Raw bytes have none, so their digest is sent in a dictionary.
"""

import contextlib
import socket
import struct

from muster._shared.codec import to_json
from muster.agent.rendezvous.protocol.framing import HEADER_BYTES, ProtocolError
from muster.agent.rendezvous.protocol.handshake import Codec

STALL_LIMIT_S = 30.0
"""How long the other side may take to send or accept anything."""


class TcpStream:
    """One end of the stream (see `interface.Stream`)."""

    def __init__(self, sock: socket.socket, codec: Codec) -> None:
        self._socket = sock
        self._codec = codec
        self._rest = codec.take_rest()
        """Bytes that the loop has already received behind the message that opened the stream."""
        sock.settimeout(STALL_LIMIT_S)

    def send(self, message: dict[str, object]) -> None:
        """Send a dictionary of JSON values.

        Raises:
            OSError: the connection broke, or stalls.
        """
        self._socket.sendall(self._codec.seal(to_json(message).encode()))

    def receive(self) -> dict[str, object]:
        """Receive one dictionary.

        Raises:
            OSError: the connection broke, or stalls.
            ProtocolError: what arrived was not sent by the other side, or is no dictionary.
        """
        header = bytearray(HEADER_BYTES)
        self.receive_raw(memoryview(header))
        (size,) = struct.unpack(">I", header)
        if size > self._codec.limit_bytes:
            raise ProtocolError(f"a frame of {size} bytes is too long")
        payload = bytearray(size)
        self.receive_raw(memoryview(payload))
        for message in self._codec.receive(bytes(header + payload)):
            return message
        raise ProtocolError("a frame has no message")

    def send_raw(self, data: memoryview) -> None:
        """Send bytes.

        Raises:
            OSError: the connection broke, or stalls.
        """
        self._socket.sendall(data)

    def receive_raw(self, into: memoryview) -> None:
        """Receive as many bytes as there is room for.

        Raises:
            OSError: the connection broke, or stalls.
        """
        if self._rest:
            count = min(len(into), len(self._rest))
            into[:count] = self._rest[:count]
            self._rest, into = self._rest[count:], into[count:]
        while into:
            count = self._socket.recv_into(into)
            if not count:
                raise ConnectionResetError("the connection was closed")
            into = into[count:]

    def abort(self) -> None:
        """Make the thread that uses the stream fail. Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the stream. May be called again."""
        self._socket.close()
