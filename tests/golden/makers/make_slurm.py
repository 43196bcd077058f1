"""Makes VERSION/slurm: five jobs of the scheduler `slurm`, run for real by the cluster of `.ci/slurm start`.

env -i PATH="$PATH" SLURM_CONF="$SLURM_CONF" .venv/bin/python tests/golden/makers/make_slurm.py VERSION
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from snapshot import GOLDEN, Marks, save_tree

DATA = GOLDEN / sys.argv[1]
WORK = Path(tempfile.mkdtemp(prefix="golden-work-"))
STATE = Path(tempfile.mkdtemp(prefix="golden-state-"))
CONF, PROGRAMS = os.environ["SLURM_CONF"], os.environ["PATH"]
os.environ.clear()
os.environ |= {"PATH": PROGRAMS, "SLURM_CONF": CONF, "HOME": "/home/golden", "XDG_STATE_HOME": str(STATE)}

from torchx.specs import AppDef, Resource, Role  # noqa: E402
from torchx.specs.api import macros  # noqa: E402

from muster.schedulers.slurm import create_scheduler  # noqa: E402

FIELDS = "iTrNDeVS"
"""What `squeue` may be asked of a job: `%i`, `%T` and so on."""


def train(word: str) -> Role:
    """Two nodes of one worker."""
    args = ["-m", "muster.agent", "--nnodes", "2", "--nproc-per-node", "1", "--rank0-env", macros.rank0_env]
    args += ["--node-rank", macros.replica_id, "--rdzv-id", macros.app_id, "--start", "cold", "--max-restarts", "1"]
    fields = {"name": "trainer", "image": "", "entrypoint": "python3", "args": [*args, "train.py", word]}
    fields |= {"env": {"LR": "0.1", "HF_TOKEN": "fake-token-of-the-role"}, "max_retries": 2, "num_replicas": 2}
    return Role(**fields, resource=Resource(cpu=1, gpu=0, memMB=128))


def run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


def wait(holds) -> None:
    until_s = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.1)


def main() -> None:
    shutil.copy(GOLDEN / "train.py", WORK)
    os.chdir(WORK)
    scheduler = create_scheduler("torchx")

    def submit(name: str, word: str, **cfg: object) -> str:
        return scheduler.submit(AppDef(name, roles=[train(word)], metadata={"team": "vision"}), cfg)

    def is_in(app_id: str, *states: str) -> bool:
        return scheduler.describe(app_id).state.name in states

    def begins(app_id: str, word: str, times: int = 1) -> bool:
        return all("".join(scheduler.log_iter(app_id, "trainer", k)).count(f": {word}\n") == times for k in (0, 1))

    ended = [submit("succeeded", "done"), submit("failed", "raise"), submit("cancelled", "wait")]
    wait(lambda: begins(ended[2], "wait"))
    scheduler.cancel(ended[2])
    wait(lambda: all(is_in(each, "SUCCEEDED", "FAILED", "CANCELLED") for each in ended))
    again = submit("again", "wait")
    wait(lambda: begins(again, "wait"))
    run("scancel", "--signal=USR1", run("squeue", "-h", "--name", again, "-o", "%i"))
    waiting = submit("waiting", "done", sbatch="--begin=now+10hours")
    wait(lambda: begins(again, "wait", 2) and is_in(waiting, "PENDING"))
    wait(lambda: "attempt 0, 1 restart left; 2 of 2 nodes run" in scheduler.describe(again).msg)
    apps = [*ended, again, waiting]
    rows = {
        each: run("squeue", "-h", "-t", "all", "--name", each, "-o", "|".join(f"%{x}" for x in FIELDS)) for each in apps
    }

    marks = Marks(STATE=str(STATE), WORK=str(WORK), PYTHON=sys.executable, MUSTER=str(GOLDEN.parents[1]))
    marks.add(socket.gethostname(), "@HOST@")
    marks.add(Path("/proc/sys/kernel/random/boot_id").read_text().strip(), "@BOOT@")
    marks.add(PROGRAMS, "/usr/bin:/bin")
    marks.add(CONF, "/etc/slurm/slurm.conf")
    for app_id in apps:
        marks.add(app_id, f"{app_id.rpartition('-')[0]}-golden")
        private = STATE / "muster/logs/torchx" / app_id / ".muster/private.json"
        marks.add(json.loads(private.read_text())["token"], "fake-rendezvous-token-of-an-app")
    shutil.rmtree(DATA / "slurm", ignore_errors=True)
    save_tree(STATE, DATA / "slurm", marks, leave_out=("muster-agent.zip", "node.zip", "stacks.txt"))
    known = {marks.apply(each): dict(zip(FIELDS, row.split("|"), strict=True)) for each, row in rows.items()}
    (DATA / "slurm" / "squeue.json").write_text(json.dumps(known, indent=1) + "\n")
    for app_id in apps:
        scheduler.delete(app_id)
    shutil.rmtree(STATE)
    shutil.rmtree(WORK)


if __name__ == "__main__":
    main()
