"""The program that runs a replica's command in a pod: waits, restarts, passes signals on."""

import json
import signal
import subprocess
import sys

import pytest
from harness import LIMIT_S, wait_until

from muster._shared.contract import Env
from muster._shared.processes import read_status


def start(policy, *command, counts=(), **env):
    words = [sys.executable, "-m", "muster.agent", "--replica", json.dumps(policy), *counts, "--", *command]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(words, env={"PATH": "/usr/bin:/bin", **env}, **pipes)


def finish(program):
    output, errors = program.communicate(timeout=LIMIT_S)
    return program.returncode, output.splitlines(), errors.splitlines()


def test_a_command_is_started_again_as_its_policy_says(tmp_path):
    policy, count = {"restart": "always", "max_restarts": 2, "backoff_s": 0.1}, tmp_path / "restarts"
    program = start(policy, "sh", "-c", "echo ran; exit 0", counts=[count])
    assert finish(program) == (
        0,
        ["ran"] * 3,
        ["muster: exited with 0: restart 1 of 2 in 0 s", "muster: exited with 0: restart 2 of 2 in 0.1 s"],
    )
    assert count.read_text() == "2"
    program = start({"restart": "on-failure", "max_restarts": 1}, "sh", "-c", "kill -9 $$")
    assert finish(program)[0] == 137
    assert finish(start({}, "sh", "-c", "exit 3")) == (3, [], [])
    assert finish(start({}, "no-such-program"))[0] == 127


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_what_is_told_to_end_is_not_started_again(signum):
    script = f"trap 'echo told; exit 5' {signum.name[3:]}; echo ready; while :; do sleep 0.05; done"
    program = start({"restart": "always"}, "sh", "-c", script)
    assert program.stdout.readline() == "ready\n"
    program.send_signal(signum)
    assert finish(program) == (143, ["told"], []), "another pod takes its place"


def test_it_ends_while_it_waits_for_another_role():
    env = {Env.AFTER: "server 9", "MUSTER_ROLE_SERVER_HOSTS": "127.0.0.1"}
    program = start({}, "echo", "started", **env)
    caught = 1 << (signal.SIGTERM - 1)
    wait_until(lambda: int(read_status(program.pid).get("SigCgt", "0"), 16) & caught, what="it handles signals")
    program.send_signal(signal.SIGTERM)
    assert finish(program) == (143, [], [])
