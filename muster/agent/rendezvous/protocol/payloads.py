"""Larger parts of messages: failures, stacks, the job's report, and a member's recovery state."""

from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any

from muster.agent.diagnosis.report import Failure, OomEvidence, Report, Stack
from muster.agent.rendezvous.consensus.members import RecoveryState
from muster.agent.rendezvous.consensus.quorum import INDICES_KEPT, RecoveredRound
from muster.agent.rendezvous.protocol.fields import (
    MalformedMessageError,
    boolean,
    count,
    integer,
    list_of,
    mapping,
    optional,
    read_field,
    seconds,
    size,
    text,
)

OOM = {"certain": boolean, "limit_bytes": optional(count), "peak_bytes": optional(count), "source": text}
"""Reader of each field of `OomEvidence`. `FAILURE` and `STACK` are alike."""


def _read_oom(value: Any) -> dict[str, Any]:
    return _read_fields(value, OOM, OomEvidence)


FAILURE = {
    "node": count,
    "node_index": count,
    "host": text,
    "local_rank": count,
    "global_rank": count,
    "attempt": count,
    "round": count,
    "pid": count,
    "time_s": seconds,
    "age_s": seconds,
    "exit_code": optional(integer),
    "signal": optional(text),
    "reason": text,
    "exception": optional(text),
    "traceback": optional(text),
    "error_file": optional(text),
    "stderr_tail": list_of(text),
    "log_path": optional(text),
    "oom": optional(_read_oom),
    "stopped_by_us": boolean,
    "collateral": boolean,
    "early": boolean,
    "hung": boolean,
}
STACK = {"global_rank": count, "node": count, "local_rank": count, "text": text}


def _read_fields(value: Any, readers: dict[str, Callable[[Any], Any]], kind: type) -> dict[str, Any]:
    """Read the known fields of a record. Fields with a default may be missing; fields of newer versions are ignored."""
    data = mapping(value)
    needed = {field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING}
    return {key: read_field(data, key, read) for key, read in readers.items() if key in data or key in needed}


def read_failure(value: Any) -> Failure:
    """The inverse of `Failure.to_json`."""
    return Failure.from_json(_read_fields(value, FAILURE, Failure))


def read_stack(value: Any) -> Stack:
    """The inverse of `build_stack`."""
    return Stack(**_read_fields(value, STACK, Stack))


def build_stack(stack: Stack) -> dict[str, Any]:
    """A dict of JSON types."""
    return {"global_rank": stack.global_rank, "node": stack.node, "local_rank": stack.local_rank, "text": stack.text}


def read_report(value: Any) -> Report:
    """The inverse of `Report.to_json`."""
    data = mapping(value)
    return Report(
        run_id=read_field(data, "run_id", text),
        reason=read_field(data, "reason", text),
        attempt=read_field(data, "attempt", count),
        max_restarts=read_field(data, "max_restarts", count),
        failures=read_field(data, "failures", list_of(read_failure)),
        stacks=read_field(data, "stacks", list_of(read_stack)),
    )


def build_recovered_round(recovered: RecoveredRound) -> dict[str, Any]:
    """A dict of JSON types."""
    return {
        "number": recovered.round_number,
        "leader_id": recovered.leader_id,
        "size": recovered.size,
        "leader_rank": recovered.leader_group_rank,
        "node_indices": list(recovered.node_indices),
        "rank": recovered.group_rank,
        "ended": sorted(recovered.ended),
    }


def read_recovered_round(value: Any) -> RecoveredRound:
    """The inverse of `build_recovered_round`."""
    data = mapping(value)
    recovered = RecoveredRound(
        round_number=read_field(data, "number", count),
        leader_id=read_field(data, "leader_id", text),
        size=read_field(data, "size", size),
        leader_group_rank=read_field(data, "leader_rank", count),
        node_indices=read_field(data, "node_indices", list_of(optional(count))),
        group_rank=read_field(data, "rank", optional(count)),
        ended=frozenset(read_field(data, "ended", list_of(count))),
    )
    highest = max(recovered.leader_group_rank, recovered.group_rank or 0, *recovered.ended)
    if highest >= recovered.size:
        raise MalformedMessageError(f"rank {highest} in a round of {recovered.size}")
    if len(recovered.node_indices) > INDICES_KEPT:
        raise MalformedMessageError(f"more than {INDICES_KEPT} indices")
    return recovered


def build_recovery_state(recovery_state: RecoveryState) -> dict[str, Any]:
    """A dict of JSON types."""
    return {
        "round": recovery_state.round_number,
        "attempt": recovery_state.attempt,
        "startup_signature": recovery_state.startup_signature,
        "final_reason": recovery_state.final_reason,
        "leader_id": recovery_state.leader_id,
        "quorum_bases": [build_recovered_round(recovered) for recovered in recovery_state.quorum_rounds],
    }


def read_recovery_state(value: Any) -> RecoveryState:
    """The inverse of `build_recovery_state`. It also reads messages that hold the same fields among others."""
    data = mapping(value)
    return RecoveryState(
        round_number=read_field(data, "round", count),
        attempt=read_field(data, "attempt", count),
        startup_signature=read_field(data, "startup_signature", optional(text)),
        final_reason=read_field(data, "final_reason", optional(text)) if "final_reason" in data else None,
        leader_id=read_field(data, "leader_id", optional(text)) if "leader_id" in data else None,
        quorum_rounds=read_field(data, "quorum_bases", list_of(read_recovered_round)),
    )
