"""`muster log`, `top`, `events` and `timeline` of one job of this machine: while it runs, and after its end."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness import wait_until

from muster.cli.history import sources
from muster.cli.history.clocks import place
from muster.cli.history.story import PHASES, tell
from muster.components import dist
from muster.schedulers.local import create_detached_scheduler

MUSTER = Path(sys.executable).with_name("muster")
PROGRAM = """
import os, time
from muster import worker
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print(f"rank {rank}, attempt {attempt}", flush=True)
at = 0
while not os.path.exists(f"go{attempt}"):
    worker.step(at, total=1_000_000, loss=0.5)
    at += 1
    time.sleep(0.05)
if attempt == 0:
    time.sleep(0.2 * (3 - rank))
    raise ValueError(f"rank {rank} has failed")
"""


@pytest.fixture
def app_id(tmp_path, state_home):
    Path("train.py").write_text(PROGRAM)
    scheduler = create_detached_scheduler("torchx")
    app_id = scheduler.submit(dist.ddp(script="train.py", j="2x2", start="cold", max_retries=1), {})
    yield app_id
    scheduler.delete(app_id)
    scheduler.close()
    assert not os.path.lexists(tmp_path / "state/muster/logs/torchx/latest"), "it goes with its job"


def follow(*words: str) -> "subprocess.Popen[str]":
    """Follow the job from another shell."""
    return subprocess.Popen([str(MUSTER), *words], stdout=subprocess.PIPE, text=True)


def test_what_commands_read_of_a_job_that_restarts(app_id, tmp_path, muster) -> None:
    pytest.importorskip("rich")

    def ask(*words: str) -> str:
        code, told, _ = muster(*words)
        assert code == 0
        return told

    logs = tmp_path / "state/muster/logs/torchx"
    assert os.readlink(logs / "latest") == app_id
    wait_until(lambda: ask("log").count(", attempt 0\n") == 4, what="all ranks")
    log, top = follow("log", "--rank", "3", "-f"), follow("top", app_id)
    assert log.stdout.readline() == "rank 3, attempt 0\n"
    assert top.stdout.readline()
    wait_until(lambda: "of 1000000" in muster("top", app_id, "--once")[1], what="a page with steps")
    code, page, _ = muster("top", "last", "--once")
    assert (code, f"detached://torchx/{app_id}  RUNNING" in page, "loss 0.5" in page) == (10, True, True), page
    assert "\x1b" not in page
    code, told, _ = muster("top", app_id, "--json")
    facts = json.loads(told)
    assert (code, facts["exit_code"], facts["state"]) == (10, 10, "RUNNING")
    assert facts["statuses"]["train"]["total"] == 1_000_000

    (tmp_path / "go0").touch()
    wait_until(lambda: ask("events", app_id).count("  workers_started ") >= 4, what="a restart")
    wait_until(lambda: has_steps(logs, 1), what="steps again")
    facts = json.loads(ask("timeline", app_id, "-o", "page.html", "--json"))
    assert (facts["has_ended"], facts["failures"]) == (False, {"worker": 1})

    (tmp_path / "go1").touch()
    rest, _ = log.communicate(timeout=120)
    assert "ValueError: rank 3 has failed\n" in rest
    assert rest.endswith("rank 3, attempt 1\n"), "it goes on in the next attempt, to the end of the job"
    assert "SUCCEEDED" in top.communicate(timeout=120)[0].splitlines()[-1]
    assert (log.returncode, top.returncode, muster("top", app_id, "--json")[0]) == (0, 0, 0)

    assert ask("log", "last", "--rank", "1") == "rank 1, attempt 1\n"
    told = ask("log", app_id)
    assert told.index("rank 3 has failed") < told.index("rank 0, attempt 1"), "by time, not node after node"
    assert ask("log", app_id, "--attempt", "0", "--stream", "stdout") == "".join(
        f"[r{rank}]:rank {rank}, attempt 0\n" for rank in range(4)
    )
    assert "ValueError: rank 3 has failed" in ask("log", app_id, "--failed", "--grep", "Error")
    assert ask("log", app_id, "--node", "1", "--grep", "rank 2, attempt 1").endswith("rank 2, attempt 1\n")

    facts = json.loads(ask("timeline", app_id, "-o", "page.html", "--json"))
    assert (facts["has_ended"], facts["succeeded"]) == (True, True)
    assert sum(facts["seconds"].values()) == pytest.approx(facts["duration_s"], abs=1.0)
    assert "Traceback" in Path("page.html").read_text()
    check_story(app_id)
    check_in_browser(tmp_path / "page.html")


def has_steps(logs: Path, attempt: int) -> bool:
    lines = "".join(path.read_text() for path in logs.rglob("events.jsonl")).splitlines()
    return any('"steps_done"' in line and f'"attempt": {attempt}' in line for line in lines)


def check_story(app_id: str) -> None:
    """Both agents run on this machine, whose clock is one: what heartbeats say must be within what they promise."""
    records = sources.load(app_id)
    placed = place(records.events)
    compared = [each.event for each in placed if each.event.what == "clock_compared"]
    assert {each.node_index for each in compared} == {0, 1}
    assert all(abs(each.detail["ahead_s"]) <= each.detail["uncertainty_s"] + 0.001 for each in compared)
    story = tell(records, placed)
    (recovery,) = story.recoveries
    assert "has failed" in recovery.cause
    assert len(story.nodes) == 2
    for node in story.nodes:
        assert {"training", "stop", "first step"} <= {PHASES[bar.phase] for bar in node.bars}
        assert all(one.end_s <= other.start_s + 1e-6 for one, other in zip(node.bars, node.bars[1:], strict=False))


def check_in_browser(page: Path) -> None:
    """The script of the page runs under the page's own policy, where a browser is."""
    browser = shutil.which("chromium")
    if browser is None:
        return
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={page.parent / 'browser'}"]
    done = subprocess.run(
        [browser, *flags, "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "HOME": str(page.parent)},
    )
    assert 'class="parts"' in done.stdout, done.stderr
    assert "Content Security Policy" not in done.stderr
