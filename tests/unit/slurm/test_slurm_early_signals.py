"""A signal that Slurm sends before a node's program handles it: at once with a short time limit, or at a preemption."""

import io
import subprocess
import sys
import zipfile
from pathlib import Path

from muster.schedulers.slurm.request import build_payload

SIGNALLED_AT_ITS_IMPORT = """\
import os, signal
from types import SimpleNamespace
for signum in (signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM):
    os.kill(os.getpid(), signum)
def main(arguments):
    handled = []
    from muster.schedulers.slurm.real_node import NodeSupervisor
    NodeSupervisor.watch_signals(SimpleNamespace(_note_signal=lambda signum, frame: handled.append(int(signum))))
    print(*sorted(handled), flush=True)
"""


def test_a_signal_during_the_imports_ends_no_node_and_is_handled(tmp_path: Path) -> None:
    """The job ended with "srun: error: n1: task 0: User defined signal 1"."""
    with zipfile.ZipFile(io.BytesIO(build_payload({}))) as packed:
        packed.extractall(tmp_path)
    node = tmp_path / "muster" / "schedulers" / "slurm" / "node.py"
    node.rename(node.with_name("real_node.py"))
    node.write_text(SIGNALLED_AT_ITS_IMPORT)
    done = subprocess.run([sys.executable, "-I", tmp_path, "app"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1 10 15\n", "")
