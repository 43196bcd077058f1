"""Timers of torch's file client."""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from muster.elastic.jobs.file_timers import FileTimers


@pytest.mark.parametrize(("is_released", "code"), [(True, 0), (False, -signal.SIGKILL)])
def test_a_timer_that_was_released_in_time_does_not_expire(tmp_path: Path, is_released: bool, code: int) -> None:
    """The process that reads the FIFO got no CPU when the release came, and looked at what was due first."""
    timers = FileTimers(str(tmp_path / "fifo"))
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as worker:
        message = {"pid": worker.pid, "scope_id": "step", "signal": int(signal.SIGKILL)}

        def write(due_s: float) -> None:
            with open(timers.path, "w") as file:
                file.write(json.dumps({**message, "expiration_time": due_s}) + "\n")

        write(time.time() - 1)
        timers.receive()
        if is_released:
            write(-1)
        timers.expire()
        worker.communicate()
        assert worker.returncode == code
    timers.close()
