"""What every agent of a job must be started with alike, and how a difference is told.

Each agent brings its rules along when it joins or leads. Two sides of a split that count with different sizes, or give
each other up at different times, could both go on; so an agent with other rules takes no part. What may differ from
node to node (workers, roles, folders for logs, names) is none of them.
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
"""Those that this protocol serves."""


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
    """The rules that one node's configuration says."""
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
    """What an agent was started with, and its job with instead: one line; None when the two are equal."""
    pairs = zip(_list_settings(own), _list_settings(jobs), strict=True)
    unlike = [f"{flag}{mine} (the job: {theirs})" for (flag, mine), (_, theirs) in pairs if mine != theirs]
    if not unlike:
        return None
    return f"{', '.join(unlike)}; all agents of a job must be started with the same"


def _list_settings(rules: JobRules) -> list[tuple[str, str]]:
    """As people write them: what stands before the value, and the value."""
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
        NonsenseError: a field is not what it must be.
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
