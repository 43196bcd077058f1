"""What nodes write to one another before they are leader and member: who is there, and who leads."""

from muster.agent.rendezvous.protocol.fields import (
    MalformedMessageError,
    address,
    count,
    optional,
    port,
    read_field,
    text,
)
from muster.agent.rendezvous.protocol.framing import Message
from muster.agent.rendezvous.protocol.job_rules import JobRules, describe_job_rules, read_job_rules
from muster.agent.rendezvous.protocol.leader_messages import Rejected, read_rejection
from muster.agent.rendezvous.protocol.member_messages import Join, read_join
from muster.agent.runtime.records import record

ROLES = frozenset({"leader", "candidate", "following", "seeking"})


@record
class LeaderQuery:
    """Who are you, and who leads?"""

    run_id: str


@record
class Announcement:
    """An acting leader calls at the job's endpoint."""

    run_id: str
    id: str
    round: int
    port: int
    rules: JobRules
    """What its job was started with."""


@record
class QueryReply:
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
    rules: JobRules
    """What it was started with."""


@record
class AnnouncementAcknowledged:
    """The answer to a call: lead on."""


@record
class AnnouncementRefused:
    """The answer to a call: a leader of a later round is here."""

    port: int


def read_run_id(message: Message) -> str:
    """Which job a visitor speaks of: the one thing that a visitor of another version must write as we do.

    Raises:
        NonsenseError: it is missing, or no text.
    """
    return read_field(message, "run_id", text)


def read_first_message(message: Message) -> LeaderQuery | Announcement | Join | None:
    """What somebody wants who has come to our door; None for kinds of newer versions.

    Raises:
        NonsenseError: nobody of ours writes such a letter.
    """
    kind = read_field(message, "t", text)
    if kind == "ask":
        return LeaderQuery(run_id=read_run_id(message))
    if kind == "join":
        return read_join(message)
    if kind == "acting":
        return Announcement(
            run_id=read_run_id(message),
            id=read_field(message, "id", text),
            round=read_field(message, "round", count),
            port=read_field(message, "port", port),
            rules=read_field(message, "rules", read_job_rules),
        )
    return None


def build_leader_query(run_id: str) -> Message:
    """See `LeaderQuery`."""
    return {"t": "ask", "run_id": run_id}


def build_announcement(call: Announcement) -> Message:
    """See `Announcement`."""
    return {
        "t": "acting",
        "run_id": call.run_id,
        "id": call.id,
        "round": call.round,
        "port": call.port,
        "rules": describe_job_rules(call.rules),
    }


def build_query_reply(status: QueryReply) -> Message:
    """See `QueryReply`."""
    return {
        "t": "status",
        "role": status.role,
        "round": status.round,
        "rank": status.rank,
        "id": status.id,
        "index": status.index,
        "leader": status.leader,
        "rules": describe_job_rules(status.rules),
    }


def read_query_reply(message: Message) -> QueryReply | Rejected | None:
    """The answer to a question; None for kinds of newer versions.

    Raises:
        NonsenseError: nobody of ours writes such a letter.
    """
    kind = read_field(message, "t", text)
    if kind == "reject":
        return read_rejection(message)
    if kind != "status":
        return None
    role = read_field(message, "role", text)
    if role not in ROLES:
        raise MalformedMessageError(f"'role': not one of {', '.join(sorted(ROLES))}")
    return QueryReply(
        role=role,
        round=read_field(message, "round", count),
        rank=read_field(message, "rank", optional(count)),
        id=read_field(message, "id", text),
        index=read_field(message, "index", optional(count)),
        leader=read_field(message, "leader", optional(address)),
        rules=read_field(message, "rules", read_job_rules),
    )


def build_announcement_acknowledgement() -> Message:
    """See `AnnouncementAcknowledged`."""
    return {"t": "heard"}


def build_announcement_refusal(own_port: int) -> Message:
    """See `AnnouncementRefused`."""
    return {"t": "yield", "port": own_port}


def read_announcement_reply(message: Message) -> AnnouncementAcknowledged | AnnouncementRefused | None:
    """The answer to a call; None for kinds of newer versions.

    Raises:
        NonsenseError: nobody of ours writes such a letter.
    """
    kind = read_field(message, "t", text)
    if kind == "yield":
        return AnnouncementRefused(port=read_field(message, "port", port))
    return AnnouncementAcknowledged() if kind == "heard" else None
