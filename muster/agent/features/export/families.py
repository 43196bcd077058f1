"""Defines the metrics, and builds their values from a look at the job. Pure.

The leading agent reports on the job, and each agent on its own node and ranks, so that nothing is reported twice.
Counters have no `_total` here: Prometheus' formats add it, and OpenTelemetry's names have none.

Source: https://prometheus.io/docs/practices/naming; torch/distributed/elastic/agent/server/api.py (`put_metric`, group
torchelastic, whose `workers.ROLE.NAME` is `torchelastic_workers_NAME{role="ROLE"}` here).
"""

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Final

from muster._shared.causes import CLASSES
from muster._shared.job_view import JobState, JobStatus, NodeStatus, RankState, RankStatus
from muster._shared.records import NO_ITEMS, record, replace

if TYPE_CHECKING:
    from muster.agent.runtime.event_log import EventRecord


RENDEZVOUS: Final = "SimpleElasticAgent._rendezvous"
INITIALIZE: Final = "SimpleElasticAgent._initialize_workers"
RESTART: Final = "SimpleElasticAgent._restart_workers"
START: Final = "LocalElasticAgent._start_workers"
STOP: Final = "LocalElasticAgent._stop_workers"
STATES: Final = ("healthy", "unhealthy", "failed", "succeeded")
ENDS: Final = ("run_success_no_retries", "run_success_with_retries", "run_failed_no_retries", "run_failed_with_retries")


@record
class TorchNames:
    """What torch's elastic agent publishes about itself, by its names, from this agent's records up to now.

    torch's `workers.ROLE.NAME` is `torchelastic_workers_NAME{role="ROLE"}` here. Its measurements of a method,
    `CLASS.METHOD.duration.ms` and `.success`, are `torchelastic_duration_ms` and `torchelastic_success` with the label
    `name`. As with torch, each agent reports on itself.

    Some values are missing, because nothing here corresponds to them. These are the durations of `_assign_worker_ranks`
    (ranks come with the round), `_monitor_workers` (nothing polls) and `run` (nobody could read it after the agent's
    end). `.failure` is missing too: a step of this agent that fails ends the job, which `muster_job_failures` and the
    report show.

    Source: torch/distributed/elastic/agent/server/api.py and local_elastic_agent.py (`put_metric` and `@prof`).
    """

    state: str = ""
    """The state of the workers, one of `STATES`; "" if none has been started."""
    end: str = ""
    """How the workers of the job have ended, one of `ENDS`; "" if they have not, or were stopped."""
    took_ms: Mapping[str, int] = NO_ITEMS
    """How long the last call took, by torch's name of the method."""
    calls: Mapping[str, int] = NO_ITEMS
    """The number of calls, by the same names."""
    rendezvous_s: float = 0.0
    """Since when this node has taken part in rendezvous, by the clock of the records."""
    broken_s: float | None = None
    """When the last round ended; None if its workers run."""


def follow(names: TorchNames, event: "EventRecord") -> TorchNames:
    """Apply one record of the agent."""
    now_s, what = event.monotonic_s, event.what
    if what == "agent_started":
        return replace(names, rendezvous_s=now_s)
    if what == "round_formed":
        return _count(names, RENDEZVOUS, now_s - names.rendezvous_s)
    if what == "workers_started":
        names = _count(names, START, event.duration_s or 0.0)
        names = _count(names, INITIALIZE, now_s - names.rendezvous_s)
        if names.broken_s is not None:
            names = _count(names, RESTART, now_s - names.broken_s)
        return replace(names, state="healthy", broken_s=None)
    if what in ("round_broken", "fenced"):
        has_failed = event.detail.get("kind") in ("failure", "final")
        return replace(names, state="failed" if has_failed else "unhealthy", broken_s=now_s)
    if what == "workers_stopped":
        names = replace(names, rendezvous_s=now_s)
        return names if names.broken_s is None else _count(names, STOP, event.duration_s or 0.0)
    if what == "job_ended" and event.detail.get("drained") is not True:
        is_success = event.detail.get("succeeded") is True
        retries = "with" if event.attempt else "no"
        end = f"run_{'success' if is_success else 'failed'}_{retries}_retries"
        return replace(names, state="succeeded" if is_success else "failed", end=end)
    return names


def _count(names: TorchNames, method: str, took_s: float) -> TorchNames:
    took_ms = {**names.took_ms, method: int(took_s * 1000)}
    return replace(names, took_ms=took_ms, calls={**names.calls, method: names.calls.get(method, 0) + 1})


Labels = tuple[tuple[str, str], ...]
Points = Iterable[tuple[Labels, float | int | None]]

RECOVERY_BOUNDS_S: Final = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0, 3600.0)


class Kind(Enum):
    """The kind of a metric, by Prometheus' name."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@record
class Exemplar:
    """One event that a counter or a bucket has counted."""

    labels: Labels
    """Its trace, or its round."""
    value: float
    time_s: float
    """The time by the wall clock."""


@record
class Point:
    """One value."""

    labels: Labels
    value: float
    exemplar: Exemplar | None = None


@record
class Histogram:
    """How many values were at most as large as each bound.

    `counts` is one longer than the bounds: the last is for all.
    """

    counts: tuple[int, ...] = (0,) * (len(RECOVERY_BOUNDS_S) + 1)
    total: float = 0.0
    """The sum of all values."""
    exemplars: Mapping[int, Exemplar] = NO_ITEMS
    """The last value that was counted first in a bucket, by bucket."""


@record
class Family:
    """One metric with all of its values."""

    name: str
    kind: Kind
    text: str
    points: tuple[Point, ...] = ()
    histogram: Histogram | None = None


@record
class Counts:
    """What this agent's records have counted so far."""

    recoveries: Histogram = Histogram()
    causes: Mapping[str, int] = NO_ITEMS
    """Failures by the class of their cause, one of `causes.CLASSES`."""
    events: Mapping[str, int] = NO_ITEMS
    """Records by name."""
    exported: Mapping[str, int] = NO_ITEMS
    """How much was sent to a collector, by signal."""
    lost: Mapping[str, int] = NO_ITEMS
    """How much was not sent, by signal."""


@record
class View:
    """What is known at one moment."""

    node: NodeStatus | None = None
    """This node; None if its workers have not been looked at yet."""
    ranks: tuple[RankStatus, ...] = ()
    """The ranks of this node."""
    job: JobStatus | None = None
    """The job; None if another node leads."""
    failures: tuple[tuple[str, int], ...] = ()
    """The job's failures by cause, when `failure_exemplars` were found."""
    failure_exemplars: Mapping[str, Exemplar] = NO_ITEMS
    """The last round that ended by each cause."""
    state: str = JobState.STARTING.value
    """What this node does."""
    started_s: float = 0.0
    """When this node's agent started, by the wall clock."""
    round: int = 0
    attempt: int = 0
    max_restarts: int = 0
    role: str = "default"
    version: str = ""
    counts: Counts = Counts()
    torch: TorchNames = TorchNames()


_JOB: Final = (
    ("muster_job_start_timestamp_seconds", "started_s", "When the job's first agent started."),
    ("muster_job_steps_planned", "total", "How many steps the job is to do."),
    ("muster_job_steps_per_second", "rate", "The rate of the rank that has done the fewest steps."),
    ("muster_job_eta_seconds", "eta_s", "Until the last step, at this rate."),
    ("muster_job_round", "round", "The number of the round."),
    ("muster_job_attempt", "attempt", "How often workers were restarted because one failed."),
    ("muster_job_restarts_left", "restarts_left", "What is left of --max-restarts."),
    ("muster_job_ranks", "world_size", "Ranks of the round."),
    ("muster_job_snapshot_step", "snapshot_step", "Of the newest snapshot in memory that all ranks have."),
    ("muster_job_peak_memory_bytes", "peak_memory_bytes", "The most memory that one rank had."),
    ("muster_job_time_to_start_seconds", "time_to_start_s", "From the first agent's start to the first step."),
    ("muster_job_goodput_ratio", "goodput.fraction", "The part of the time that went into steps that count, 0 to 1."),
    ("muster_job_productive_seconds", "goodput.productive_s", "Time in steps that count; a restart may take it back."),
    ("muster_job_paused_seconds", "goodput.pause_s", "Time in pauses, which is neither productive nor lost."),
)
"""Name, field of `JobStatus` and meaning, for metrics without labels."""

_RANK: Final = (
    ("muster_rank_steps_per_second", "rate", "Its rate."),
    ("muster_rank_still_seconds", "still_s", "Since its last step."),
    ("muster_rank_cpu_cores", "cpu", "Cores that it and its child processes use."),
    ("muster_rank_memory_bytes", "memory_bytes", "Their resident memory."),
    ("muster_rank_gpu_utilization_ratio", "gpu", "Use of its GPU, 0 to 1."),
    ("muster_rank_gpu_memory_bytes", "gpu_memory_bytes", "Memory of its GPU that is in use."),
    ("muster_rank_gpu_temperature_celsius", "device.temperature_c", "Of its GPU."),
    ("muster_rank_gpu_power_watts", "device.power_w", "That its GPU takes."),
    ("muster_rank_gpu_clock_hertz", "device.clock_hz", "Of the processors of its GPU."),
    ("muster_rank_gpu_xid_errors", "device.xids", "Errors (Xid) of its GPU since the agent's start."),
    ("muster_rank_gpu_ecc_corrected_errors", "device.ecc_corrected", "Errors of its GPU's memory since then."),
    ("muster_rank_gpu_ecc_uncorrected_errors", "device.ecc_uncorrected", "Those that could not be corrected."),
    ("muster_rank_gpu_nvlinks", "device.links", "NVLinks of its GPU that are active."),
    ("muster_rank_collective_seconds", "collective_s", "Since it entered a collective."),
)
"""The same for `RankStatus`."""

_CAUSES: Final = ("worker", "hang", "node", "fenced")
"""Causes that exist from the beginning: for Prometheus, a counter that begins at 1 has no increase."""


def build_families(view: View) -> list[Family]:
    """Return all metrics that have a value at this moment."""
    families = [] if view.job is None else _build_job(view, view.job)
    families += [*_build_node(view), *_build_ranks(view.ranks), *_build_torch(view.torch, (("role", view.role),))]
    return [family for family in families if family.points or family.histogram]


def _build_job(view: View, job: JobStatus) -> list[Family]:
    goodput = job.goodput
    failures = {**dict.fromkeys(_CAUSES, 0), **dict(job.failures)}
    counted = tuple(
        Point(labels=(("cause", cause),), value=count, exemplar=view.failure_exemplars.get(cause))
        for cause, count in failures.items()
    )
    role = (("role", view.role),)
    left = job.restarts_left
    return [
        _gather(
            "muster_job_state",
            "1 for the state that the job is in, 0 for all others.",
            (((("state", each.value),), int(job.state is each)) for each in JobState),
        ),
        _gather(
            "muster_job_step",
            "The step of the rank that has done the fewest.",
            [((), job.optimizer_steps if job.step is None else job.step)],
        ),
        *(_gather(name, text, [((), _read(job, path))]) for name, path, text in _JOB),
        _gather(
            "muster_job_value",
            "What the script reports with its steps, such as the loss.",
            (((("name", name),), _parse_value(value)) for name, value in job.values),
        ),
        _gather(
            "muster_job_nodes",
            "Nodes that take part, are spare, or are lost.",
            (
                ((("state", state),), count)
                for state, count in (
                    ("running", job.nodes_running),
                    ("spare", job.nodes_spare),
                    ("lost", job.nodes_lost),
                )
            ),
        ),
        _gather(
            "muster_job_slow_rank_late_seconds",
            "How much later than the others a slow rank arrives at each step.",
            (
                ((("rank", str(each.global_rank)), ("host", each.host)), each.late_s)
                for each in job.slow_ranks
                if each.is_chronic
            ),
        ),
        _gather(
            "muster_job_lost_seconds",
            "All other time but pauses, by cause.",
            (((("cause", cause),), lost_s) for cause, lost_s in (() if goodput is None else goodput.lost_s)),
        ),
        Family(
            name="muster_job_failures",
            kind=Kind.COUNTER,
            text="Rounds that ended because of a worker, a hang, a lost node, or a silent leader (fenced).",
            points=counted,
        ),
        _gather(
            "muster_job_causes",
            "Failures by the class of their cause.",
            (((("class", each),), view.counts.causes.get(each, 0)) for each in CLASSES),
            Kind.COUNTER,
        ),
        Family(
            name="muster_job_recovery_seconds",
            kind=Kind.HISTOGRAM,
            text="From the end of a round until the job had caught up.",
            histogram=view.counts.recoveries,
        ),
        _gather("torchelastic_workers_remaining_restarts", "torch's name of restarts left.", [(role, left)]),
        _gather(
            "torchelastic_workers_flakiness",
            "torch's: which part of the restarts is used up, in per cent.",
            [(role, None if left is None else _compute_flakiness(left, view))],
        ),
    ]


def _build_node(view: View) -> list[Family]:
    node = view.node
    info = (
        ("host", "" if node is None else node.host),
        ("node", "" if node is None or node.node is None else str(node.node)),
        ("role", view.role),
        ("version", view.version),
    )
    found = [
        _gather("muster_node_info", "1; what this agent is, as labels.", [(info, 1)]),
        _gather("muster_node_start_timestamp_seconds", "When this agent started.", [((), view.started_s or None)]),
        _gather(
            "muster_node_leads",
            "1: this agent leads and reports the job. 0: another one does.",
            [((), int(view.job is not None))],
        ),
        _gather("muster_node_round", "The round that this node takes part in.", [((), view.round)]),
        _gather("muster_node_cpu_cores", "Cores that its workers use together.", [((), _read(node, "cpu"))]),
        _gather("muster_node_memory_bytes", "Their memory together.", [((), _read(node, "memory_bytes"))]),
        _gather(
            "muster_node_workers",
            "Workers of this node, by state.",
            (((("state", each.value),), sum(rank.state is each for rank in view.ranks)) for each in RankState),
        ),
    ]
    counts = view.counts
    for name, text, counted, label in (
        ("muster_agent_events", "Records of events.jsonl, by name.", counts.events, "what"),
        ("muster_agent_otlp_exported", "Spans and metrics that a collector has taken.", counts.exported, "signal"),
        (
            "muster_agent_otlp_lost",
            "Spans and metrics that no collector has taken and that were given up.",
            counts.lost,
            "signal",
        ),
    ):
        points = (((((label, each),), n)) for each, n in counted.items())
        found.append(_gather(name, text, points, Kind.COUNTER))
    return found


def _build_ranks(ranks: tuple[RankStatus, ...]) -> list[Family]:
    labels = [(("rank", str(rank.global_rank)),) for rank in ranks]
    steps = [rank.optimizer_steps if rank.step is None else rank.step for rank in ranks]
    text = "The step of the rank, else the steps of its optimizer."
    return [
        _gather("muster_rank_step", text, zip(labels, steps, strict=True)),
        *(
            _gather(name, text, zip(labels, [_read(rank, path) for rank in ranks], strict=True))
            for name, path, text in _RANK
        ),
        _gather(
            "muster_rank_gpu_slowed",
            "1 for each reason for which its GPU is slower than it could be.",
            (
                ((*label, ("reason", reason)), 1)
                for label, rank in zip(labels, ranks, strict=True)
                if rank.device is not None and rank.device.slowed_by
                for reason in rank.device.slowed_by.split(", ")
            ),
        ),
    ]


def _build_torch(names: TorchNames, role: Labels) -> list[Family]:
    """See `TorchNames`."""
    states = [
        _gather(
            f"torchelastic_workers_{each}", "1 while this node's workers are so.", [(role, int(names.state == each))]
        )
        for each in STATES
    ]
    ends = [
        _gather(f"torchelastic_workers_{each}", "1 after the job has ended so.", [(role, int(names.end == each))])
        for each in ENDS
    ]
    total = [(role, int(names.end != ""))]
    took = (((("name", name),), took_ms) for name, took_ms in names.took_ms.items())
    calls = (((("name", name),), count) for name, count in names.calls.items())
    return [
        *states,
        _gather("torchelastic_workers_run", "1 after the job has ended.", total, Kind.COUNTER),
        *ends,
        _gather(
            "torchelastic_duration_ms", "How long torch's method of this name would have taken, the last time.", took
        ),
        _gather("torchelastic_success", "How often it would have been called.", calls, Kind.COUNTER),
    ]


def _read(known: object, path: str) -> float | int | None:
    """Return a field, or a field of it; None if it is unknown."""
    for name in path.split("."):
        known = getattr(known, name, None)
    return known if isinstance(known, float | int) else None


def _gather(name: str, text: str, points: Points, kind: Kind = Kind.GAUGE) -> Family:
    """Return a family with the points that have a value."""
    shown = tuple(Point(labels=labels, value=value) for labels, value in points if value is not None)
    return Family(name=name, kind=kind, text=text, points=shown)


def _parse_value(value: float | str) -> float | None:
    """Parse one of a rank's values, in which "nan", "inf" and "-inf" are text."""
    try:
        return float(value)
    except ValueError:
        return None


def _compute_flakiness(restarts_left: int, view: View) -> int:
    """Compute it as torch does: 0 with all restarts left, and 100 only after the job has failed."""
    if view.torch.end.startswith("run_failed"):
        return 100
    return int(100.0 - 100.0 * (restarts_left + 1) / (view.max_restarts + 1))


def count_value(histogram: Histogram, value: float, exemplar: Exemplar) -> Histogram:
    """Return the histogram with one more value."""
    place = next((at for at, bound in enumerate(RECOVERY_BOUNDS_S) if value <= bound), len(RECOVERY_BOUNDS_S))
    return Histogram(
        counts=tuple(count + (at >= place) for at, count in enumerate(histogram.counts)),
        total=histogram.total + value,
        exemplars={**histogram.exemplars, place: exemplar},
    )
