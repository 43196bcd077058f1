"""How a job that runs is doing, as records: its state, nodes, ranks, recoveries and events.

The leader's node writes a `JobStatus` into `status.json`. Commands, adapters and views read it by `codec.salvage`.
`status.schema.json` beside this module is its JSON schema. A field marked as sparse is left out while it has its
default. Every list and text has a limit, so that the file has one: `contract.STATUS_LIMIT_BYTES`.

A job of more than `LISTED_RANKS` ranks lists no ranks: its nodes name their slowest one. A job of more than
`LISTED_NODES` nodes lists those that differ. `nodes_running`, `nodes_spare` and `nodes_lost` count all.
"""

from enum import Enum
from typing import Annotated, Final

from muster._shared.contract import FORMAT
from muster._shared.fields import AS_OBJECT, SPARSE, Count, Integer, Limit, Line, Name, Number, Seconds, Step
from muster._shared.records import record
from muster._shared.reports import format_duration

LISTED_RANKS: Final = 256
LISTED_NODES: Final = 256
MOST_RECOVERIES: Final = 16
MOST_EVENTS: Final = 32
MOST_SLOW_RANKS: Final = 8
_VALUE_CHARS = 32

ShownValues = Annotated[tuple[tuple[Name, Number | Name], ...], Limit(most=8), AS_OBJECT]
"""What a rank shows beside its step, by name. "nan", "inf" and "-inf" are text."""
LastLine = Annotated[str, Limit(most=160)]
"""The last line of a rank's output, without escape sequences and control characters."""

# Left out while they have their default.
_Number = Annotated[Count, SPARSE]
_Number_ = Annotated[Count | None, SPARSE]
_Step = Annotated[Step | None, SPARSE]
_Seconds = Annotated[Seconds | None, SPARSE]
_Fraction = Annotated[Seconds | None, SPARSE]
_Name = Annotated[Name, SPARSE]
_Line = Annotated[Line, SPARSE]
_Values = Annotated[ShownValues, SPARSE]


class JobState(Enum):
    """What a job does."""

    STARTING = "starting"
    """No worker runs yet, and none has."""
    WAITING = "waiting"
    """For nodes: a round cannot be formed."""
    RUNNING = "running"
    PAUSED = "paused"
    DRAINING = "draining"
    """All ranks are to stop, or to save, at one step."""
    RESTARTING = "restarting"
    """A round has ended, and the next one has no workers yet."""
    HUNG = "hung"
    """It is reported to hang, and goes on."""
    ENDED = "ended"


class NodeState(Enum):
    """What a node is for the job."""

    RUNNING = "running"
    SPARE = "spare"
    """It waits until a round needs it."""
    LOST = "lost"
    """It took part in the last round, and cannot be reached."""


class RankState(Enum):
    """What the process of a rank does."""

    STARTING = "starting"
    RUNNING = "running"
    ENDED = "ended"
    """With code 0."""
    FAILED = "failed"


@record
class DeviceStatus:
    """What a GPU does, besides its use and the memory that is in use. None and "": it does not say."""

    memory_total_bytes: _Number_ = None
    temperature_c: _Number_ = None
    """Degrees Celsius."""
    power_w: _Number_ = None
    power_limit_w: _Number_ = None
    clock_hz: _Number_ = None
    """The clock rate of its processors."""
    slowed_by: _Name = ""
    """Why it is slower than it could be: "power cap, hardware thermal"."""
    xids: _Number = 0
    """Errors that the driver has reported (Xid), since the agent's first look."""
    last_xid: _Number_ = None
    """The number of the last one."""
    ecc_corrected: _Number = 0
    """Errors of its memory since then."""
    ecc_uncorrected: _Number = 0
    links: _Number_ = None
    """NVLinks that are active."""
    is_lost: Annotated[bool, SPARSE] = False
    """It has fallen off the bus."""


@record
class RankStatus:
    """One rank. A field that is None is not known, or does not apply."""

    global_rank: Count
    node: Count
    """The group rank of its node."""
    local_rank: Count
    state: Annotated[RankState, SPARSE] = RankState.RUNNING
    step: _Step = None
    total: _Step = None
    optimizer_steps: _Step = None
    """Where it has reported no step."""
    rate: _Seconds = None
    """Steps a second."""
    lag_steps: _Number = 0
    """Steps that it is behind the first rank."""
    phase: _Name = ""
    """As the script names it."""
    values: _Values = ()
    still_s: _Seconds = None
    """Since its last step. None: it has done none."""
    is_still: Annotated[bool, SPARSE] = False
    """Whether the time since its last step is clearly longer than earlier steps took."""
    cpu: _Fraction = None
    """In cores, with its child processes: 1.5 is one and a half."""
    memory_bytes: _Number_ = None
    """Resident, with its child processes."""
    gpu: _Fraction = None
    """Use of its GPU, 0..1."""
    gpu_memory_bytes: _Number_ = None
    device: Annotated[DeviceStatus | None, SPARSE] = None
    """Its GPU."""
    collective: _Name = ""
    """The one that it has entered and not completed: "all_reduce #6 of default_pg". "": none is known."""
    collective_s: _Seconds = None
    """Since it has entered it."""
    last_line: Annotated[LastLine, SPARSE] = ""


@record
class NodeStatus:
    """One node."""

    node_index: Count
    node: _Number_ = None
    """Its group rank. None: it takes no part in the round."""
    host: _Name = ""
    metrics: _Name = ""
    """Where its agent serves metrics, as "127.0.0.1:9464". "": it does not."""
    state: NodeState = NodeState.RUNNING
    age_s: _Seconds = None
    """The age of what is known of it, when the status was written."""
    ranks: _Number = 0
    """How many it runs."""
    first_rank: _Number_ = None
    """Its lowest global rank."""
    step: _Step = None
    """The step of its rank that has done the fewest."""
    most_step: _Step = None
    """The step of its rank that has done the most."""
    cpu: _Fraction = None
    """Cores that its workers use together."""
    memory_bytes: _Number_ = None
    """The memory of its workers together."""
    gpu: _Fraction = None
    """Mean use of its GPUs, 0..1."""
    gpu_memory_bytes: _Number_ = None
    """The memory of its GPUs together."""
    suspicion: _Line = ""
    """Why the node is the last choice for a round: "it failed first (device or link)"."""
    slowest: Annotated[RankStatus | None, SPARSE] = None
    """Where the job lists no ranks: its rank that has done the fewest steps."""


@record
class Goodput:
    """What part of the time went into steps that count.

    Productive is the time in steps that were not repeated after a restart, less what the first step of an attempt
    takes longer than the median. A pause counts neither as productive nor as lost. `_shared.goodput` has the rules.
    """

    fraction: Number = 0.0
    """productive / (productive + lost), 0..1."""
    productive_s: Seconds = 0.0
    lost_s: Annotated[tuple[tuple[Name, Seconds], ...], Limit(most=16), AS_OBJECT] = ()
    """By cause: "start" (until the first step), "waiting" (for nodes), "detect" (from the last step to the end of a
    round), "stop", "round" (until the next round), "restart" (workers to first step), "repeated" (steps done again),
    "checkpoint", "hang", "end" (after the last step)."""
    pause_s: Annotated[Seconds, SPARSE] = 0.0


@record
class Recovery:
    """What began a new round after the first one."""

    round: Count
    """The round that it led to."""
    attempt: Count
    cause: Line = ""
    """One clause: "rank 3 on host-b exited with code 1"."""
    time_s: Seconds = 0.0
    """When it began, by the leader's wall clock."""
    cost_s: _Seconds = None
    """What was lost from the last step before it until the job was as far as before. None: it is not yet."""
    parts_s: Annotated[tuple[tuple[Name, Seconds], ...], Limit(most=8), AS_OBJECT, SPARSE] = ()
    """What of it was lost to what, as in `Goodput.lost_s`: the parts sum up to the cost."""
    cause_class: _Name = ""
    """The class of a failure, one of `causes.CLASSES`."""
    snapshot_step: _Step = None
    """The step at which all ranks continued from memory. None: they did not."""
    repeated_steps: _Number_ = None
    """How many steps were done again then. None: not known."""
    is_resize: Annotated[bool, SPARSE] = False
    """Nothing had failed: nodes joined, or left as they were told to."""


@record
class JobEvent:
    """Something that a person may want to know of, in one line."""

    time_s: Seconds
    """By the leader's wall clock."""
    text: Line


@record
class SlowRank:
    """A rank that keeps the others waiting, beyond what is noise."""

    global_rank: Count
    node: Count
    host: _Name = ""
    is_chronic: bool
    """It was late in most of the time that was looked at. False: once."""
    late_s: Seconds
    """How much later it arrives at a step than the median rank."""
    late_fraction: Number = 0.0
    """The same as a part of the time of a step."""
    share: Number = 0.0
    """The share of the looks at which it was the last one, 0..1."""

    def describe(self) -> str:
        """Say it in one clause: "rank 3 on host-b is 0.21 s late at each step (34 % of it)"."""
        where = f" on {self.host}" if self.host else ""
        late = f"{self.late_s:.2g} s late" if self.late_s < 10 else f"{self.late_s:.0f} s late"
        if not self.is_chronic:
            return f"rank {self.global_rank}{where} was {late} once"
        part = f" ({self.late_fraction:.0%} of it)".replace("%", " %") if self.late_fraction > 0 else ""
        return f"rank {self.global_rank}{where} is {late} at each step{part}"


@record
class JobStatus:
    """How a job is doing. `step` to `values` are of the rank that has done the fewest steps."""

    format: Count = FORMAT
    round: Count = 0
    attempt: Count = 0
    state: JobState = JobState.RUNNING
    bar: _Name = ""
    """The name of the progress bar that step and total are from, such as "Epoch 2"; "bar" if it has none."""
    paused_since_s: Seconds | None = None
    """By the wall clock, as all times here."""
    step: Step | None = None
    total: Step | None = None
    optimizer_steps: Step | None = None
    """Where no step was reported."""
    rate: Seconds = 0.0
    """Steps a second."""
    values: ShownValues = ()
    time_s: Seconds = 0.0
    """When it was written."""
    most_steps_done: _Step = None
    """The most steps of an ended job in an earlier round, if those are more than in the last one."""
    run_id: _Name = ""
    reason: _Line = ""
    """Why the job is in its state, in one clause."""
    since_s: _Seconds = None
    """When it came into its state."""
    started_s: _Seconds = None
    """When its first agent started."""
    exit_code: Annotated[Integer | None, SPARSE] = None
    """The exit code of a job that has ended."""
    cause_class: _Name = ""
    """The class of the cause, one of `causes.CLASSES`, if a failure has ended the job or restarts it."""
    restarts_left: _Number_ = None
    eta_s: _Seconds = None
    """Seconds until the last step, at the present rate. None: not known."""
    world_size: _Number = 0
    """Ranks of the round."""
    goodput: Annotated[Goodput | None, SPARSE] = None
    """None: the script reports no steps."""
    time_to_start_s: _Seconds = None
    """From the start of its first agent to its first step. If no step is reported, it lasts until its workers ran."""
    failures: Annotated[tuple[tuple[Name, Count], ...], Limit(most=16), AS_OBJECT, SPARSE] = ()
    """How often a round ended because of a "worker" that failed, a "hang", a lost "node" or a silent leader
    ("fenced")."""
    nodes_running: _Number = 0
    nodes_spare: _Number = 0
    nodes_lost: _Number = 0
    nodes: Annotated[tuple[NodeStatus, ...], Limit(most=LISTED_NODES), SPARSE] = ()
    """In the order of their group ranks, then spare and lost ones."""
    ranks: Annotated[tuple[RankStatus, ...], Limit(most=LISTED_RANKS), SPARSE] = ()
    """In the order of their global ranks. It is empty if there are more than `LISTED_RANKS`."""
    recoveries: Annotated[tuple[Recovery, ...], Limit(most=MOST_RECOVERIES, keeps_end=True), SPARSE] = ()
    """The last ones, oldest first."""
    recovery_count: _Number = 0
    """How many there were."""
    resize_count: _Number = 0
    """How many of them only changed the size of the job."""
    events: Annotated[tuple[JobEvent, ...], Limit(most=MOST_EVENTS, keeps_end=True), SPARSE] = ()
    """The last ones, oldest first."""
    slow_ranks: Annotated[tuple[SlowRank, ...], Limit(most=MOST_SLOW_RANKS), SPARSE] = ()
    """The slowest first. Empty: none is slower than noise explains."""
    snapshot_step: _Step = None
    """The step of the newest snapshot in memory that all ranks are known to have. None: there is none."""
    snapshot_s: _Seconds = None
    """Since when that is known, by the wall clock."""
    peak_memory_bytes: _Number_ = None
    """The most that one rank had."""
    peak_memory_rank: _Number_ = None
    """Its global rank."""

    @property
    def steps_done(self) -> int:
        """How many steps were done. They are the optimizer's if the script reports none."""
        return (self.optimizer_steps or 0) if self.step is None else limit_steps(self.step + 1, self.total)

    @property
    def still_s(self) -> float | None:
        """The time since the last step, if that is clearly longer than earlier steps took."""
        ranks = self.ranks or tuple(node.slowest for node in self.nodes if node.slowest is not None)
        position = self.step, self.optimizer_steps
        last = [each for each in ranks if (each.step, each.optimizer_steps) == position]
        is_running = self.state in (JobState.RUNNING, JobState.HUNG)
        if not (is_running and last and all(each.is_still for each in last)):
            return None
        ages_s = {node.node: node.age_s or 0.0 for node in self.nodes}
        return min(ages_s.get(each.node, 0.0) + (each.still_s or 0.0) for each in last)

    def describe(self, paused_since: str = "") -> str:
        """Say it in a few words: "step 812 of 1000, 7.9 a second, loss 0.31", or since when the job is paused."""
        if self.step is None and self.optimizer_steps is None:
            return ""
        position = f"step {self.optimizer_steps} (by optimizer)" if self.step is None else f"step {self.step}"
        if self.state is JobState.PAUSED:
            parts = [f"paused at {position}{paused_since}"]
        else:
            position = f"{self.bar}: {position}" if self.bar else position
            parts = [position if self.step is None or self.total is None else f"{position} of {self.total}"]
            if (still_s := self.still_s) is not None:
                parts.append(f"no step for {format_duration(still_s)}")
            elif self.rate > 0:
                parts.append(f"{format_rate(self.rate)} a second")
        if self.snapshot_step is not None and self.snapshot_s is not None:
            age_s = max(0.0, self.time_s - self.snapshot_s)
            parts.append(f"snapshot of step {self.snapshot_step} ({age_s:.0f} s old)")
        return ", ".join([*parts, *(f"{name} {format_value(value)}" for name, value in self.values)])


def limit_steps(done: int, total: int | None) -> int:
    """Return how many steps were done, but no more than the total. A script may count them from 1, as Trainers do."""
    return min(done, max(done - 1, total or done))


def describe_steps(done: int, most: int, total: int | None, word: str = "") -> str:
    """Say how far a job is: "62 of 4000 steps", or "11 of 4000 steps, 62 before a restart".

    Args:
        done: in its last round.
        most: in any.
        total: None: not known.
        word: follows "steps".
    """
    now, before = limit_steps(done, total), limit_steps(most, total)
    text = f"{now}{f' of {total}' if total else ''} step{'s'[: (total or now) != 1]}{word}"
    return f"{text}, {before} before a restart" if before > now else text


def format_rate(rate: float) -> str:
    """Return the steps a second, as people read it."""
    return f"{rate:.2g}" if rate < 1 else f"{rate:.1f}" if rate < 20 else f"{rate:.0f}"


def format_value(value: float | str) -> str:
    """Return one of a rank's values, as people read it."""
    return value[:_VALUE_CHARS] if isinstance(value, str) else f"{value:.6g}"
