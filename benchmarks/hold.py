"""Whole runs on a hold beside the same on local_cwd: `dist.ddp -j 2x4`, one gloo all-reduce over eight workers.

    python benchmarks/hold.py [--count N]
    python benchmarks/hold.py --functions [--count N]
    python benchmarks/hold.py --scheduler local_docker --words "--image muster-test:torch" --cfg keep=none [--nodes 2x2]
    python benchmarks/hold.py --scheduler ssh
    python benchmarks/hold.py --scheduler slurm --words "--cpu 1 --memMB 64"
    python benchmarks/hold.py --scheduler kubernetes --words "--image img"

The second line: `elastic_launch` of functions, spawn, two workers, with `held=` beside torch's. The others: on a hold
of another adapter, beside the same job on that adapter. The hosts behind ssh are servers of this machine, and the
cluster of Kubernetes is the model of the tests, whose pods are processes of this machine. Docker's engine and Slurm
must run.

From the start of the command line's process to its end, `torchx run` and `muster run` each; and of that what is after
the last worker's last script line. A run begins when an agent waits again on both nodes, as it does for whoever edits
between runs.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import _launching
from _sampling import SampleFailed, Samples, build_parser, sample_in_turn, show
from elastic_launch import CALLER, launch
from torchx_run import LIMIT_S, WORKERS, clean_env

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from doubles import kubernetes_api
from doubles.kubernetes_kubelet import run_kubelet
from sshd_world import SshWorld

BIN = Path(sys.executable).parent
LAST_LIMIT = 0.15 / 2
"""0.15 s of a run of 2 s."""
SCRIPT = """\
import json, os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
print("all-reduce done", flush=True)
dist.destroy_process_group()
if "MARKS" in os.environ:
    fd = os.open(os.environ["MARKS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, (json.dumps({"t": time.monotonic(), "rank": os.environ["RANK"]}) + "\\n").encode())
"""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a whole process took."""

    whole_s: float
    last_s: float
    """From the last worker's last script line on."""


def measure(folder: Path, command: str, scheduler: str) -> Run:
    """Run one whole process; every worker must have finished the all-reduce."""
    if scheduler != "local_cwd":
        _launching.wait_for(lambda: all(state == "ready" for state in read_states(folder)), LIMIT_S)
    marks = folder / "marks"
    marks.unlink(missing_ok=True)
    argv = [str(BIN / command), "run", "-s", scheduler, "dist.ddp", "-j", "2x4", "--script", "main.py"]
    began_s = time.monotonic()
    process = subprocess.Popen(
        argv, cwd=folder, env=make_env(folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        code = process.wait(LIMIT_S)
        ended_s = time.monotonic()
    except subprocess.TimeoutExpired:
        raise SampleFailed from None
    finally:
        _launching.stop(process)
    found = _launching.read_marks(marks)
    if code != 0 or len({mark["rank"] for mark in found}) != WORKERS:
        raise SampleFailed
    return Run(whole_s=ended_s - began_s, last_s=ended_s - max(mark["t"] for mark in found))


def read_states(folder: Path) -> list[str]:
    """Read what the holders of both nodes report."""
    return [
        str(json.loads(path.read_text())["state"]) for path in folder.glob("state/muster/logs/*/*/*/hold-*/hold.json")
    ]


def make_env(folder: Path) -> dict[str, str]:
    """Return the environment of all commands."""
    return {**clean_env(BIN), "MARKS": str(folder / "marks"), "XDG_STATE_HOME": str(folder / "state")}


def show_runs(what: str, sampled: Mapping[str, Samples[Run]], *, limit: float) -> None:
    """Show whole runs, and their ends beside a whole run of the second launcher."""
    whole = {name: samples.of(lambda run: run.whole_s) for name, samples in sampled.items()}
    show(f"{what}, whole", whole, limit=limit)
    first, second = sampled
    ends = {name: sampled[name].of(lambda run: run.last_s) for name in (first, second)}
    show(
        f"{what}, last script line to prompt, beside a whole run of {second}",
        {first: ends[first], "run": whole[second]},
        limit=LAST_LIMIT,
    )
    show(f"{what}, last script line to prompt", ends)


def measure_functions(folder: Path, api: str) -> float:
    """Launch functions from a program once, until the results are back."""
    if api == "held":
        _launching.wait_for(lambda: all(state == "ready" for state in read_states(folder)), LIMIT_S)
    return launch(api, folder / "caller.py", make_env(folder))["wall_s"]


def compare_functions(folder: Path, count: int) -> None:
    """Compare functions on a hold with torch's launcher."""
    (folder / "caller.py").write_text(CALLER)
    with hold(folder, "1x2"):
        samplers = {api: partial(measure_functions, folder, api) for api in ("held", "torch", "muster")}
        show("elastic_launch of functions, spawn, 2 workers", sample_in_turn(count, samplers), limit=0.35)


@contextmanager
def hold(folder: Path, size: str) -> Iterator[None]:
    """Hold this machine."""
    subprocess.run([BIN / "muster", "hold", "dist.ddp", "-j", size], cwd=folder, env=make_env(folder), check=True)
    try:
        yield
    finally:
        subprocess.run([BIN / "muster", "release", "--now"], cwd=folder, env=make_env(folder), check=False)


def measure_elsewhere(folder: Path, scheduler: str, words: list[str], ranks: int) -> float:
    """Run one whole process of `muster run` on another adapter; every worker must have finished the all-reduce."""
    if scheduler == "held":
        _launching.wait_for(lambda: "held: idle" in call(folder, "status", read_handle(folder)).stdout, LIMIT_S)
    began_s = time.monotonic()
    done = call(folder, "run", "--log", "-s", scheduler, *words, "--script", "main.py")
    took_s = time.monotonic() - began_s
    if done.returncode != 0 or done.stderr.count("all-reduce done") != ranks:
        sys.stderr.write(done.stderr)
        raise SampleFailed
    return took_s


def call(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run a command of muster's."""
    env = {**make_env(folder), "NO_COLOR": "1"}
    command = [BIN / "muster", *words]
    work = folder / "work"  # it travels
    return subprocess.run(command, cwd=work, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def read_handle(folder: Path) -> str:
    """Read the hold's handle."""
    return (folder / "handle").read_text().replace("torchx/", "")


@contextmanager
def nodes_of(scheduler: str, folder: Path) -> Iterator[str]:
    """Start what stands for nodes elsewhere, if the tests have something; the scheduler's options for it."""
    if scheduler == "ssh":
        (folder / "runs").mkdir()
        with closing(SshWorld(folder / "hosts", hosts=2)) as world:
            yield f"hosts=a,b,ssh={world.ssh},python={sys.executable},folder={folder}/runs"
    elif scheduler == "kubernetes":
        with kubernetes_api.serve() as cluster, run_kubelet(cluster, folder / "pods"):
            kubernetes_api.write_kubeconfig(folder / "kubeconfig", cluster)
            os.environ["KUBECONFIG"] = str(folder / "kubeconfig")
            yield "namespace=team"
    else:
        yield ""


def compare_elsewhere(folder: Path, options: argparse.Namespace, cfg: str) -> None:
    """Compare runs on a hold of another adapter with jobs of that adapter."""
    nodes, _, processes = options.nodes.partition("x")
    job = ["dist.ddp", "-j", options.nodes, *shlex.split(options.words)]
    (folder / "work").mkdir()
    (folder / "main.py").rename(folder / "work/main.py")
    given = ",".join(filter(None, (cfg, options.cfg)))
    cold = [*(["-cfg", given] if given else []), *job]
    held = call(folder, "hold", "--json", "-s", options.scheduler, *cold)
    if held.returncode != 0:
        sys.exit(held.stdout + held.stderr)
    (folder / "handle").write_text(json.loads(held.stdout)["handle"])
    ranks = int(nodes) * int(processes)
    try:
        samplers = {
            "held": partial(measure_elsewhere, folder, "held", job, ranks),
            options.scheduler: partial(measure_elsewhere, folder, options.scheduler, cold, ranks),
        }
        show(f"muster run dist.ddp -j {options.nodes}, whole", sample_in_turn(options.count, samplers), limit=0.45)
    finally:
        call(folder, "release", "--now")


def prepare(folder: Path) -> None:
    """Write the script, and make the folders of the commands."""
    (folder / "main.py").write_text(SCRIPT)
    (folder / "state").mkdir()


def main() -> None:
    parser = build_parser(__doc__)
    parser.add_argument("--functions", action="store_true", help="functions beside torch's launcher")
    parser.add_argument("--scheduler", default="local_cwd", help="where the nodes are")
    parser.add_argument("--words", default="", help="more arguments of dist.ddp")
    parser.add_argument("--cfg", default="", help="options of the scheduler")
    parser.add_argument("--nodes", default="2x2", help="NODESxPROCESSES, for other schedulers than local_cwd")
    options = parser.parse_args()
    with _launching.scratch() as folder:
        prepare(folder)
        if options.scheduler != "local_cwd":
            with nodes_of(options.scheduler, folder) as cfg:
                compare_elsewhere(folder, options, cfg)
            return
        if options.functions:
            compare_functions(folder, options.count)
            return
        with hold(folder, "2x4"):
            for command, scheduler, limit in (("torchx", "local_held", 0.45), ("muster", "held", 0.2)):
                samplers = {
                    "held": partial(measure, folder, command, scheduler),
                    "local_cwd": partial(measure, folder, command, "local_cwd"),
                }
                show_runs(f"{command} run dist.ddp -j 2x4", sample_in_turn(options.count, samplers), limit=limit)


if __name__ == "__main__":
    main()
