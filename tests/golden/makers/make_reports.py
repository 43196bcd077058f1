"""Makes 19df633/reports: what real agents leave when their job ends well, heals, fails, hangs, or runs out of memory.

    env -i PATH="$PATH" .venv/bin/python tests/golden/makers/make_reports.py    # as root: `oom` needs a memory cgroup

Of each job: `events.jsonl` of all its nodes, `report.json`, node 0's `error.json` and its last words for Kubernetes,
`message`.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from snapshot import DATA, GOLDEN, Marks

LIMIT_BYTES = 96 << 20
KEPT = ("events.jsonl", "report.json", "error.json", "message")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Job:
    """The agents of one job, as processes in one folder."""

    def __init__(self, name: str, word: str, *flags: str, nodes: str = "2", started: int = 2, workers: int = 1) -> None:
        self.name = name
        self.folder = Path(tempfile.mkdtemp(prefix=f"golden-{name}-"))
        shutil.copy(GOLDEN / "train.py", self.folder)
        words = ["--nnodes", nodes, "--nproc-per-node", str(workers), "--rdzv-backend", "c10d", "--start", "cold"]
        words += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", name, "--tee", "3"]
        words += ["--log-dir", str(self.folder / "logs"), *flags]
        self.commands = [
            [sys.executable, "-m", "muster.agent", *words, "--node-rank", str(index), "train.py", word]
            for index in range(started)
        ]
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, before: str = "") -> "Job":
        """`before`: a shell command that each agent's process carries out first."""
        for index, command in enumerate(self.commands):
            own = self.folder / f"node{index}"
            own.mkdir()
            names = {"MUSTER_TERMINATION_LOG": "message", "TORCHELASTIC_ERROR_FILE": "error.json"}
            env = {**os.environ, **{key: str(own / name) for key, name in names.items()}}
            shell = ["sh", "-c", f'{before} exec "$@"', "sh", *command]
            with (own / "console").open("wb") as console:
                process = subprocess.Popen(shell, cwd=self.folder, env=env, stdout=console, stderr=console)
            self.processes.append(process)
        return self

    def wait_for(self, text: str, count: int) -> None:
        until_s = time.monotonic() + 60
        consoles = [self.folder / f"node{index}" / "console" for index in range(len(self.commands))]
        while sum(console.read_text().count(text) for console in consoles) < count:
            assert time.monotonic() < until_s, (self.name, text)
            time.sleep(0.02)

    def end(self, *codes: int) -> None:
        """Wait for all agents, then keep what they left."""
        found = [process.wait(timeout=120) for process in self.processes]
        assert found == list(codes), (self.name, found, (self.folder / "node0/console").read_text())
        marks = Marks(WORK=str(self.folder), PYTHON=sys.executable, MUSTER=str(GOLDEN.parents[1]))
        marks.add(socket.gethostname(), "@HOST@")
        target = DATA / "reports" / self.name
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for name in KEPT:
            folder = self.folder / ("logs/" + self.name if name in ("events.jsonl", "report.json") else "node0")
            if (folder / name).exists():
                (target / name).write_text(marks.apply((folder / name).read_text()))
        shutil.rmtree(self.folder)


def main() -> None:
    Job("succeeded", "done").start().end(0, 0)
    Job("restarted", "crash-once", "--max-restarts", "1", nodes="1", started=1, workers=2).start().end(0)
    Job("warm", "done", "--start", "warm", "--preload", "json", nodes="1", started=1, workers=2).start().end(0)
    Job("failed", "raise", "--max-restarts", "1").start().end(1, 1)
    Job("hung", "sit", "--hang-timeout", "1").start().end(1, 1)

    lost = Job("node-lost", "wait", "--rdzv-conf", "last_call_timeout=0.3", nodes="1:2").start()
    lost.wait_for("attempt 0: wait", 2)
    guard = lost.processes[1].pid
    (agent,) = Path(f"/proc/{guard}/task/{guard}/children").read_text().split()
    os.kill(int(agent), signal.SIGKILL)
    lost.wait_for("rank 0 of 1", 1)
    (lost.folder / "go").touch()
    lost.end(0, 128 + signal.SIGKILL)

    gone = Job("node-gone", "wait", "--rdzv-conf", "join_timeout=2").start()
    gone.wait_for("attempt 0: wait", 2)
    gone.processes[1].kill()  # the guard: its agent says goodbye
    gone.end(69, -signal.SIGKILL)

    preempted = Job("preempted", "wait", nodes="1", started=1).start()
    preempted.wait_for("attempt 0: wait", 1)
    preempted.processes[0].terminate()
    preempted.end(143)

    version2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    cgroup = Path("/sys/fs/cgroup" if version2 else "/sys/fs/cgroup/memory", f"golden-{os.getpid()}")
    cgroup.mkdir()
    (cgroup / ("memory.max" if version2 else "memory.limit_in_bytes")).write_text(str(LIMIT_BYTES))
    oom = Job("oom", "eat", nodes="1", started=1, workers=2)
    oom.start(before=f"echo $$ > {cgroup}/cgroup.procs;").end(1)
    cgroup.rmdir()


if __name__ == "__main__":
    main()
