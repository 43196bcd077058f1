"""Progress without code: a Hugging Face Trainer tells it to the agent, and what else reaches that port."""

import errno
import http.client
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness import AGENT, LIMIT_S, PROGRAMS, Tree, wait_until
from other_user import call_as_other, needs_two_users

from muster.agent.features import http_peer
from muster.agent.features.http_peer import PEERS
from muster.agent.features.trainer.endpoint import BODY_LIMIT_BYTES, TrainerEndpoint
from muster.agent.features.trainer.node import TrainerPort
from muster.agent.runtime.loop import Loop
from muster.agent.workers.status_page import ReportedStatus

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="a system without memory files")

COMMAND = [*AGENT, "--standalone", "--rdzv-id", "run", "--log-dir", "logs"]
DEAD_PROXY = "http://127.0.0.1:1"


def read_status(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "logs/run/status.json").read_text())
    except FileNotFoundError:
        return {}


@pytest.mark.torch
@pytest.mark.long
@pytest.mark.parametrize(("package", "program"), [("transformers", "hf_trainer"), ("lightning", "lightning_fit")])
def test_a_trainer_is_shown_with_step_and_total(package: str, program: str, tmp_path: Path) -> None:
    """Also where the environment names a proxy: Python asks it for loopback, too."""
    pytest.importorskip(package)
    env = {**os.environ, "http_proxy": DEAD_PROXY, "HOME": str(tmp_path)}
    with Tree([*COMMAND, str(PROGRAMS / f"agent/{program}.py"), "end"], cwd=tmp_path, env=env) as tree:
        wait_until(lambda: read_status(tmp_path).get("step") == 30, what="step 30")
        status = read_status(tmp_path)
        assert status["total"] == 40
        values = status.get("values", {})
        assert ("loss" in values) == (package == "transformers")
        assert "current_step" not in values
        (tmp_path / "end").touch()
        outcome = tree.wait().check()
    assert read_status(tmp_path)["step"] == 40
    assert "[muster] 40 of 40 steps" in outcome.stderr, outcome.explain()


@pytest.mark.torch
@pytest.mark.long
def test_an_unchanged_trainer_loses_no_step_with_the_flag(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    flags = ["--nproc-per-node", "2", "--max-restarts", "1", "--preload", "torch,transformers.trainer"]
    program = str(PROGRAMS / "agent/hf_loses_rank.py")
    with Tree([*COMMAND, *flags, "--trainer-callback", program], cwd=tmp_path) as tree:
        outcome = tree.wait(120).check()
    steps = [int(each) for each in re.findall(r"step (\d+)", outcome.stdout)]
    assert steps in ([*range(1, 20), *range(20, 31)], [*range(1, 21), *range(20, 31)]), outcome.explain()
    assert "all ranks continue at step 19 from memory" in outcome.stderr, outcome.explain()


def test_a_progress_bar_is_shown_where_nothing_else_tells(tmp_path: Path) -> None:
    pytest.importorskip("tqdm")
    program = str(PROGRAMS / "agent/tqdm_loop.py")
    with Tree([*COMMAND, "--start", "cold", "--tee", "3", program, "end"], cwd=tmp_path) as tree:
        wait_until(lambda: read_status(tmp_path).get("step") == 430, what="step 430")
        assert read_status(tmp_path)["total"] == 1000
        (tmp_path / "end").touch()
        tree.wait().check()


class Port:
    """The port and what answers, in this process."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.told: list[tuple[str, ReportedStatus]] = []
        self.opened = 0
        self.port = TrainerPort(self.loop, self.open_endpoint)
        self.env = self.port.build_env({}, "/7")
        self.token = Path(self.env["KUBEFLOW_TRAINER_SERVER_TOKEN"]).read_text()

    def open_endpoint(self, token: str) -> TrainerEndpoint:
        self.opened += 1
        return TrainerEndpoint(self.loop, token, lambda path, told: self.told.append((path, told)))

    def connect(self) -> http.client.HTTPConnection:
        host = self.env["KUBEFLOW_TRAINER_SERVER_URL"].split("/")[2]
        link = http.client.HTTPConnection(host, timeout=10)
        link.connect()
        return link

    def ask(self, body: bytes, token: str | None = None) -> int:
        link = self.connect()
        link.request("POST", "/7", body, {"Authorization": f"Bearer {self.token if token is None else token}"})
        for _ in range(20):
            self.loop.turn(0.01)
        try:
            return link.getresponse().status
        finally:
            link.close()


@pytest.fixture
def port() -> Iterator[Port]:
    made = Port()
    yield made
    made.port.close()
    made.port.close()
    made.loop.close()


def build_body(**metrics: object) -> bytes:
    listed = [{"name": name, "value": str(value)} for name, value in metrics.items()]
    return json.dumps({"trainerStatus": {"lastUpdatedTime": "x", "progressPercentage": 3, "metrics": listed}}).encode()


def test_what_a_trainer_tells_is_answered_at_once(port: Port) -> None:
    assert port.opened == 0
    body = build_body(loss=0.5, grad_norm="nan", current_step=12, total_steps=200, current_epoch=0.1, train_note="abc")
    assert port.ask(body) == 200
    ((path, told),) = port.told
    assert (path, told.step, told.total) == ("/7", 12, 200)
    assert [*told.values] == ["loss", "grad_norm"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"[" * 50_000, 422),
        (b"\xff", 422),
        (b"{}", 422),
        (b'{"trainerStatus": 5}', 422),
        (b"x" * (BODY_LIMIT_BYTES + 1), 413),
    ],
    ids=range(5),
)
def test_what_is_no_status_is_refused(port: Port, body: bytes, status: int) -> None:
    assert port.ask(body) == status
    assert port.told == []


@pytest.mark.parametrize("step", ["-1", "nan", "1e400", str(2**63), "", "x"])
def test_a_step_that_is_none_is_not_shown(port: Port, step: str) -> None:
    assert port.ask(build_body(current_step=step, total_steps=step, loss=1)) == 200
    ((_, told),) = port.told
    assert (told.step, told.total, told.values) == (None, None, {"loss": 1.0})


def test_without_the_token_nothing_is_taken(port: Port) -> None:
    for token in ("", "0" * 32, "é"):
        assert port.ask(build_body(current_step=5), token.encode().decode("latin-1")) == 403
    assert port.told == []


@needs_two_users
def test_another_user_cannot_read_the_token(port: Port) -> None:
    path = port.env["KUBEFLOW_TRAINER_SERVER_TOKEN"]

    def read() -> None:
        try:
            open(path).close()
        except PermissionError:
            return
        raise AssertionError("it is readable")

    call_as_other(read)


def test_connections_that_say_nothing_are_few_keep_no_trainer_out_and_end(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_peer, "LIMIT_S", 2.0)
    links = []
    for _ in range(PEERS + 1):
        links.append(port.connect())
        port.loop.turn(0.02)
    assert port.ask(build_body(current_step=5)) == 200
    assert [_is_closed(link) for link in links] == [True, True] + [False] * (PEERS - 1)
    until_s = time.monotonic() + LIMIT_S
    while not all(map(_is_closed, links)):
        assert time.monotonic() < until_s
        port.loop.turn(0.05)
    for link in links:
        link.close()


def test_without_a_descriptor_the_port_closes_and_the_agent_goes_on(port: Port) -> None:
    """An agent that cannot accept would turn for ever."""

    class Listener:
        def accept(self) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

    endpoint = port.open_endpoint("")
    port.port._open_endpoint = lambda _token: SimpleNamespace(
        accept=lambda _listener: endpoint.accept(Listener()), close=endpoint.close
    )
    link = port.connect()
    port.loop.turn(0.05)
    link.close()
    with pytest.raises(ConnectionRefusedError):
        port.connect()


def _is_closed(link: http.client.HTTPConnection) -> bool:
    link.sock.setblocking(False)
    try:
        return link.sock.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ({"KUBEFLOW_TRAINER_SERVER_URL": "https://real"}, {}),
        ({"KUBEFLOW_TRAINER_SERVER_CA_CERT": "/ca"}, {}),
        ({"HTTP_PROXY": "p"}, {"no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"}),
        ({"all_proxy": "p", "NO_PROXY": "corp"}, {"no_proxy": "corp,127.0.0.1", "NO_PROXY": "corp,127.0.0.1"}),
        ({"http_proxy": "p", "no_proxy": "*"}, {"no_proxy": "*", "NO_PROXY": "*"}),
        ({"no_proxy": "corp"}, {}),
    ],
    ids=range(6),
)
def test_variables_that_are_set_are_kept(port: Port, given: dict[str, str], added: dict[str, str]) -> None:
    env = port.port.build_env(given, "/7")
    ours = {name: env.pop(name) for name in [*env] if name.startswith("KUBEFLOW")}
    assert env == added
    assert bool(ours) == (not any(name.startswith("KUBEFLOW") for name in given))
