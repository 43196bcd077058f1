"""Messages between nodes before they are leader and member: leader queries, and announcements after a takeover."""

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
    """Asks a node what its role is and where its leader is."""

    run_id: str


@record
class Announcement:
    """An acting leader announces itself at the job's endpoint."""

    run_id: str
    id: str
    round: int
    port: int
    rules: JobRules
    """What its job was started with."""


@record
class QueryReply:
    """The reply to a `LeaderQuery`."""

    role: str
    """One of `ROLES`."""
    round: int
    rank: int | None
    """Its group rank in that round."""
    id: str
    index: int | None
    leader: tuple[str, int] | None
    """Address of its leader, if that is another node."""
    rules: JobRules
    """What it was started with."""


@record
class AnnouncementAcknowledged:
    """The reply to an `Announcement`: this node accepts it."""


@record
class AnnouncementRefused:
    """The reply to an `Announcement`: this node leads a later round."""

    port: int


def read_run_id(message: Message) -> str:
    """The job that a first message is for: the one field that every version must write alike.

    Raises:
        MalformedMessageError: it is missing, or not text.
    """
    return read_field(message, "run_id", text)


def read_first_message(message: Message) -> LeaderQuery | Announcement | Join | None:
    """Parse the first message on a new connection; None for types of newer versions.

    Raises:
        MalformedMessageError: it is malformed.
    """
    kind = read_field(message, "type", text)
    if kind == "leader_query":
        return LeaderQuery(run_id=read_run_id(message))
    if kind == "join":
        return read_join(message)
    if kind == "announcement":
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
    return {"type": "leader_query", "run_id": run_id}


def build_announcement(announcement: Announcement) -> Message:
    """See `Announcement`."""
    return {
        "type": "announcement",
        "run_id": announcement.run_id,
        "id": announcement.id,
        "round": announcement.round,
        "port": announcement.port,
        "rules": describe_job_rules(announcement.rules),
    }


def build_query_reply(reply: QueryReply) -> Message:
    """See `QueryReply`."""
    return {
        "type": "query_reply",
        "role": reply.role,
        "round": reply.round,
        "rank": reply.rank,
        "id": reply.id,
        "index": reply.index,
        "leader": reply.leader,
        "rules": describe_job_rules(reply.rules),
    }


def read_query_reply(message: Message) -> QueryReply | Rejected | None:
    """Parse the reply to a `LeaderQuery`; None for types of newer versions.

    Raises:
        MalformedMessageError: it is malformed.
    """
    kind = read_field(message, "type", text)
    if kind == "rejected":
        return read_rejection(message)
    if kind != "query_reply":
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
    return {"type": "announcement_acknowledged"}


def build_announcement_refusal(own_port: int) -> Message:
    """See `AnnouncementRefused`."""
    return {"type": "announcement_refused", "port": own_port}


def read_announcement_reply(message: Message) -> AnnouncementAcknowledged | AnnouncementRefused | None:
    """Parse the reply to an `Announcement`; None for types of newer versions.

    Raises:
        MalformedMessageError: it is malformed.
    """
    kind = read_field(message, "type", text)
    if kind == "announcement_refused":
        return AnnouncementRefused(port=read_field(message, "port", port))
    return AnnouncementAcknowledged() if kind == "announcement_acknowledged" else None
