"""What a process inherits: facts that it cannot set for itself, and settings that it can. For both sides."""

import os
import resource
import signal

_ROWS = ("Uid", "Gid", "Groups", "NoNewPrivs", "Seccomp", "SigIgn", "SigBlk", "CapInh", "CapPrm", "CapEff", "CapBnd")


def read_limits() -> "dict[str, tuple[int, int]]":
    """Return all limits, soft and hard, by their names in `resource`."""
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {name: resource.getrlimit(getattr(resource, name)) for name in names}


def read_settings(facts: "dict[str, str]") -> "dict[str, object]":
    """Return the settings that a run sets for itself, as this process has them. Remove the umask from the facts."""
    return {
        "cwd": os.getcwd(),
        "umask": int(facts.pop("umask"), 8),
        "limits": read_limits(),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "cpus": sorted(os.sched_getaffinity(0)),
    }


def read_facts() -> "dict[str, str]":
    """Return what a process inherits and no run can set for itself, by its name in messages."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        rows = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    facts = {name: rows.get(name, "") for name in _ROWS}
    # Agents block SIGTTOU, for themselves only.
    facts["SigBlk"] = f"{int(rows['SigBlk'], 16) & ~(1 << (signal.SIGTTOU - 1)):016x}"
    for name in sorted(os.listdir("/proc/self/ns")):
        if not name.endswith("_for_children"):
            facts[f"{name} namespace"] = os.readlink(f"/proc/self/ns/{name}")
    for name in ("oom_score_adj", "cgroup"):
        with open(f"/proc/self/{name}", encoding="utf-8", errors="surrogateescape") as file:
            facts[name] = file.read()
    # Sets the size of thread stacks at a process's start.
    facts["RLIMIT_STACK"] = str(resource.getrlimit(resource.RLIMIT_STACK))
    facts["umask"] = rows.get("Umask", "0022")
    return facts
