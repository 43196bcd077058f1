"""What `torchx run` and `torchx log` show: colours and live bars on a terminal, plain lines to all others."""

import io
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from doubles.samples import make_round
from torchx.schedulers.api import DescribeAppResponse
from torchx.specs import AppState

from muster.agent.logs.lines import build_prefix
from muster.schedulers.adapter.scheduler import PluginScheduler
from muster.schedulers.runner import job_console, live_lines
from muster.schedulers.runner.live_lines import LiveLines

ROUND = make_round(group_rank=1, group_world_size=2, rank_offset=2, world_size=4)
NODE = build_prefix(role="main", local_rank=1, round=ROUND).decode()
ALONE = "[main1]:"
LINES = [f"{NODE}step 1\n", f"{ALONE}step 1\n", "[muster] a line\n", "JOB FAILED  job: why\n", "[x] y\n", "plain\n"]


BAR = f"\r{ALONE} 40%|####\n"
END = f"\r{ALONE}\n"
XTERM = {"TERM": "xterm"}


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    made = Screen()
    monkeypatch.setattr(live_lines, "find_printer", lambda: made)
    return made


def print_all(screen: Screen, lines: list[str], environ: dict[str, str] = XTERM) -> None:
    """As TorchX prints the lines of one replica."""
    for line in LiveLines().show(lines, "main", 0, environ):
        screen.write(f"main/0 {line}")


def test_programs_get_plain_lines_and_bars_without_marks() -> None:
    assert list(LiveLines().show([*LINES, BAR, END], "main", 0, XTERM)) == [*LINES, f"{ALONE} 40%|####\n"]


def test_a_file_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_lines, "find_printer", io.StringIO)
    assert list(LiveLines().show([*LINES, BAR, END], "main", 0, XTERM)) == [*LINES, f"{ALONE} 40%|####\n"]


def test_people_get_colours(screen: Screen) -> None:
    print_all(screen, LINES)
    assert screen.getvalue().splitlines() == [
        f"\x1b[32mmain/0\x1b[0m {line}"
        for line in (
            f"\x1b[32m{NODE}\x1b[0mstep 1",  # global rank 3
            f"\x1b[33m{ALONE}\x1b[0mstep 1",
            "[muster] a line",
            "\x1b[1;31mJOB FAILED  job: why\x1b[0m",
            "[x] y",
            "plain",
        )
    ]


def test_it_is_known_whether_people_have_seen_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = LiveLines()
    list(lines.show(LINES, "main", 0, XTERM))
    assert not lines.has_printed
    monkeypatch.setattr(live_lines, "find_printer", io.StringIO)
    list(lines.show(LINES, "main", 0, XTERM))
    assert lines.has_printed


@pytest.mark.parametrize("environ", [{"TERM": "xterm", "NO_COLOR": "1"}, {"TERM": "dumb"}, {}])
def test_colours_can_be_refused(screen: Screen, environ: dict[str, str]) -> None:
    print_all(screen, LINES, environ)
    assert screen.getvalue().splitlines(keepends=True) == [f"main/0 {line}" for line in LINES]


def test_a_bar_is_a_row_below_all_lines_until_it_ends(screen: Screen) -> None:
    lines = [BAR, "a line\n", f"\r{ALONE} 80%|########\n", f"{ALONE}100%\n", END, "more\n"]
    print_all(screen, lines, {"TERM": "x", "NO_COLOR": "1"})
    row, erased = f"main/0 {ALONE} 40%|####", "\r\x1b[K"
    later = f"main/0 {ALONE} 80%|########"
    assert screen.getvalue() == (
        f"{row}{erased}main/0 a line\n{row}{erased}{later}{erased}main/0 {ALONE}100%\n{later}{erased}main/0 more\n"
    )


def test_rows_are_in_the_order_of_ranks_and_go_with_their_replica(screen: Screen) -> None:
    lines = LiveLines()

    def read_first() -> Iterator[str]:
        yield "\r[main2]: 5%\n"
        assert list(lines.show(["\r[main10]: 1%\n", "\r[main2]: 3%\n"], "main", 0, XTERM)) == []

    assert list(lines.show(read_first(), "main", 1, XTERM)) == []
    shown = screen.getvalue().split("\x1b[K")
    assert "main/0 [main2]: 3%\nmain/0 [main10]: 1%\nmain/1 [main2]: 5%\r" in shown
    assert shown[-2:] == ["main/1 [main2]: 5%\r", ""]


class Job(PluginScheduler):
    """A scheduler whose only app is in one state."""

    def __init__(self, state: AppState, msg: str) -> None:
        super().__init__("test", "torchx")
        self.response = DescribeAppResponse(app_id="train-1", state=state, msg=msg)

    def describe_app(self, app_id: str) -> DescribeAppResponse:
        return self.response

    read_facts = list_apps = delete_app = read_log = schedule = None  # type: ignore[assignment]
    _cancel_existing = _submit_dryrun = None  # type: ignore[assignment]


WHY = "ranks 0-7 failed in the same way: ValueError: no file; no restarts are allowed"
FAILED = ["JOB FAILED  train-1: ranks 0-7 failed in", "the same way: ValueError: no file; no", "restarts are allowed"]


@pytest.mark.parametrize(
    ("function", "state", "is_terminal", "shown"),
    [
        ("wait", AppState.FAILED, True, FAILED),
        ("wait", AppState.CANCELLED, True, []),
        ("wait", AppState.FAILED, False, []),
        ("status", AppState.FAILED, True, []),
    ],
)
def test_why_a_job_failed_is_the_last_thing_on_the_screen(
    monkeypatch: pytest.MonkeyPatch, function: str, state: AppState, is_terminal: bool, shown: list[str]
) -> None:
    terminal = Screen() if is_terminal else io.StringIO()
    monkeypatch.setattr(live_lines, "runs_command_line", lambda: True)
    monkeypatch.setattr(job_console, "measure", lambda _: os.terminal_size((41, 24)))
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("NO_COLOR", "1")
    job = Job(state, WHY)
    namespace: dict[str, Any] = {"__name__": "torchx.runner.api"}
    exec(f"def {function}(job): job.describe('train-1')", namespace)  # a frame with those globals
    namespace[function](job)
    assert terminal.getvalue() == "", "not before TorchX has printed the status"
    job.close()
    job.close()
    assert terminal.getvalue().splitlines() == shown


def test_a_program_is_not_told_why_a_job_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Screen())
    live_lines.repeat_failure("train-1", WHY, XTERM)
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]
