"""What tests of holds run, and how they look at processes."""

import contextlib
from pathlib import Path

FACTS = """
import json, os, resource, signal, sys, threading, time
import torch
def count_threads():
    value = torch.ones(400, 400)
    torch.mm(value, value)
    return [torch.get_num_threads(), *torch.__config__.parallel_info().splitlines()]
def count_in_another_thread():
    found = []
    thread = threading.Thread(target=lambda: found.extend(count_threads()))
    thread.start()
    thread.join()
    while os.path.exists(f"/proc/self/task/{thread.native_id}"):
        time.sleep(0.001)  # at its end, free() opens /proc/sys/vm/overcommit_memory
    return found
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
facts = {
    "environ": {k: v for k, v in os.environ.items() if not k.startswith(VARYING)},
    "cwd": os.getcwd(), "argv": sys.argv, "path": sys.path, "flags": str(sys.flags), "orig_argv": sys.orig_argv[1:],
    "limits": {n: resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith("RLIMIT_")},
    "signals": {int(s): str(signal.getsignal(s)) for s in signal.valid_signals()},
    "status": {k: status[k].strip() for k in ("Umask", "SigBlk", "SigIgn", "CapEff", "Groups", "NoNewPrivs")},
    "nice": os.nice(0), "cpus": sorted(os.sched_getaffinity(0)), "oom": open("/proc/self/oom_score_adj").read(),
    "threads": threading.active_count(), "torch_threads": count_threads(), "others": count_in_another_thread(),
    "zone": [time.tzname, time.timezone, time.localtime(0)[:5]], "cuda": torch.cuda._parse_visible_devices(),
    "fds": sorted(n for n in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd/" + n)),
    "stdin": os.readlink("/proc/self/fd/0"), "cgroup": open("/proc/self/cgroup").read(),
    "shm": sorted(n for n in os.listdir("/dev/shm") if "muster" in n and not n.startswith("muster-bench-")),
    "modules": sorted(n for n in sys.modules if n.partition(".")[0] == "muster"),
}
open(sys.argv[1] + os.environ["RANK"], "w").write(json.dumps(facts, sort_keys=True, indent=1))
"""
VARYING = ("TORCHELASTIC_", "MASTER_", "MUSTER_", "TORCHX_", "PYTEST_", "KUBEFLOW_")
"""Prefixes of variables that have a job's id, folder or port."""


def read_command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def list_below(root: int) -> list[int]:
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found, todo = [], [root]
    while todo:
        each = todo.pop()
        below = [pid for pid, parent in parents.items() if parent == each]
        found += below
        todo += below
    return found


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    except OSError:
        return True
