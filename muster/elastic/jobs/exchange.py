"""Exchanges the results of a job that has ended well between the programs that started its nodes.

The program of the node that had global rank 0 listens at MASTER_ADDR:MASTER_PORT of the last round. Every node can
reach that address, and the workers' store listened there until the end. Each other program connects, sends its results
and then receives all others. No result passes through an agent or through JSON, and none is in memory as a whole. It
goes from one unnamed file to another in pieces, so only the disk limits its size.

Results are unpickled, which can run any code. So both sides prove that they know the job's token, and every frame is
authenticated. Nothing is encrypted, as in rendezvous.
"""

import contextlib
import errno
import hashlib
import hmac
import json
import os
import selectors
import socket
import struct
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from muster.elastic.jobs.errors import ResultsMissing
from muster.elastic.jobs.results import RoundPlace

_MEETING_LIMIT_S = 60.0
"""How long the programs wait for one another after the job's end. The agents have ended at the same moment."""

_HANDSHAKE_LIMIT_S = 20.0
"""How long each answer of a handshake may take that may be another job's."""

_STRANGERS = 64
"""How many connections may have proved nothing beside those of the nodes."""

_SILENCE_LIMIT_S = 600.0
"""While one program is served, the others wait. One whose machine is gone is noticed sooner, by keep-alives."""

_KEEP_ALIVE_OPTIONS = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 6}
"""Seconds, seconds, probes. A machine that is gone is noticed after 40 s."""

_RETRY_S = 0.1
_CHUNK_BYTES = 1 << 20
_FRAME_LIMIT_BYTES = _CHUNK_BYTES + 4096
_NONCE_BYTES = _MAC_BYTES = 32
_NODE = struct.Struct(">I")
_HELLO_BYTES = _NONCE_BYTES + 4 + _MAC_BYTES + _NODE.size
"""A nonce, and a frame that proves the token and says which node this is."""


@dataclass
class Gathered:
    """Results by global rank, as descriptors of unnamed files. -1: the worker ended well without one."""

    fds: dict[int, int] = field(default_factory=dict)

    def close(self) -> None:
        """Close the files. Idempotent."""
        while self.fds:
            _, fd = self.fds.popitem()
            if fd >= 0:
                os.close(fd)


def exchange_results(place: RoundPlace, own: Mapping[int, int], token: str) -> Gathered:
    """Send this node's results to the other nodes' programs, and receive theirs.

    Args:
        place: this node's in the job's last round.
        own: this node's results, in the form of `Gathered`. Their descriptors stay the caller's.
        token: the job's.

    Returns:
        The other nodes' results, which the caller closes.

    Raises:
        ResultsMissing: names the ranks whose results are missing, and why.
    """
    key = hmac.new(token.encode(), f"results of round {place.number}".encode(), hashlib.sha256).digest()
    gathered = Gathered()
    try:
        if place.node == 0:
            why = _serve(place, own, key, gathered)
        else:
            why = _ask(place, own, key, gathered)
    except BaseException:  # KeyboardInterrupt too: close the files
        gathered.close()
        raise
    missing = sorted(set(range(place.world_size)) - set(own) - set(gathered.fds))
    if missing:
        gathered.close()
        ranks = ", ".join(map(str, missing))
        raise ResultsMissing(f"the job succeeded, but the results of ranks {ranks} did not come: {why}")
    return gathered


# -- the program of global rank 0's node ------------------------------------------------------------------------------


def _serve(place: RoundPlace, own: Mapping[int, int], key: bytes, gathered: Gathered) -> str:
    """Receive from each other program, then send to each. Return why something is missing."""
    with contextlib.ExitStack() as stack:
        try:
            listener = stack.enter_context(_listen(place))
        except OSError as error:
            return f"cannot listen at port {place.master_port}: {error.strerror or error}"
        meeting = _Meeting(listener, place, key)
        stack.callback(meeting.close)
        why = meeting.run()
        for node, channel in [*meeting.channels.items()]:
            try:
                _receive_results(channel, gathered)
            except (OSError, ValueError, KeyError) as error:  # noqa: PERF203
                why = f"the connection to node {node}'s program broke: {error}"
                meeting.channels.pop(node).connection.close()
        everything = {**own, **gathered.fds}
        for channel in meeting.channels.values():
            with contextlib.suppress(OSError):  # it has ended; the others get theirs
                _send_results(channel, everything, why)
        return why


class _Meeting:
    """The handshakes with all other programs, side by side. Close it.

    Any process can connect. So nothing waits for one connection, all together have one limit, and of too many that have
    proved nothing the oldest is closed. A program whose connection was closed connects again.
    """

    def __init__(self, listener: socket.socket, place: RoundPlace, key: bytes) -> None:
        self._listener = listener
        self._place = place
        self._key = key
        self._selector = selectors.DefaultSelector()
        self._unproven: dict[socket.socket, tuple[bytes, bytearray]] = {}
        """What was sent and what has come, the oldest connection first."""
        self.channels: dict[int, _Channel] = {}
        """Of the programs that have proved the token, by node."""

    def run(self) -> str:
        """Wait for all programs. Return why one is missing."""
        why = ""
        deadline_s = time.monotonic() + _MEETING_LIMIT_S
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        while len(self.channels) < self._place.nodes - 1:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                absent = min(set(range(1, self._place.nodes)) - set(self.channels))
                return why or f"node {absent} did not connect within {_MEETING_LIMIT_S:g} s"
            for ready, _ in self._selector.select(left_s):
                if ready.data is None:
                    self._accept()
                elif ready.data in self._unproven:  # not closed in this turn
                    try:
                        self._receive(ready.data)
                    except OSError as error:  # another job's, or half a message
                        why = f"a connection broke: {error}"
                        self._close_unproven(ready.data)
        return why

    def _accept(self) -> None:
        try:
            connection, _address = self._listener.accept()
        except OSError:  # gone, or no descriptors left
            if not self._unproven:
                time.sleep(_RETRY_S)
        else:
            nonce = os.urandom(_NONCE_BYTES)
            self._unproven[connection] = nonce, bytearray()
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, connection)
            with contextlib.suppress(OSError):  # reading it tells
                connection.send(nonce)
            if len(self._unproven) <= self._place.nodes + _STRANGERS:
                return
        for oldest in [*self._unproven][:1]:
            self._close_unproven(oldest)

    def _receive(self, connection: socket.socket) -> None:
        """Read a part of the other side's handshake.

        Raises:
            OSError: the other side does not know the key, or the connection broke.
        """
        nonce, hello = self._unproven[connection]
        data = connection.recv(_HELLO_BYTES - len(hello))
        if not data:
            raise ConnectionError("the other side closed it")
        hello += data
        if len(hello) < _HELLO_BYTES:
            return
        channel = _Channel(connection, self._key, nonce, bytes(hello[:_NONCE_BYTES]), is_server=True)
        (node,) = _NODE.unpack(channel.verify(bytes(hello[-_MAC_BYTES - _NODE.size :])))
        channel.send(b"")
        self._selector.unregister(connection)
        del self._unproven[connection]
        earlier = self.channels.pop(node, None)  # of which it has not got this proof
        if earlier is not None:
            earlier.connection.close()
        self.channels[node] = channel

    def _close_unproven(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._unproven[connection]
        connection.close()

    def close(self) -> None:
        """Close all connections."""
        self._selector.close()
        for connection in (*self._unproven, *(each.connection for each in self.channels.values())):
            connection.close()


def _listen(place: RoundPlace) -> socket.socket:
    """Listen where the other nodes look.

    Raises:
        OSError: the port is still in use after the limit.
    """
    deadline_s = time.monotonic() + _MEETING_LIMIT_S
    while True:
        try:
            return _create_server(place)
        except OSError as error:  # noqa: PERF203  # until then it may be the store's
            if error.errno != errno.EADDRINUSE or time.monotonic() >= deadline_s:
                raise
            time.sleep(_RETRY_S)


def _create_server(place: RoundPlace) -> socket.socket:
    """Listen at MASTER_ADDR alone, as the store did.

    If it is a name, or not this machine's address (NAT), listen at all addresses.
    """
    host, port, backlog = place.master_addr, place.master_port, place.nodes + _STRANGERS
    try:
        numeric = "127.0.0.1" if host == "localhost" else host
        family, _, _, _, address = socket.getaddrinfo(numeric, port, flags=socket.AI_NUMERICHOST)[0]
        return socket.create_server(address[:2], family=family, backlog=backlog)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=backlog)


# -- the others' ------------------------------------------------------------------------------------------------------


def _ask(place: RoundPlace, own: Mapping[int, int], key: bytes, gathered: Gathered) -> str:
    """Send to the program of global rank 0's node, then receive from it. Return why something is missing."""
    where = f"{place.master_addr}:{place.master_port}"
    try:
        channel = _connect(place, key)
    except OSError as error:
        return f"node 0's program did not answer at {where} within {_MEETING_LIMIT_S:g} s: {error.strerror or error}"
    try:
        with channel.connection:
            _send_results(channel, own, "")
            return _receive_results(channel, gathered, skipped=own)
    except (OSError, ValueError, KeyError) as error:
        return f"the connection to node 0's program at {where} broke: {error}"


def _connect(place: RoundPlace, key: bytes) -> "_Channel":
    """Connect and prove the token. Try again and again, because the other program may be slower than this one.

    Until then the port may still be the store's, or another process's.
    """
    deadline_s = time.monotonic() + _MEETING_LIMIT_S
    while True:
        connection = None
        try:
            connection = socket.create_connection((place.master_addr, place.master_port), _HANDSHAKE_LIMIT_S)
            own = os.urandom(_NONCE_BYTES)
            connection.sendall(own)
            other = _read(connection, _NONCE_BYTES, _HANDSHAKE_LIMIT_S)
            channel = _Channel(connection, key, own, other, is_server=False)
            channel.send(_NODE.pack(place.node))
            channel.receive(_HANDSHAKE_LIMIT_S)  # proves the token
        except OSError:
            if connection is not None:
                connection.close()
            if time.monotonic() >= deadline_s:
                raise
            time.sleep(_RETRY_S)
        else:
            return channel


# -- what travels -----------------------------------------------------------------------------------------------------


def _send_results(channel: "_Channel", results: Mapping[int, int], why_incomplete: str) -> None:
    for rank, fd in results.items():
        size = os.fstat(fd).st_size if fd >= 0 else -1
        channel.send(json.dumps({"rank": rank, "size": size}).encode())
        for at in range(0, size, _CHUNK_BYTES):
            channel.send(os.pread(fd, _CHUNK_BYTES, at))
    channel.send(json.dumps({"end": why_incomplete}).encode())


def _receive_results(channel: "_Channel", gathered: Gathered, *, skipped: Mapping[int, int] | None = None) -> str:
    """Receive until the other side's end. Return what it says about missing results.

    Args:
        channel: to the other side.
        gathered: gets the results.
        skipped: ranks whose results are not kept.
    """
    while "end" not in (message := json.loads(channel.receive())):
        rank, left = int(message["rank"]), int(message["size"])
        if left < 0:
            gathered.fds[rank] = -1
            continue
        with tempfile.TemporaryFile(buffering=0, prefix="muster_result_") as file:
            for data in _receive_pieces(channel, left):
                view = memoryview(data)
                while view:
                    view = view[file.write(view) :]
            if rank not in (skipped or {}):
                gathered.fds[rank] = os.dup(file.fileno())
    for rank in skipped or {}:
        gathered.fds.pop(rank, None)
    return str(message["end"])


def _receive_pieces(channel: "_Channel", left: int) -> Iterator[bytes]:
    while left > 0:
        data = channel.receive()
        left -= len(data)
        if not data or left < 0:
            raise ConnectionError("a result does not have the announced size")
        yield data


class _Channel:
    """One connection after the exchange of nonces: frames with a MAC over their number and content.

    Whoever can send a frame knows the key.
    """

    def __init__(self, connection: socket.socket, key: bytes, own: bytes, other: bytes, *, is_server: bool) -> None:
        self.connection = connection
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE_OPTIONS.items():
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        nonces = other + own if is_server else own + other
        sides = (b"server", b"client") if is_server else (b"client", b"server")
        self._send_key, self._receive_key = (_compute_mac(key, side, nonces) for side in sides)
        self._sent = self._received = 0

    def send(self, payload: bytes) -> None:
        """Send one frame."""
        mac = _compute_mac(self._send_key, struct.pack(">Q", self._sent), payload)
        self._sent += 1
        self.connection.settimeout(_SILENCE_LIMIT_S)
        self.connection.sendall(struct.pack(">I", _MAC_BYTES + len(payload)) + mac + payload)

    def receive(self, limit_s: float = _SILENCE_LIMIT_S) -> bytes:
        """Receive one frame.

        Raises:
            OSError: the connection broke, or the frame is not the other side's.
        """
        (size,) = struct.unpack(">I", _read(self.connection, 4, limit_s))
        if not _MAC_BYTES <= size <= _FRAME_LIMIT_BYTES:
            raise ConnectionError("the other side is not a program of this job")
        return self.verify(_read(self.connection, size, limit_s))

    def verify(self, frame: bytes) -> bytes:
        """Return what is in a frame, without its size.

        Raises:
            ConnectionError: it is not the other side's.
        """
        mac, payload = frame[:_MAC_BYTES], frame[_MAC_BYTES:]
        if not hmac.compare_digest(mac, _compute_mac(self._receive_key, struct.pack(">Q", self._received), payload)):
            raise ConnectionError("the other side does not know the job's token")
        self._received += 1
        return payload


def _read(connection: socket.socket, size: int, limit_s: float) -> bytes:
    """Read so many bytes within one limit, however they come.

    Raises:
        OSError: the connection broke, or they do not come.
    """
    deadline_s = time.monotonic() + limit_s
    found = bytearray()
    while len(found) < size:
        connection.settimeout(max(1e-3, deadline_s - time.monotonic()))
        data = connection.recv(size - len(found))
        if not data:
            raise ConnectionError("the other side closed it")
        found += data
    return bytes(found)


def _compute_mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.new(key, b"".join(parts), hashlib.sha256).digest()
