"""What nodes write to one another before they are leader and member: who is there, and who leads."""

from muster.agent.rendezvous.protocol.fields import NonsenseError, count, optional, place, port, take, text
from muster.agent.rendezvous.protocol.framing import Message
from muster.agent.rendezvous.protocol.leader_messages import Rejected, read_rejection
from muster.agent.rendezvous.protocol.member_messages import Join, read_join
from muster.agent.runtime.records import record

ROLES = frozenset({"leader", "candidate", "following", "seeking"})


@record
class Question:
    """Who are you, and who leads?"""

    run_id: str


@record
class Call:
    """An acting leader calls at the job's endpoint."""

    run_id: str
    id: str
    round: int
    port: int


@record
class Status:
    """The answer to a question."""

    role: str
    """One of `ROLES`."""
    round: int
    rank: int | None
    """Its group rank in that round."""
    id: str
    index: int | None
    leader: tuple[str, int] | None
    """Where its leader is."""


@record
class CallHeard:
    """The answer to a call: lead on."""


@record
class Yield:
    """The answer to a call: a leader of a later round is here."""

    port: int


def read_run_id(message: Message) -> str:
    """Which job a visitor speaks of: the one thing that a visitor of another version must write as we do.

    Raises:
        NonsenseError: it is missing, or no text.
    """
    return take(message, "run_id", text)


def read_visit(message: Message) -> Question | Call | Join | None:
    """What somebody wants who has come to our door; None for kinds of newer versions.

    Raises:
        NonsenseError: nobody of ours writes such a letter.
    """
    kind = take(message, "t", text)
    if kind == "ask":
        return Question(run_id=read_run_id(message))
    if kind == "join":
        return read_join(message)
    if kind == "acting":
        return Call(
            run_id=read_run_id(message),
            id=take(message, "id", text),
            round=take(message, "round", count),
            port=take(message, "port", port),
        )
    return None


def build_question(run_id: str) -> Message:
    """See `Question`."""
    return {"t": "ask", "run_id": run_id}


def build_call(call: Call) -> Message:
    """See `Call`."""
    return {"t": "acting", "run_id": call.run_id, "id": call.id, "round": call.round, "port": call.port}


def build_status(status: Status) -> Message:
    """See `Status`."""
    return {
        "t": "status",
        "role": status.role,
        "round": status.round,
        "rank": status.rank,
        "id": status.id,
        "index": status.index,
        "leader": status.leader,
    }


def read_reply(message: Message) -> Status | Rejected | None:
    """The answer to a question; None for kinds of newer versions.

    Raises:
        NonsenseError: nobody of ours writes such a letter.
    """
    kind = take(message, "t", text)
    if kind == "reject":
        return read_rejection(message)
    if kind != "status":
        return None
    role = take(message, "role", text)
    if role not in ROLES:
        raise NonsenseError(f"'role': not one of {', '.join(sorted(ROLES))}")
    return Status(
        role=role,
        round=take(message, "round", count),
        rank=take(message, "rank", optional(count)),
        id=take(message, "id", text),
        index=take(message, "index", optional(count)),
        leader=take(message, "leader", optional(place)),
    )


def build_call_heard() -> Message:
    """See `CallHeard`."""
    return {"t": "heard"}


def build_yield(own_port: int) -> Message:
    """See `Yield`."""
    return {"t": "yield", "port": own_port}


def read_call_reply(message: Message) -> CallHeard | Yield | None:
    """The answer to a call; None for kinds of newer versions.

    Raises:
        NonsenseError: nobody of ours writes such a letter.
    """
    kind = take(message, "t", text)
    if kind == "yield":
        return Yield(port=take(message, "port", port))
    return CallHeard() if kind == "heard" else None
