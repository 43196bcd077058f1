"""Serves byte ranges of the base, from any node, to this node's workers: see `_shared.snapshot_file.RemoteReader`.

A worker that continues with another number of ranks reads what it needs from several of the old ones. The socket has no
name in the file system. Only processes that can open the control file know its name.
"""

import contextlib
import functools
import os
import socket
import threading
from collections.abc import Callable

from muster._shared.holder_socket import read_peer
from muster._shared.snapshot_file import ANSWER, NOT_KEPT, NOT_REACHED, REQUEST, build_address
from muster.agent.features.snapshots.memory import Key, SnapshotMemory
from muster.agent.features.snapshots.transfer import NotKept, TransferError
from muster.agent.rendezvous.protocol.framing import ProtocolError
from muster.agent.runtime.loop import start_thread

ReadRange = Callable[[Key, int, int, int, Callable[[memoryview], None], Callable[[int], None]], None]
"""See `exchange.Exchange.read_range`."""
_ACCEPT_RETRY_S = 0.1


class RangeServer:
    """Answers the workers of one node, each connection in a thread. Close it."""

    def __init__(self, memory: SnapshotMemory, read_range: ReadRange) -> None:
        """Listen.

        Raises:
            OSError: no descriptor is left.
            RuntimeError: no thread is left.
        """
        self._read_range = read_range
        self._closed = threading.Event()
        memory.name_socket()
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(build_address(memory.control) or b"")
            self._listener.listen(64)
            start_thread(self._accept, "muster-ranges")
        except BaseException:
            self._listener.close()
            raise

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed, or no descriptors left: a worker waits
                if self._closed.wait(_ACCEPT_RETRY_S):
                    return
                continue
            try:
                if read_peer(connection) in (os.getuid(), 0):
                    start_thread(functools.partial(self._serve, connection), "muster-range")
                    continue
            except RuntimeError:  # no threads left: closes the connection
                pass
            connection.close()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            while True:
                has_answered = False

                def answer(length: int) -> None:
                    nonlocal has_answered
                    has_answered = True
                    connection.sendall(ANSWER.pack(length))

                try:
                    request = connection.recv(REQUEST.size, socket.MSG_WAITALL)
                    if len(request) < REQUEST.size:
                        return
                    lineage, step, rank, offset, length = REQUEST.unpack(request)
                    self._read_range((lineage, step), rank, offset, length, connection.sendall, answer)
                except (OSError, ProtocolError, TransferError) as error:
                    if has_answered:
                        return  # mid-transfer: closes the connection
                    try:
                        connection.sendall(ANSWER.pack(NOT_KEPT if isinstance(error, NotKept) else NOT_REACHED))
                    except OSError:
                        return

    def close(self) -> None:
        """Close the server. May be called again."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
