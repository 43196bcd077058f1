"""Says why a replica has not succeeded, for `torchx status` and `muster status`.

TorchX prints an error in torch's format as exit code, time, host and message. What is no JSON it prints as it is, in
place of the replica's whole line. Without any it writes "(no reply file)".
"""

import dataclasses
import json
from collections.abc import Mapping

from torchx.specs import AppState
from torchx.specs.api import NONE, ReplicaStatus

from muster._shared.reports import Failure, Report
from muster.schedulers.failure_report import find_root_cause

_STOPPED: Mapping[AppState, str] = {
    AppState.CANCELLED: "the job was cancelled",
    AppState.FAILED: "stopped when the job failed",
}
_ELSEWHERE = "see Msg"


def explain_replica(replica: ReplicaStatus, app_state: AppState, report: Report | None) -> ReplicaStatus:
    """Return a replica that has failed or was cancelled with the reason. One that has an error keeps it.

    A cancelled replica counts as failed if the report has its failure: its scheduler removed it only afterwards.

    Args:
        replica: as an adapter knows it.
        app_state: of its app.
        report: of the job that the replica's role runs, if the app has failed. None: there is none.
    """
    if replica.state not in (AppState.FAILED, AppState.CANCELLED):
        return replica
    own = [each for each in report.failures if each.node_index == replica.id] if report is not None else []
    first = next((each for each in own if not each.collateral), None)
    is_explained = replica.structured_error_msg != NONE
    if first is not None and (replica.state is AppState.CANCELLED or not is_explained):  # also if its pod is gone
        return dataclasses.replace(replica, state=AppState.FAILED, structured_error_msg=_build_error(first))
    if is_explained:
        return replica
    if replica.state is AppState.CANCELLED:
        return replace_line(replica, _STOPPED.get(app_state, "stopped"))
    root = None if report is None else find_root_cause(report)
    if root is not None:
        return replace_line(replica, f"ended because of {replica.role}[{root.node_index}]")
    return replace_line(replica, _ELSEWHERE)


def replace_line(replica: ReplicaStatus, why: str) -> ReplicaStatus:
    """Return a replica whose line in `torchx status` says why it is in its state, and nothing more."""
    return dataclasses.replace(replica, structured_error_msg=f"{_begin_line(replica)} ({why})")


def find_reason(replica: ReplicaStatus) -> str | None:
    """Return why a replica has failed or was cancelled, as `explain_replica` says it. None: it is not known."""
    error, beginning = str(replica.structured_error_msg), _begin_line(replica)
    if error == NONE:
        return None
    try:
        message = json.loads(error)["message"]
        return str(message["message"] if isinstance(message, dict) else message)
    except (ValueError, LookupError, TypeError):  # a line of `replace_line`, or what another package says
        why = error[len(f"{beginning} (") : -len(")")] if error.startswith(beginning) else error.strip()
        return None if why in ("", _ELSEWHERE) else why


def _begin_line(replica: ReplicaStatus) -> str:
    return f"\n {' ' if replica.id else '*'}{replica.role}[{replica.id}]:{replica.state}"


def _build_error(failure: Failure) -> str:
    what = f" ({failure.exception.splitlines()[0]})" if failure.exception else ""
    message = {
        "message": f"rank {failure.global_rank} {failure.describe_end()}{what}",
        "errorCode": failure.exit_code,
        "extraInfo": {"timestamp": str(int(failure.time_s))},
    }
    return json.dumps({"message": message})
