"""Makes VERSION/ssh: four jobs of the scheduler `ssh`, run for real on hosts of the tests.

env -i PATH="$PATH" PYTHONPATH=tests .venv/bin/python tests/golden/makers/make_ssh.py VERSION
"""

import json
import os
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path

from snapshot import GOLDEN, Marks, save_tree

DATA = GOLDEN / sys.argv[1]
WORK = Path(tempfile.mkdtemp(prefix="golden-work-"))
STATE = Path(tempfile.mkdtemp(prefix="golden-state-"))
os.environ.clear()
os.environ |= {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/home/golden", "XDG_STATE_HOME": str(STATE)}

from sshd_world import SshWorld  # noqa: E402
from torchx.specs import AppDef, Resource, Role  # noqa: E402
from torchx.specs.api import macros  # noqa: E402

from muster.schedulers.ssh import create_scheduler  # noqa: E402


def train(word: str) -> Role:
    """Two nodes of one worker."""
    args = ["-m", "muster.agent", "--nnodes", "2", "--nproc-per-node", "1", "--rank0-env", macros.rank0_env]
    args += ["--node-rank", macros.replica_id, "--rdzv-id", macros.app_id, "--start", "cold", "--max-restarts", "1"]
    fields = {"name": "trainer", "image": "", "entrypoint": "python3", "args": [*args, "train.py", word]}
    fields |= {"env": {"LR": "0.1", "HF_TOKEN": "fake-token-of-the-role"}, "max_retries": 2, "num_replicas": 2}
    return Role(**fields, resource=Resource(cpu=1, gpu=0, memMB=128))


def wait(holds) -> None:
    until_s = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.1)


def main() -> None:
    code = WORK / "code"
    code.mkdir()
    shutil.copy(GOLDEN / "train.py", code)
    os.chdir(code)
    world, scheduler = SshWorld(WORK / "hosts", hosts=3), create_scheduler("torchx")
    cfg = {"hosts": world.names, "spares": 1, "ssh": world.ssh, "python": sys.executable, "folder": str(WORK)}

    def submit(name: str, word: str) -> str:
        app = AppDef(name, roles=[train(word)], metadata={"team": "vision"})
        return scheduler.submit(app, cfg, workspace=f"file://{code}")

    def has_ended(app_id: str) -> bool:
        return scheduler.describe(app_id).state.name in ("SUCCEEDED", "FAILED", "CANCELLED")

    def begins(app_id: str) -> bool:
        return all("wait" in "".join(scheduler.log_iter(app_id, "trainer", k)) for k in (0, 1))

    ended = [submit("succeeded", "done"), submit("failed", "raise"), submit("cancelled", "wait")]
    wait(lambda: begins(ended[2]))
    scheduler.cancel(ended[2])
    wait(lambda: all(map(has_ended, ended)))
    running = submit("running", "wait")
    wait(lambda: begins(running) and "attempt 0, 1 restart left; 2 of 2 nodes run" in scheduler.describe(running).msg)

    apps = [*ended, running]
    marks = Marks(STATE=str(STATE), WORK=str(WORK), PYTHON=sys.executable, MUSTER=str(GOLDEN.parents[1]))
    marks.add(socket.gethostname(), "@HOST@")
    marks.add(Path("/proc/sys/kernel/random/boot_id").read_text().strip(), "@BOOT@")
    for app_id in apps:
        marks.add(app_id, f"{app_id.rpartition('-')[0]}-golden")
        private = STATE / "muster/logs/torchx" / app_id / ".muster/private.json"
        if private.exists():
            marks.add(json.loads(private.read_text())["token"], "fake-rendezvous-token-of-an-app")
    shutil.rmtree(STATE / "muster/ssh-bundles", ignore_errors=True)
    shutil.rmtree(DATA / "ssh", ignore_errors=True)
    workspaces = [path.name for path in STATE.rglob("workspace-*.tar")]
    save_tree(STATE, DATA / "ssh", marks, leave_out=("muster-agent.zip", "lost.notice", "stacks.txt", *workspaces))
    for app_id in apps:
        scheduler.delete(app_id)
    world.close()
    shutil.rmtree(STATE)
    shutil.rmtree(WORK)


if __name__ == "__main__":
    main()
