"""Jobs that hang: which rank, collective and line the report names. The texts are written by hand."""

import itertools
import json
import os
import re
import signal
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from harness import AGENT, PROGRAMS, Outcome, Tree, check_all, read_events, run_tree, start_nodes
from launchers import SCALED

PROGRAM = PROGRAMS / "hangs" / "hang.py"
SIXTH = "all_reduce #6 of default_pg (4 x float32)"
WAIT = "    time.sleep(LONG_S)"
ABSENT = f"rank 1 did not enter {SIXTH}; rank 0 has waited in it for # s"
APART = "where rank 0 entered all_reduce (4 x float32); they have waited for # s"


@pytest.fixture(autouse=True)
def _scaled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real limits where torch's own timeout is the subject."""
    if "torchs_own_timeout" not in request.node.name:
        for name, value in SCALED.items():
            monkeypatch.setenv(name, value)


def find_line(text: str) -> int:
    return 1 + PROGRAM.read_text().splitlines().index(text)


def build_argv(log_dir: Path, how: str, *flags: str) -> list[str]:
    agent = [*AGENT, "--standalone", "--nproc-per-node", "2", "--rdzv-id", "hang"]
    limits = ["--hang-timeout", "3", "--shutdown-timeout", "2", "--log-dir", str(log_dir)]
    return [*agent, *limits, *flags, str(PROGRAM), how, "1"]


def remove_seconds(text: str) -> str:
    """Those that make sense."""
    return re.sub(r"(?<= )\d{1,2}(?= s\b)|(?<= )[1-5]\d\d(?= s\b)", "#", text)


ROWS = {
    "sleeps": (ABSENT, WAIT),
    "skips": (f"rank 1 entered barrier #6 of default_pg {APART}", "        dist.barrier()"),
    "other": (f"rank 1 entered broadcast #6 of default_pg (4 x float32) {APART}", "        dist.broadcast(values, 0)"),
    "size": (f"rank 1 entered all_reduce #6 of default_pg (0 x float32) {APART}", "    dist.all_reduce(values)"),
    "leaves": (f"rank 0 hung: rank 1 has ended; rank 0 has waited in {SIXTH} for # s", None),
    "spins": (ABSENT, "    while True: pass"),
    "native": (ABSENT, "        ctypes.PyDLL(None).sleep(int(LONG_S))"),
    "init": ("rank 1 did not call init_process_group, in which rank 0 waits", WAIT),
    "loads": (ABSENT, "        for _ in DataLoader(Stuck(), num_workers=1):"),
    "group": ("rank 1 did not enter barrier #1 of pair of ranks 0-1; rank 0 has waited in it for # s", WAIT),
    "receives": ("rank 1 is elsewhere while rank 0 waits in recv (hang.py:#)", WAIT),
    "stops": (f"rank 1 is stopped (SIGSTOP); rank 0 has waited in {SIXTH} for # s", None),  # it answers nothing
    "old": ("rank 1 did not enter all_reduce (hang.py:#), where rank 0 waits", WAIT),
}
"""By what the program does: what the report says of it, and the line at which it says that rank 1 is."""


SHORT = (("sleeps", "warm"), ("stops", "warm"), ("loads", "cold"))
"""Of alike rows one in `make test`; two imports of torch make cold starts the dearer half."""


@pytest.mark.parametrize(
    ("how", "start"),
    [
        each if each in SHORT else pytest.param(*each, marks=pytest.mark.long)
        for each in itertools.product(ROWS, ("warm", "cold"))
    ],
)
def test_the_guilty_rank_is_named(how: str, start: str, tmp_path: Path) -> None:
    flags = ["--hang-action", "stop", "--max-restarts", "2"] if how == "sleeps" else []
    outcome = run_tree(build_argv(tmp_path, how, "--start", start, *flags)).check(1)
    reason = check_report(outcome, tmp_path, *ROWS[how])
    assert reason.endswith("(--hang-action stop)") == (how == "sleeps"), reason


def check_report(outcome: Outcome, log_dir: Path, expected: str, line: str | None) -> str:
    report = json.loads((log_dir / "hang" / "report.json").read_text())
    reason = re.sub(r"(\w \(hang.py):\d+", r"\1:#", remove_seconds(report["reason"]))
    assert reason.startswith(expected), f"{reason}\n{outcome.explain()}"
    if line is not None:
        assert f"; last seen at hang.py:{find_line(line)}" in reason, f"{reason}\n{outcome.explain()}"
    assert ("for its DataLoader" in reason) == ("DataLoader" in (line or "")), reason
    root = report["failures"][0]
    named = int(expected[len("rank ") :].split(maxsplit=1)[0])
    assert (root["global_rank"], root["hung"], root["collateral"]) == (named, True, False), outcome.explain()
    assert "WorkerServer" not in outcome.stderr, outcome.explain()
    assert "[W" not in outcome.stderr, outcome.explain()
    return reason


@pytest.mark.long
def test_the_guilty_rank_is_named_behind_a_wrapper(tmp_path: Path) -> None:
    """With --no-python: a shell script starts Python."""
    wrapper = tmp_path / "wrapper.sh"
    wrapper.write_text('#!/bin/sh\n"$@"\nexit $?\n')
    wrapper.chmod(0o755)
    argv = build_argv(tmp_path, "sleeps", "--no-python")
    argv[argv.index(str(PROGRAM)) : -2] = [str(wrapper), sys.executable, str(PROGRAM)]
    outcome = run_tree(argv).check(1)
    check_report(outcome, tmp_path, ABSENT, WAIT)


def wait_for(tree: Tree, *texts: str) -> None:
    """The console wraps nothing: each text is within one line."""
    for text in texts:
        tree.wait_for_line(re.escape(text), stream="stderr")


def start_pair(log_dir: Path, how: str, guilty: int, nproc: int, *flags: str) -> AbstractContextManager[list[Tree]]:
    """Two nodes of one job on this machine; the first one leads."""
    limits = ["--hang-timeout", "3", "--shutdown-timeout", "2", "--log-dir", log_dir, "--nproc-per-node", str(nproc)]
    return start_nodes(2, "--rdzv-id", "hang", *limits, *flags, PROGRAM, how, str(guilty))


def test_a_rank_of_another_node_that_ended_is_named(tmp_path: Path) -> None:
    with start_pair(tmp_path, "exits", 1, 1) as trees:
        check_all(trees, 1)
    assert " rank 1 had exited" in json.loads((tmp_path / "hang" / "report.json").read_text())["reason"]


@pytest.mark.parametrize("start", [pytest.param("cold", marks=pytest.mark.long), "warm"])
def test_a_hang_of_two_nodes_is_told_while_the_job_goes_on(start: str, tmp_path: Path) -> None:
    """Rank 2 is on the other node than the leader, which prints the page; each node prints it on request."""
    with start_pair(tmp_path, "sleeps", 2, 2, "--hang-action", "report", "--start", start) as trees:
        found = f"did not enter {SIXTH}; ranks 0-1, 3 have waited in it for"
        wait_for(trees[0], "rank 2 (node 1, ", found, "stacks of rank 2:")
        assert found not in trees[1].stderr, trees[1].stderr
        trees[1].send(signal.SIGUSR2)
        wait_for(trees[1], found, "stacks of rank 2:")
        for tree in trees:
            tree.send(signal.SIGTERM)
        outcomes = [tree.wait() for tree in trees]
    assert [outcome.leftovers for outcome in outcomes] == [(), ()], outcomes[0].explain()
    assert "JOB FAILED" not in outcomes[0].stderr, outcomes[0].explain()


@pytest.mark.long
@pytest.mark.parametrize("nproc", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_rank_is_named_before_torchs_own_timeout_whatever_its_node_does(nproc: int, tmp_path: Path) -> None:
    """The last rank computes in a phase that it names: by itself that is no hang for half an hour."""
    guilty = 2 * nproc - 1
    flags = ["--hang-timeout", "auto", "--hang-action", "stop"]
    with start_pair(tmp_path, "evaluates", guilty, nproc, *flags) as trees:
        outcomes = check_all(trees, 1, timeout_s=240)
    report = json.loads((tmp_path / "hang" / "report.json").read_text())
    waiting = "rank 0 has" if guilty == 1 else "ranks 0-2 have"
    expected = f"rank {guilty} did not enter {SIXTH}; {waiting} waited in it for # s; last seen at hang.py:"
    assert remove_seconds(report["reason"]).startswith(expected), outcomes[0].explain()
    assert "timeout of 95 s (--hang-timeout); " in report["reason"], report["reason"]
    root = report["failures"][0]
    assert (root["global_rank"], root["hung"], root["collateral"]) == (guilty, True, False), outcomes[0].explain()


@pytest.mark.long
def test_the_ranks_that_kept_the_others_waiting_are_recorded_when_the_job_goes_on(tmp_path: Path) -> None:
    with start_pair(tmp_path, "sleeps", 2, 2, "--max-restarts", "1") as trees:
        outcomes = check_all(trees, 1, timeout_s=240)
    explained = [(each["attempt"], each["ranks"]) for each in read_events(tmp_path) if each["what"] == "hang_explained"]
    assert explained == [(0, [2])], outcomes[0].explain()


@pytest.mark.parametrize(
    ("how", "signum", "code"),
    [
        pytest.param("sleeps", signal.SIGINT, 130, id="ctrl-c", marks=pytest.mark.long),
        pytest.param("sleeps", signal.SIGTERM, 143, id="stop", marks=pytest.mark.long),
        pytest.param("asks", signal.SIGTERM, 143, id="stop of a job that asks"),
    ],
)
def test_a_stop_of_a_job_that_stands_still_prints_its_page(
    how: str, signum: signal.Signals, code: int, tmp_path: Path
) -> None:
    """A job that asks `should_stop` is asked to stop at one step, which ranks that hang do not reach."""
    flags = ("--hang-timeout", "5", "--hang-action", "report")
    with Tree(build_argv(tmp_path, how, *flags), env={**os.environ, "MUSTER_DRAIN_LIMIT_S": "2"}) as tree:
        wait_for(tree, "the job hangs: no collective and no step for ", "stacks of rank 1:")
        reported = tree.stderr
        tree.send(signum)
        outcome = tree.wait().check(code)
    page = outcome.stderr[len(reported) :]
    assert ("at one step" in page) == (how == "asks"), outcome.explain()
    assert f"enter {SIXTH}; rank 0 " in " ".join(page.split()), outcome.explain()
    assert all(f"stacks of rank {rank}:" in page for rank in (0, 1)), outcome.explain()
