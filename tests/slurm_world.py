"""A real Slurm on this machine, as .ci/slurm starts it, and jobs on it whose ranks count and save steps."""

import functools
import os
import subprocess
from pathlib import Path
from typing import ClassVar

import harness
from harness import LIMIT_S, PROGRAMS, ROOT
from torchx.specs import AppDef, Resource, Role, is_terminal
from torchx.specs.api import macros

from muster.schedulers.slurm import create_scheduler

SCRIPT = ROOT / ".ci" / "slurm"
PROGRAM = PROGRAMS / "slurm_steps.py"


class Cluster:
    """Four nodes, n1 to n4; `home` has their files."""

    def __init__(self, home):
        self.home = Path(home)
        self.env = {
            "PATH": f"{self.home}/bin:{os.environ['PATH']}",
            "SLURM_CONF": f"{self.home}/slurm.conf",
            "MUSTER_SLURM": str(self.home),
        }

    def run(self, *words, check=True):
        """Run a command of Slurm's; what it prints."""
        done = subprocess.run(words, env={**os.environ, **self.env}, capture_output=True, text=True, timeout=LIMIT_S)
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def script(self, *words, **env):
        """Run .ci/slurm for this cluster."""
        command, env = [SCRIPT, *words, self.home], {**os.environ, **env}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stdout + done.stderr

    @property
    def signals_only_tasks(self):
        """Whether its signals but SIGKILL reach the tasks only, as with Slurm's default, and not every process."""
        return "ProctrackType=proctrack/cgroup" in (self.home / "slurm.conf").read_text()

    def kill_node(self, number, silent_s=0):
        """End a slurmd, its step daemons and all processes of the node, at once.

        A machine that crashes closes no connection. `silent_s` is how long theirs stay open: those who wait for it
        have given it up by then.
        """
        self.script("node", str(number), "kill", SILENT_S=str(silent_s))

    def restart_controller(self, job_id):
        """Kill slurmctld and start it again.

        It writes its state at most every 5 s. One that has not written that a job runs holds the job after its restart,
        and drains its node ("launch failed requeued held", "Duplicate jobid"): so a change is written first.
        """
        state = self.home / "state" / "job_state"

        def read_time():
            return state.stat().st_mtime_ns if state.exists() else 0

        before = read_time()
        self.run("scontrol", "update", f"JobId={job_id}", "Comment=changed")
        wait_until(lambda: read_time() > before, "slurmctld has written its state")
        self.script("ctld")

    def find_job(self, name):
        """The id and the state of an app's newest job."""
        return self.run("squeue", "-h", "-t", "all", "--name", name, "-o", "%i %T").splitlines()[-1].split()


def find_shared():
    """The cluster that `.ci/slurm start` has started; None: there is none that answers."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    cluster = Cluster(os.environ.get("MUSTER_SLURM") or f"{cache}/muster/slurm")
    if not (cluster.home / "slurm.conf").exists():
        return None
    nodes = cluster.run("sinfo", "-h", "-N", "-t", "idle,alloc,mix", "-o", "%N", check=False).split()
    return cluster if len(set(nodes)) == 4 else None


wait_until = functools.partial(harness.wait_until, every_s=0.1)

PATIENT = "keep_alive_max_attempt=60"
"""An agent without CPU time for some seconds is no lost node, where the loss of one is not the subject."""


def build_app(folder, nodes=2, least=None, total=100000, delay_s=0.05, retries=0, conf=""):
    size = str(nodes) if least is None else f"{least}:{nodes}"
    args = ["-m", "muster.agent", "--nnodes", size, "--nproc-per-node", "1", "--start", "cold"]
    args += ["--rank0-env", macros.rank0_env, "--node-rank", macros.replica_id, "--rdzv-id", macros.app_id]
    args += ["--rdzv-conf", conf] if conf else []
    args += ["--shutdown-timeout", "2", str(PROGRAM), str(folder), str(total), str(delay_s)]
    role = Role("w", image="", entrypoint="python3", args=args, num_replicas=nodes, min_replicas=least)
    role.max_retries = retries
    role.resource = Resource(cpu=1, gpu=0, memMB=64)
    return AppDef("steps", roles=[role])


class Job:
    """One app. What a test that has failed leaves open, the fixture of its cluster closes."""

    open: ClassVar[list["Job"]] = []

    def __init__(self, cluster, folder, *, app=None, **cfg):
        self.cluster, self.folder = cluster, folder
        folder.mkdir(exist_ok=True)
        self.scheduler = create_scheduler("test")
        self.app_id = self.scheduler.submit(app or build_app(folder), cfg)
        self.open.append(self)

    def describe(self):
        return self.scheduler.describe(self.app_id)

    def read(self, index=0):
        return "".join(self.scheduler.log_iter(self.app_id, "w", index))

    def wait_line(self, text, index=0, times=1):
        wait_until(
            lambda: self.read(index).count(text) >= times, lambda: f"{text!r} ({times}x)\n{self.explain()}", 150.0
        )

    def wait_state(self, name, deadline_s=120.0):
        def find():
            found = self.describe()
            assert found.state.name == name or not is_terminal(found.state), f"{found}\n{self.read()}"
            return found if found.state.name == name else None

        return wait_until(find, lambda: f"{self.app_id} becomes {name}\n{self.explain()}", deadline_s)

    def wait_steps(self, more=20):
        """Wait until so many more steps were done."""
        steps = len(self.trace())
        wait_until(lambda: len(self.trace()) >= steps + more, lambda: f"{more} more steps\n{self.explain()}", 150.0)

    def explain(self):
        """What the cluster, the app and its first two nodes say."""
        seen = [self.cluster.run(*words, check=False) for words in (("squeue", "-t", "all"), ("sinfo", "-N"))]
        return "\n".join([*seen, str(self.describe()), self.read(0), self.read(1)])

    def find_nodes(self, replicas):
        """The nodes on which workers have begun, one for each beginning."""
        lines = [line for index in range(replicas) for line in self.read(index).splitlines() if "begins at" in line]
        return [line.split()[-1] for line in lines]

    def trace(self):
        """(step, run) of each step of rank 0, in the order in which they were done."""
        try:
            rows = (self.folder / "trace").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [(int(step), run) for step, run in (row.split() for row in rows if " " in row)]

    def find_job(self):
        return self.cluster.find_job(self.app_id)

    def close(self):
        self.open.remove(self)
        self.scheduler.delete(self.app_id)


def compute_weight(total):
    weight = 1.0
    for step in range(total):
        weight = weight * 0.999 + step
    return weight
