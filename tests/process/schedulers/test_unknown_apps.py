"""TorchX's commands about an app that does not exist, or an engine that does not answer: one line each, and an end."""

import gc
import socket
from importlib.util import find_spec

import pytest

from muster.schedulers.docker.engine import Engine

pytestmark = pytest.mark.torchx

APP_COMMANDS = ["status", "log", "log role", "log replica", "cancel", "describe"]
APP_COMMANDS += ["delete"] if find_spec("torchx.cli.cmd_delete") else []
TAILS = {"log role": "/r", "log replica": "/r/0"}


@pytest.fixture
def run(tmp_path, monkeypatch, torchx):
    """Runs `torchx ...` in an empty home; returns (exit code, the lines it said)."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def call(*words):
        code, told, errors = torchx(*words)
        return code, [line for line in (told + errors).splitlines() if line.strip()]

    return call


def words_of(command, scheduler):
    return command.split()[0], f"{scheduler}://torchx/nope{TAILS.get(command, '')}"


def test_an_app_that_local_cwd_does_not_have(run):
    for command in APP_COMMANDS:
        code, lines = run(*words_of(command, "local_cwd"))
        assert code == 1, lines
        assert len(lines) <= 2, lines  # `log` says first that it waits
        assert "nope" in lines[-1], lines


@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")  # of Docker's SDK, which cannot connect
def test_an_engine_that_does_not_exist(run, tmp_path, monkeypatch):
    address = f"unix://{tmp_path}/none.sock"
    monkeypatch.setenv("DOCKER_HOST", address)
    for command in APP_COMMANDS:
        code, lines = run(*words_of(command, "docker"))
        assert (code, len(lines) <= 2) == (1, True), lines
        assert f"{address} (No such file" in lines[-1]
    code, lines = run("list", "-s", "docker")
    assert code == 0
    assert [line for line in lines if "are not listed" in line], lines
    gc.collect()  # what it warns of is not the next test's


def test_an_engine_that_never_answers(run, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:  # it accepts connections
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("DOCKER_HOST", address)
        monkeypatch.setattr(Engine.__init__, "__defaults__", (0.2,))
        code, lines = run(*words_of("status", "docker"))
    assert (code, len(lines)) == (1, 1), lines
    assert f"answers at {address}" in lines[0]
