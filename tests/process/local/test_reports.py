"""What a cancelled job of local_cwd says; and stopping a job for a while."""

import threading
from pathlib import Path

import pytest
from harness import wait_until

from muster.components import dist
from muster.schedulers.supervision.app_folder import AppFolder
from muster.schedulers.supervision.registry import AppRegistry, find_state_dir

TICKS = """
import os, sys, time
for step in range(6000):
    print("step", step, flush=True)
    if os.path.exists(sys.argv[1]):
        break
    time.sleep(0.05)
"""

pytestmark = pytest.mark.usefixtures("state_home")


def find_folder(app_id: str) -> AppFolder:
    import os

    return AppRegistry(find_state_dir(os.environ), "local_cwd").open(app_id)


def read_stderr(folder: AppFolder, nodes: int) -> str:
    logs = [folder.role_dir("train") / str(index) / "stderr.log" for index in range(nodes)]
    return "".join(log.read_text() for log in logs)


def test_a_cancelled_job_says_so_once(scheduler, tmp_path) -> None:
    (tmp_path / "train.py").write_text(TICKS)
    app_id = scheduler.submit(dist.ddp(str(tmp_path / "done"), script="train.py", j="3x1", start="cold"), {})
    folder = find_folder(app_id)
    logs = [folder.role_dir("train") / str(index) / "stdout.log" for index in range(3)]
    wait_for_text(logs, "step 1\n")
    scheduler.cancel(app_id)
    wait_until(lambda: scheduler.describe(app_id).state.name == "CANCELLED", what="the end")
    lines = [line for line in read_stderr(folder, 3).splitlines() if line.startswith("[muster]")]
    senders = "`torchx cancel`, the end of `torchx run`, or `kill`"
    assert f"(usually sent by {senders})" in lines[0]
    assert len(lines) == 2, lines
    assert lines[1].startswith("[muster] stopped after ")


def wait_for_text(logs: list[Path], text: str) -> None:
    is_there = lambda: all(log.exists() and text in log.read_text() for log in logs)  # noqa: E731
    wait_until(is_there, what="all nodes run")


@pytest.mark.soak
@pytest.mark.parametrize("still_s", [0, pytest.param(7, marks=pytest.mark.long)])
def test_a_suspended_job_stands_still_on_all_nodes(scheduler, tmp_path, still_s) -> None:
    """Also for longer than the lease of its two nodes and their hang timeout; then it goes on where it was."""
    (tmp_path / "train.py").write_text(TICKS)
    done = tmp_path / "done"
    app = dist.ddp(str(done), script="train.py", j="2x1", start="cold", hang_timeout=6)
    app_id = scheduler.submit(app, {})
    folder = find_folder(app_id)
    logs = [folder.role_dir("train") / str(index) / "stdout.log" for index in (0, 1)]
    wait_for_text(logs, "step 5\n")
    assert folder.send_request("suspend")
    sizes: list[int] = []

    def stand_still() -> bool:
        last, sizes[:] = sizes[:], [log.stat().st_size for log in logs]
        threading.Event().wait(0.5)
        return last == sizes

    wait_until(stand_still, what="no node writes")
    shown = [log.read_text() for log in logs]
    threading.Event().wait(still_s)
    assert [log.read_text() for log in logs] == shown
    assert folder.send_request("continue")
    wait_until(lambda: all(log.stat().st_size > len(text) for log, text in zip(logs, shown, strict=True)), what="steps")
    done.touch()
    wait_until(lambda: scheduler.describe(app_id).state.name == "SUCCEEDED", what="the end")
    assert scheduler.describe(app_id).num_restarts == 0
    for log in logs:
        assert log.read_text().count("step 0\n") == 1, f"workers started again: {read_stderr(folder, 2)}"
