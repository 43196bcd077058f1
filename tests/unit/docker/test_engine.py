"""The interface to the engine: its state, its answers, and the output of commands in containers."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from types import SimpleNamespace

import pytest

from muster.schedulers.docker import sdk
from muster.schedulers.docker.engine import Engine, parse_container
from muster.schedulers.docker.sdk import complete
from muster.schedulers.docker.spec import Label


def test_an_interrupt_is_raised_when_the_engine_has_answered():
    created = []

    def create():
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        threading.Event().wait(0.1)  # the main thread has its KeyboardInterrupt by now
        created.append("c")

    with pytest.raises(KeyboardInterrupt):
        complete(create)
    assert created == ["c"]


def test_the_engines_answer_is_the_callers():
    assert complete(lambda: "c") == "c"
    with pytest.raises(ZeroDivisionError):
        complete(lambda: 1 // 0)


@pytest.mark.parametrize(
    ("environ", "has_socket", "is_configured"),
    [
        ({}, False, False),
        ({"DOCKER_HOST": ""}, False, False),
        ({"DOCKER_HOST": "tcp://a"}, False, True),
        ({}, True, True),
    ],
)
def test_an_engine_is_configured_by_a_variable_or_a_socket(environ, has_socket, is_configured, monkeypatch, tmp_path):
    place = tmp_path / "docker.sock"
    if has_socket:
        place.touch()
    monkeypatch.setattr(sdk, "DEFAULT_HOST", f"unix://{place}")
    assert sdk.is_configured(environ) is is_configured


RECORDED = {
    "Id": "c208796d5464",
    "Name": "/job-trainer-0",
    "Config": {"Labels": {"io.muster.app": "job", "io.muster.role": "trainer"}},
    "HostConfig": {"Memory": 0, "DeviceRequests": None},
}
"""What a real engine said of a container on 22 November 2026, without the rest."""
STARTED = "2026-11-22T06:38:31.667719138Z"


@pytest.mark.parametrize(
    ("status", "is_running", "code", "finished", "expected"),
    [
        ("exited", False, 143, "2026-11-22T06:38:39.100751473Z", 143),
        ("running", True, 0, "0001-01-01T00:00:00Z", None),
    ],
)
def test_what_an_engine_says_of_a_container_is_read(status, is_running, code, finished, expected):
    state = {"Status": status, "Running": is_running, "ExitCode": code, "OOMKilled": False, "Error": ""}
    found = parse_container({**RECORDED, "State": {**state, "StartedAt": STARTED, "FinishedAt": finished}})
    assert (found.name, found.labels["io.muster.role"], found.gpu_ids) == ("job-trainer-0", "trainer", ())
    assert (found.running, found.exit_code, found.finished_at) == (is_running, expected, finished)


def test_the_newest_container_of_a_replica_comes_last():
    numbers = {"c": "2", "a": "0", "b": "1"}
    state = {"Status": "running", "ExitCode": 0}

    def inspect(name):
        return {**RECORDED, "Id": name, "Config": {"Labels": {Label.INCARNATION: numbers[name]}}, "State": state}

    engine = Engine({})
    listed = [{"Id": name} for name in numbers]
    engine._client = SimpleNamespace(api=SimpleNamespace(containers=lambda **_: listed, inspect_container=inspect))
    assert [facts.id for facts in engine.list_containers({})] == ["a", "b", "c"]


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
