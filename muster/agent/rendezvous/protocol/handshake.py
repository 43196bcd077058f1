"""Authentication: a handshake with the job's token, then a MAC on every frame. Pure."""

import os
import struct
from collections.abc import Callable, Iterator

from muster._shared.codec import encode_message, to_json
from muster._shared.contract import FORMAT, FormatError, check_format
from muster.agent.rendezvous.protocol.framing import (
    FRAME_LIMIT_BYTES,
    HANDSHAKE_LIMIT_BYTES,
    MAC_BYTES,
    UNAUTHENTICATED_LIMIT_BYTES,
    Frame,
    FrameReader,
    ProtocolError,
    RefusalError,
    build_frame,
    decode_json,
)
from muster.agent.rendezvous.protocol.messages import Message


def _hmac(key: bytes, *parts: bytes) -> bytes:
    import hashlib
    import hmac

    return hmac.new(key, b"\0".join(parts), hashlib.sha256).digest()


def _matches(proof: bytes, right: bytes) -> bool:
    import hmac

    return hmac.compare_digest(proof, right)


OTHER_TOKEN = "the other node has a different job token (MUSTER_TOKEN)"


class Codec:
    """One side of one stream: handshake first, then messages.

    `receive` takes the bytes that arrive and returns messages; the handshake's replies go to `write`. `open` is True
    once the other side has proved the token. Calling `encode` before that is a mistake of the caller.
    """

    def __init__(
        self,
        token: str | None,
        *,
        is_server: bool,
        write: Callable[[bytes], None],
        nonce: Callable[[], bytes] = lambda: os.urandom(16),
    ) -> None:
        self._key = token.encode() if token else None
        self._is_server = is_server
        self._write = write
        self._reader = FrameReader(HANDSHAKE_LIMIT_BYTES)
        self._nonce = nonce()
        self._nonces: tuple[bytes, bytes] = (b"", b"")
        self._send_key = self._receive_key = b""
        self._sent = self._received = 0
        self._has_hello = self._has_proved = False
        self.open = False

    def start(self) -> None:
        """Send the client's hello. Without a token the client does not wait for a reply."""
        if self._is_server:
            return
        self._reply({"hello": FORMAT, "auth": self._key is not None})
        if self._key is None:
            self._open()

    def encode(self, message: Message) -> bytes:
        """Return the frame of a message, with its MAC if there is a token."""
        return self.seal(encode_message(message, self._reader.limit_bytes - MAC_BYTES).encode())

    def seal(self, payload: bytes) -> bytes:
        """Return the frame of a payload, with its MAC if there is a token."""
        if self._key is None:
            return build_frame(payload)
        mac = _hmac(self._send_key, struct.pack(">Q", self._sent), payload)
        self._sent += 1
        return build_frame(mac + payload)

    def receive(self, data: bytes) -> Iterator[Frame]:
        """Return the messages that are complete with these bytes.

        Raises:
            ProtocolError: the stream must be closed.
        """
        self._reader.add(data)
        while (payload := self._reader.next_payload()) is not None:
            if self.open:
                yield self._unpack(payload)
            else:
                self._handle_handshake(decode_json(payload))

    def _unpack(self, payload: bytes) -> Frame:
        if self._key is not None:
            mac, payload = payload[:MAC_BYTES], payload[MAC_BYTES:]
            right = _hmac(self._receive_key, struct.pack(">Q", self._received), payload)
            if not _matches(mac, right):
                raise ProtocolError("a frame was changed in transit")
            self._received += 1
        message = decode_json(payload)
        if "refused" in message:
            raise RefusalError(self._read_refusal(message))
        return message

    def _handle_handshake(self, message: Frame) -> None:
        if "refused" in message:
            raise RefusalError(self._read_refusal(message))
        if self._is_server:
            if self._has_hello:
                self._check_client(message)
            else:
                self._handle_hello(message)
        elif self._has_proved:
            self._check_mac(message, b"server")
            self._open()
        else:
            self._prove(message)

    def _handle_hello(self, message: Frame) -> None:
        try:
            check_format(message.get("hello"), "the node that joins")
        except FormatError as error:
            self._refuse(str(error))
        if bool(message.get("auth")) != (self._key is not None):
            self._refuse("one of the two nodes has a job token (MUSTER_TOKEN), the other has none")
        self._has_hello = True
        if self._key is None:
            self._open()
            return
        self._reply({"nonce": self._nonce.hex()})

    def _refuse(self, why: str) -> None:
        self._reply({"refused": why})
        raise RefusalError(why)

    def _reply(self, message: Frame) -> None:
        self._write(build_frame(to_json(message).encode()))

    def _prove(self, message: Frame) -> None:
        self._nonces = (self._nonce, _read_hex(message, "nonce"))
        self._has_proved = True
        self._reply({"nonce": self._nonce.hex(), "mac": self._compute_mac(b"client").hex()})

    def _check_client(self, message: Frame) -> None:
        self._nonces = (_read_hex(message, "nonce"), self._nonce)
        self._check_mac(message, b"client")
        self._reply({"mac": self._compute_mac(b"server").hex()})
        self._open()

    def _compute_mac(self, side: bytes) -> bytes:
        return _hmac(self._key or b"", side, *self._nonces)

    def _check_mac(self, message: Frame, side: bytes) -> None:
        if not _matches(_read_hex(message, "mac"), self._compute_mac(side)):
            self._refuse(OTHER_TOKEN)

    def _read_refusal(self, message: Frame) -> str:
        """Return why the other side refuses.

        A client can have only one reason, and any process could send any text in its place.
        """
        why = message["refused"]
        if self._is_server:
            return OTHER_TOKEN
        return why[:200] if isinstance(why, str) and why.isprintable() else "it refused without a reason"

    @property
    def limit_bytes(self) -> int:
        """The most bytes that a frame may have."""
        return self._reader.limit_bytes

    def take_rest(self) -> bytes:
        """Take the bytes that were received after the last message."""
        return self._reader.take_rest()

    def trust(self) -> None:
        """Allow long frames both ways, because the other side is now a member or the leader."""
        self._reader.limit_bytes = FRAME_LIMIT_BYTES

    def _open(self) -> None:
        self.open = True
        self._reader.limit_bytes = UNAUTHENTICATED_LIMIT_BYTES if self._key is None else FRAME_LIMIT_BYTES
        if self._key is not None:
            to_server = _hmac(self._key, b"to server", *self._nonces)
            to_client = _hmac(self._key, b"to client", *self._nonces)
            self._send_key, self._receive_key = (to_client, to_server) if self._is_server else (to_server, to_client)


def _read_hex(message: Frame, key: str) -> bytes:
    value = message.get(key)
    try:
        return bytes.fromhex(value) if isinstance(value, str) else b""
    except ValueError as error:
        raise ProtocolError(f"{key!r} of the handshake is not hexadecimal") from error
