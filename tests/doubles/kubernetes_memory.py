"""Connects the client library to the model of the API server without sockets: every request is a call.

Production code runs unchanged, from a scheduler down to urllib3 and the websocket's client.
"""

import io
from contextlib import contextmanager, suppress
from http.client import parse_headers

from doubles.kubernetes_cluster import Cluster, Cut, Silence, respond

ADDRESS = ("127.0.0.1", 6443)
STREAM_TIMEOUT_S = 60


class Server:
    """Whether the server accepts connections."""

    def __init__(self):
        self.is_up = True
        self.refused = 0

    def stop(self):
        self.is_up = False


class Connection:
    """What the client takes for a socket. One request."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.sent, self.left, self.pieces = b"", b"", None
        self.is_shut, self.is_read, self.timeout_s = False, False, None

    def sendall(self, data):
        self.sent += data

    def send(self, data):
        self.sent += data
        return len(data)

    def makefile(self, *_args, **_more):
        self.is_read = True
        return io.BufferedReader(Reader(self))

    def begin(self):
        head, _, content = self.sent.partition(b"\r\n\r\n")
        line, _, lines = head.partition(b"\r\n")
        method, target, _ = line.decode().split(" ")
        headers = parse_headers(io.BytesIO(lines + b"\r\n\r\n"))
        return respond(self.cluster, method, target, headers, content).render()

    def recv(self, size):
        try:
            while not self.left and self.is_open():
                if self.cluster.is_silent:
                    self.wait_in_vain(lambda: not self.cluster.is_silent)
                self.pieces = self.pieces or self.begin()
                self.left = next(self.pieces)
        except (Cut, StopIteration):
            return b""
        except Silence:
            self.wait_in_vain()
        data, self.left = self.left[:size], self.left[size:]
        return data

    def is_open(self):
        return self.cluster.server.is_up and not (self.is_shut or self.cluster.closing)

    def wait_in_vain(self, is_over=lambda: False):
        """The limit of a request passes at once; what reads a stream gives up by itself."""
        if self.timeout_s is not None and self.timeout_s < STREAM_TIMEOUT_S:
            raise TimeoutError("timed out")
        with self.cluster.lock:
            self.cluster.lock.wait_for(lambda: is_over() or not self.is_open(), STREAM_TIMEOUT_S)

    def shutdown(self, *_how):
        self.is_shut = True
        with self.cluster.lock:
            self.cluster.lock.notify_all()

    def end(self):
        if self.pieces is not None:
            with suppress(ValueError):  # another thread reads
                self.pieces.close()

    def close(self):
        if not self.is_read:
            self.end()

    def settimeout(self, seconds):
        self.timeout_s = seconds

    def gettimeout(self):
        return self.timeout_s


class Reader(io.RawIOBase):
    """Reads a connection, also after its socket was closed."""

    def __init__(self, connection):
        self.connection = connection

    def readable(self):
        return True

    def readinto(self, view):
        data = self.connection.recv(len(view))
        view[: len(data)] = data
        return len(data)

    def close(self):
        self.connection.end()
        super().close()


@contextmanager
def connect(patch, **options):
    """A cluster that this process reaches, by `patch`, a `pytest.MonkeyPatch`. Yields it."""
    cluster = Cluster(**options)
    cluster.server, cluster.url = Server(), "http://{}:{}".format(*ADDRESS)

    def open_connection(address, *_args, **_more):
        if address != ADDRESS or not cluster.server.is_up:
            cluster.server.refused += 1
            raise ConnectionRefusedError(111, "Connection refused")
        return Connection(cluster)

    patch.setattr("urllib3.util.connection.create_connection", open_connection)
    patch.setattr("urllib3.connectionpool.is_connection_dropped", lambda _connection: True)  # one request each
    patch.setattr("websocket._http._open_socket", lambda found, *_more: open_connection(found[0][4]))
    try:
        yield cluster
    finally:
        with cluster.lock:
            cluster.closing = True
            cluster.lock.notify_all()


def start_again(cluster, *, forbids=0, fails=0):
    """Start a server that was stopped with `cluster.server.stop()`.

    A real one answers requests before it has read the rights: 403, and then, while other parts of it start, 500.
    """
    cluster.fail_first(forbids, fails)
    cluster.server.is_up = True
