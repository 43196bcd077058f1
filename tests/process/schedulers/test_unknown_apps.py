"""TorchX's commands about an app that does not exist, or an engine that does not answer: one line each, and an end."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.torchx

TORCHX = str(Path(sys.executable).with_name("torchx"))
HAS_DELETE = "delete" in subprocess.run([TORCHX, "--help"], capture_output=True, text=True, check=True).stdout
APP_COMMANDS = ["status", "log", "log role", "log replica", "cancel", "describe", *(["delete"] if HAS_DELETE else [])]
TAILS = {"log role": "/r", "log replica": "/r/0"}


@pytest.fixture
def run(tmp_path):
    """Runs `torchx ...` in an empty home; returns (exit code, the lines it said)."""

    def torchx(*words, **env):
        env = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "PYTHONWARNINGS": "ignore", **env}
        done = subprocess.run([TORCHX, *words], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=90)
        return done.returncode, [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]

    return torchx


def words_of(command, scheduler):
    return command.split()[0], f"{scheduler}://torchx/nope{TAILS.get(command, '')}"


@pytest.fixture
def silent_address():
    """An address that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("command", APP_COMMANDS)
def test_an_app_that_local_cwd_does_not_have(run, command):
    code, lines = run(*words_of(command, "local_cwd"))
    assert code == 1, lines
    assert len(lines) <= 2, lines  # `log` says first that it waits
    assert "nope" in lines[-1], lines


@pytest.mark.parametrize("command", APP_COMMANDS)
def test_an_engine_that_does_not_exist(run, command, tmp_path):
    address = f"unix://{tmp_path}/none.sock"
    code, lines = run(*words_of(command, "docker"), DOCKER_HOST=address)
    assert code == 1
    assert len(lines) <= 2, lines
    assert f"no Docker engine answers at {address} (No such file or directory)" in lines[-1]


def test_an_engine_that_never_answers(run, silent_address):
    code, lines = run(*words_of("status", "docker"), DOCKER_HOST=silent_address)
    assert (code, len(lines)) == (1, 1), lines
    assert f"no Docker engine answers at {silent_address}" in lines[0]


def test_a_list_says_that_it_may_be_incomplete(run, tmp_path):
    code, lines = run("list", "-s", "docker", DOCKER_HOST=f"unix://{tmp_path}/none.sock")
    assert code == 0
    assert [line for line in lines if "apps that only the engine knows are not listed" in line], lines
