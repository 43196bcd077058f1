"""What is known of an app: its jobs as Slurm reports them, and what its nodes have recorded.

The nodes' records say how replicas have ended. Slurm's exit code does not, because a job whose spare took over has a
task that failed. Without a shared folder only Slurm is asked.
"""

import contextlib
import posixpath
import re
import time
from dataclasses import dataclass, replace
from typing import Any, Final

from torchx.specs import AppState, is_terminal
from torchx.specs.api import ReplicaStatus

from muster._shared.contract import LogNames
from muster._shared.foreign_files import parse_json, read_regular, read_whole
from muster.schedulers import adapter
from muster.schedulers.adapter.supervised import REPLICA_STATES, count_restarts
from muster.schedulers.slurm import client, reasons
from muster.schedulers.slurm.client import QueueEntry
from muster.schedulers.slurm.node import (
    JOBS_NAME,
    LOG_NAME,
    NODE_NAME,
    NOT_OURS,
    STOPS,
    NodeFolder,
    choose_reasons,
    list_replicas,
    list_runs,
    read_sizes,
)
from muster.schedulers.slurm.request import NOT_SENT
from muster.schedulers.wording.facts import ExplainedReplica

_CLOCKS_S: Final = 2.0
"""How much the clocks of nodes and controller may differ. A job waits longer before it runs again."""
_START_S: Final = 30.0
"""By then a task has started, where no record says it."""
_SUBMISSION_S: Final = 86400.0
_CHECKPOINT_LIMIT_BYTES: Final = 1 << 16
_LOG_LIMIT_BYTES: Final = 2000
_SAYS_LITTLE: Final = re.compile(r"srun: (error: .*task [0-9,-]+: |Job step aborted|got SIG|forcing job)|Try \"srun ")


@dataclass(frozen=True, kw_only=True)
class NodeState:
    """What one node has recorded of its replica in the newest run."""

    node: str
    record: adapter.AppRecord

    @property
    def has_failed(self) -> bool:
        """Whether its replica has failed for good."""
        return self.record.app.phase.value == "ended" and self.record.app.app_state == "FAILED"

    def has_running(self, replica: adapter.ReplicaId) -> bool:
        """Return whether its replica runs by its record, which a lost node does not change any more."""
        return self.record.app.replicas[replica].status.value == "running"


@dataclass(frozen=True, kw_only=True)
class App:
    """An app as it is now."""

    spec: adapter.AppSpec
    folder: adapter.AppFolder
    entry: QueueEntry | None
    """Its newest job. None: Slurm does not know it (any more)."""
    runs: tuple[str, ...]
    """`JOBID.RESTARTS`, oldest first."""
    nodes: dict[adapter.ReplicaId, NodeState]
    """The nodes of the newest run."""
    is_cancelled: bool

    @property
    def is_shared(self) -> bool:
        """Whether the nodes see the folder."""
        return str(self.folder.path) == self.spec.folder

    @property
    def state(self) -> AppState:
        """TorchX's."""
        if self.entry is None:
            return self._judge_records() or AppState.UNKNOWN
        state = reasons.STATES.get(self.entry.state, AppState.UNKNOWN)
        if not is_terminal(state):
            return state
        return self._judge_records() or state

    def _judge_records(self) -> AppState | None:
        """Return how the newest run has ended by its records. None: they do not say."""
        if self.is_cancelled:
            return AppState.CANCELLED
        if not self.nodes or (self.entry is not None and not self.runs[-1].startswith(f"{self.entry.job_id}.")):
            return None
        if all(map(self._is_content, self.spec.roles)):
            return AppState.SUCCEEDED
        is_by_hand = self.entry is not None and self.entry.state == "CANCELLED"
        return AppState.CANCELLED if is_by_hand else AppState.FAILED

    def _is_content(self, role: adapter.SupervisedRole) -> bool:
        """Return whether the app has succeeded as far as this role counts, if the others have."""
        if not role.policy.critical or self._has_succeeded(role.name):
            return True
        own = [each for replica, each in self.nodes.items() if replica.role == role.name]
        return bool(role.policy.ends_with) and not any(each.has_failed for each in own)

    def _has_succeeded(self, name: str) -> bool:
        """Tell whether a role has succeeded: an agent ends with 0 only when every worker of its job has."""
        role = next(each for each in self.spec.roles if each.name == name)
        known = [each.record.app.replicas[replica] for replica, each in self.nodes.items() if replica.role == name]
        good = sum(each.status.value == "succeeded" for each in known)
        return good > 0 if role.runs_agent else good >= role.needed

    @property
    def remote_folder(self) -> adapter.AppFolder:
        """The app's folder on its nodes."""
        return adapter.AppFolder(self.spec.folder)

    def has_started(self) -> bool:
        """Return whether all tasks of the job that runs can receive a message. One that is just starting cannot."""
        if self.entry is None or self.entry.state != "RUNNING":
            return False
        if not self.is_shared:
            return self.entry.start_s is not None and time.time() - self.entry.start_s > _START_S
        is_current = bool(self.runs) and self.runs[-1].startswith(f"{self.entry.job_id}.")
        running = [each for each, known in self.nodes.items() if known.has_running(each)]
        return is_current and len(running) == len(self.nodes) == len(list_replicas(self.spec))

    def find_running(self, role: str | None = None) -> dict[adapter.ReplicaId, str]:
        """Find the nodes of replicas that run by their records, of one role or all. Without records: with a node.

        A node that Slurm has lost is none of them.
        """
        if self.entry is None or reasons.STATES.get(self.entry.state) is not AppState.RUNNING:
            return {}
        if not self.is_shared:
            placed = zip(list_replicas(self.spec), self.entry.nodes, strict=False)
            return {each: node for each, node in placed if role in (None, each.role)}
        return {
            each: known.node
            for each, known in self.nodes.items()
            if role in (None, each.role) and known.has_running(each) and known.node in self.entry.nodes
        }


def read_app(folder: adapter.AppFolder) -> App:
    """Read an app. Looking changes nothing.

    Raises:
        FileNotFoundError: no app here (any more).
        EngineError: Slurm does not answer.
    """
    spec = folder.read_spec()
    jobs = client.list_jobs(spec.app_id, read_jobs(folder))
    runs = list_runs(folder)
    nodes = {} if not runs or not spec.details else _read_nodes(folder, spec, runs[-1])
    entry = jobs[-1] if jobs else None
    if entry is not None and entry.state == "RUNNING" and entry.start_s is not None:  # not the last run's remains
        nodes = {each: known for each, known in nodes.items() if known.record.submitted_s > entry.start_s - _CLOCKS_S}
    return App(
        spec=spec,
        folder=folder,
        entry=entry,
        runs=runs,
        nodes=nodes,
        is_cancelled=folder.request_file.exists(),
    )


def find_end_s(app: App, added_s: float) -> float | None:
    """Find when an app ended, in wall-clock seconds. None: it runs, or nothing here can tell that it does not.

    A job that Slurm does not know may be one of another cluster that has the same home folder.

    Args:
        app: see `read_app`.
        added_s: when its submission began. One that has no job a day later was killed.
    """
    if app.entry is not None:
        has_ended = is_terminal(reasons.STATES.get(app.entry.state, AppState.UNKNOWN))
        return (app.entry.end_s or added_s) if has_ended else None
    if not app.nodes and not read_jobs(app.folder):
        return added_s + _SUBMISSION_S
    ended = [known.record.ended_s for known in app.nodes.values()]
    return max((each for each in ended if each is not None), default=None) if None not in ended else None


def read_jobs(folder: adapter.AppFolder) -> list[str]:
    """Return the ids of the jobs that were submitted for an app."""
    try:
        return read_whole(folder.state_dir / JOBS_NAME).decode().split()
    except FileNotFoundError:
        return []


def find_app_of_job(job_id: str, registry: adapter.AppRegistry) -> str | None:
    """Find the app that has, or had, a job of Slurm's. None: none that was submitted here."""
    for app_id in registry:
        folder = registry.open(app_id)
        if folder is not None and job_id in read_jobs(folder):
            return app_id
    return None


def _read_nodes(folder: adapter.AppFolder, spec: adapter.AppSpec, run: str) -> dict[adapter.ReplicaId, NodeState]:
    found = {}
    for replica in list_replicas(spec):
        node = NodeFolder(folder.path, run, replica)
        with contextlib.suppress(OSError, ValueError):
            record = node.read_record()
            if record is not None:
                found[replica] = NodeState(node=read_whole(node.state_dir / NODE_NAME).decode(), record=record)
    return found


def build_facts(app: App, reports: adapter.AgentReports, submitted_s: float | None) -> adapter.AppFacts:
    """Return what people are shown.

    Args:
        app: see `read_app`.
        reports: what its agents report.
        submitted_s: when the app was submitted. Its job counts from its last requeue.
    """
    state = app.state
    lost = set[str]()
    if state is AppState.RUNNING and app.entry is not None and app.entry.state == "RUNNING":
        sizes = read_sizes(app.folder.state_dir)
        wanted = {known.node for each, known in app.nodes.items() if each.index < sizes.get(each.role, each.index + 1)}
        lost = wanted - set(app.entry.nodes)
    known = adapter.AppFacts(
        app_id=app.spec.app_id,
        app=adapter.load_app(app.spec.description),
        state=state,
        replicas=_list_statuses(app, state, lost),
        restarts=sum(each.record.app.num_restarts for each in app.nodes.values()),
        reasons=_list_reasons(app, state, lost),
        ui_url=app.folder.path.as_uri(),
        submitted_s=submitted_s,
        since_s=_find_since_s(app.entry, state),
    )
    reports = replace(reports, jobs={role: job for role, job in reports.jobs.items() if _is_of_this_run(app, job)})
    return adapter.combine_facts(known, reports, tells_jobs=state is AppState.RUNNING or is_terminal(state))


def _find_since_s(entry: QueueEntry | None, state: AppState) -> float | None:
    """Return since when an app has ended, or waits."""
    if entry is None:
        return None
    return entry.end_s if is_terminal(state) else entry.submitted_s if state is AppState.PENDING else None


def _is_of_this_run(app: App, job: adapter.JobFacts) -> bool:
    """Return whether agents report of the run that Slurm has started, and not of the one before."""
    entry = app.entry
    if entry is None or entry.state != "RUNNING" or entry.start_s is None or job.status is None:
        return True
    return job.status.time_s > entry.start_s - _CLOCKS_S


def _list_statuses(app: App, state: AppState, lost: set[str]) -> list[ReplicaStatus]:
    def find_state(replica: adapter.ReplicaId) -> AppState:
        known = app.nodes.get(replica)
        size = read_sizes(app.folder.state_dir).get(replica.role)
        if size is not None and replica.index >= size:
            return AppState.CANCELLED
        if known is None or state is AppState.PENDING:
            return AppState.PENDING if state is AppState.RUNNING and app.is_shared else state
        found = REPLICA_STATES[known.record.app.replicas[replica].status]
        if found not in (AppState.RUNNING, AppState.PENDING):
            return found
        if known.node in lost:
            return AppState.FAILED
        is_over = is_terminal(state)
        return (AppState.CANCELLED if state is AppState.CANCELLED else AppState.FAILED) if is_over else found

    replicas = list_replicas(app.spec) if app.spec.details else []
    return [
        ExplainedReplica(
            id=each.index,
            role=each.role,
            state=find_state(each),
            hostname=app.nodes[each].node if each in app.nodes else "",
            reasons=count_restarts(app.nodes[each].record.app.replicas[each]) if each in app.nodes else (),
        )
        for each in sorted(replicas, key=lambda each: [role.name for role in app.spec.roles].index(each.role))
    ]


def _list_reasons(app: App, state: AppState, lost: set[str]) -> adapter.Reasons:
    found: list[adapter.Reason] = []
    entry = app.entry
    if entry is None:
        found.append(
            adapter.Reason(code=adapter.Code.SLURM_FORGOT if read_jobs(app.folder) else adapter.Code.NOT_SUBMITTED)
        )
    elif state is AppState.PENDING:
        found.append(reasons.explain_wait(entry))
    elif is_terminal(state):
        found += explain_end(app, state)
    else:
        found += [adapter.Reason(code=adapter.Code.NODES_LOST, hosts=(name,)) for name in sorted(lost)]
        alone = _list_failed_roles(app)
        found += alone.values()
        records = [known.record.app for each, known in app.nodes.items() if each.role not in alone]
        causes = filter(None, (record.reasons for record in records))
        found += [adapter.Reason(code=adapter.Code.NODE_REPORTS, causes=each) for each in causes]
        word = "" if entry.state == "RUNNING" else entry.state.lower()
        found.append(adapter.Reason(code=adapter.Code.SLURM_JOB, job=entry.job_id, word=word))
    if len(app.runs) > 1 or (app.runs and state is AppState.PENDING):
        found.append(adapter.Reason(code=adapter.Code.INCARNATION, count=len(app.runs) + (state is AppState.PENDING)))
    if state is AppState.PENDING:
        before = choose_reasons([known.record.app.reasons for known in app.nodes.values()])
        found += [adapter.Reason(code=adapter.Code.BEFORE, causes=before)] if before else []
    return tuple(dict.fromkeys(found))


def _list_failed_roles(app: App) -> dict[str, adapter.Reason]:
    """Return why roles have failed that are not critical, by the records of their nodes."""
    extra = [role.name for role in app.spec.roles if not role.policy.critical]
    failed = {each.role: known.record.app for each, known in app.nodes.items() if known.has_failed}
    return {
        name: adapter.Reason(code=adapter.Code.FAILED_ALONE, role=name, causes=failed[name].reasons)
        for name in extra
        if name in failed
    }


def explain_end(app: App, state: AppState) -> adapter.Reasons:
    """Return why it has ended: what a node says, else Slurm, else what the script printed."""
    if state is AppState.SUCCEEDED:
        return tuple(_list_failed_roles(app).values())
    if app.is_cancelled:
        return (adapter.Reason(code=STOPS.get(app.folder.read_request() or "", adapter.Code.CANCELLED)),)
    order = ("FAILED", "CANCELLED")
    records = [known.record for known in app.nodes.values()]
    ended = [
        (order.index(each.app.outcome.value), each.ended_s or 0.0, each.app.reasons)
        for each in records
        if each.app.outcome is not None and each.app.outcome.value in order
    ]
    by_slurm = None if app.entry is None else reasons.explain_end(app.entry)
    if not ended:
        line = _read_last_line(app.folder) if app.is_shared else _explain_node_dir(app)
        return tuple(each for each in (by_slurm, line) if each is not None)
    first = min(ended, key=lambda each: each[:2])[2]
    return first if by_slurm is None else (*first, by_slurm)


def _explain_node_dir(app: App) -> adapter.Reason | None:
    """Say why a job whose nodes share no folder could not use its folder in `node_dir`. None: it could."""
    ended = None if app.entry is None else client.find_ended(app.entry.job_id)
    if ended is not None and ended.exit_code == NOT_OURS:
        return adapter.Reason(code=adapter.Code.FOLDER_FOREIGN, job=ended.job_id, text=app.spec.folder, host="a node")
    if ended is None or ended.exit_code != NOT_SENT:
        return None
    return adapter.Reason(
        code=adapter.Code.FOLDER_UNWRITABLE, job=ended.job_id, text=posixpath.dirname(app.spec.folder)
    )


def find_checkpoint(app: App) -> str:
    """Return the step and the path of the last checkpoint that an app's agents have kept. "": none is known."""
    found = []
    for role in app.spec.roles:
        for path in app.folder.role_dir(role.name).glob(f"*/{LogNames.CHECKPOINT}"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                kept: Any = parse_json(read_regular(str(path), _CHECKPOINT_LIMIT_BYTES))
                found.append((int(kept["number"]), f"step {int(kept['step'])} ({kept['path']})"))
    return max(found, default=(0, ""))[1]


def _read_last_line(folder: adapter.AppFolder) -> adapter.Reason | None:
    """Return what the script or srun has said last that is more than an exit code: why nothing has started."""
    lines = read_last_lines(folder)
    chosen = [line for line in lines if not _SAYS_LITTLE.search(line)] or lines
    return adapter.Reason(code=adapter.Code.SCRIPT_SAID, text=chosen[-1]) if chosen else None


def read_last_lines(folder: adapter.AppFolder) -> list[str]:
    """Return the last lines of what the script and srun have said."""
    try:
        text = read_regular(folder.state_dir / LOG_NAME, _LOG_LIMIT_BYTES, -_LOG_LIMIT_BYTES).decode(errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()]
