"""Reads how a job is doing from its log folder, where agents were started by hand and no scheduler knows the job."""

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from torchx.schedulers.api import DescribeAppResponse
from torchx.specs import AppDef, AppState, Role
from torchx.specs.api import ReplicaStatus

from muster._shared.contract import AGENT_MODULE, LogNames
from muster._shared.control import CommandExit, ControlError
from muster.cli.history import sources
from muster.cli.history.clocks import TimedEvent, place
from muster.cli.history.story import find_lost, tell
from muster.schedulers.adapter.properties import Properties
from muster.schedulers.adapter.scheduler import LogRequest, read_run_file
from muster.schedulers.adapter.status import build_status
from muster.schedulers.errors import EngineError
from muster.schedulers.failure_report import RecordReader, explain_report
from muster.schedulers.processes.agent_files import find_newest_run, read_tail
from muster.schedulers.wording.facts import AppFacts
from muster.schedulers.wording.reasons import Code, Reason, Reasons

if TYPE_CHECKING:
    from muster._shared.job_view import JobStatus

_SILENT_S: Final = 15.0
"""An agent writes its status every 5 s at least."""
_SLURM_END_S: Final = 120.0
"""Slurm ends a job within this time after its agents have ended."""
_STOPPED_CODES: Final = (130, 143)
"""Exit codes of agents that a signal has stopped."""


def find_run(word: str) -> Path:
    """Return the folder of a run: this one, or the newest one in it.

    Raises:
        ControlError: it has none.
    """
    folder = Path(word)
    run = folder if (folder / LogNames.EVENTS).is_file() else find_newest_run(folder)
    if run is None:
        what = (
            f"{word} has no {LogNames.EVENTS} of a job: it is no log folder, or not all nodes of its job have come yet"
        )
        raise ControlError(f"{what}, as the agents' output says", CommandExit.REFUSED)
    return run.resolve()


def read_run(run: Path) -> AppFacts:
    """Return what the agents of a run have written of their job.

    Raises:
        ControlError: its records cannot be read.
    """
    records = sources.load(str(run))
    placed = place(records.events)
    story = tell(records, placed)
    codes = {each.event.detail.get("exit_code") for each in placed if each.event.what == "agent_ended"}

    def read(names: Sequence[str]) -> list[bytes]:
        return [read_tail(run / name) for name in names]

    job = RecordReader(read).job
    report = records.report
    written_s = sources.find_last_write((run / LogNames.EVENTS, run / LogNames.STATUS))
    silent_s = time.time() - written_s
    reasons: list[Reason] = []
    if story.runs and silent_s < _SILENT_S:
        state = AppState.RUNNING
    elif story.runs:
        state = AppState.UNKNOWN
        reasons = [_explain_silence(placed, silent_s)]
    elif story.succeeded:
        state = AppState.SUCCEEDED
    else:
        state = AppState.CANCELLED if codes and codes <= set(_STOPPED_CODES) else AppState.FAILED
        if report is not None and state is AppState.FAILED:
            reasons = [explain_report(report)]
        elif story.ending:
            reasons = [Reason(code=Code.RECORDED_END, text=story.ending)]
    if state in (AppState.UNKNOWN, AppState.CANCELLED) or (state is AppState.FAILED and report is None):
        reasons += _explain_by_slurm(placed, written_s)
    role = Role(name=run.name, image="", entrypoint="python3", args=["-m", AGENT_MODULE])
    replicas = _list_nodes(run.name, job.status) if state is AppState.RUNNING else None
    return AppFacts(
        app_id=run.name,
        app=AppDef(name=run.name, roles=[role]),
        state=state,
        replicas=replicas,
        restarts=job.attempt,
        reasons=tuple(reasons),
        jobs={run.name: job},
        submitted_s=story.start_s,
        since_s=story.start_s if state is AppState.RUNNING else story.end_s if not story.runs else written_s,
    )


class RunFolder:
    """Answers as a scheduler does. The output of its nodes is on their consoles."""

    backend = ""
    properties = Properties()

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read_facts(self, app_id: str) -> AppFacts:  # noqa: ARG002
        """See `PluginScheduler`."""
        return read_run(self.folder)

    def describe_app(self, app_id: str) -> DescribeAppResponse:
        """See `PluginScheduler`."""
        return build_status(self.read_facts(app_id))

    def find_run_dir(self, app_id: str, role: str) -> Path:  # noqa: ARG002
        """Return the folder."""
        return self.folder

    def read_run_file(self, app_id: str, role: str, index: int, name: str, limit_bytes: int) -> bytes | None:  # noqa: ARG002
        """See `PluginScheduler`."""
        return read_run_file(self.folder, name, limit_bytes)

    def read_log(self, app_id: str, request: LogRequest) -> Sequence[str]:  # noqa: ARG002
        """Return no lines."""
        return ()

    def count_merged_ranks(self, app_id: str, role: str) -> int:  # noqa: ARG002
        """Return 0: no line is merged."""
        return 0


def _explain_by_slurm(placed: Sequence[TimedEvent], written_s: float) -> Reasons:
    """Return why Slurm has ended the job in which the agents were started. Empty: it has not, or it is not known.

    Slurm's answer counts only if its job ended when the agents did: one that was queued again keeps its id.

    Args:
        placed: the records of all agents.
        written_s: when the last of them wrote.
    """
    started = [each.event.detail.get("slurm_job") for each in placed if each.event.what == "agent_started"]
    if not started or not started[-1]:
        return ()
    from muster.schedulers.slurm import client
    from muster.schedulers.slurm.reasons import explain_end

    with contextlib.suppress(EngineError):
        entry = client.find_ended(str(started[-1]))
        if entry is not None and entry.end_s is not None and abs(entry.end_s - written_s) < _SLURM_END_S:
            reason = explain_end(entry)
            return () if reason is None else (reason,)
    return ()


def _explain_silence(placed: Sequence[TimedEvent], silent_s: float) -> Reason:
    """Name the nodes of the last round whose agents have left no record of their end. Say how the others have ended.

    Args:
        placed: the records of all agents.
        silent_s: seconds since the last of them wrote.
    """
    number = max(each.event.round for each in placed)
    nodes = {each.event.agent: each.event.node_index for each in placed if each.event.round == number}
    ends = (each.event for each in placed if each.event.what == "agent_ended")
    codes = {event.agent: event.detail.get("exit_code") for event in ends}
    known = codes.keys() | find_lost(placed)
    silent = sorted({index for agent, index in nodes.items() if agent not in known and index is not None})
    return Reason(
        code=Code.AGENTS_SILENT,
        nodes=tuple(silent),
        count=len(silent),
        age_s=silent_s,
        exit_codes=tuple(sorted({int(codes[agent] or 0) for agent in nodes if agent in codes})),
    )


def _list_nodes(role: str, status: "JobStatus | None") -> list[ReplicaStatus] | None:
    """Return the nodes that agents report. None: a large job lists only those that differ."""
    if status is None or len(status.nodes) < status.nodes_running + status.nodes_spare + status.nodes_lost:
        return None
    states = {"lost": AppState.FAILED}
    return [
        ReplicaStatus(
            id=each.node_index, role=role, state=states.get(each.state.value, AppState.RUNNING), hostname=each.host
        )
        for each in status.nodes
    ]
