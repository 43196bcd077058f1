"""Frames and authentication, byte by byte, without sockets."""

import json
import re
import struct

import pytest

from muster._shared.contract import FORMAT
from muster.agent.rendezvous.interface import AllStarted
from muster.agent.rendezvous.protocol.framing import (
    FRAME_LIMIT_BYTES,
    HANDSHAKE_LIMIT_BYTES,
    UNAUTHENTICATED_LIMIT_BYTES,
    FrameReader,
    ProtocolError,
    RefusalError,
    build_frame,
)
from muster.agent.rendezvous.protocol.handshake import OTHER_TOKEN, Codec
from muster.agent.rendezvous.protocol.messages import Exit, Goodbye, LeaderQuery

STARTED = AllStarted(round_number=1)
STARTED_FRAME = {"type": "AllStarted", "round_number": 1}


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
def test_messages_pass_both_ways(token) -> None:
    wire = Wire(token, token)
    wire.pump()
    assert wire.client.open
    assert wire.server.open
    wire.to_server.extend(wire.client.encode(LeaderQuery(run_id='ü"}')))
    wire.to_client.extend(wire.server.encode(Exit()))
    assert wire.pump() == ([{"type": "LeaderQuery", "run_id": 'ü"}'}], [{"type": "Exit", "peak_bytes": 0}])


def test_frames_are_small_until_the_other_side_is_trusted() -> None:
    frame = build_frame(b'"' + b"x" * UNAUTHENTICATED_LIMIT_BYTES + b'"')
    peer = Wire(None, None)
    peer.pump()
    with pytest.raises(ProtocolError, match=f"at most {UNAUTHENTICATED_LIMIT_BYTES} bytes"):
        list(peer.server.receive(frame))
    member = Wire(None, None)
    member.pump()
    member.server.trust()
    with pytest.raises(ProtocolError, match="a JSON object"):
        list(member.server.receive(frame))
    with pytest.raises(ProtocolError, match=f"at most {FRAME_LIMIT_BYTES} bytes"):
        list(authenticated().server.receive(struct.pack(">I", FRAME_LIMIT_BYTES + 1)))


@pytest.mark.parametrize(("client", "server"), [("a", "b"), ("a", None), (None, "b")])
def test_a_client_without_the_token_is_refused_with_a_reason(client, server) -> None:
    wire = Wire(client, server)
    with pytest.raises(ProtocolError, match="MUSTER_TOKEN"):
        wire.pump()


def test_a_server_that_cannot_prove_the_token_is_refused() -> None:
    wire = Wire("secret", "secret")
    assert list(wire.client.receive(build_frame(b'{"nonce": "00"}'))) == []
    with pytest.raises(ProtocolError, match="different job token"):
        list(wire.client.receive(build_frame(json.dumps({"mac": "00" * 32}).encode())))
    assert not wire.client.open


def test_the_newcomer_proves_first() -> None:
    """A peer that only connected got the server's MAC, with which it could try tokens by itself."""
    wire = Wire("secret", "secret")
    sent = list(wire.server.receive(bytes(wire.to_server)))
    assert sent == []
    (reply,) = read_frames(wire.to_client)
    assert list(reply) == ["nonce"]
    proof = {"nonce": "00" * 16, "mac": "00" * 32}
    wire.to_client.clear()
    with pytest.raises(ProtocolError, match="different job token"):
        list(wire.server.receive(build_frame(json.dumps(proof).encode())))
    assert read_frames(wire.to_client) == [{"refused": OTHER_TOKEN}]


@pytest.mark.parametrize("token", [None, "secret"])
def test_an_agent_of_another_format_is_refused_with_a_line_on_both_sides(token) -> None:
    wire = Wire(token, token)
    other = {"hello": 6, "auth": token is not None, "nonce": "00" * 16}
    with pytest.raises(RefusalError, match=f"format 6, .* format {FORMAT} ") as refused:
        list(wire.server.receive(build_frame(json.dumps(other).encode())))
    line = str(refused.value)
    assert read_frames(wire.to_client) == [{"refused": line}]
    with pytest.raises(RefusalError, match=re.escape(line)):
        list(wire.client.receive(build_frame(json.dumps({"refused": line}).encode())))


def read_frames(data: bytearray) -> list[dict[str, object]]:
    reader = FrameReader(HANDSHAKE_LIMIT_BYTES)
    reader.add(bytes(data))
    return [json.loads(payload) for payload in iter(reader.next_payload, None)]


def authenticated() -> Wire:
    wire = Wire("secret", "secret")
    wire.pump()
    return wire


def test_a_changed_frame_is_detected() -> None:
    wire = authenticated()
    frame = bytearray(wire.client.encode(STARTED))
    frame[-2] ^= 1
    with pytest.raises(ProtocolError, match="changed"):
        list(wire.server.receive(bytes(frame)))


def test_a_replayed_frame_is_detected() -> None:
    wire = authenticated()
    frame = wire.client.encode(STARTED)
    assert list(wire.server.receive(frame)) == [STARTED_FRAME]
    with pytest.raises(ProtocolError, match="changed"):
        list(wire.server.receive(frame))


def test_a_reflected_frame_is_detected() -> None:
    wire = authenticated()
    with pytest.raises(ProtocolError, match="changed"):
        list(wire.client.receive(wire.client.encode(STARTED)))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "is too long"),
        (struct.pack(">I", HANDSHAKE_LIMIT_BYTES + 1), "is too long"),
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


def test_single_bytes_make_the_same_messages() -> None:
    wire = Wire("secret", "secret")
    wire.pump()
    frame = wire.client.encode(Goodbye(reason="x" * 50))
    got = []
    for byte in frame:
        got += wire.server.receive(bytes([byte]))
    assert got == [{"type": "Goodbye", "reason": "x" * 50}]


def test_a_refusal_without_text_is_a_refusal() -> None:
    wire = Wire("secret", "secret")
    with pytest.raises(ProtocolError, match="without a reason"):
        list(wire.client.receive(build_frame(json.dumps({"refused": [["\x1b[2J"]]}).encode())))
