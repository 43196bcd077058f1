"""`--notify` of real jobs: a failure, a hang, a preemption, commands that hang or fail."""

import json
import signal
import sys
from pathlib import Path

from harness import AGENT, Outcome, Tree, run_tree

TELL = """
import json, os, sys
told = {name[14:]: value for name, value in os.environ.items() if name.startswith("MUSTER_NOTIFY_")}
with open(sys.argv[1], "a") as file:
    file.write(json.dumps({**told, "stdin": sys.stdin.read(), "token": os.environ.get("MUSTER_TOKEN")}) + "\\n")
print("told", told["EVENT"])
"""


def build_argv(folder: Path, program: str, *flags: str, notify: str = "") -> list[str]:
    (folder / "tell.py").write_text(TELL)
    (folder / "train.py").write_text(program)
    notify = notify or f"{sys.executable} -S tell.py 'told to.jsonl'"
    agent = [*AGENT, "--standalone", "--start", "cold", "--rdzv-id", "job"]
    return [*agent, "--log-dir", str(folder / "logs"), f"--notify={notify}", *flags, "train.py"]


def read_told(folder: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / "told to.jsonl").read_text().splitlines()]


def run(folder: Path, program: str, *flags: str, notify: str = "") -> Outcome:
    return run_tree(build_argv(folder, program, *flags, notify=notify), cwd=folder)


def test_a_failure_and_then_a_success_with_the_same_folder(tmp_path: Path) -> None:
    done = run(tmp_path, "raise ValueError('bad batch')").check(1)
    [told] = read_told(tmp_path)
    assert (told["EVENT"], told["EXIT_CODE"], told["RUN_ID"], told["token"]) == ("failed", "1", "job", None)
    assert "ValueError: bad batch" in told["REASON"]
    assert told["stdin"].strip() in done.stderr, done.explain()
    assert "JOB FAILED" in told["stdin"]
    assert "[muster] --notify: told failed\n" in done.stderr, done.explain()
    assert [run(tmp_path, program).exit_code for program in ("pass", "raise SystemExit(4)")] == [0, 1]
    assert [each["EVENT"] for each in read_told(tmp_path)] == ["failed", "ended", "failed"]


def test_a_hang_is_told_while_its_workers_are_stopped_and_the_end_that_follows(tmp_path: Path) -> None:
    """The command outlives the stop of the round's workers."""
    slow = "sh -c 'sleep 1; exec " + f'{sys.executable} -S tell.py "told to.jsonl"' + "'"
    flags = ("--hang-timeout", "1", "--hang-action", "restart", "--max-restarts", "1", "--shutdown-timeout", "1")
    done = run(tmp_path, "import time; time.sleep(600)", *flags, notify=slow).check(1)
    assert [each["EVENT"] for each in read_told(tmp_path)] == ["hang", "failed"], done.explain()
    assert "hung" in read_told(tmp_path)[0]["REASON"], done.explain()


def test_a_signal(tmp_path: Path) -> None:
    argv = build_argv(tmp_path, "import time; print('runs', flush=True); time.sleep(600)")
    for signum, event in ((signal.SIGTERM, "preempted"), (signal.SIGINT, "stopped")):
        with Tree(argv, cwd=tmp_path) as tree:
            tree.wait_for_line("runs")
            tree.send(signum)
            done = tree.wait().check(128 + signum)
        assert read_told(tmp_path)[-1]["EVENT"] == event, done.explain()


def test_a_command_that_hangs_is_killed_with_all_of_it(tmp_path: Path) -> None:
    """After a signal within 3 s."""
    argv = build_argv(tmp_path, "import time; print('runs', flush=True); time.sleep(600)", notify="sh -c 'sleep 99; :'")
    with Tree(argv, cwd=tmp_path) as tree:
        tree.wait_for_line("runs")
        tree.send(signal.SIGTERM)
        done = tree.wait().check(143)
    assert "not ended" in done.stderr, done.explain()


def test_a_command_that_fails_changes_nothing(tmp_path: Path) -> None:
    done = run(tmp_path, "pass", notify="sh -c 'echo oh no >&2; exit 5'").check()
    assert "--notify: oh no\n[muster] --notify sh exited with code 5\n" in done.stderr, done.explain()
