"""`muster rehearse --app`: causes faults in a job that runs, by what its scheduler lets this user do.

A fault here is a signal to a process of the job, sent where it runs, or the end of a node as the scheduler ends one: a
container is stopped, a pod deleted. The process is looked at there first. A pid that is not below an agent of this very
app is not touched. What the job does afterwards is in its status.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from torchx.specs import AppState, Role, is_terminal

from muster._shared.contract import LogNames
from muster._shared.control import CommandExit, ControlError
from muster.cli.history.sources import parse_files
from muster.cli.operations import check_runs, choose_agent_role, describe, open_scheduler
from muster.cli.rehearse.faults import FAULTS
from muster.cli.rehearse.outcome import Row, Verdict
from muster.cli.rehearse.watch import find_processes
from muster.schedulers.adapter.scheduler import PluginScheduler

if TYPE_CHECKING:
    from muster._shared.job_view import JobStatus

_LIMIT_BYTES: Final = 64 << 20
_COMMAND_S: Final = 60.0
_LOOK_S: Final = 1.0
_RECORDS_S: Final = 10.0
"""How long a node's records are waited for: over ssh they come after its output."""
CAUSED: Final = {name: fault.live_signal for name, fault in FAULTS.items() if fault.live_signal}
"""What gets which signal, by the name of a fault that can be caused in a job that runs."""

_SEND = """
import os, sys
app, agent, pid, signum = sys.argv[1], *map(int, sys.argv[2:])
def parent(pid):
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[1])
try:
    with open(f"/proc/{agent}/environ", "rb") as file:
        if b"MUSTER_APP_ID=" + app.encode() not in file.read().split(b"\\0"):
            sys.exit(f"process {agent} is no agent of {app}")
    at = parent(agent) if pid == 0 else pid
    way = at
    while pid and way > 1 and way != agent:
        way = parent(way)
    if pid and way != agent:
        sys.exit(f"process {pid} is not below the agent of {app}")
    os.kill(at, signum)
except OSError as error:
    sys.exit(f"{error.filename or pid}: {error.strerror}")
"""
"""Runs in the node. A pid of 0 means the parent of the agent."""


@dataclass(frozen=True, kw_only=True)
class _Target:
    name: str
    """Of the fault."""
    node: int
    rank: int | None
    agent_pid: int
    pid: int
    """0: the parent of the agent."""

    def __str__(self) -> str:
        return f"node {self.node}" if self.rank is None else f"rank {self.rank} on node {self.node}"

    def build_row(self, verdict: Verdict, **known: Any) -> Row:
        """Return what became of it."""
        return Row(name=self.name, title=FAULTS[self.name].title, at=str(self), verdict=verdict, **known)


def disturb(
    handle: str, names: Sequence[str], *, seed: int, limit_s: float, confirm: Callable[[str], bool]
) -> Iterator[Row]:
    """Cause faults in a running job, one after the other, and follow each until the job is further than before.

    It ends with the first that was not survived.

    Args:
        handle: of the app.
        names: of `CAUSED`.
        seed: chooses ranks and nodes.
        limit_s: how long a recovery may take.
        confirm: is asked before each, with what will be done.

    Raises:
        ControlError: no such app, it does not run, or its scheduler does not let this user do it.
    """
    with open_scheduler(handle) as (scheduler, app_id):
        job = _Job(scheduler, app_id, _find_role(scheduler, app_id))
        for name in names:
            target = job.choose(name, random.Random(f"{seed} {name}"))  # noqa: S311
            if not confirm(f"{FAULTS[name].title}: {target} of {app_id}"):
                yield target.build_row(Verdict.NOT_TRIED, reason="it was not confirmed")
                continue
            before = job.read_status()
            began_s = time.monotonic()
            job.cause(target)
            row = job.follow(target, before, began_s, limit_s)
            yield row
            if row.verdict is not Verdict.SURVIVED:
                return


def _find_role(scheduler: PluginScheduler, app_id: str) -> Role:
    response = describe(scheduler, app_id)
    check_runs(app_id, response.state)
    return choose_agent_role(app_id, response.roles)


class _Job:
    def __init__(self, scheduler: PluginScheduler, app_id: str, role: Role) -> None:
        self._scheduler, self._app_id, self._role = scheduler, app_id, role

    def choose(self, name: str, rng: random.Random) -> _Target:
        node = rng.randrange(self._role.num_replicas)
        until_s = time.monotonic() + _RECORDS_S
        while True:
            content = self._scheduler.read_run_file(self._app_id, self._role.name, node, LogNames.EVENTS, _LIMIT_BYTES)
            agent, workers = find_processes(parse_files(iter([(self._app_id, content or b"")])), node)
            if agent and workers:
                break
            if time.monotonic() > until_s:
                raise ControlError(f"node {node} of {self._app_id} has reported no running worker", CommandExit.LOST)
            time.sleep(_LOOK_S)
        kind = CAUSED[name][0]
        rank = rng.choice(sorted(workers)) if kind == "rank" else None
        pid = agent if kind == "agent" else 0 if rank is None else workers[rank]
        return _Target(name=name, node=node, rank=rank, agent_pid=agent, pid=pid)

    def cause(self, target: _Target) -> None:
        kind, signum = CAUSED[target.name]
        place = (self._app_id, self._role.name, target.node)
        if kind == "node" and self._scheduler.end_node(*place):
            return
        own_name = self._app_id.rpartition(":")[2]  # NAMESPACE:NAME on Kubernetes
        words = [own_name, *map(str, (target.agent_pid, target.pid, int(signum)))]
        code, _, errors = self._scheduler.run_in_node(*place, ["python3", "-c", _SEND, *words], _COMMAND_S)
        if code != 0:
            line = " ".join(errors.split()) or f"the command ended with {code}"
            raise ControlError(f"{target.name} could not be caused: {line}", CommandExit.REFUSED)

    def follow(self, target: _Target, before: "JobStatus | None", began_s: float, limit_s: float) -> Row:
        done = None if before is None else before.step
        while time.monotonic() - began_s < limit_s:
            time.sleep(_LOOK_S)
            response = self._scheduler.describe_app(self._app_id)
            if response is None or is_terminal(response.state):
                if response is not None and response.state is AppState.SUCCEEDED:
                    return target.build_row(Verdict.SURVIVED, result="the job had succeeded by then")
                how = "it is gone" if response is None else response.state.name
                return target.build_row(Verdict.LOST, reason=f"{how}; `muster status {self._app_id}` says more")
            now = self.read_status()
            if now is None or _name_run(now) == _name_run(before) or now.step is None or now.step <= (done or 0):
                continue
            cost_s = now.recoveries[-1].cost_s if now.recoveries else None
            took_s = time.monotonic() - began_s if cost_s is None else cost_s
            return target.build_row(Verdict.SURVIVED, recovery_s=took_s, result="not comparable: it runs on")
        return target.build_row(Verdict.LOST, reason=f"it had not caught up after {limit_s:.0f} s")

    def read_status(self) -> "JobStatus | None":
        facts = self._scheduler.read_facts(self._app_id)
        job = None if facts is None else facts.jobs.get(self._role.name)
        return None if job is None else job.status


def _name_run(status: "JobStatus | None") -> object:
    """Name the run of the workers, which differs once they were started again."""
    return None if status is None else (status.started_s, status.round, status.attempt)
