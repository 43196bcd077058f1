"""What the adapters do in TorchX's command line and in `Runner.wait`, and in another version."""

import ast
import contextlib
import importlib.metadata
import logging
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torchx
from torchx.specs import AppDef, AppState, AppStatus, Role
from torchx.specs.api import ReplicaStatus

from muster.schedulers.adapter import supervised
from muster.schedulers.adapter.status import AppFacts, build_status
from muster.schedulers.errors import SchedulerError
from muster.schedulers.runner import callers
from muster.schedulers.runner.command_line import follow_suspension, print_errors_as_lines, unwind_on_signals
from muster.schedulers.supervision.app_folder import AppFolder

pytestmark = pytest.mark.torchx

MAIN = "torchx.cli.main"
NAMES_OF_ANOTHER_VERSION = ("torchx.commands.main", "torchx.commands.log", "torchx.runner.core", "torchx_cli.cmd_log")


ROOT = Path(__file__).parents[3]
PLACE = re.compile(r"    ([\w/]+\.py) (\d+|-) (\d+|-) `(.*)`\n((?:        .*\n)*?)        tests/(.*)::(.*)\n")
RELEASES = {"0.7.0": 0, "2026.10.26": 1}
"""The lines of TorchX that the table has numbers of."""

TOUCHES = {
    "_getframe": {"callers.py"},
    "_current_frames": {"callers.py"},
    "excepthook": {"command_line.py"},
    "add_representer": {"dry_run.py", "status.py"},
}
"""What reaches beyond TorchX's public interface, and the modules of the schedulers that may."""


def list_places() -> list[tuple[str, ...]]:
    return [found.groups() for found in PLACE.finditer(callers.__doc__ or "")]


def find_release() -> int | None:
    for name in ("torchx", "torchx-nightly"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return RELEASES.get(importlib.metadata.version(name))
    return None


@pytest.mark.parametrize("place", list_places(), ids=lambda place: f"{place[0]}:{place[1]}")
def test_each_place_of_torchx_is_where_it_was(place: tuple[str, ...]) -> None:
    """In another release the text is to be there; its line then belongs into the table."""
    name, *numbers, text, why, test_file, test = place
    tests = (ROOT / "tests" / test_file).read_text()
    assert f"def {test}(" in tests, f"there is no {test_file}::{test}"
    release = find_release()
    path = Path(torchx.__file__).parent / name
    if release is not None and numbers[release] == "-":
        assert not path.exists(), f"{name} is there now"
        return
    lines = path.read_text().splitlines()
    assert any(text in line for line in lines), f"{name} has no {text!r}: see {why}"
    if release is not None:
        assert text in lines[int(numbers[release]) - 1], f"{text!r} is in another line of {name}"


def test_the_table_has_all_that_is_touched() -> None:
    assert len(list_places()) == (callers.__doc__ or "").count("        tests/")
    found: dict[str, set[str]] = {word: set() for word in TOUCHES}
    for path in (ROOT / "muster" / "schedulers").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in found:
                found[node.attr].add(path.name)
    assert found == TOUCHES


def test_a_failed_app_is_printed_with_the_names_of_its_states() -> None:
    app = AppDef("app", roles=[Role(name="r", image="")])
    replicas = [ReplicaStatus(id=0, state=AppState.FAILED, role="r", hostname="h")]
    facts = AppFacts(app_id="app-x", app=app, state=AppState.FAILED, replicas=replicas)
    described = build_status(facts)
    printed = str(AppStatus(state=described.state, roles=described.roles_statuses))
    assert "state: FAILED" in printed
    assert "python/object" not in printed


def call_from(module: str, action: Callable[[], Any], function: str = "run") -> Any:
    """Call an action from a function of a module of that name."""
    namespace: dict[str, Any] = {"__name__": module}
    exec(f"def {function}(action): return action()", namespace)  # a frame with those globals
    return namespace[function](action)


def test_commands_and_wait_are_recognised() -> None:
    # `pytest` is started as a module of that name, too: only these frames count.
    assert call_from(MAIN, callers.runs_command_line)
    assert call_from(MAIN, lambda: in_thread(callers.runs_command_line))
    assert call_from("muster.cli.run_command", callers.runs_command_line), "it submits as `torchx run` does"
    assert print_lines("torchx.util.log_tee_helpers", sys.stdout) is sys.stdout
    assert print_lines("torchx.cli.cmd_log", object()) is None, "it is no stream"
    for name in ("cmd_log", "cmd_cancel", "cmd_delete"):
        assert call_from(f"torchx.cli.{name}", callers.needs_app)
    assert call_from("torchx.runner.api", callers.is_wait, "wait")
    assert call_from("torchx.cli.cmd_status", callers.shows_status)
    assert not call_from("torchx.cli.cmd_list", callers.shows_status)


def print_lines(module: str, file: object) -> Any:
    """As TorchX's function does that prints lines to a stream."""
    namespace: dict[str, Any] = {"__name__": module, "find_printer": callers.find_printer}
    exec("def print_log_lines(file): return find_printer()", namespace)
    return namespace["print_log_lines"](file)


def in_thread(action: Callable[[], Any]) -> Any:
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(action()))
    thread.start()
    thread.join()
    return answers[0]


def test_every_answer_is_no_in_another_version() -> None:
    for name in NAMES_OF_ANOTHER_VERSION:
        for ask in (callers.runs_command_line, callers.needs_app, callers.is_wait, callers.shows_status):
            assert call_from(name, ask, "wait") is False
    assert call_from("torchx.runner.api", callers.is_wait, "wait_for_end") is False
    assert call_from("torchx.cli.cmd_log", callers.find_printer, "print_lines") is None
    assert print_lines("mine", sys.stdout) is None
    assert call_from("torchx.cli.cmd_status", callers.needs_app) is False, "`status` says by itself that there is none"


class Apps:
    """Stands in for the supervision client: one app that runs until somebody waits for its end."""

    def __init__(self) -> None:
        self.waited = False
        self.revived = 0

    def revive_app(self, folder: AppFolder) -> tuple[str, str]:
        self.revived += 1
        return self.read_app(folder)

    def read_app(self, folder: AppFolder) -> tuple[str, str]:
        return "spec", "ended" if self.waited else "running"

    def has_ended(self, record: str) -> bool:
        return record == "ended"

    def runs_here(self, record: str) -> bool:
        return True

    def wait_ended(self, folder: AppFolder, limit_s: float) -> None:
        assert limit_s <= supervised._WAIT_LIMIT_S
        self.waited = True


@pytest.fixture
def apps(monkeypatch: pytest.MonkeyPatch) -> Apps:
    apps = Apps()
    monkeypatch.setattr(supervised, "client", apps)
    return apps


def test_wait_gets_the_end_and_every_other_caller_the_state_of_now(apps: Apps, tmp_path: Path) -> None:
    def read(keeps: bool = False) -> Any:
        return supervised.read_app_for_wait(AppFolder(tmp_path), keeps=keeps)

    for name in NAMES_OF_ANOTHER_VERSION:
        assert call_from(name, read, "wait") == ("spec", "running")
    assert read() == ("spec", "running")
    assert (apps.waited, apps.revived) == (False, 0)  # looking starts nothing
    assert read(keeps=True) == ("spec", "running")
    assert (apps.waited, apps.revived) == (False, 1)
    assert call_from("torchx.runner.api", read, "wait") == ("spec", "ended")
    assert apps.revived == 2


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """What reaches the hooks that were there before ours; they are there again afterwards."""
    reached: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda _kind, value, _tb: reached.append(value))
    monkeypatch.setattr(threading, "excepthook", lambda args: reached.append(args.exc_value))
    return reached


def raise_uncaught(error: BaseException) -> None:
    sys.excepthook(type(error), error, None)


def test_errors_of_commands_are_lines(hooks: list[BaseException], caplog: pytest.LogCaptureFixture) -> None:
    call_from(MAIN, print_errors_as_lines)
    ours = sys.excepthook
    call_from(MAIN, print_errors_as_lines)
    assert sys.excepthook is ours, "set once"
    with caplog.at_level(logging.ERROR):
        raise_uncaught(SchedulerError("docker has no app 'x'"))
        raise_uncaught(KeyboardInterrupt())
        in_thread_that_fails(SchedulerError("docker has no app 'x'"))
    assert len(caplog.records) == 1
    assert hooks == []
    others = [ValueError("not ours"), RuntimeError("nor in a thread")]
    raise_uncaught(others[0])
    in_thread_that_fails(others[1])
    assert hooks == others


def in_thread_that_fails(error: BaseException) -> None:
    def fail() -> None:
        raise error

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()


@pytest.mark.usefixtures("hooks")
def test_the_hooks_of_other_programs_and_versions_stay() -> None:
    before = (sys.excepthook, threading.excepthook)
    for name in NAMES_OF_ANOTHER_VERSION:
        call_from(name, print_errors_as_lines)
    assert (sys.excepthook, threading.excepthook) == before


@pytest.fixture
def default_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP have no handler, and get back what they had."""
    before = {each: signal.signal(each, signal.SIG_DFL) for each in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.mark.usefixtures("default_signals")
def test_a_signal_unwinds_a_command_once(monkeypatch: pytest.MonkeyPatch) -> None:
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr("atexit.register", at_exit.append)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    call_from(MAIN, unwind_on_signals)
    call_from(MAIN, unwind_on_signals)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    with pytest.raises(SystemExit) as raised:
        signal.raise_signal(signal.SIGTERM)
    assert raised.value.code == 143
    signal.raise_signal(signal.SIGTERM)  # `timeout` sends two
    assert len(at_exit) == 1


@pytest.mark.usefixtures("default_signals")
def test_the_signals_of_other_programs_stay() -> None:
    for name in NAMES_OF_ANOTHER_VERSION:
        call_from(name, unwind_on_signals)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(("name", "is_followed"), [(MAIN, True), ("muster.cli.run_command", True), ("mine", False)])
def test_a_stop_of_the_command_is_told_to_its_jobs(name: str, is_followed: bool) -> None:
    before = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    try:
        call_from(name, lambda: follow_suspension(lambda word: None))
        assert (signal.getsignal(signal.SIGTSTP) is not signal.SIG_DFL) is is_followed
    finally:
        signal.signal(signal.SIGTSTP, before)
