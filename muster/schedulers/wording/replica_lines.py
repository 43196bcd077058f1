"""Why a replica has not succeeded, for `torchx status` and `muster status`.

TorchX prints an error in torch's format as exit code, time, host and message. What is no JSON it prints as it is, in
place of the replica's whole line. Without any it writes "(no reply file)".
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Final

from torchx.specs import AppState
from torchx.specs.api import NONE, ReplicaStatus

from muster._shared.contract import show_controls
from muster._shared.reports import Failure
from muster.schedulers.failure_report import find_root_cause
from muster.schedulers.wording.facts import AppFacts, ExplainedReplica
from muster.schedulers.wording.reasons import Code, Reason
from muster.schedulers.wording.words import word_all

_STOPPED: Final[Mapping[AppState, Code]] = {
    AppState.CANCELLED: Code.JOB_CANCELLED,
    AppState.FAILED: Code.STOPPED_WITH_JOB,
}
_ELSEWHERE: Final = "see Msg"


def explain_replicas(facts: AppFacts) -> list[ExplainedReplica]:
    """Return the replicas of an app. Those that have failed or were cancelled have a reason, where one is known."""
    return [_explain_replica(each, facts) for each in facts.replicas or ()]


def _explain_replica(replica: ReplicaStatus, facts: AppFacts) -> ExplainedReplica:
    """Explain one replica. One whose reason or error its adapter knows keeps it.

    A cancelled replica counts as failed if its role's report has its failure: its scheduler removed it only afterwards.
    """
    known = ExplainedReplica(**{field.name: getattr(replica, field.name) for field in dataclasses.fields(replica)})
    if replica.state not in (AppState.FAILED, AppState.CANCELLED):
        return known
    report = facts.reports.get(replica.role) if facts.state is AppState.FAILED else None
    own = [each for each in report.failures if each.node_index == replica.id] if report is not None else []
    first = next((each for each in own if not each.collateral), None)
    is_explained = bool(known.reasons) or known.structured_error_msg != NONE
    if first is not None and (replica.state is AppState.CANCELLED or not is_explained):  # also if its pod is gone
        known.state, known.reasons = AppState.FAILED, (_explain_failure(first),)
        known.structured_error_msg = _build_error(first)
        return known
    root = None if report is None else find_root_cause(report)
    if is_explained:
        return known
    if replica.state is AppState.CANCELLED:
        known.reasons = (Reason(code=_STOPPED.get(facts.state, Code.REPLICA_STOPPED)),)
    elif root is not None:
        known.reasons = (Reason(code=Code.ENDED_WITH, replica=f"{replica.role}[{root.node_index}]"),)
    return known


def build_replica(replica: ExplainedReplica) -> ReplicaStatus:
    """Return a replica as TorchX prints it."""
    error = replica.structured_error_msg
    if error == NONE and replica.state in (AppState.FAILED, AppState.CANCELLED):
        why = word_all(replica.reasons) or _ELSEWHERE
        error = f"\n {' ' if replica.id else '*'}{replica.role}[{replica.id}]:{replica.state} ({why})"
    return ReplicaStatus(
        id=replica.id,
        state=replica.state,
        role=replica.role,
        hostname=replica.hostname,
        structured_error_msg=clean_error(error),
    )


def find_reason(replica: ExplainedReplica) -> str | None:
    """Return why a replica has failed or was cancelled, in words. None: it is not known."""
    if replica.reasons:
        return word_all(replica.reasons)
    if replica.structured_error_msg == NONE:
        return None
    try:
        message = json.loads(replica.structured_error_msg)["message"]
        return str(message["message"] if isinstance(message, dict) else message)
    except (ValueError, LookupError, TypeError):  # what another package says
        return replica.structured_error_msg.strip() or None


def clean_error(text: str) -> str:
    """Clean an error, which TorchX prints: JSON whose texts a worker may have written, or a line."""
    try:
        return json.dumps(_clean_texts(json.loads(text)))
    except ValueError:
        return show_controls(text)


def _clean_texts(data: object) -> object:
    if isinstance(data, dict):
        return {name: _clean_texts(value) for name, value in data.items()}
    if isinstance(data, list):
        return [_clean_texts(each) for each in data]
    return show_controls(data) if isinstance(data, str) else data


def _explain_failure(failure: Failure) -> Reason:
    what = failure.exception.splitlines()[0] if failure.exception else ""
    return Reason(
        code=Code.WORKER_FAILED,
        rank=failure.global_rank,
        text=failure.describe_end(),
        exception=what,
        exit_code=failure.exit_code,
        signal=failure.signal or "",
    )


def _build_error(failure: Failure) -> str:
    message = {
        "message": word_all([_explain_failure(failure)]),
        "errorCode": failure.exit_code,
        "extraInfo": {"timestamp": str(int(failure.time_s))},
    }
    return json.dumps({"message": message})
