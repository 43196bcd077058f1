"""What a supervisor loads of a driver, and what `torchx list` loads."""

import os
import subprocess
import sys
from pathlib import Path


def test_a_driver_loads_no_torchx():
    """A supervisor starts while the submission waits for it."""
    program = (
        "import sys; from muster.schedulers.adapter import EventQueue, Launch, ProcessDriver, ReplicaEnded\n"
        "print([name for name in sys.modules if name.partition('.')[0] in ('torchx', 'yaml', 'docker', 'kubernetes')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_list_without_apps_does_not_load_what_describes_one(tmp_path: Path) -> None:
    """`torchx list` is asked often; muster's part of its time is that of its imports."""
    program = (
        "import sys; from torchx.cli.main import main; main(['list', '-s', 'local_cwd'])\n"
        "print(*[name for name in sys.modules if name.startswith('muster.')])"
    )
    env = {**os.environ, "HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    loaded = done.stdout.splitlines()[-1].split()
    assert "muster.schedulers.local.scheduler" in loaded
    describing = ("status", "job_line", "failure_report", "asking", "file_logs", "codec", "driver")
    assert [name for name in loaded if name.endswith(describing)] == []
