"""The settings that must be equal for all agents of a job, and the message about a difference.

Each agent sends its rules when it joins or leads. Two sides of a partition that count with different sizes, or with
different silence limits, could both continue; so an agent with other rules is refused. Settings that may differ from
node to node (workers, roles, log folders, names) are not among them.
"""

from typing import Any

from muster.agent.config import RendezvousConfig
from muster.agent.rendezvous.protocol.fields import (
    MalformedMessageError,
    count,
    mapping,
    read_field,
    seconds,
    size,
    text,
)
from muster.agent.runtime.records import record

BACKENDS = ("muster", "static")
"""The backends that use this protocol."""


@record
class JobRules:
    """Equal on all nodes."""

    backend: str
    min_nodes: int
    max_nodes: int
    max_restarts: int
    join_timeout_s: float
    last_call_s: float
    keep_alive_interval_s: float
    keep_alive_max_attempt: int


def build_job_rules(config: RendezvousConfig) -> JobRules:
    """The rules in one node's configuration."""
    return JobRules(
        backend="static" if config.backend == "static" else "muster",
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        max_restarts=config.max_restarts,
        join_timeout_s=config.join_timeout_s,
        last_call_s=config.last_call_timeout_s,
        keep_alive_interval_s=config.keep_alive_interval_s,
        keep_alive_max_attempt=config.keep_alive_max_attempt,
    )


def describe_difference(own: JobRules, jobs: JobRules) -> str | None:
    """One line that names each setting that differs, with both values; None when the rules are equal."""
    pairs = zip(_list_settings(own), _list_settings(jobs), strict=True)
    different = [f"{flag}{mine} (the job: {theirs})" for (flag, mine), (_, theirs) in pairs if mine != theirs]
    if not different:
        return None
    return f"{', '.join(different)}; all agents of a job must be started with the same values"


def _list_settings(rules: JobRules) -> list[tuple[str, str]]:
    """Pairs of flag and value, as on the command line."""
    is_fixed = rules.min_nodes == rules.max_nodes
    return [
        ("--rdzv-backend ", rules.backend),
        ("--nnodes ", f"{rules.max_nodes}" if is_fixed else f"{rules.min_nodes}:{rules.max_nodes}"),
        ("--max-restarts ", str(rules.max_restarts)),
        ("--rdzv-conf join_timeout=", repr(rules.join_timeout_s).removesuffix(".0")),
        ("--last-call-timeout ", repr(rules.last_call_s).removesuffix(".0")),
        ("--rdzv-conf keep_alive_interval=", repr(rules.keep_alive_interval_s).removesuffix(".0")),
        ("--rdzv-conf keep_alive_max_attempt=", str(rules.keep_alive_max_attempt)),
    ]


def describe_job_rules(rules: JobRules) -> dict[str, Any]:
    """A dict of JSON types."""
    return dict(vars(rules))


def read_job_rules(value: Any) -> JobRules:
    """The inverse of `describe_job_rules`.

    Raises:
        MalformedMessageError: a field is invalid.
    """
    data = mapping(value)
    return JobRules(
        backend=read_field(data, "backend", _read_backend),
        min_nodes=read_field(data, "min_nodes", size),
        max_nodes=read_field(data, "max_nodes", size),
        max_restarts=read_field(data, "max_restarts", count),
        join_timeout_s=read_field(data, "join_timeout_s", seconds),
        last_call_s=read_field(data, "last_call_s", seconds),
        keep_alive_interval_s=read_field(data, "keep_alive_interval_s", seconds),
        keep_alive_max_attempt=read_field(data, "keep_alive_max_attempt", size),
    )


def _read_backend(value: Any) -> str:
    name = text(value)
    if name not in BACKENDS:
        raise MalformedMessageError(f"not one of {', '.join(BACKENDS)}")
    return name
