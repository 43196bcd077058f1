"""What two nodes on this machine print when their job fails, hangs, or gets a request for stacks."""

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO

import pytest
from harness import AGENT, PROGRAMS, Tree, check_all, run_tree, start_nodes
from launchers import MOSTLY_WARM, START_FLAGS

IDLE = PROGRAMS / "agent/idle.py"


Start = Callable[..., AbstractContextManager[list[Tree]]]


@pytest.fixture(params=MOSTLY_WARM)
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Start:
    """Start two agents of one job, two workers each: flags and the program."""
    flags = ["--nproc-per-node", "2", "--tee", "3", "--start", request.param, "--log-dir", tmp_path]
    return functools.partial(start_nodes, 2, *flags)


def test_a_traceback_stands_on_the_console_once(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, time\n"
        "def step(batch):\n"
        "    raise ValueError(f'bad batch {batch}')\n"
        "if os.environ['RANK'] == '1':\n"
        "    step(17)\n"
        "time.sleep(60)\n"
    )
    agent = [*AGENT, *START_FLAGS, "--standalone", "--nproc-per-node", "2"]
    agent += ["--log-dir", str(tmp_path)]
    for flags, places in ((["--tee", "3"], "above, in the lines [default1]\n"), ([], "above\n")):
        outcome = run_tree([*agent, *flags, str(script)]).check(1)
        assert outcome.stderr.count("Traceback (most recent call last)") == 1, outcome.explain()
        assert f"raised at : {script}, line 3, in step" in " ".join(outcome.stderr.split()), outcome.explain()
        assert f"  traceback : {places}" in outcome.stderr, outcome.explain()


def test_the_last_line_has_the_peak_memory_of_the_largest_worker_of_all_nodes(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os\nx = bytearray(os.urandom(1)) * ((600 << 20) * (os.environ['RANK'] == '3'))\n")
    with start(script) as trees:
        outcomes = check_all(trees)
    (line,) = [line for line in outcomes[0].stderr.splitlines() if "peak memory" in line]
    found = re.search(r"peak memory of a worker (\d+) MiB", line)
    assert found is not None, line
    assert int(found[1]) >= 600, line


def test_in_pods_the_node_with_the_page_ends_first_and_not_before_all_have_the_report(
    start: Start, tmp_path: Path
) -> None:
    """There the others are removed when the first pod fails; here each agent copies both messages at its end."""
    script = tmp_path / "train.py"
    script.write_text("import os, sys, time\nif os.environ['RANK'] == '3':\n    sys.exit(7)\ntime.sleep(60)\n")
    messages = [tmp_path / f"message{index}" for index in (0, 1)]
    look = (
        '"$@"; code=$?; date +%s.%N >"$SEEN.end"; cd "$ALL"; cp message0 "$SEEN.0"; cp message1 "$SEEN.1"; exit $code'
    )
    envs = []
    for index in (0, 1):
        messages[index].touch()
        own = {"MUSTER_TERMINATION_LOG": str(messages[index]), "SEEN": str(tmp_path / f"seen{index}")}
        envs.append({**os.environ, **own, "ALL": str(tmp_path)})
    with start(script, envs=envs, wrapper=["sh", "-c", look, "sh"]) as trees:
        outcomes = check_all(trees, 1)
    seen = [(tmp_path / f"seen{index}.{other}").read_text() for index in (0, 1) for other in (0, 1)]
    assert all("exited with code 7" in text for text in seen), seen
    printed = ["JOB FAILED" in outcome.stderr for outcome in outcomes]
    ends_s = [float((tmp_path / f"seen{index}.end").read_text()) for index in (0, 1)]
    first = printed.index(True)
    assert ends_s[first] < ends_s[1 - first] - 0.5, (printed, ends_s)


class TestHangs:
    def test_a_job_in_which_no_worker_moves_has_failed(self, start: Start, tmp_path: Path) -> None:
        with start("--hang-timeout", "1", IDLE, tmp_path / "never", "0", "1", "2", "3") as trees:
            outcomes = check_all(trees, 1)
        page = " ".join("".join(outcome.stderr for outcome in outcomes).split())
        assert re.search(r"hung: .* \d+ s \(--hang-timeout", page), page
        assert "ranks 0-3:" in page, page
        assert page.count("in sit_still") == 1, page
        report = json.loads((tmp_path / "job" / "report.json").read_text())
        assert {stack["global_rank"] for stack in report["stacks"]} == {0, 1, 2, 3}
        assert all(failure["hung"] and failure["pid"] > 0 for failure in report["failures"])

    @pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), 1], ids=["worker", "child of a worker"])
    @pytest.mark.parametrize("start", MOSTLY_WARM)
    def test_an_occasional_line_that_the_agent_does_not_capture_is_activity(
        self, start: str, rank: int, tmp_path: Path
    ) -> None:
        """For three times the timeout one worker prints to the agent's own output, and the other sits still."""
        done = tmp_path / "done"
        flags = ["--standalone", "--nproc-per-node", "2", "--hang-timeout", "2", "--log-dir", str(tmp_path)]
        program = [str(PROGRAMS / "agent/ticks.py"), str(done), str(rank)]
        with Tree([*AGENT, *flags, "--start", start, *program]) as tree:
            tree.wait_for_line(f"tick {rank}", count=24)
            done.touch()
            outcome = tree.wait().check()
        assert "hung" not in outcome.stderr, outcome.explain()


def test_sigusr2_prints_stacks_and_disturbs_no_worker(start: Start, tmp_path: Path) -> None:
    done = tmp_path / "done"
    with start(IDLE, done, "0", "1", "2", "3") as trees:
        for tree in trees:
            tree.wait_for_line("ready", count=2)
        for tree in trees:
            tree.send(signal.SIGUSR2)
            tree.wait_for_line("stacks of ranks 0-3:", stream="stderr")
            tree.wait_for_line("in sit_still", stream="stderr")
        done.touch()
        check_all(trees)


@pytest.mark.parametrize("start", MOSTLY_WARM)
def test_repeated_requests_for_stacks_do_not_delay_a_stop(start: str, tmp_path: Path) -> None:
    """Rank 0 blocks all signals, so that each collection lasts up to its limit and all of them overlap."""
    fail_file = tmp_path / "fail"
    flags = ["--standalone", "--nproc-per-node", "2", "--shutdown-timeout", "1", "--log-dir", str(tmp_path)]
    program = [str(PROGRAMS / "agent/deaf.py"), str(fail_file)]
    with Tree([*AGENT, *flags, "--tee", "3", "--start", start, *program]) as tree:
        tree.wait_for_line("ready", count=2)
        ended = threading.Event()

        def request_stacks() -> None:
            while not ended.wait(0.05):
                with contextlib.suppress(ProcessLookupError):
                    tree.send(signal.SIGUSR2)

        requester = threading.Thread(target=request_stacks)
        requester.start()
        try:
            tree.wait_for_line("stacks of rank 1", stream="stderr")
            fail_file.touch()
            outcome = tree.wait()
        finally:
            ended.set()
            requester.join()
    assert (outcome.exit_code, outcome.leftovers) == (1, ()), outcome.explain()
    assert "JOB FAILED" in outcome.stderr, outcome.explain()


def test_a_report_comes_after_all_lines_of_its_nodes_workers(tmp_path: Path) -> None:
    """The reader of standard output is the slower one, and both write one log, as Docker's do."""
    script = tmp_path / "train.py"
    script.write_text("for line in range(300_000):\n    print('line', line)\nraise ValueError('bad batch')\n")
    agent = [*AGENT, "--standalone", "--tee", "3", "--start", "cold"]
    log: list[bytes] = []

    def follow(pipe: IO[bytes], pause_s: float) -> None:
        while data := os.read(pipe.fileno(), 16384):
            threading.Event().wait(pause_s)
            log.append(data)

    command = [*agent, "--log-dir", str(tmp_path / "logs"), str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        readers = [
            threading.Thread(target=follow, args=(process.stdout, 0.01)),
            threading.Thread(target=follow, args=(process.stderr, 0.0)),
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
    merged = b"".join(log).decode()
    assert process.returncode == 1, merged[-2000:]
    assert merged.index("line 299999\n") < merged.index("JOB FAILED"), merged[-2000:]
