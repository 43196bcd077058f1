"""Serves the model of the API server (`kubernetes_cluster.py`) over HTTP."""

import socket
import ssl
import threading
import time
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from doubles.kubernetes_cluster import (
    Cluster,
    Cut,
    Fault,
    Silence,
    encode_exit,
    encode_frame,
    respond,
    write_kubeconfig,
)

__all__ = ["Fault", "serve", "write_kubeconfig"]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    cluster: Cluster

    def log_message(self, *args):
        pass

    def handle(self):
        try:
            super().handle()
        except (ConnectionError, BrokenPipeError, TimeoutError):
            self.close_connection = True

    def serve(self):
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            response = respond(self.cluster, self.command, self.path, self.headers, content)
            with closing(response.render()) as pieces:
                for data in pieces:
                    self.wfile.write(data)
                    self.wfile.flush()
            if response.status == 101:
                self.close_connection = True
            if response.process is not None:
                self.attach(response.process)
        except Silence:
            while not self.cluster.closing:
                time.sleep(0.05)
        except Cut:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

    do_GET = do_POST = do_PATCH = do_DELETE = serve  # noqa: N815

    def attach(self, process):
        """Pass bytes between a process and the websocket. The end of the connection is the end of the input."""
        lock = threading.Lock()

        def pump(stream, channel):
            while data := stream.read1(1 << 16):
                with lock, suppress(OSError):
                    self.wfile.write(encode_frame(2, bytes([channel]) + data))

        def feed():
            with suppress(OSError, ValueError):
                while (frame := self.read_frame()) is not None:
                    if frame[:1] == b"\0":
                        process.stdin.write(frame[1:])
                        process.stdin.flush()
            with suppress(OSError):
                process.stdin.close()

        pumps = [threading.Thread(target=pump, args=(process.stdout, 1), daemon=True)]
        pumps += [threading.Thread(target=pump, args=(process.stderr, 2), daemon=True)]
        for thread in (*pumps, threading.Thread(target=feed, daemon=True)):
            thread.start()
        for thread in pumps:
            thread.join()
        code = process.wait()
        process.stdout.close()
        process.stderr.close()
        with lock, suppress(OSError):
            self.wfile.write(encode_exit(code))
            self.connection.shutdown(2)

    def read_frame(self):
        """The content of the next message of the client, which is masked; None: there is no more."""
        head = self.rfile.read(2)
        if len(head) < 2 or head[0] & 0xF == 8:
            return None
        size = head[1] & 0x7F
        if size >= 126:
            size = int.from_bytes(self.rfile.read(2 if size == 126 else 8), "big")
        mask = self.rfile.read(4)
        data = self.rfile.read(size)
        if len(data) < size:
            return None
        whole = int.from_bytes(data, "big") ^ int.from_bytes((mask * (size // 4 + 1))[:size], "big")
        return whole.to_bytes(size, "big")


class Server(ThreadingHTTPServer):
    """One life of the server: connections are refused after it, and those that are open break."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address, handler):
        super().__init__(address, handler)
        self.open_sockets = set()
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()

    def process_request(self, request, client_address):
        self.open_sockets.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request):
        self.open_sockets.discard(request)
        super().shutdown_request(request)

    def stop(self):
        self.shutdown()
        self.thread.join()
        self.server_close()
        for request in list(self.open_sockets):
            with suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request, client_address):
        pass  # a client that disconnects is not an error


@contextmanager
def serve(certificate=None, **options):
    """A running server: yields its Cluster, with `url`.

    `certificate`: the paths of a certificate and of its key, for https.
    """
    cluster = Cluster(**options)
    handler = type("BoundHandler", (Handler,), {"cluster": cluster})
    cluster.server = Server(("127.0.0.1", 0), handler)
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        cluster.server.socket = context.wrap_socket(
            cluster.server.socket, server_side=True, do_handshake_on_connect=False
        )
    cluster.url = f"http{'s' * bool(certificate)}://127.0.0.1:{cluster.server.server_address[1]}"
    try:
        yield cluster
    finally:
        cluster.closing = True
        cluster.server.stop()
