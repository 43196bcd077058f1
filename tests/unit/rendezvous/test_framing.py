"""Frames and authentication, byte by byte, without sockets."""

import struct

import pytest

from muster.agent.rendezvous.protocol.framing import (
    HANDSHAKE_LIMIT_BYTES,
    Broadcast,
    ProtocolError,
    build_frame,
    encode_json,
)
from muster.agent.rendezvous.protocol.handshake import Codec


class Wire:
    """A client and a server whose bytes the test may tamper with."""

    def __init__(self, client_token: str | None, server_token: str | None) -> None:
        self.to_server, self.to_client = bytearray(), bytearray()
        self.client = Codec(client_token, is_server=False, write=self.to_server.extend)
        self.server = Codec(server_token, is_server=True, write=self.to_client.extend)
        self.client.start()
        self.server.start()

    def pump(self) -> tuple[list, list]:
        got_server, got_client = [], []
        while self.to_server or self.to_client:
            data, self.to_server[:] = bytes(self.to_server), b""
            got_server += self.server.receive(data)
            data, self.to_client[:] = bytes(self.to_client), b""
            got_client += self.client.receive(data)
        return got_server, got_client


@pytest.mark.parametrize("token", [None, "secret"])
def test_a_circular_reads_like_any_other_message(token) -> None:
    wire = Wire(token, token)
    wire.pump()
    circular = Broadcast({"t": "round", "text": 'ü"}', "list": [1]})
    plain = [{"t": "round", "text": 'ü"}', "list": [1], "rank": rank, "bases": []} for rank in range(2)]
    letters = [circular.address(), *(circular.address(rank=rank, bases=[]) for rank in range(2))]
    assert letters[1:] == plain
    for letter in letters:
        wire.to_client.extend(wire.server.encode(letter))
    assert wire.pump() == ([], [circular.common, *plain])


@pytest.mark.parametrize("token", [None, "secret"])
def test_messages_pass_both_ways(token) -> None:
    wire = Wire(token, token)
    wire.pump()
    assert wire.client.open
    assert wire.server.open
    wire.to_server.extend(wire.client.encode({"t": "join", "text": "ü"}))
    wire.to_client.extend(wire.server.encode({"t": "welcome"}))
    assert wire.pump() == ([{"t": "join", "text": "ü"}], [{"t": "welcome"}])


@pytest.mark.parametrize(("client", "server"), [("a", "b"), ("a", None), (None, "b")])
def test_strangers_are_refused_in_words(client, server) -> None:
    wire = Wire(client, server)
    with pytest.raises(ProtocolError, match="MUSTER_TOKEN"):
        wire.pump()


def test_a_server_that_cannot_prove_itself_is_not_believed() -> None:
    wire = Wire("secret", "secret")
    wire.to_server.clear()
    wire.to_client.extend(build_frame(encode_json({"nonce": "00" * 16, "mac": "00" * 32})))
    with pytest.raises(ProtocolError, match="another job token"):
        list(wire.client.receive(bytes(wire.to_client)))


def authenticated() -> Wire:
    wire = Wire("secret", "secret")
    wire.pump()
    return wire


def test_a_changed_frame_is_noticed() -> None:
    wire = authenticated()
    frame = bytearray(wire.client.encode({"t": "done", "round": 1}))
    frame[-2] ^= 1
    with pytest.raises(ProtocolError, match="changed"):
        list(wire.server.receive(bytes(frame)))


def test_a_replayed_frame_is_noticed() -> None:
    wire = authenticated()
    frame = wire.client.encode({"t": "done", "round": 1})
    assert list(wire.server.receive(frame)) == [{"t": "done", "round": 1}]
    with pytest.raises(ProtocolError, match="changed"):
        list(wire.server.receive(frame))


def test_a_reflected_frame_is_noticed() -> None:
    wire = authenticated()
    with pytest.raises(ProtocolError, match="changed"):
        list(wire.client.receive(wire.client.encode({"t": "done"})))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "bytes, at most"),
        (struct.pack(">I", HANDSHAKE_LIMIT_BYTES + 1), "bytes, at most"),
        (build_frame(b"\x80\x04K\x01."), "not JSON"),
        (build_frame(b"[1, 2]"), "not a JSON object"),
        (build_frame(b"[" * 900), "not JSON"),
        (build_frame(b'{"hello": 99}'), "version"),
    ],
)
def test_garbage_is_refused(data, why) -> None:
    server = Codec(None, is_server=True, write=bytearray().extend)
    with pytest.raises(ProtocolError, match=why):
        list(server.receive(data))


def test_a_trickle_of_bytes_makes_the_same_messages() -> None:
    wire = Wire("secret", "secret")
    wire.pump()
    frame = wire.client.encode({"t": "x", "n": list(range(50))})
    got = []
    for byte in frame:
        got += wire.server.receive(bytes([byte]))
    assert got == [{"t": "x", "n": list(range(50))}]


def test_a_refusal_that_is_no_text_is_one() -> None:
    wire = authenticated()
    with pytest.raises(ProtocolError, match="without words"):
        list(wire.client.receive(wire.server.encode({"refused": [["\x1b[2J"]]})))
