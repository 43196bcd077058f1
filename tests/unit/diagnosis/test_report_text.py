"""The report on one page, as JSON, in torch's format, and shortened to a termination message."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from doubles.samples import make_failure_of_rank_3
from hypothesis import given, settings
from hypothesis import strategies as st

from muster._shared.codec import decode
from muster._shared.contract import TERMINATION_LOG_LIMIT_BYTES
from muster._shared.records import replace
from muster._shared.reports import Failure, OomEvidence, RankProgress, Report, Stack, name_ranks, print_values
from muster.agent.diagnosis.report_files import (
    build_termination_message,
    build_torch_error,
    write_report,
    write_torch_error_file,
)
from muster.agent.diagnosis.report_text import format_report, format_steps
from muster.agent.diagnosis.root_cause import find_root
from muster.agent.diagnosis.tracebacks import find_place, has_printed

TRACEBACK = 'Traceback (most recent call last):\n  File "/w/main.py", line 3, in <module>\nValueError: boom'


make_failure = partial(
    make_failure_of_rank_3,
    exit_code=1,
    exception="ValueError: boom",
    traceback=TRACEBACK,
    stderr_tail=("loading", *TRACEBACK.splitlines()),
)


def make_collateral(rank: int) -> Failure:
    return make_failure(
        node=0,
        host="host-a",
        global_rank=rank,
        local_rank=rank,
        exit_code=None,
        signal="SIGTERM",
        exception=None,
        traceback=None,
        stderr_tail=(),
        collateral=True,
        stopped_by_us=True,
    )


def make_report(*failures: Failure, **changes: Any) -> Report:
    values: dict[str, Any] = {"run_id": "job", "reason": "rank 3 failed", "attempt": 0, "max_restarts": 0, **changes}
    return Report(failures=failures, **values)


@pytest.mark.parametrize(("most", "line"), [(1, "after 1 of 1 restart"), (3, "after 1 of 3 restarts")])
def test_the_page_counts_restarts(most: int, line: str) -> None:
    assert line in format_report(make_report(attempt=1, max_restarts=most)).splitlines()


def test_the_page_says_once_that_all_restarts_are_used() -> None:
    page = format_report(make_report(attempt=1, max_restarts=1, reason="rank 3 failed; its one restart is used"))
    assert "its one restart is used" in page
    assert "after 1 of 1 restart" not in page


@pytest.mark.parametrize("has_colour", [False, True])
def test_escape_sequences_of_a_worker_are_shown(has_colour: bool) -> None:
    evil = "\x1b]52;c;eA==\x07\x1b[2J\r"
    failure = make_failure(
        exception=f"E: {evil}", traceback=f"{TRACEBACK}{evil}", stderr_tail=(f"tail {evil}",), host=evil
    )
    stack = Stack(global_rank=0, node=0, local_rank=0, text=f"Thread 0x1 (most recent call first):\n  {evil}")
    page = format_report(make_report(failure, reason=f"rank {evil}", stacks=(stack,)), has_colour=has_colour)
    ours = ("\x1b[1;31m", "\x1b[0m") if has_colour else ()
    for sequence in ours:
        assert sequence in page
        page = page.replace(sequence, "")
    assert not [each for each in page if not each.isprintable() and each != "\n"]
    assert r"rank \x1b]52;c;eA==\x07" in page


def test_the_page_names_everything_once() -> None:
    stacks = tuple(
        Stack(global_rank=rank, node=0, local_rank=rank, text=f"Thread 0x{rank:x} (most recent call first):\n  in wait")
        for rank in (0, 1)
    )
    page = format_report(make_report(make_failure(), *(make_collateral(rank) for rank in (0, 1, 2)), stacks=stacks))
    assert "JOB FAILED  job: rank 3 failed" in page
    assert "rank      : 3 (local rank 1 on node 1)" in page
    assert "host      : host-b" in page
    assert "process   : exited with code 1 (pid 4711)" in page
    assert page.count("ValueError: boom") == 1  # at the traceback's end
    assert 'File "/w/main.py", line 3' in page
    assert "    | loading" in page
    assert "/logs/job/attempt_0/1/stderr.log" in page
    assert "ranks 0-2 (node 0, host-a): were ended by SIGTERM" in page
    assert page.count("in wait") == 1
    assert "ranks 0-1:" in page


def test_collateral_is_never_the_root_even_when_it_came_first() -> None:
    root = make_failure()
    assert find_root(make_report(make_collateral(0), root)) is root
    assert find_root(make_report()) is None
    assert "JOB FAILED" in format_report(make_report())


def test_ranks_that_were_stopped_are_no_cause_when_no_rank_has_failed() -> None:
    reason = "node 1 (host-b): the debugger of one of its ranks was quit"
    page = format_report(make_report(make_collateral(0), make_collateral(1), reason=reason))
    assert "Root cause" not in page
    assert "Ended because of it\n  ranks 0-1 (node 0, host-a): were ended by SIGTERM\n" in page


def test_a_fault_of_the_program_does_not_read_like_a_wrong_flag() -> None:
    """A tensor of another shape had "cause: usage"."""
    page = format_report(make_report(make_failure(exception="RuntimeError: shapes", traceback=None, cause="usage")))
    assert "  cause     : program, arguments or environment\n" in page


@pytest.mark.parametrize(
    ("certain", "text"),
    [
        (True, "the OOM killer killed a process in this node's cgroup (limit 4.00 GiB, peak 3.99 GiB"),
        (False, "a guess"),
    ],
)
def test_an_oom_kill_is_named_and_a_guess_is_called_one(certain: bool, text: str) -> None:
    oom = OomEvidence(certain=certain, limit_bytes=4 << 30, peak_bytes=int(3.99 * (1 << 30)), source="/sys/x")
    page = format_report(make_report(make_failure(exit_code=None, signal="SIGKILL", oom=oom)))
    assert "was ended by SIGKILL" in page
    assert text in " ".join(page.split())


def test_a_thousand_dead_ranks_take_one_line_per_node() -> None:
    others = [replace(make_collateral(rank), node=rank // 8, host=f"h{rank // 8}") for rank in range(1000)]
    page = format_report(make_report(make_failure(), *others))
    assert "ranks 0-7 (node 0, h0)" in page
    assert "... and 109 more such lines" in page
    assert len(page.splitlines()) < 50


def test_a_torch_traceback_is_printed_once() -> None:
    """Torch prints it with the rank before each line, and longer than @record records it."""
    printed = ["[rank3]: " + line for line in TRACEBACK.splitlines()]
    printed.insert(1, '[rank3]:   File "/torch/errors/__init__.py", line 9, in wrapper')
    page = format_report(make_report(make_failure(stderr_tail=("[W] loading", *printed, "bye"))))
    assert page.count("boom") == page.count("main.py") == page.count("Traceback") == 1, page
    assert "wrapper" not in page
    assert "    | [W] loading" in page
    assert "    | bye" in page


def test_what_the_console_has_is_not_repeated() -> None:
    deep = """Traceback (most recent call last):
  File "/w/main.py", line 3, in <module>
    step(batch)
  File "/w/model.py", line 8, in step
    loss.backward()
  File "/venv/lib/python3.11/site-packages/torch/_tensor.py", line 630, in backward
    torch.autograd.backward(
RuntimeError: boom"""
    failure = make_failure(exception="RuntimeError: boom", traceback=deep, stderr_tail=("loading", *deep.splitlines()))
    page = format_report(make_report(failure), printed_as="[main1|n1.r3]")
    assert page.count("RuntimeError: boom") == 1
    assert "  raised at : /w/model.py, line 8, in step\n" in page, "the user's innermost frame"
    assert "  traceback : above, in the lines [main1|n1.r3]\n" in page
    assert "most recent call" not in page
    assert "loading" not in page
    assert "  traceback : above\n" in format_report(make_report(failure), printed_as="")


def test_where_the_stderr_is_that_the_agent_does_not_read() -> None:
    failure = make_failure(exit_code=3, exception=None, traceback=None, stderr_tail=())
    line = "  stderr    : above, if any; with --tee 2 its last lines are also here\n"
    assert line in format_report(make_report(failure), printed_as="")
    for other in (replace(failure, exit_code=None, signal="SIGKILL"), replace(failure, stderr_tail=("out",))):
        assert line not in format_report(make_report(other), printed_as="")
    assert line not in format_report(make_report(failure), printed_as="[main1]")
    assert line not in format_report(make_report(failure))


def test_the_place_of_a_crash_is_its_innermost_frame() -> None:
    stack = """Fatal Python error: Segmentation fault

Current thread 0x1 (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "/w/crash.py", line 3 in <module>"""
    assert find_place(stack) == ("/w/crash.py, line 3", "<module>")
    assert find_place("no frames") is None


def test_a_place_is_the_line_that_called_muster_and_not_one_of_muster() -> None:
    ours = '  File "/tmp/bundle.zip/muster/worker.py", line 223, in _end_with\n    raise SystemExit\n'
    traceback = f'Traceback (most recent call last):\n  File "/w/up.py", line 3, in check\n    give_up()\n{ours}'
    assert find_place(traceback) == ("/w/up.py, line 3", "check")


def test_a_crash_shows_no_frame_of_muster() -> None:
    crash = 'Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n  File "m.py"'
    own = '  File "/x/muster/agent/workers/program.py", line 178 in run'
    tail = ("epoch 1", *crash.splitlines(), own)
    failure = make_failure(exit_code=None, signal="SIGSEGV", exception=crash.splitlines()[0], traceback=crash)
    page = format_report(make_report(replace(failure, stderr_tail=tail)))
    assert "program.py" not in page
    assert page.count("Segmentation") == 1
    assert "    | epoch 1" in page


def test_ranks_that_failed_in_the_same_way_are_not_called_victims() -> None:
    same = [replace(make_failure(global_rank=rank), collateral=False) for rank in (0, 1, 2)]
    page = format_report(make_report(make_failure(), *same))
    assert "Failed in the same way\n  ranks 0-2 (node 1, host-b)\n" in page
    assert "Ended because of it" not in page


@pytest.mark.parametrize("columns", [40, 70])
def test_no_line_of_text_is_wider_than_the_page(columns: int) -> None:
    reason = "rank 3 on node 1 (host-b) was ended by SIGKILL: " + "word " * 60
    root = make_failure(traceback=None, exception="E: " + "x " * 200, stderr_tail=(), log_path=None)
    others = [replace(make_collateral(rank), exception="F: " + "y " * 200) for rank in range(3)]
    page = format_report(make_report(root, *others, reason=reason), columns=columns)
    assert max(map(len, page.splitlines())) == columns
    assert "y ..." in " ".join(line.strip() for line in page.splitlines())


def test_a_long_error_of_a_victim_is_cut_between_words() -> None:
    cut = replace(make_collateral(0), exception="F: " + "peer " * 100)
    whole = replace(make_collateral(1), exception="F" * 300)
    page = " ".join(format_report(make_report(make_failure(), cut, whole)).split())
    assert " peer ..." in page
    assert "F" * 160 + " ..." in page


def test_rank_lists() -> None:
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([2, 0, 1, 8]) == "ranks 0-2, 8"


def test_json_round_trip_and_no_temporary_file_is_left(tmp_path: Path) -> None:
    report = make_report(make_failure(oom=OomEvidence(certain=True, limit_bytes=1)), make_collateral(0))
    path = tmp_path / "report.json"
    write_report(report, str(path))
    assert decode(Report, json.loads(path.read_text())) == report
    assert list(tmp_path.iterdir()) == [path]


def test_torch_format_without_an_error_file(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    write_torch_error_file(make_report(make_failure(exit_code=None, signal="SIGSEGV")), str(path))
    assert json.loads(path.read_text()) == {
        "message": {
            "message": "ValueError: boom",
            "extraInfo": {"py_callstack": TRACEBACK, "timestamp": "1700000000"},
            "errorCode": -11,
        }
    }


def test_torch_format_of_a_hang_has_the_stack_of_the_rank_that_keeps_the_others_waiting(tmp_path: Path) -> None:
    hung = {"exit_code": None, "exception": None, "traceback": None, "hung": True}
    guilty = make_failure(**hung, blocking="did not enter all_reduce", reason="no step for 4 s")
    waits = make_failure(**hung, reason="no step for 4 s", global_rank=0, collateral=True)
    stacks = tuple(Stack(global_rank=rank, node=1, local_rank=0, text=f"stack of {rank}") for rank in (0, 3))
    path = tmp_path / "error.json"
    write_torch_error_file(make_report(guilty, waits, stacks=stacks), str(path))
    message = json.loads(path.read_text())["message"]
    assert message["message"] == "rank 3 on node 1 (host-b) did not enter all_reduce; hung: no step for 4 s"
    assert message["extraInfo"]["py_callstack"] == "stack of 3"


def test_torch_format_keeps_what_the_worker_recorded(tmp_path: Path) -> None:
    own = {"message": {"message": "Own: text", "extraInfo": {"py_callstack": "s", "timestamp": "1", "more": 1}}, "x": 2}
    error_file = tmp_path / "worker.json"
    error_file.write_text(json.dumps(own))
    error = build_torch_error(make_failure(error_file=str(error_file), exit_code=17))
    assert error == {**own, "message": {**own["message"], "errorCode": 17}}


def test_without_a_failure_no_torch_file_is_written(tmp_path: Path) -> None:
    write_torch_error_file(make_report(), str(tmp_path / "error.json"))
    assert list(tmp_path.iterdir()) == []


def test_a_small_report_fits_whole_into_the_termination_message() -> None:
    report = make_report(make_failure(local_rank=0, global_rank=0, node=0))
    assert decode(Report, json.loads(build_termination_message(report))) == report


@settings(max_examples=40)
@given(
    text=st.text(min_size=0, max_size=200),
    repeats=st.integers(0, 200),
    others=st.integers(0, 300),
    run_id=st.text(max_size=50),
)
def test_a_termination_message_is_valid_and_small_and_keeps_the_root(text, repeats, others, run_id) -> None:
    root = make_failure(exception=text * repeats, traceback=text * repeats, stderr_tail=(text * repeats,) * 20)
    collateral = [make_collateral(rank) for rank in range(others)]
    message = build_termination_message(make_report(*collateral, root, run_id=run_id, reason=text))
    assert len(message) <= TERMINATION_LOG_LIMIT_BYTES
    first = decode(Report, json.loads(message)).failures[0]
    assert (first.global_rank, first.host, first.exit_code) == (3, "host-b", 1)


@pytest.mark.parametrize(
    ("reported", "line"),
    [
        ({"step": 7, "total_steps": 10}, "  step      : 7 of 10"),
        ({"step": 0, "optimizer_steps": 3}, "  step      : 0"),
        ({"optimizer_steps": 8}, "  step      : 8 since the process began (by optimizer)"),
        ({"reports_steps": True}, "  step      : none in this attempt"),
        ({"saved_step": 29}, "  step      : none in this attempt; the last saved step is 29"),
        ({}, None),
    ],
)
def test_the_step_of_the_rank_is_its_own_else_its_optimizers(reported: dict[str, int], line: str | None) -> None:
    page = format_report(make_report(make_failure(**reported))).splitlines()
    assert [each for each in page if each.startswith("  step")] == ([line] if line else [])


def test_steps_of_ranks_that_are_equally_far_stand_on_one_line() -> None:
    loss = (("loss", "0.31"), ("lr", "1e-05"))
    progress = (
        RankProgress(global_rank=0, step=7, total=10, values=loss),
        RankProgress(global_rank=1, step=7, total=10, values=(("loss", "0.5"),)),
        RankProgress(global_rank=2, optimizer_steps=8),
        RankProgress(global_rank=3),
    )
    assert list(format_steps(progress)) == [
        "ranks 0-1: step 7 of 10, loss 0.31, lr 1e-05",
        "rank 2: step 8 (by optimizer)",
    ]


def test_the_values_that_a_rank_showed_stand_beside_its_step() -> None:
    page = format_report(make_report(make_failure(step=7, values=print_values({"loss": float("nan"), "lr": 1e-5}))))
    assert "  step      : 7, loss nan, lr 1e-05" in page.splitlines()


def test_a_syntax_error_is_not_repeated() -> None:
    """Its text has the file and the line at the end, where Python prints them above."""
    printed = ('  File "/w/main.py", line 1', "    def f(:", "          ^", "SyntaxError: invalid syntax")
    failure = make_failure(
        exception="SyntaxError: invalid syntax (main.py, line 1)", traceback="\n".join(printed), stderr_tail=printed
    )
    assert has_printed(failure.stderr_tail, failure.exception, failure.traceback)
    assert not has_printed(["SyntaxError: invalid"], failure.exception, failure.traceback)
    assert "last lines of stderr" not in format_report(make_report(failure))
