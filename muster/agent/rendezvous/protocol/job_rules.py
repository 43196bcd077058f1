"""The settings that must be equal for all agents of a job, and the message about a difference.

Each agent sends its rules when it joins or leads. Two sides of a partition that count with different sizes, or with
different silence limits, could both continue. So an agent with other rules is refused. Settings that may differ from
node to node (workers, roles, log folders, names) are not among the rules.
"""

from enum import Enum

from muster._shared.fields import Count, Paragraph, Seconds, Size
from muster._shared.records import record
from muster.agent.config import RendezvousConfig
from muster.agent.runtime.limits import TIME_SCALE


class Backend(Enum):
    """The backends that use this protocol."""

    MUSTER = "muster"
    STATIC = "static"


@record
class JobRules:
    """The settings, equal on all nodes."""

    backend: Backend
    min_nodes: Size
    max_nodes: Size
    max_restarts: Count
    join_timeout_s: Seconds
    last_call_s: Seconds
    keep_alive_interval_s: Seconds
    keep_alive_max_attempt: Size
    time_scale: Seconds
    """1 but in tests."""
    policy: Paragraph = ""


def build_job_rules(config: RendezvousConfig) -> JobRules:
    """Return the rules in one node's configuration."""
    return JobRules(
        backend=Backend.STATIC if config.backend == "static" else Backend.MUSTER,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        max_restarts=config.max_restarts,
        join_timeout_s=config.join_timeout_s,
        last_call_s=config.last_call_timeout_s,
        keep_alive_interval_s=config.keep_alive_interval_s,
        keep_alive_max_attempt=config.keep_alive_max_attempt,
        time_scale=TIME_SCALE,
        policy=config.policy,
    )


def describe_difference(own: JobRules, jobs: JobRules) -> str | None:
    """Return one line that names each setting that differs, with both values; None if the rules are equal."""
    if own == jobs:
        return None
    pairs = zip(_list_settings(own), _list_settings(jobs), strict=True)
    different = [f"{flag}{mine} (the job: {theirs})" for (flag, mine), (_, theirs) in pairs if mine != theirs]
    return f"{', '.join(different)}; all agents of a job must be started with the same values"


def _list_settings(rules: JobRules) -> list[tuple[str, str]]:
    """Return the pairs of flag and value, as on the command line."""
    is_fixed = rules.min_nodes == rules.max_nodes
    return [
        ("--rdzv-backend ", rules.backend.value),
        ("--nnodes ", f"{rules.max_nodes}" if is_fixed else f"{rules.min_nodes}:{rules.max_nodes}"),
        ("--max-restarts ", str(rules.max_restarts)),
        ("--rdzv-conf join_timeout=", repr(rules.join_timeout_s).removesuffix(".0")),
        ("--last-call-timeout ", repr(rules.last_call_s).removesuffix(".0")),
        ("--rdzv-conf keep_alive_interval=", repr(rules.keep_alive_interval_s).removesuffix(".0")),
        ("--rdzv-conf keep_alive_max_attempt=", str(rules.keep_alive_max_attempt)),
        ("--on ", repr(rules.policy)),
        ("MUSTER_TIME_SCALE=", f"{rules.time_scale:g}"),
    ]
