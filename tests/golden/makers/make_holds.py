"""Makes VERSION/holds: holds of this machine and of two hosts, runs on them, and the default hold, all run for real.

env -i PATH="$PATH" PYTHONPATH=tests .venv/bin/python tests/golden/makers/make_holds.py VERSION
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
from sshd_world import SshWorld

DATA = GOLDEN / sys.argv[1]
BIN = Path(sys.executable).parent
WORK = Path(tempfile.mkdtemp(prefix="golden-work-"))
STATE = Path(tempfile.mkdtemp(prefix="golden-state-"))
ENV = {
    "PATH": f"{BIN}:/usr/local/bin:/usr/bin:/bin",
    "HOME": "/home/golden",
    "XDG_STATE_HOME": str(STATE),
    "XDG_RUNTIME_DIR": str(STATE / "run"),
    "WANDB_API_KEY": "fake-key-of-the-caller",
}


def call(*words: str, may_fail: bool = False) -> str:
    done = subprocess.run([BIN / "muster", *words], cwd=WORK / "code", env=ENV, capture_output=True, text=True)
    assert may_fail or done.returncode == 0, done
    return done.stdout.strip()


def wait(holds) -> None:
    until_s = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.1)


def hold(*words: str) -> str:
    return str(json.loads(call("hold", "--json", *words, "dist.ddp", "-j", "2x1"))["handle"])


def run(word: str, app: str, *options: str, may_fail: bool = False) -> str:
    """The app's id."""
    words = ("run", "-s", "held", "-cfg", ",".join([f"app={app}", *options]), "dist.ddp", "-j", "2x1")
    printed = call(*words, "--script", "train.py", "--", word, may_fail=may_fail)
    return printed.rpartition("/")[2]


def find_id(handle: str) -> str:
    return handle.rpartition("/")[2]


def read_private(app_id: str) -> str:
    """The token of an app; "": it is not kept any more."""
    path = STATE / "muster/logs/torchx" / app_id / ".muster/private.json"
    return json.loads(path.read_text())["token"] if path.exists() else ""


def main() -> None:
    (WORK / "code").mkdir()
    (WORK / "runs").mkdir()
    (STATE / "run").mkdir(mode=0o700)
    shutil.copy(GOLDEN / "train.py", WORK / "code")
    os.utime(WORK / "code/train.py", (1.7e9, 1.7e9))
    world = SshWorld(WORK / "hosts", hosts=2)
    busy = hold()
    apps = {"succeeded": run("done", busy), "failed": run("raise", busy, may_fail=True)}
    idle = hold("--idle-minutes", "90")
    released = hold()
    call("release", released)
    options = f"hosts=a,b,ssh={world.ssh},python={sys.executable},folder={WORK}/runs"
    there = hold("-s", "ssh", "-cfg", options)
    apps["carried"] = run("done", there)
    apps["running"] = run("wait", busy, "detach=true")
    wait(lambda: call("log", f"held://{apps['running']}").count(": wait") == 2)
    call("hold", "--default")
    call("run", "-s", "local_cwd", "dist.ddp", "-j", "1x1", "--script", "train.py", "--", "done")
    everyday = find_id(call("list", "-n", "1").splitlines()[0].split()[0])

    def is_ready() -> bool:
        found = [json.loads(path.read_text()) for path in STATE.glob("run/muster/hold-*/hold.json")]
        return bool(found) and found[0]["state"] == "ready" and found[0]["idle_since_s"] is not None

    wait(is_ready)
    call("delete", everyday)
    apps |= {"busy": find_id(busy), "idle": find_id(idle), "released": find_id(released), "there": find_id(there)}
    marks = Marks(STATE=str(STATE), WORK=str(WORK), PYTHON=sys.executable, MUSTER=str(GOLDEN.parents[1]))
    marks.add(socket.gethostname(), "@HOST@")
    marks.add(Path("/proc/sys/kernel/random/boot_id").read_text().strip(), "@BOOT@")
    for name, app_id in apps.items():
        marks.add(app_id, f"{name}-golden")
        if token := read_private(app_id):
            marks.add(token, "fake-rendezvous-token-of-an-app")
    shutil.rmtree(DATA / "holds", ignore_errors=True)
    packed = [path.name for path in STATE.rglob("*.tar*")]
    left_out = ("muster-agent.zip", "node.zip", "lost.notice", "stacks.txt", *packed)
    shutil.rmtree(STATE / "muster/ssh-bundles", ignore_errors=True)
    save_tree(STATE, DATA / "holds", marks, leave_out=left_out)
    call("hold", "--default", "off")
    for handle in (busy, idle, there):
        call("release", "--now", handle)
    world.close()
    shutil.rmtree(STATE)
    shutil.rmtree(WORK)


if __name__ == "__main__":
    main()
