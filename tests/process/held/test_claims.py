"""A run from another machine claims a held node before its files travel: one at a time, and nothing of it stays."""

import contextlib
import json
import os
import re
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import wait_until
from held_runs import REDUCE, Commands

from muster._shared.holds.connection import connect


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[tuple[Commands, Path]]:
    """A hold of this machine, and its holder's folder."""
    commands = Commands(tmp_path)
    held = commands.hold("dist.ddp", "-j", "1x1")
    yield commands, next((tmp_path / "state").rglob(f"logs/*/{held.app_id}/*/hold-0"))
    commands.call("muster", "release", "--now")


def ask(holder: socket.socket, message: dict[str, Any]) -> dict[str, Any]:
    holder.send(json.dumps(message).encode())
    holder.settimeout(60)
    answer: dict[str, Any] = json.loads(holder.recv(65536))
    return answer


def read_state(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "hold.json").read_text()))


def test_a_claim_keeps_others_off_and_ends_with_its_process(folder: tuple[Commands, Path]) -> None:
    commands, place = folder
    with contextlib.closing(connect(str(place))) as first, contextlib.closing(connect(str(place))) as second:
        assert ask(first, {"claim": "one"}) == {"claimed": "one"}
        told = read_state(place)
        assert (told["state"], told["run"], told["idle_since_s"]) == ("busy", "one", None)
        line = "this hold runs one now; with -cfg wait=true a run waits for it"
        assert ask(second, {"claim": "two"}) == {"refused": line, "run": "one"}
        done = commands.run(REDUCE, j="1x1")
        assert (done.returncode, line in done.stderr) == (1, True), done
        first.close()
        wait_until(lambda: read_state(place)["state"] == "ready", timeout_s=60, what="the claim has ended")
        assert ask(second, {"claim": "two"}) == {"claimed": "two"}
    wait_until(lambda: read_state(place)["state"] == "ready", timeout_s=60, what="the claim has ended")
    done = commands.run(REDUCE, j="1x1")
    assert (done.returncode, done.stderr.count("sum 1.0")) == (0, 1), done


def test_what_an_order_does_not_say_the_holder_adds(folder: tuple[Commands, Path]) -> None:
    """As an order that comes by way of another adapter: its limits, priority and CPUs are those of the node."""
    commands, place = folder
    script = commands.work / "facts.py"
    script.write_text("import os, torch\nprint('facts', os.nice(0), os.getcwd(), os.environ['WORD'], flush=True)\n")
    args = ["--nnodes", "1", "--nproc-per-node", "1", "--rdzv-id", "x", str(script)]
    env = {
        **commands.env,
        "WORD": "here",
        "MUSTER_LOG_DIR": str(commands.work / "logs"),
        "MUSTER_TOKEN": secrets.token_hex(32),
    }
    order = {"args": args, "env": env, "cwd": str(commands.work)}
    read_end, write_end = os.pipe()
    with contextlib.closing(connect(str(place))) as holder, open(read_end) as output:
        assert ask(holder, {"claim": "x"}) == {"claimed": "x"}
        fd, null = os.memfd_create("order"), os.open(os.devnull, os.O_RDWR)
        os.write(fd, json.dumps(order).encode())
        socket.send_fds(holder, [b'{"run": "x"}'], [fd, null, write_end, write_end])
        for each in (fd, null, write_end):
            os.close(each)
        text = output.read()
        assert json.loads(holder.recv(65536)) == {"exit": 0}, text
    priority = os.getpriority(os.PRIO_PROCESS, 0)
    assert re.search(rf"facts {priority} {re.escape(str(commands.work))} here", text), text
    assert "template is not used" not in text


def test_the_program_on_the_node_ends_with_its_connection(folder: tuple[Commands, Path]) -> None:
    from muster.schedulers.held import node
    from muster.schedulers.inside.frames import FRAME, build_program, pack

    _, place = folder
    order = {"run": "x", "args": None, "env": {}, "cwd": None, "waits": False, "workspace": None}
    source = build_program(node.__file__, "main(sys.argv[2])")
    command = [sys.executable, "-I", "-S", "-c", source, "client", str(place)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(pack(node.ORDER, json.dumps(order).encode()))
        process.stdin.flush()
        assert process.stdout.read(FRAME.size) == pack(node.CLAIMED)
        assert read_state(place)["run"] == "x"
        process.stdin.close()
        assert process.wait(60) == 0
    wait_until(lambda: read_state(place)["state"] == "ready", timeout_s=60, what="the claim has ended")
