"""`muster timeline` and `muster events` of a job of this machine: while it runs, and after it was cancelled."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from harness import wait_until

from muster.components import dist
from muster.schedulers.local import create_detached_scheduler

PROGRAM = """
import os, time
from muster import worker
for i in range(1000000):
    time.sleep(0.05)
    worker.step(i, loss=1 / (i + 1))
    if i == 10 and os.environ["RANK"] == "3" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ValueError("bad batch")
"""


def test_a_job_is_told_while_it_runs_and_after_it_was_cancelled(tmp_path, state_home, muster) -> None:
    def ask(*words: str) -> str:
        code, told, _ = muster(*words)
        assert code == 0
        return told

    Path("train.py").write_text(PROGRAM)
    scheduler = create_detached_scheduler("torchx")
    app_id = scheduler.submit(dist.ddp(script="train.py", j="2x2", start="cold", max_retries=1), {})
    try:
        wait_until(lambda: _has_steps(tmp_path, 0), what="steps")
        wait_until(lambda: ask("events", app_id).count("  workers_started ") >= 4, what="a restart")
        wait_until(lambda: _has_steps(tmp_path, 1), what="steps again")
        facts = json.loads(ask("timeline", app_id, "-o", "page.html", "--json"))
        assert (facts["has_ended"], facts["failures"]) == (False, {"worker": 1})
        scheduler.cancel(app_id)
        wait_until(lambda: scheduler.describe(app_id).state.name == "CANCELLED", what="the end")
        facts = json.loads(ask("timeline", app_id, "-o", "page.html", "--json"))
        assert (facts["has_ended"], facts["succeeded"]) == (True, False)
        assert sum(facts["seconds"].values()) == pytest.approx(facts["duration_s"], abs=1.0)
        assert "Traceback" in Path("page.html").read_text()
        check_in_browser(tmp_path / "page.html")
    finally:
        scheduler.delete(app_id)
        scheduler.close()


def _has_steps(tmp_path: Path, attempt: int) -> bool:
    lines = "".join(path.read_text() for path in (tmp_path / "state").rglob("events.jsonl")).splitlines()
    return any('"steps_done"' in line and f'"attempt": {attempt}' in line for line in lines)


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
