"""Which kinds of agents the default hold keeps: those that recent clients would have needed."""

import contextlib
import json
import os
import site
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

import muster
from muster._shared.contract import Env
from muster.agent.cli.command_line import FlagValues, parse_command_line
from muster.agent.errors import UsageError
from muster.agent.hold import difference
from muster.agent.hold.listening import Order
from muster.agent.workers.warm.fork_safety import is_read_early

FAILED_STARTS: Final = 3
"""After this many agents of a kind that ended before they were ready, no more are started."""
_REMEMBERED_JOBS: Final = 4
_BASE_VARIABLES: Final = ("HOME", "PATH")
_DEVICE_VARIABLES: Final = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""Variables that matter if an agent counts devices: `--nproc-per-node gpu`."""
_LOGINS: Final = "0::/user.slice/user-{uid}.slice/"
"""Below this path systemd gives each login and each terminal its own cgroup."""


class Wish:
    """A kind of agent, and how many of them should wait."""

    def __init__(self, command: Sequence[str], nproc: str, env: Mapping[str, str], cpus: Sequence[int]) -> None:
        self.command = list(command)
        self.flags = ["--nproc-per-node", nproc]
        self.env = dict(env)
        self.cpus = list(cpus)
        self.key = json.dumps([self.command, nproc, sorted(self.env.items()), len(self.cpus)])
        self.failed = 0
        self._jobs: deque[tuple[str, int]] = deque(maxlen=_REMEMBERED_JOBS)

    def add(self, job: str) -> None:
        """Note a node of a job."""
        count = 1
        if self._jobs and self._jobs[-1][0] == job:
            count += self._jobs.pop()[1]
        self._jobs.append((job, count))

    def build_orders(self) -> list[Order]:
        """Build orders from which `read_wish` makes the wish again."""
        args = [*self.flags, "-m", "job"]
        order = Order(name="again", command=self.command, args=args, env=self.env, cpus=self.cpus)
        return [order] * max(1, self.count)

    @property
    def count(self) -> int:
        """Return how many agents should wait."""
        return 0 if self.failed >= FAILED_STARTS else max((count for _, count in self._jobs), default=1)


def read_wish(order: Order) -> Wish | None:
    """Return what an agent must be to become an order's agent; None if that would not fork from a template.

    Args:
        order: `command`, `args`, `env` and `cpus` of the message that `client` sends.
    """
    env = order["env"]
    try:
        line = parse_command_line(order["args"])
        values = FlagValues(line.given, env)
        nproc = values.text("nproc-per-node") or "1"
        is_cold = values.switch("no-python") or values.switch("run-path") or values.text("start") == "cold"
        imports_more = (values.text("preload") or "auto") != "auto" or values.text("numa-binding") is not None
    except UsageError:
        return None  # reported by the agent
    python = env.get("PYTHON_EXEC") or order["command"][0]
    is_special = any(name in env for name in (Env.CONTROL_FD, Env.IMAGE)) or python != order["command"][0]
    if line.script is None or is_cold or imports_more or is_special:
        return None
    devices = () if nproc.isdecimal() else _DEVICE_VARIABLES
    names = (name for name in env if is_read_early(name) or name in (*_BASE_VARIABLES, *devices))
    return Wish(order["command"], nproc, {name: env[name] for name in names}, order["cpus"])


def is_other_cgroup(theirs: str, ours: str) -> bool:
    """Return whether a client's workers would escape its cgroup here, given texts of /proc/PID/cgroup.

    The cgroups of one user's logins and terminals count as one, as long as their limits are equal.
    """
    logins = _LOGINS.format(uid=os.getuid())
    if theirs == ours:
        return False
    are_logins = theirs.startswith(logins) and ours.startswith(logins)
    return not are_logins or difference.read_cgroup_limits(theirs) != difference.read_cgroup_limits(ours)


def read_stamps() -> dict[str, int]:
    """Return when packages were last installed or removed, by folder, and when muster was."""
    folders = [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
    paths = {*folders, site.getusersitepackages(), os.path.abspath(muster.__file__)}
    found = {}
    for path in paths:
        with contextlib.suppress(OSError):
            found[path] = os.stat(path).st_mtime_ns
    return found
