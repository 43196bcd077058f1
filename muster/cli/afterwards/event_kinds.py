"""What an agent writes into `events.jsonl`, by the name of the event: public.

Every line has the fields of `muster.agent.runtime.event_log.EventRecord`. `detail` has those of the record below that
`EVENT_KINDS` names. `events.schema.json` beside this module says the same as a JSON schema, and the documentation
prints this list. A later version may add events and fields. A reader ignores what it does not know, and refuses
records with another `format`.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final

from muster._shared.fields import AS_OBJECT, Count, Integer, Limit, Name, Number, Seconds
from muster._shared.records import record

Text = Annotated[str, Limit(most=1 << 16)]
Values = Annotated[tuple[tuple[Name, Number | Name], ...], Limit(most=64), AS_OBJECT]
Pids = Annotated[tuple[Count, ...], Limit(most=1 << 20)]


@record
class AgentStarted:
    """The agent runs."""

    pid: Count
    start: Name
    """How workers start."""
    host: Name = ""
    node_index: Count | None = None
    slurm_job: Name | None = None
    """The id of the Slurm job that the agent is part of."""


@record
class PreflightFinding:
    """A check has found that something on this machine is not as expected, or that nodes differ."""

    text: Text
    check: Name = ""
    """The name of the check, as in its table. "": nodes differ."""
    level: Name = "warning"
    """"error": the attempt ends. "warning": the job goes on."""


@record
class RoundFormed:
    """The node takes part in a round."""

    world_size: Count
    nodes: Count
    master: Name
    restarts_left: Integer
    rank_offset: Count = 0
    """Global rank of its first worker."""
    role_rank_offset: Count = 0
    role_world_size: Count = 0
    snapshot_step: Count | None = None
    """The step of the snapshot in memory from which all ranks continue. None: there is none."""


@record
class WorkersStarted:
    """All workers of the round run. `duration_s`: since `round_formed`."""


@record
class WorkerReleased:
    """One worker started."""

    local_rank: Count
    pid: Count
    how: Name
    """"warm": a parked fork became this worker. "cold": fork and exec."""
    reason: Text | None = None
    """Why it started cold, if a warm start was wanted."""


@record
class WorkerExited:
    """A worker's process ended."""

    code: Integer


@record
class WorkerFailed:
    """A worker has failed."""

    reason: Text


@record
class WorkersIdle:
    """`ranks` have shown no sign of life for the limit, or the job hangs.

    If `ranks` is empty, all ranks are active again.
    """


@record
class StacksTaken:
    """The stacks of `ranks` were read."""


@record
class RoundBroken:
    """The round ends."""

    kind: Name
    """"failure", "membership" (a node was lost or joined), "fenced", "final" or "drained"."""
    reason: Text
    hang: bool = False
    """The job hung."""
    joined: bool = False
    """Nodes have joined, and nothing has failed."""
    left: bool = False
    """Nodes leave as they were told to, and nothing has failed."""
    cause: Name = ""
    """The class of the failure that has ended the round (see the page on verdicts). "": no failure has."""


@record
class WorkersStopped:
    """No worker of the round is left. `duration_s`: since `round_broken`."""


@record
class WorkersNotEnded:
    """The kernel cannot end these processes."""

    pids: Pids


@record
class Fenced:
    """The guard has killed the workers, because the leader was silent for too long."""


@record
class DrainBegun:
    """The agents begin to agree on a step at which all ranks stop, save or pause."""

    drain: Count
    """Its number."""
    kind: Name
    """"stop", "checkpoint" or "pause"."""
    limit_s: Seconds = 0.0


@record
class DrainCommitted:
    """The agents have agreed on the step. `duration_s`: since `drain_begun`."""

    drain: Count
    step: Count


@record
class DrainWithdrawn:
    """The agents cannot agree on a step, or a pause or checkpoint has ended. The ranks go on."""

    drain: Count
    reason: Text


@record
class Requested:
    """A person has asked the job for something with the `muster` command, through this agent."""

    kind: Name
    limit_s: Seconds | None = None


@record
class RequestAnswered:
    """The leader has answered a person's request."""

    outcome: Name
    text: Text


@record
class CheckpointCompleted:
    """All ranks of the job have saved a checkpoint."""

    step: Count
    path: Text | None


@record
class StepsDone:
    """How far the job is. The leader writes it once a second, after an hour once a minute, and when a round ends.

    If no step is reported, it is not written.
    """

    done: Count
    """The steps of the rank that has done the fewest: 1 + its last step, or the number that its optimizer has
    counted."""
    is_counted: bool
    """True: the script counts the steps, across attempts. False: the optimizer does, from 0 in each attempt."""
    ago_s: Seconds
    """The time between the last step of that rank and this record."""
    total: Count | None = None
    rate: Number | None = None
    """Steps a second."""
    phase: Name = ""
    """The phase, as the script names it."""
    values: Values = ()
    """Numbers that the script reports, such as the loss."""


@record
class ClockCompared:
    """How much the leader's clock is ahead of the clock of this agent's records. Heartbeats show it.

    The agent writes it again when the difference has changed by more than its uncertainty, or when another node leads.
    """

    member: Name
    """This agent, as rendezvous names it."""
    leader: Name
    """The leader. It is equal to `member` if this agent leads."""
    ahead_s: Seconds
    """`monotonic_s` plus this is the leader's CLOCK_BOOTTIME."""
    uncertainty_s: Seconds
    """`ahead_s` is wrong by at most this: half of the time that the quickest answer to a heartbeat took."""


@record
class NodesAwaited:
    """The next round cannot be formed: nodes are missing."""

    reason: Text


@record
class TemplateReady:
    """Warm starts: the template has imported what workers need."""

    modules: Annotated[tuple[Name, ...], Limit(most=1 << 16)] | Count
    import_s: Seconds
    rss_bytes: Count | None = None
    """Missing if workers are forks of the Python program that started the job."""
    pss_bytes: Count | None = None


@record
class TemplateEnded:
    """Warm starts: the template is gone."""

    status: Integer | None
    reason: Text
    last_line: Text


@record
class WorkersParked:
    """Warm starts: forks wait for the next round."""

    count: Count
    duration_s: Seconds
    """How long the forks took."""


@record
class Signal:
    """The agent received a signal."""

    name: Name
    guard_died: bool


@record
class Notice:
    """A line was printed."""

    text: Text


@record
class HangNamed:
    """A line was printed that reports a hang. The job goes on."""

    text: Text


@record
class HangEnded:
    """A line was printed that says that the hang is over."""

    text: Text


@record
class HangExplained:
    """A hang has ended the round. A line was printed that says which ranks kept the others waiting."""

    text: Text


@record
class StoodStill:
    """A line was printed that says that the job stands still, and may hang."""

    text: Text


@record
class MovedAgain:
    """The job stood still. A line was printed that says that it goes on again."""

    text: Text


@record
class RendezvousLost:
    """Rendezvous failed."""

    reason: Text


@record
class JobEnded:
    """The job has ended on all nodes."""

    succeeded: bool
    drained: bool = False
    reason: Text = ""
    """Why it failed."""


@record
class AgentEnded:
    """The agent ends."""

    exit_code: Count


EVENT_KINDS: Final[Mapping[str, type[Any]]] = {
    "agent_started": AgentStarted,
    "preflight_finding": PreflightFinding,
    "round_formed": RoundFormed,
    "workers_started": WorkersStarted,
    "worker_released": WorkerReleased,
    "worker_exited": WorkerExited,
    "worker_failed": WorkerFailed,
    "workers_idle": WorkersIdle,
    "stacks_taken": StacksTaken,
    "round_broken": RoundBroken,
    "workers_stopped": WorkersStopped,
    "workers_not_ended": WorkersNotEnded,
    "fenced": Fenced,
    "drain_begun": DrainBegun,
    "drain_committed": DrainCommitted,
    "drain_withdrawn": DrainWithdrawn,
    "requested": Requested,
    "request_answered": RequestAnswered,
    "checkpoint_completed": CheckpointCompleted,
    "steps_done": StepsDone,
    "clock_compared": ClockCompared,
    "nodes_awaited": NodesAwaited,
    "template_ready": TemplateReady,
    "template_ended": TemplateEnded,
    "workers_parked": WorkersParked,
    "signal": Signal,
    "notice": Notice,
    "hang_named": HangNamed,
    "hang_ended": HangEnded,
    "hang_explained": HangExplained,
    "stood_still": StoodStill,
    "moved_again": MovedAgain,
    "rendezvous_lost": RendezvousLost,
    "job_ended": JobEnded,
    "agent_ended": AgentEnded,
}
