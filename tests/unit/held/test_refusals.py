"""What holds refuse, before anything is started, and what an agent that waits cannot become."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torchx.specs import AppDef, AppState

from muster._shared.contract import HoldKey
from muster._shared.control import ControlError
from muster.agent.hold import facts, thread_counts
from muster.agent.hold.start import HeldTemplate
from muster.cli import hold_command
from muster.cli.commands import main
from muster.elastic import launch
from muster.schedulers.adapter.properties import Properties
from muster.schedulers.errors import EngineError, SchedulerError
from muster.schedulers.held import holds, scheduler
from muster.schedulers.held import holds as lending
from muster.schedulers.local.hold_lock import lock_hold
from muster.schedulers.local.holds import Hold, explain_states
from muster.schedulers.wording.facts import AppFacts
from muster.schedulers.wording.reasons import Code, Reason


class Two(Hold):
    """A hold of two nodes of two processes."""

    lock_path = Path()

    def read_states(self) -> list[Any]:
        return [{"nproc": 2}, {"nproc": 3}]

    def list_folders(self) -> list[str]:
        return ["/held"]


@pytest.fixture
def hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Two:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made = Two(scheduler="local_cwd", app_id="hold-x", folder=None, role="hold", nodes=2)  # type: ignore[arg-type]
    monkeypatch.setattr(Two, "lock_path", tmp_path / "lock")
    monkeypatch.setattr(holds, "find_all", lambda _state_dir: [made])
    return made


@pytest.fixture
def busy(hold: Two) -> Iterator[Two]:
    fd = lock_hold(hold.lock_path, "main-1")
    assert fd is not None
    yield hold
    os.close(fd)


@pytest.mark.parametrize(
    ("nodes", "processes", "line"),
    [
        (3, "1", "the run needs 3 nodes, and local_cwd://hold-x has 2 nodes"),
        (1, "3", "role main runs 3 processes on each node, and local_cwd://hold-x holds 2"),
        (2, "2", ""),
        (1, "gpu", ""),
    ],
)
def test_a_run_that_is_larger_than_the_hold(hold: Two, nodes: int, processes: str, line: str) -> None:
    request = SimpleNamespace(nodes=nodes, processes={"main": processes})
    if not line:
        scheduler._check_fit(request, hold)  # type: ignore[arg-type]
        return
    with pytest.raises(SchedulerError, match=f"^{re.escape(line)}$"):
        scheduler._check_fit(request, hold)  # type: ignore[arg-type]


def test_a_run_on_a_busy_hold_is_refused_or_waits_for_its_end(
    hold: Two, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fd = lock_hold(hold.lock_path, "main-1")
    assert fd is not None
    with pytest.raises(EngineError, match=r"^local_cwd://hold-x runs main-1 now; wait$"):
        holds.take_hold(hold, "main-2", hint="; wait")
    turns = iter((bool, bool, lambda: os.close(fd)))
    monkeypatch.setattr(holds, "time", SimpleNamespace(sleep=lambda _s: next(turns)()))
    os.close(holds.take_hold(hold, "main-2", waits=True))
    assert capsys.readouterr().err.count("main-1 on local_cwd://hold-x\n") == 1


def test_a_hold_that_is_none_of_those_here_is_named(hold: Two, tmp_path: Path) -> None:
    with pytest.raises(SchedulerError, match=r"^'other' .*: local_cwd://hold-x$"):
        holds.choose_hold(tmp_path, "other")


@pytest.mark.parametrize(
    ("nodes", "nproc", "said"),
    [(1, "1", "1 node with up to 1 process;"), (2, "4", "2 nodes with up to 4 processes each;")],
)
def test_what_a_hold_has_room_for(nodes: int, nproc: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    hold_command._print_ready("local_cwd://hold-x", [{HoldKey.NPROC: nproc}] * nodes, as_json=False)
    assert capsys.readouterr().err.startswith(f"ready: {said}")


def test_a_hold_that_waits_for_nodes_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was printed: for as long as a cluster had no room."""
    monkeypatch.setattr("muster.schedulers.adapter.waiting_line._SPACING_S", 0.0)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(hold_command, "time", SimpleNamespace(sleep=lambda _s: None))
    monkeypatch.setattr(hold_command, "build_remote", lambda *_args: None)
    states = [AppState.PENDING] * 3 + [AppState.FAILED]
    why, app = (Reason(code=Code.FOREIGN_TEXT, text="no room"),), AppDef(name="a")
    told = (AppFacts(app_id="a", app=app, state=each, replicas=None, reasons=why) for each in states)
    lines: list[str] = []
    cancelled: list[str] = []
    scheduler = SimpleNamespace(
        backend="x", properties=Properties(), read_facts=lambda _id: next(told), cancel=cancelled.append
    )
    with pytest.raises(ControlError, match=": no room"):
        hold_command.wait_ready(scheduler, "a", lines.append)  # type: ignore[arg-type]
    assert (lines, cancelled) == (["PENDING: no room"], ["a"])


def test_a_busy_hold_is_not_released(busy: Two) -> None:
    line = (
        "local_cwd://hold-x runs main-1: `muster stop held://main-1` stops it, `muster release --now hold-x` ends both"
    )
    with pytest.raises(ControlError, match=f"^{re.escape(line)}$"):
        hold_command.release(None, now=False)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("-s", "held"), "-s held runs jobs on a hold: name the scheduler whose nodes to hold, such as -s local_cwd"),
        (("dist.ddp", "--script", "main.py"), "a hold has no program of its own: leave --script, -m and arguments out"),
        (("--idle-minutes", "0"), "'0' is not a number of minutes from 0.01 to 10080"),
        (("-cfg", "detach=false"), "a hold always goes on when its command ends: leave detach=false out"),
    ],
)
def test_wrong_holds_are_one_line(
    hold: Two, words: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(["hold", *words])
    except SystemExit as ended:
        code = ended.code
    shown = capsys.readouterr()
    assert (code, shown.out) == (2, "")
    assert shown.err.splitlines()[-1].endswith(problem)


FORKS = (
    "held=True: with start_method='fork' workers are forks of this program, and not of the hold's agent; use "
    "start_method='spawn', or no hold"
)
SEVERAL = (
    "nodes=2, held=True: a program can run functions on one node of a hold only; for more nodes start a program with "
    "its own hold on each node, and give all of them endpoint=, HOST:PORT of the leading one"
)


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"held": "other"}, "held='other': 'other' is none of the holds here: local_cwd://hold-x"),
        ({"held": True, "nproc": 3}, "held=True: nproc=3: local_cwd://hold-x holds at most 2"),
        ({"held": True, "start_method": "fork"}, FORKS),
        ({"held": True, "nodes": 2}, SEVERAL),
    ],
    ids=str,
)
def test_functions_that_cannot_run_on_a_hold(hold: Two, more: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        launch(print, **more)


def test_a_hold_is_lent_to_one_program_at_a_time(busy: Two) -> None:
    with pytest.raises(EngineError, match=r"^local_cwd://hold-x runs main-1 now$"):
        lending.lend_node(None, "idle of process 7", 1)


@pytest.mark.parametrize(
    ("run", "state", "code"),
    [
        ("main-1", {}, Code.HOLD_RUNS),
        ("", {}, Code.HOLD_STARTS),
        ("", {HoldKey.STATE: "ready", HoldKey.IDLE_SINCE_S: 0.0, HoldKey.IDLE_LIMIT_S: 60.0}, Code.HOLD_IDLE),
        ("", {HoldKey.STATE: "starting", HoldKey.IDLE_SINCE_S: 0.0, HoldKey.IDLE_LIMIT_S: 60.0}, Code.HOLD_IMPORTS),
    ],
)
def test_what_is_known_of_a_hold(run: str, state: dict[str, Any], code: Code) -> None:
    reason = explain_states(run, [state])
    assert (reason.code, reason.job, reason.limit_s) == (code, run, 60.0 if state else None)


# -- what an agent cannot become --------------------------------------------------------------------------------------

PREFIX = ("/venv/bin/python", "/venv/agent.py")
FACTS = facts.read_facts()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        *(
            ({"facts": {name: "another"}}, f"{name} is not the hold's")
            for name in FACTS
            if name not in ("umask", "cgroup")
        ),
        ({"facts": {"umask": "0777"}}, ""),
        ({"facts": {"cgroup": "1:name=systemd:/other"}}, "the limits of its cgroup are not the hold's"),
        ({"command": ["/other/bin/python", "/venv/agent.py"]}, "the hold has another Python, /venv/bin/python"),
        ({"command": ["/venv/bin/python", "/other.py"]}, "the hold has another version of the agent"),
        ({"command": [*PREFIX, "more"]}, "the hold has another version of the agent"),
        ({"python_flags": ["-O"]}, "the flags of its Python are not the hold's"),
        ({"limits": {"RLIMIT_NOFILE": (1, 1)}}, ""),
        ({"limits": {"RLIMIT_NOFILE": (1, 1 << 40)}}, "RLIMIT_NOFILE is not the hold's"),
        ({"nice": 19}, ""),
        ({"nice": -20}, "its priority is not the hold's"),
    ],
    ids=str,
)
def test_a_client_that_differs(change: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts.os, "geteuid", lambda: 1000)
    theirs = {**FACTS, **change.get("facts", {})}
    order: Any = {"command": PREFIX, "limits": {}, "nice": 0, **change, "facts": theirs}
    assert facts.find_difference(order, FACTS, PREFIX) == reason


@pytest.mark.parametrize(
    ("env", "options", "cwd", "reason"),
    [
        ({}, {}, "/", None),
        ({"MALLOC_ARENA_MAX": "2"}, {}, "/", "MALLOC_ARENA_MAX differs, and is read only at start"),
        ({"OMP_PROC_BIND": "true"}, {}, "/", "OMP_PROC_BIND differs, and is read only at start"),
        ({"OMP_NUM_THREADS": "2", "A_WORD": "one"}, {}, "/", None),
        ({}, {"cpus": [0]}, "/", "workers are bound to CPUs, which libraries count at import"),
        ({"PYTHONPATH": "lib"}, {}, "/", "PYTHONPATH differs, and is read only at start"),
    ],
    ids=str,
)
def test_a_program_that_the_template_cannot_have(
    env: dict[str, str], options: dict[str, Any], cwd: str, reason: str | None
) -> None:
    template = object.__new__(HeldTemplate)
    template._env = {}
    given: Any = SimpleNamespace(**{"env": env, "cpus": None, **options})
    assert template.find_obstacle(given, cwd) == reason


@pytest.mark.parametrize(
    ("text", "count"),
    [("4", 4), ("2,1", None), ("0", None), ("", None), ("65536", None), ("²", None)],
)
def test_a_count_of_threads_that_can_be_set_after_the_start(text: str, count: int | None) -> None:
    settings = thread_counts.ThreadSettings(variables={"OMP_NUM_THREADS": text}, cpus=frozenset({0}))
    if count is not None:
        assert thread_counts._read_wanted(settings).openmp == count
        return
    with pytest.raises(thread_counts._CannotAdoptError, match=f"^{text!r} is no count"):
        thread_counts._read_wanted(settings)
