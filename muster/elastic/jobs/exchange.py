"""Exchanges the results of a job that has ended well between the programs that started its nodes.

The program of the node that had global rank 0 listens at MASTER_ADDR:MASTER_PORT of the last round. Every node can
reach that address, and the workers' store listened there until the end. Each other program connects, sends its results
and then receives all others. No result passes through an agent or through JSON, and none is in memory as a whole. It
goes from one unnamed file to another in pieces, so only the disk limits its size.

Results are unpickled, which can run any code. So both sides prove that they know the job's token, by the handshake that
nodes have in rendezvous, and the digest of each result comes in an authenticated frame. Nothing is encrypted, as in
rendezvous.
"""

import contextlib
import errno
import hashlib
import hmac
import os
import selectors
import socket
import tempfile
import time
from collections.abc import Collection, Mapping

from muster.agent.rendezvous.protocol.framing import ProtocolError
from muster.agent.rendezvous.protocol.handshake import Codec
from muster.agent.rendezvous.transport.stream import TcpStream
from muster.agent.runtime.ports import bind_address
from muster.elastic.jobs.errors import ResultsMissing
from muster.elastic.jobs.results import RoundPosition, close_fds

_MEETING_LIMIT_S = 60.0
"""How long the programs wait for one another after the job's end. The agents have ended at the same moment."""

_HANDSHAKE_LIMIT_S = 20.0
"""How long a handshake may take that may be with another job's process."""

_STRANGERS = 64
"""How many connections may have proved nothing beside those of the nodes."""

_SILENCE_LIMIT_S = 600.0
"""While one program is served, the others wait. One whose machine is gone is noticed sooner, by keep-alives."""

_KEEP_ALIVE_OPTIONS = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 6}
"""Seconds, seconds, probes. A machine that is gone is noticed after 40 s."""

_RETRY_S = 0.1
_CHUNK_BYTES = 1 << 20
_BROKEN = (OSError, ProtocolError, ValueError, KeyError)
"""What reading from the other side raises."""


def exchange_results(position: RoundPosition, own: Mapping[int, int], token: str) -> dict[int, int]:
    """Send this node's results to the other nodes' programs, and receive theirs.

    Args:
        position: this node's in the job's last round.
        own: this node's results, by global rank, as descriptors of files. They stay the caller's. -1: the worker ended
            well without one.
        token: the job's.

    Returns:
        The other nodes' results, in the same form. The caller closes them.

    Raises:
        ResultsMissing: names the ranks whose results are missing, and why.
    """
    key = hmac.new(token.encode(), f"results of round {position.number}".encode(), hashlib.sha256).hexdigest()
    gathered: dict[int, int] = {}
    try:
        why = (_serve if position.node == 0 else _ask)(position, own, key, gathered)
    except BaseException:  # KeyboardInterrupt too: close the files
        close_fds(gathered.values())
        raise
    missing = sorted(set(range(position.world_size)) - set(own) - set(gathered))
    if missing:
        close_fds(gathered.values())
        ranks = ", ".join(map(str, missing))
        raise ResultsMissing(f"the job succeeded, but the results of ranks {ranks} did not come: {why}")
    return gathered


# -- the program of global rank 0's node ------------------------------------------------------------------------------


def _serve(position: RoundPosition, own: Mapping[int, int], key: str, gathered: dict[int, int]) -> str:
    """Receive from each other program, then send to each. Return why something is missing."""
    with contextlib.ExitStack() as stack:
        try:
            listener = stack.enter_context(_listen(position))
        except OSError as error:
            return f"cannot listen at port {position.master_port}: {error.strerror or error}"
        meeting = _Meeting(listener, position, key)
        stack.callback(meeting.close)
        why = meeting.run()
        for node, stream in [*meeting.streams.items()]:
            try:
                _receive_results(stream, gathered)
            except _BROKEN as error:  # noqa: PERF203
                why = f"the connection to node {node}'s program broke: {error}"
                meeting.streams.pop(node).close()
        for stream in meeting.streams.values():
            with contextlib.suppress(OSError):  # it has ended; the others get theirs
                _send_results(stream, {**own, **gathered}, why)
        return why


class _Meeting:
    """The handshakes with all other programs, side by side. Close it.

    Any process can connect. So nothing waits for one connection, all together have one limit, and of too many that have
    proved nothing the oldest is closed. A program whose connection was closed connects again.
    """

    def __init__(self, listener: socket.socket, position: RoundPosition, key: str) -> None:
        self._listener = listener
        self._position = position
        self._key = key
        self._selector = selectors.DefaultSelector()
        self._unproven: dict[socket.socket, Codec] = {}
        """The oldest connection first."""
        self.streams: dict[int, TcpStream] = {}
        """Of the programs that have proved the token, by node."""

    def run(self) -> str:
        """Wait for all programs. Return why one is missing."""
        why = ""
        deadline_s = time.monotonic() + _MEETING_LIMIT_S
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        while len(self.streams) < self._position.nodes - 1:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                absent = min(set(range(1, self._position.nodes)) - set(self.streams))
                return why or f"node {absent} did not connect within {_MEETING_LIMIT_S:g} s"
            for ready, _ in self._selector.select(left_s):
                if ready.data is None:
                    self._accept()
                elif ready.data in self._unproven:  # not closed in this turn
                    try:
                        self._receive(ready.data)
                    except _BROKEN as error:  # another job's, or half a message
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
            connection.setblocking(False)
            self._unproven[connection] = Codec(self._key, is_server=True, write=connection.sendall)
            self._selector.register(connection, selectors.EVENT_READ, connection)
            if len(self._unproven) <= self._position.nodes + _STRANGERS:
                return
        for oldest in [*self._unproven][:1]:
            self._close_unproven(oldest)

    def _receive(self, connection: socket.socket) -> None:
        """Read a part of the other side's handshake, and then which node it is.

        Raises:
            OSError: the connection broke.
            ProtocolError: the other side does not know the key.
        """
        codec = self._unproven[connection]
        data = connection.recv(_CHUNK_BYTES)
        if not data:
            raise ConnectionError("the other side closed it")
        message = next(codec.receive(data), None)
        if message is None:
            return
        node = int(str(message["node"]))
        stream = _open_stream(connection, codec)
        stream.send(message)
        self._selector.unregister(connection)
        del self._unproven[connection]
        earlier = self.streams.pop(node, None)  # of which it has not got this answer
        if earlier is not None:
            earlier.close()
        self.streams[node] = stream

    def _close_unproven(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._unproven[connection]
        connection.close()

    def close(self) -> None:
        """Close all connections."""
        self._selector.close()
        for connection in self._unproven:
            connection.close()
        for stream in self.streams.values():
            stream.close()


def _listen(position: RoundPosition) -> socket.socket:
    """Listen where the other nodes look, as the store did.

    Raises:
        OSError: the port is still in use after the limit.
    """
    deadline_s = time.monotonic() + _MEETING_LIMIT_S
    while True:
        try:
            listener = bind_address(position.master_addr, position.master_port)
            break
        except OSError as error:  # until then it may be the store's
            if error.errno != errno.EADDRINUSE or time.monotonic() >= deadline_s:
                raise
            time.sleep(_RETRY_S)
    listener.listen(position.nodes + _STRANGERS)
    return listener


# -- the others' ------------------------------------------------------------------------------------------------------


def _ask(position: RoundPosition, own: Mapping[int, int], key: str, gathered: dict[int, int]) -> str:
    """Send to the program of global rank 0's node, then receive from it. Return why something is missing."""
    where = f"{position.master_addr}:{position.master_port}"
    try:
        stream = _connect(position, key)
    except (OSError, ProtocolError) as error:
        why = getattr(error, "strerror", None) or error
        return f"node 0's program did not answer at {where} within {_MEETING_LIMIT_S:g} s: {why}"
    try:
        with contextlib.closing(stream):
            _send_results(stream, own, "")
            return _receive_results(stream, gathered, skipped=own)
    except _BROKEN as error:
        return f"the connection to node 0's program at {where} broke: {error}"


def _connect(position: RoundPosition, key: str) -> TcpStream:
    """Connect and prove the token. Try again and again, because the other program may be slower than this one.

    Until then the port may still be the store's, or another process's.
    """
    deadline_s = time.monotonic() + _MEETING_LIMIT_S
    while True:
        connection = None
        try:
            connection = socket.create_connection((position.master_addr, position.master_port), _HANDSHAKE_LIMIT_S)
            codec = Codec(key, is_server=False, write=connection.sendall)
            _shake_hands(connection, codec)
            stream = _open_stream(connection, codec)
            stream.send({"node": position.node})
            stream.receive()
        except (OSError, ProtocolError):
            if connection is not None:
                connection.close()
            if time.monotonic() >= deadline_s:
                raise
            time.sleep(_RETRY_S)
        else:
            return stream


def _shake_hands(connection: socket.socket, codec: Codec) -> None:
    """Prove the token, and have the other side prove it, within one limit, however its bytes come.

    Raises:
        OSError: the connection broke, or the limit has passed.
        ProtocolError: the other side does not know the token.
    """
    deadline_s = time.monotonic() + _HANDSHAKE_LIMIT_S
    codec.start()
    while not codec.open:
        connection.settimeout(max(1e-3, deadline_s - time.monotonic()))
        data = connection.recv(_CHUNK_BYTES)
        if not data:
            raise ConnectionError("the other side closed it")
        next(codec.receive(data), None)


# -- what travels -----------------------------------------------------------------------------------------------------


def _open_stream(connection: socket.socket, codec: Codec) -> TcpStream:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE_OPTIONS.items():
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    stream = TcpStream(connection, codec)
    connection.settimeout(_SILENCE_LIMIT_S)
    return stream


def _send_results(stream: TcpStream, results: Mapping[int, int], why_incomplete: str) -> None:
    for rank, fd in results.items():
        size = os.fstat(fd).st_size if fd >= 0 else -1
        stream.send({"rank": rank, "size": size})
        if fd < 0:
            continue
        digest = hashlib.sha256()
        for at in range(0, size, _CHUNK_BYTES):
            data = os.pread(fd, _CHUNK_BYTES, at)
            digest.update(data)
            stream.send_raw(memoryview(data))
        stream.send({"digest": digest.hexdigest()})
    stream.send({"end": why_incomplete})


def _receive_results(stream: TcpStream, gathered: dict[int, int], *, skipped: Collection[int] = ()) -> str:
    """Receive until the other side's end. Return what it says about missing results.

    Args:
        stream: to the other side.
        gathered: gets the results.
        skipped: ranks whose results are not kept.
    """
    while "end" not in (message := stream.receive()):
        rank, left = int(str(message["rank"])), int(str(message["size"]))
        fd = _receive_file(stream, left) if left >= 0 else -1
        if rank not in skipped:
            gathered[rank] = fd
        elif fd >= 0:
            os.close(fd)
    return str(message["end"])


def _receive_file(stream: TcpStream, left: int) -> int:
    digest = hashlib.sha256()
    with tempfile.TemporaryFile(prefix="muster_result_") as file:
        while left:
            data = memoryview(bytearray(min(left, _CHUNK_BYTES)))
            stream.receive_raw(data)
            left -= len(data)
            digest.update(data)
            file.write(data)
        if stream.receive() != {"digest": digest.hexdigest()}:
            raise ConnectionError("a result was changed on its way")
        file.flush()
        return os.dup(file.fileno())
