"""What letters enclose: failures, stacks, the job's report, and what a member carries of the job."""

from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any

from muster.agent.diagnosis.report import Failure, OomEvidence, Report, Stack
from muster.agent.rendezvous.consensus.members import Carry
from muster.agent.rendezvous.consensus.quorum import INDICES_KEPT, CarriedBase
from muster.agent.rendezvous.protocol.fields import (
    NonsenseError,
    count,
    many,
    mapping,
    optional,
    seconds,
    size,
    switch,
    take,
    text,
    whole,
)

OOM = {"certain": switch, "limit_bytes": optional(count), "peak_bytes": optional(count), "source": text}
"""How each field of `OomEvidence` is read; the others likewise."""


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
    "exit_code": optional(whole),
    "signal": optional(text),
    "reason": text,
    "exception": optional(text),
    "traceback": optional(text),
    "error_file": optional(text),
    "stderr_tail": many(text),
    "log_path": optional(text),
    "oom": optional(_read_oom),
    "stopped_by_us": switch,
    "collateral": switch,
    "early": switch,
}
STACK = {"global_rank": count, "node": count, "local_rank": count, "text": text}


def _read_fields(value: Any, readers: dict[str, Callable[[Any], Any]], kind: type) -> dict[str, Any]:
    """The known fields of a record: what has a default may be missing, and what newer versions add is left out."""
    data = mapping(value)
    needed = {field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING}
    return {key: take(data, key, read) for key, read in readers.items() if key in data or key in needed}


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
        run_id=take(data, "run_id", text),
        reason=take(data, "reason", text),
        attempt=take(data, "attempt", count),
        max_restarts=take(data, "max_restarts", count),
        failures=take(data, "failures", many(read_failure)),
        stacks=take(data, "stacks", many(read_stack)),
    )


def build_base(base: CarriedBase) -> dict[str, Any]:
    """A dict of JSON types."""
    return {
        "number": base.number,
        "by": base.by,
        "size": base.size,
        "leader": base.leader,
        "indices": list(base.indices),
        "rank": base.rank,
        "ended": sorted(base.ended),
    }


def read_base(value: Any) -> CarriedBase:
    """The inverse of `build_base`."""
    data = mapping(value)
    base = CarriedBase(
        number=take(data, "number", count),
        by=take(data, "by", text),
        size=take(data, "size", size),
        leader=take(data, "leader", count),
        indices=take(data, "indices", many(optional(count))),
        rank=take(data, "rank", optional(count)),
        ended=frozenset(take(data, "ended", many(count))),
    )
    highest = max(base.leader, base.rank or 0, *base.ended)
    if highest >= base.size:
        raise NonsenseError(f"rank {highest} of only {base.size}")
    if len(base.indices) > INDICES_KEPT:
        raise NonsenseError(f"more than {INDICES_KEPT} indices")
    return base


def build_carry(carry: Carry) -> dict[str, Any]:
    """A dict of JSON types."""
    return {
        "round": carry.round,
        "attempt": carry.attempt,
        "early": carry.early,
        "final": carry.final,
        "leader": carry.leader,
        "bases": [build_base(base) for base in carry.bases],
    }


def read_carry(value: Any) -> Carry:
    """The inverse of `build_carry`. Letters that hold the same fields among others are read with it too."""
    data = mapping(value)
    return Carry(
        round=take(data, "round", count),
        attempt=take(data, "attempt", count),
        early=take(data, "early", optional(text)),
        final=take(data, "final", optional(text)) if "final" in data else None,
        leader=take(data, "leader", optional(text)) if "leader" in data else None,
        bases=take(data, "bases", many(read_base)),
    )
