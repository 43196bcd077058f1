"""What a process inherits: facts that it cannot set for itself, and settings that it can. For both sides."""

import contextlib
import os
import resource
import signal
from collections.abc import Mapping, Sequence
from typing import Final

from muster.agent.hold.listening import Order

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


_CGROUP_LIMITS: Final = ("memory.max", "memory.high", "cpu.max", "cpuset.cpus", "pids.max")


def find_difference(order: Order, ours: Mapping[str, str], prefix: Sequence[str]) -> str:
    """Return the reason in one clause; "" if it can.

    Args:
        order: see `client`.
        ours: the facts of this process.
        prefix: the command that starts agents here, without flags.
    """
    theirs = order["facts"]
    for name in sorted(ours.keys() - {"umask", "cgroup"}):
        if theirs.get(name) != ours[name]:
            return f"{name} is not the hold's"
    if _read_cgroup_limits(theirs["cgroup"]) != _read_cgroup_limits(ours["cgroup"]):
        return "the limits of its cgroup are not the hold's"
    command = order["command"]
    if not _is_same_python(command[0], prefix[0]):
        return f"the hold has another Python, {prefix[0]}"
    if len(command) != len(prefix) or not _is_same_file(command[1], prefix[1]):
        return "the hold has another version of the agent"
    if "python_flags" in order and order["python_flags"] != _list_python_flags():
        return "the flags of its Python are not the hold's"
    for name, (_, hard) in order["limits"].items():
        own = resource.getrlimit(getattr(resource, name))[1]
        is_higher = own != resource.RLIM_INFINITY and (hard == resource.RLIM_INFINITY or hard > own)
        if is_higher and os.geteuid() != 0:
            return f"{name} is not the hold's"
    if order["nice"] < os.getpriority(os.PRIO_PROCESS, 0) and os.geteuid() != 0:
        return "its priority is not the hold's"
    return ""


def _is_same_python(one: str, other: str) -> bool:
    """Return whether file and folder are the same: Pythons of virtual environments link to one file."""
    return os.path.dirname(one) == os.path.dirname(other) and os.path.realpath(one) == os.path.realpath(other)


def _list_python_flags() -> list[str]:
    """Return the flags that this interpreter has from its command line or from variables."""
    import subprocess

    found: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # noqa: SLF001
    return found


def _is_same_file(one: str, other: str) -> bool:
    """Return whether it is the same file or a copy, because each app has its own bundle."""
    if one == other:
        return True
    try:
        with open(one, "rb") as first, open(other, "rb") as second:
            return first.read() == second.read()
    except OSError:
        return False


def _read_cgroup_limits(text: str) -> list[str]:
    """Return the limits of the processes of a cgroup, from the text of /proc/PID/cgroup.

    With version 1, return the text itself.
    """
    path = text.strip().partition("0::")[2] if text.startswith("0::") else ""
    if not path:
        return [text]
    found = []
    while path not in ("", "/"):
        for name in _CGROUP_LIMITS:
            with contextlib.suppress(OSError), open(f"/sys/fs/cgroup{path}/{name}", encoding="ascii") as file:
                value = file.read().strip()
                if value and not value.startswith("max"):
                    found.append(f"{path}/{name} {value}")
        path = path.rpartition("/")[0]
    return found
