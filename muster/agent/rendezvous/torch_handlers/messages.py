"""What passes between `rendezvous` and the thread that owns torch's handler: commands one way, findings the other.

If that thread belongs to the program that drives this agent, each is one JSON line, {"rendezvous": message}.
"""

from enum import Enum

from muster._shared.codec import MessageUnion, encode_message
from muster._shared.fields import (
    Count,
    GroupRank,
    Name,
    Paragraph,
    Port,
    Processes,
    Size,
)
from muster._shared.records import record
from muster._shared.reports import Failure
from muster.agent.rendezvous.interface import Notice, RendezvousFailed
from muster.agent.rendezvous.torch_handlers.watch import FailedElsewhere, NodeLost

LINE_LIMIT_BYTES = 1 << 20
COMMAND_LIMIT_BYTES = 1 << 16
"""A writable socket takes this much at once."""


class Order(Enum):
    """What the thread must do."""

    NEXT = "next"
    """Join the next round."""
    PAUSE = "pause"
    """The round is broken; only send heartbeats."""
    DONE = "done"
    """All workers of this node have succeeded."""
    FAIL = "fail"
    """The job has failed for good. Tell the others why, with the root cause."""
    AWAIT_END = "await_end"
    """No worker is left here. Report when the others know the job's end."""
    STAND_STILL = "stand_still"
    """All workers of this node stand still. Tell the others, and report when those of all nodes do."""
    MOVE = "move"
    """The workers of this node have moved again."""
    QUIT = "quit"


@record
class Command:
    """A command. Commands are carried out in the order sent."""

    order: Order
    reason: Paragraph = ""
    """The reason, with `FAIL`."""
    root: Failure | None = None


@record
class HandlerFormedRound:
    """A round of torch's handler is complete. It has this node's place in the round, see `agent.round.Round`."""

    group_rank: GroupRank
    group_world_size: Size
    rank_offset: Count
    world_size: Processes
    role_rank_offset: Count
    role_world_size: Processes
    master_addr: Name
    master_port: Port
    use_agent_store: bool


@record
class NodesWaiting:
    """Nodes wait to join."""

    count: Count


@record
class EndKnown:
    """Every node that can know the job's end knows it."""

    succeeded: bool


@record
class AllStandStill:
    """The workers of all nodes stand still."""


ThreadFinding = (
    HandlerFormedRound
    | NodesWaiting
    | NodeLost
    | FailedElsewhere
    | EndKnown
    | AllStandStill
    | RendezvousFailed
    | Notice
)

COMMANDS: MessageUnion[Command] = MessageUnion(Command)
THREAD_FINDINGS: MessageUnion[ThreadFinding] = MessageUnion(ThreadFinding)


def encode_line(message: Command | ThreadFinding, limit_bytes: int = LINE_LIMIT_BYTES) -> bytes:
    """Return one line for the other process. Long texts are shortened."""
    return b'{"rendezvous":' + encode_message(message, limit_bytes).encode() + b"}\n"
