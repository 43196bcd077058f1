"""Makes 19df633/local_cwd: five jobs of the schedulers `local_cwd` and `detached`, run for real.

env -i PATH="$PATH" .venv/bin/python tests/golden/makers/make_local.py
"""

import json
import os
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path

from snapshot import DATA, GOLDEN, Marks, save_tree

WORK = Path(tempfile.mkdtemp(prefix="golden-work-"))
STATE = Path(tempfile.mkdtemp(prefix="golden-state-"))
os.environ.clear()
os.environ |= {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/home/golden",
    "XDG_STATE_HOME": str(STATE),
    "WANDB_API_KEY": "fake-key-of-the-caller",
}

from torchx.specs import AppDef, Resource, RetryPolicy, Role  # noqa: E402
from torchx.specs.api import macros  # noqa: E402

from muster.schedulers.local import create_detached_scheduler, create_scheduler  # noqa: E402

TINY = Resource(cpu=1, gpu=0, memMB=128)


def train(word: str, **more: object) -> Role:
    """Two nodes of one worker."""
    args = ["-m", "muster.agent", "--nnodes", "2", "--nproc-per-node", "1", "--rank0-env", macros.rank0_env]
    args += ["--node-rank", macros.replica_id, "--rdzv-id", macros.app_id, "--start", "cold", "--max-restarts", "1"]
    env = {"LR": "0.1", "HF_TOKEN": "fake-token-of-the-role"}
    fields = {"name": "trainer", "image": "", "entrypoint": "python3", "args": [*args, "train.py", word], "env": env}
    return Role(**(fields | {"num_replicas": 2, "resource": TINY, "max_retries": 2} | more))


def shell(script: str, **more: object) -> Role:
    fields = {"name": "side", "image": "", "entrypoint": "sh", "args": ["-c", script], "resource": TINY}
    return Role(**(fields | more))


def wait(holds) -> None:
    until_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.05)


def main() -> None:
    shutil.copy(GOLDEN / "train.py", WORK)
    os.chdir(WORK)
    detached, owning = create_detached_scheduler("torchx"), create_scheduler("torchx")

    def submit(scheduler, name: str, *roles: Role) -> str:
        return scheduler.submit(AppDef(name, roles=list(roles), metadata={"team": "vision"}), {})

    def has_ended(app_id: str) -> bool:
        return detached.describe(app_id).state.name in ("SUCCEEDED", "FAILED", "CANCELLED")

    def lines(scheduler, app_id: str, role: str, k: int = 0) -> list[str]:
        return list(scheduler.log_iter(app_id, role, k))

    succeeded = submit(detached, "succeeded", train("done"))
    wait(lambda: has_ended(succeeded))
    failed = submit(detached, "failed", train("raise"))
    wait(lambda: has_ended(failed))
    cancelled = submit(detached, "cancelled", shell("echo working; echo careful >&2; sleep 1000", num_replicas=2))
    wait(lambda: all(len(lines(detached, cancelled, "side", k)) == 2 for k in (0, 1)))
    detached.cancel(cancelled)
    wait(lambda: has_ended(cancelled))
    side = shell("echo beside; test -e go || sleep 1000", max_retries=1, retry_policy=RetryPolicy.REPLICA)
    running = submit(detached, "running", train("wait"), side)
    owned = submit(owning, "owned", shell("echo up; sleep 1000"))
    wait(lambda: all(any("wait" in line for line in lines(detached, running, "trainer", k)) for k in (0, 1)))
    wait(lambda: lines(detached, running, "side") and lines(owning, owned, "side"))

    host, boot = socket.gethostname(), Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    marks = Marks(STATE=str(STATE), WORK=str(WORK), PYTHON=sys.executable, MUSTER=str(GOLDEN.parents[1]))
    for text, mark in ((host, "@HOST@"), (boot, "@BOOT@")):
        marks.add(text, mark)
    for app_id in (succeeded, failed, cancelled, running, owned):
        marks.add(app_id, f"{app_id.rpartition('-')[0]}-golden")
        private = STATE / "muster/logs/torchx" / app_id / "private.json"
        if private.exists():
            marks.add(json.loads(private.read_text())["token"], "fake-rendezvous-token-of-an-app")
    shutil.rmtree(DATA / "local_cwd", ignore_errors=True)
    save_tree(STATE, DATA / "local_cwd", marks, leave_out=("lost.notice", "stacks.txt"))
    detached.cancel(running)
    wait(lambda: has_ended(running))
    owning.close()
    shutil.rmtree(STATE)
    shutil.rmtree(WORK)


if __name__ == "__main__":
    main()
