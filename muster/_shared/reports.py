"""What a job reports to people, as records: failures, stacks, progress, its report, answers to requests.

`job_view` has the status of a job that runs.

The agent writes them, with `_shared.codec`: to its leader, into files of the run's folder, into a container's last
message, as the answer of `muster-agent ask`. Adapters, commands and the Python API read them.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated

from muster._shared.contract import FORMAT, AskOutcome, describe_end
from muster._shared.fields import (
    AS_OBJECT,
    PACKED,
    SPARSE,
    Count,
    Integer,
    LateRanks,
    Limit,
    Line,
    Lines,
    Name,
    Paragraph,
    RoleName,
    Seconds,
    Step,
    Traceback,
)
from muster._shared.records import record, replace

Values = Annotated[tuple[tuple[Name, Name], ...], Limit(most=8), AS_OBJECT]
"""What a rank shows beside its step, by name: ("loss", "0.3125"). As text: a message holds no NaN."""


@record
class OomEvidence:
    """Why a SIGKILL is attributed to the OOM killer."""

    certain: bool
    """True when the cgroup's counter went up. False: a guess, and reported as one."""
    limit_bytes: Count | None = None
    peak_bytes: Count | None = None
    source: Line = ""
    """The file the evidence was read from."""


@record
class FailedCheck:
    """A check by which a feature has found that no worker of a node can run."""

    feature: Name
    name: Name
    advice: Line = ""
    """What starts the job all the same, in a clause."""
    cause: Name = ""
    """The class of what it has found. "": its text says more."""


@record
class Failure:
    """One failed worker. `time_s` is from the node's own wall clock: for people, not for ordering."""

    node: Count
    """The node's group rank in the round."""
    node_index: Count
    host: Name
    local_rank: Count
    global_rank: Count
    attempt: Count
    round: Count
    pid: Count
    time_s: Seconds
    age_s: Seconds = 0.0
    """Seconds since it happened, when it was sent. The leader orders by arrival minus age, never by wall clocks."""
    exit_code: Integer | None = None
    """None when a signal ended it."""
    signal: Name | None = None
    """"SIGKILL", for example. None: it exited."""
    reason: Line = ""
    """One line when no process has exited: it could not be started, or hung."""
    exception: Paragraph | None = None
    """"ValueError: the text", from error.json or stderr."""
    traceback: Traceback | None = None
    """The traceback's text, its last frames if it is long. For a fatal signal it is faulthandler's."""
    error_file: Line | None = None
    stderr_tail: Lines = ()
    """Last lines of the rank's stderr, oldest first. It is empty if stderr was not captured."""
    log_path: Line | None = None
    oom: OomEvidence | None = None
    stopped_by_us: bool = False
    """Ended after the agent had sent it a signal: always collateral."""
    collateral: bool = False
    """It failed because of the root cause. False for the root cause and for ranks that failed in the same way."""
    step: Count | None = None
    """The last step that the worker reported through `muster.worker`. None: it reported none."""
    total_steps: Count | None = None
    """How many steps it expected."""
    optimizer_steps: Count | None = None
    """Steps of its busiest optimizer, where it has reported no step itself and torch has done some."""
    values: Values = ()
    """What it showed beside its step."""
    ended_ranks: Annotated[tuple[Count, ...], Limit(most=64)] = ()
    """Global ranks, at most 64, that had ended with code 0 when it lost the connection to a peer."""
    early: bool = False
    """It failed with a start-up error within seconds. The same error twice in a row is not retried."""
    cause: Name = ""
    """The class of its cause, one of `causes.CLASSES`. "": it was ended by us."""
    evidence: Line = ""
    """The line that the class was found by. "": the end of the process says it."""
    requested_verdict: Name = ""
    """What the rank has said itself should follow: "stop" (`worker.give_up`), "elsewhere" (`worker.leave_node`)."""
    reports_steps: bool = False
    """Its script reports its steps, so that `step` None means that it has done none in this attempt."""
    hung: bool = False
    """It was alive but idle for the hang timeout. `reason` says what it did not do."""
    blocking: Annotated[Line, SPARSE] = ""
    """How a hung rank keeps the others waiting: "did not enter barrier". "": it waits, too, or nothing is known."""
    check: Annotated[FailedCheck | None, SPARSE] = None
    """What has found `reason`, which is then about the node."""
    advice: Annotated[Line, SPARSE] = ""
    """What a person can check or do next. "": the cause says enough."""
    saved_step: Annotated[Count | None, SPARSE] = None
    """The step of the snapshot or checkpoint from which the attempt could resume, if the rank has done no step."""

    def describe_end(self, *, plural: bool = False) -> str:
        """Say how it ended. `plural`: it and others, in the same way."""
        if self.hung:
            idle = f"hung: {self.reason}" if self.reason else "hung"
            return f"{self.blocking}; {idle}" if self.blocking else idle
        if self.reason or (self.exit_code is None and self.signal is None):
            return self.reason or "did not start"
        return describe_end(self.exit_code, self.signal, plural=plural)


ENTRY_LIMIT = 16
"""Entries that are kept of each group: those that are not done, and the last ones."""


@record
class Collective:
    """One call of a collective, or of send or recv, as the flight recorder of a rank has it."""

    number: Count
    """Counted by the group, from 1."""
    operation: Name
    """"all_reduce"."""
    sizes: Name
    """"4 x float32", for example. "": the recorder has none."""
    age_s: Seconds
    """Since the rank has entered it."""
    is_done: bool
    is_p2p: bool = False
    timeout_s: Seconds = 0.0
    """After which torch ends the rank if it is not done. 0: not known."""


@record
class Group:
    """A process group, as one rank sees it."""

    name: Name
    description: Name
    """What the program has called it, such as "default_pg". "": it has given no name."""
    entered: Count
    """The number of the last collective that this rank has entered. 0: none."""
    completed: Count
    ranks: Annotated[tuple[Count, ...], Limit(most=65536)] = ()
    """Global ranks. Empty: not known."""
    entries: Annotated[tuple[Collective, ...], Limit(most=ENTRY_LIMIT, keeps_end=True)] = ()
    """In the order of the calls."""


@record
class LaunchCount:
    """How often a rank has launched an operation, and the least and most often that a rank of its communicator has."""

    operation: Name
    """"AllReduce". "": all of them together."""
    by_rank: Count
    least: Count
    most: Count


@record
class Launches:
    """What NCCL's own monitor says of one rank in one communicator."""

    communicator: Name
    """Its hash. "": of several whose ranks agree, the largest."""
    size: Count
    state: Name = ""
    """See `agent.features.hangs.nccl_launches`. "": it runs."""
    counts: Annotated[tuple[LaunchCount, ...], Limit(most=16)] = ()
    """With an older NCCL, only those in which ranks differ."""
    still_s: Seconds = 0.0
    """For how long the reports have said the same. 0: there was one."""


ENDED = "X"
"""The state of a rank whose process has ended by itself. Source: proc(5), dead."""


@record
class RankView:
    """What is known of one rank of a job that may hang, at one moment."""

    global_rank: Count
    node: Count
    host: Name
    state: Name = ""
    """The kernel's process state (R, S, D, T: stopped, Z), or `ENDED`. "": not known."""
    is_answering: bool = False
    """Its server has answered."""
    has_server: bool = False
    is_initialising: bool = False
    """It is inside `init_process_group`."""
    groups: Annotated[tuple[Group, ...], Limit(most=64, keeps_end=True)] = ()
    launches: Annotated[tuple[Launches, ...], Limit(most=32), SPARSE] = ()

    @property
    def progress(self) -> tuple[int, ...] | None:
        """What changes whenever the rank enters or completes a collective. None: it has entered none."""
        counts = tuple(number for group in self.groups for number in (group.entered, group.completed))
        return counts if any(counts) else None

    def list_forms(self) -> "Iterator[RankView]":
        """Yield this view, then shorter ones, for a message that has no room for all: the last entries are kept."""
        yield self
        for entries, groups in ((4, 64), (2, 16), (1, 4)):
            kept = tuple(replace(group, entries=group.entries[-entries:]) for group in self.groups[-groups:])
            yield replace(self, groups=kept, launches=self.launches[:groups])


@record
class RankProgress:
    """How far a rank is, and what it did between two looks, one second apart."""

    global_rank: Count
    step: Step | None = None
    """The last that it has reported."""
    total: Step | None = None
    optimizer_steps: Step | None = None
    """Where it has reported none."""
    rate: Seconds = 0.0
    """Steps a second. 0: it has done none."""
    values: Values = ()
    moved: Line | None = None
    """It has done a step, or has entered or completed a collective: "all_reduce #6 of default_pg, 12 a second".

    "": this is all that is known. None: it has not.
    """
    is_busy: bool = False
    """It has used the CPU, or has written or loaded something."""
    still_s: Seconds | None = None
    """Since its last step or collective. None: it has shown none."""
    role: RoleName = ""

    def list_forms(self) -> "Iterator[RankProgress]":
        """See `RankView.list_forms`."""
        yield self
        yield replace(self, values=())


@record
class Stack:
    """Python stacks of one rank, collected while it was alive."""

    global_rank: Count
    node: Count
    local_rank: Count
    text: Traceback
    """"": it gave none."""
    view: Annotated[Annotated[RankView, PACKED] | None, SPARSE] = None
    """What its flight recorder says. It is not in the report. None: it was not read, or no message had room for it."""
    progress: Annotated[Annotated[RankProgress, PACKED] | None, SPARSE] = None
    """Not in the report either. None: it was not looked at twice, or no message had room for it."""
    role: RoleName = ""


@record
class FinalFailure:
    """Why the job has failed for good, as decided when its last round ended."""

    cause: Line
    """One clause about what failed, as far as it was known."""
    global_rank: Count | None = None
    """The rank that `cause` describes. None: it describes none."""
    verdict: Line = ""
    """One clause that says why no attempt follows. Empty: `cause` says it."""

    def describe(self) -> str:
        """Say both in one line."""
        return f"{self.cause}; {self.verdict}" if self.verdict else self.cause


Failures = Annotated[tuple[Failure, ...], Limit(most=4096)]
Stacks = Annotated[tuple[Stack, ...], Limit(most=4096)]


@record
class Report:
    """The one report of a failed job. `failures` is ordered by time on the leader's clock: the root cause first."""

    run_id: Name = ""
    reason: Paragraph
    """One line that names the root cause, and why the job ended: what console, status and schedulers show. The last
    message of a container may have room for nothing else."""
    attempt: Count = 0
    max_restarts: Count = 0
    """That were allowed: `--max-restarts`, and those that a rule gave free."""
    failures: Failures = ()
    stacks: Stacks = ()
    suspected: Annotated[tuple[Line, ...], Limit(most=64)] = ()
    """Nodes that are suspected to be at fault, one clause each."""
    format: Count = FORMAT


@record
class Answer:
    """What became of a person's request."""

    outcome: AskOutcome
    line: Line
    """For the person, see `control.describe_answer`."""
    is_unchanged: bool = False
    """Nothing was changed for it."""
    step: Step | None = None
    """The step that was agreed on. For `stacks` it is that of the rank that has done the fewest."""
    ranks: Count = 0
    """How many it concerns."""
    took_s: Seconds = 0.0
    late: LateRanks = ()
    stacks: Stacks = ()
    progress: Annotated[tuple[RankProgress, ...], Limit(most=4096)] = ()
    """The progress of the ranks whose stacks were asked for."""
    format: Count = FORMAT


def print_values(values: Mapping[str, float]) -> tuple[tuple[str, str], ...]:
    """Write numbers as people read them: 0.3125, 1.2e-05, nan."""
    return tuple((name, f"{number:.6g}") for name, number in values.items())


def format_size(size_bytes: int, decimals: int = 1) -> str:
    """Return a text such as `200 bytes`, `3 KiB`, `14 MiB`, `1.5 GiB`. `decimals` are those of the last one."""
    if size_bytes < 1 << 20:
        return f"{size_bytes} bytes" if size_bytes < 1 << 10 else f"{size_bytes / (1 << 10):.0f} KiB"
    if size_bytes < 1 << 30:
        return f"{size_bytes / (1 << 20):.0f} MiB"
    return f"{size_bytes / (1 << 30):.{decimals}f} GiB"


def format_duration(seconds: float, decimals: int = 1) -> str:
    """Return a text such as `0.4 s`, `12 s`, `3 min 5 s`, `2 h`, `1 d 4 h`. `decimals` are those below 10 s."""
    if seconds < 9.95:
        return f"{max(0.0, seconds):.{decimals}f} s"
    left, parts = round(seconds), list[str]()
    for unit_s, unit in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        count, left = divmod(left, unit_s)
        if count or parts:
            parts.append(f"{count} {unit}" if count else "")
    return " ".join(filter(None, parts[:2]))


def describe_replaced(replaced: int, processes: int, where: str = "") -> str:
    """Say of a round that some processes went on in how many others took the place of lost ones.

    >>> describe_replaced(1, 4)
    '1 of 4 processes was replaced, and the others kept running'
    >>> describe_replaced(0, 2, " of this node")
    '0 of 2 processes of this node were replaced, and the others kept running'
    """
    verb = "was" if replaced == 1 else "were"
    return f"{replaced} of {processes} processes{where} {verb} replaced, and the others kept running"


def remove_thread_ids(text: str) -> str:
    """Remove thread ids from stacks: all processes differ in them."""
    heads = (line.partition("hread 0x") for line in text.splitlines())
    return "\n".join(f"{head}hread" if sign else head for head, sign, _ in heads)


def name_ranks(ranks: Iterable[int]) -> str:
    """Return a text such as `rank 3`, or `ranks 0-3, 8`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank{'s' if len(spans) > 1 or spans[0][0] != spans[0][1] else ''} {text}"
