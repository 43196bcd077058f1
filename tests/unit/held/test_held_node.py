"""The program on a node of a hold: what travels, what is kept, and what is refused; no process is started."""

import hashlib
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from muster._shared.contract import Env
from muster.schedulers.held import link
from muster.schedulers.node_program import agents, held_run
from muster.schedulers.node_program.frames import Channel, FrameReader, Kind, NodeError, pack
from muster.schedulers.node_program.held_run import HeldRun
from muster.schedulers.workspace.packing import list_workspace


def start_run(hold: Path, order: dict[str, Any]) -> tuple[HeldRun, FrameReader, int]:
    """A run that has its order, and what it sends."""
    read_fd, write_fd = os.pipe()
    made = HeldRun(str(hold), Channel(os.open(os.devnull, os.O_RDONLY), write_fd))
    made.handle(Kind.ORDER, json.dumps(order).encode())
    return made, FrameReader(), read_fd


class Sent:
    """What a link sends, and what comes back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(held_run.signal, "signal", lambda *_: None)
        monkeypatch.setattr(held_run.signal, "set_wakeup_fd", lambda *_, **__: None)
        monkeypatch.setattr(HeldRun, "_prepare", lambda _self: None)

    def make(self, hold: Path, run: str, workspace: Path, *, change: str = "") -> list[str]:
        """Make the folder of a run; the names that had to travel."""
        entries = list_workspace(str(workspace))
        names = {entry["digest"]: entry["name"] for entry in entries if entry["kind"] == "file"}
        stored = os.listdir(hold / "store") if (hold / "store").exists() else []
        order: dict[str, Any] = {"run": run, "workspace": entries, "args": [], "env": {}, "cwd": None, "waits": False}
        made, frames, read_fd = start_run(hold, order)
        for digest in (digest for digest in names if digest not in stored):
            content = (workspace / names[digest]).read_bytes()
            for begin in range(0, len(content), 7):
                made.handle(Kind.INPUT, content[begin : begin + 7])
            if names[digest] == change:
                made.handle(Kind.INPUT, b"changed")
            made.handle(Kind.CLOSED, b"")
        made._make_folder()
        (wanted,) = (json.loads(data) for kind, data in frames.feed(os.read(read_fd, 1 << 16)) if kind == Kind.WANTED)
        return [names[digest] for digest in wanted]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    return Sent(monkeypatch)


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    (folder / "sub").mkdir(parents=True)
    (folder / "main.py").write_text("print('a longer line than seven bytes')\n")
    (folder / "sub" / "tool").write_text("#!/bin/sh\n")
    (folder / "sub" / "tool").chmod(0o755)
    (folder / "same.py").write_text((folder / "main.py").read_text())
    (folder / "link").symlink_to("sub/tool")
    os.utime(folder / "main.py", (1000, 1000))
    return folder


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    (tmp_path / "hold").mkdir()
    return tmp_path / "hold"


def test_a_run_gets_the_workspace_and_only_what_has_changed_travels(sent: Sent, hold: Path, workspace: Path) -> None:
    assert sorted(sent.make(hold, "one", workspace)) == ["same.py", "sub/tool"], "same.py is main.py, too"
    work = hold / "runs" / "one" / "work"
    assert (work / "main.py").read_text() == (workspace / "main.py").read_text()
    assert (work / "main.py").stat().st_mtime == 1000
    assert (work / "sub" / "tool").stat().st_mode & 0o777 == 0o755
    assert os.readlink(work / "link") == "sub/tool"
    (work / "main.py").write_text("the run has written into it")
    (workspace / "sub" / "tool").write_text("#!/bin/bash\n")
    assert sent.make(hold, "two", workspace) == ["sub/tool"]
    assert os.listdir(hold / "runs") == ["two"], "nothing is left of the former run"
    assert (hold / "runs" / "two" / "work" / "main.py").read_text() == (workspace / "main.py").read_text()
    assert len(os.listdir(hold / "store")) == 2, "contents that no file has any more are gone"


def test_a_file_that_changes_while_it_is_sent_is_named(sent: Sent, hold: Path, workspace: Path) -> None:
    with pytest.raises(NodeError, match=r"sub/tool changed while"):
        sent.make(hold, "one", workspace, change="sub/tool")
    assert "sub/tool" in sent.make(hold, "two", workspace), "it was not kept"


def test_of_a_file_that_grows_the_link_sends_what_was_listed(workspace: Path) -> None:
    entries = list_workspace(str(workspace))
    with (workspace / "main.py").open("a") as file:  # the log of the very command, say
        file.write("more")
    made = link.HeldLink.__new__(link.HeldLink)
    made._order = {"root": str(workspace), "node": {"workspace": entries}}
    (entry,) = (each for each in entries if each["name"] == "main.py")
    *data, end = made._read_wanted([entry["digest"]])
    assert hashlib.sha256(b"".join(data)).hexdigest() == entry["digest"]
    assert end == b""


def test_a_link_that_goes_while_it_sends_leaves_no_run(
    monkeypatch: pytest.MonkeyPatch, hold: Path, workspace: Path
) -> None:
    prepare = HeldRun._prepare
    Sent(monkeypatch)
    monkeypatch.setattr(HeldRun, "_prepare", prepare)
    monkeypatch.setattr(HeldRun, "_claim", lambda _self: None)
    order = {"run": "one", "workspace": list_workspace(str(workspace)), "args": [], "env": {}}
    made, _, _ = start_run(hold, order)
    made.handle(Kind.INPUT, b"prin")
    made.run()
    assert not (hold / "runs" / "one" / "work").exists()


def test_frames_are_cut_wherever_they_were_divided() -> None:
    data = pack(Kind.OUT, b"one") + pack(Kind.EXIT, b"0")
    for cut in range(len(data)):
        reader = FrameReader()
        assert [*reader.feed(data[:cut]), *reader.feed(data[cut:])] == [(Kind.OUT, b"one"), (Kind.EXIT, b"0")]


def test_a_command_on_a_held_node_gets_what_its_holder_was_started_with(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [b"python3", b"/opt/muster/muster-agent.zip", b"--muster-hold", b"1:1800", b"--nnodes", b"2", b""]
    monkeypatch.setattr(agents, "read_command", lambda _pid: b"\0".join(words))
    env = {"MUSTER_LOG_DIR": "/logs"}
    given = {"A": "{muster-hold}/runs/x", "B": "as it is {muster-hold}"}
    assert agents.complete_order(7, 1, env, ["{muster-agent}", "ask", "{muster-hold}/a"], given) == (
        ["python3", "/opt/muster/muster-agent.zip", "ask", "/logs/hold-1/a"],
        {"A": "/logs/hold-1/runs/x", "B": "as it is {muster-hold}"},
    )
    assert agents.complete_order(7, 1, env, ["{muster-python}", "-c", "x"], {})[0] == ["python3", "-c", "x"]
    assert agents.complete_order(7, 1, env, ["tail"], {})[0] == ["tail"]


@pytest.mark.usefixtures("sent")
def test_a_run_has_no_variable_that_counts_what_became_of_its_hold(monkeypatch: pytest.MonkeyPatch, hold: Path) -> None:
    """Its agent would say that the run begins anew, since pods were drained."""
    ours, holder = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for name in (Env.INCARNATION, Env.JOB_INCARNATION, Env.DRAINED_PODS, Env.CHECKPOINT, Env.JOB_OBJECT):
        monkeypatch.setenv(name, "1")
    order: dict[str, Any] = {"run": "one", "args": [], "env": {"A": "{muster-hold}/a"}, "cwd": str(hold)}
    made, _, _ = start_run(hold, order)
    made._holder = ours
    made._give()
    with ours, holder:
        fds = socket.recv_fds(holder, 100, 4)[1]
        env = json.loads(os.pread(fds[0], 1 << 20, 0))["env"]
    for fd in fds:
        os.close(fd)
    assert (env["A"], [name for name in env if env[name] == "1" and name.startswith("MUSTER_")]) == (f"{hold}/a", [])
