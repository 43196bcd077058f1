"""The output of a command in a container, from an engine that sends it together with the head of its answer."""

import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer

import pytest

from muster.schedulers.docker.engine import Engine

HEAD = b"HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n"
FRAMES = b"\1\0\0\0\0\0\0\4out1" + b"\2\0\0\0\0\0\0\4err\n" + b"\1\0\0\0\0\0\0\4out2"


def build_handler(early: int) -> type[BaseHTTPRequestHandler]:
    """Build an engine's side: so many bytes of the output come with the head, the rest when the client has read on."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(b'{"ApiVersion": "1.41", "ExitCode": 3}')

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            if not self.path.endswith("/start"):
                self._answer(b'{"Id": "e"}')
                return
            self.connection.sendall(HEAD + FRAMES[:early])
            self.connection.sendall(FRAMES[early:])
            self.close_connection = True

        def _answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    return Handler


@pytest.fixture
def start_engine(tmp_path: Path) -> Iterator[Callable[[int], Engine]]:
    running = []

    def start(early: int) -> Engine:
        path = tmp_path / "engine"
        server = ThreadingUnixStreamServer(str(path), build_handler(early))
        engine = Engine({"DOCKER_HOST": f"unix://{path}"})
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        running.append((engine, server, thread))
        return engine

    yield start
    for engine, server, thread in running:
        engine.close()
        server.shutdown()
        thread.join()
        server.server_close()


EARLY = (0, 3, 8, 10, 12, 30, len(FRAMES))


@pytest.mark.parametrize("early", EARLY)
def test_no_output_is_lost(start_engine: Callable[[int], Engine], early: int) -> None:
    """Docker's SDK loses what it has read together with the head."""
    assert start_engine(early).run_inside("c0", ["echo"]) == (3, "out1out2", "err\n")


@pytest.mark.parametrize("early", EARLY)
def test_no_output_of_a_pipe_is_lost(start_engine: Callable[[int], Engine], early: int) -> None:
    pipe = start_engine(early).open_inside("c0", ["python3"]).pump()
    output = b"".join(iter(lambda: os.read(pipe.stdout, 100), b""))
    assert (output, pipe.end()) == (b"out1out2", "err")
