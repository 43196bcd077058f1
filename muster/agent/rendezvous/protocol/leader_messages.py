"""Messages from the leader to its members."""

from collections.abc import Callable, Iterator
from typing import Any

from muster.agent.diagnosis.report import Report
from muster.agent.rendezvous.consensus.actions import BreakRound, FormRound
from muster.agent.rendezvous.consensus.members import RecoveryState
from muster.agent.rendezvous.interface import BreakKind
from muster.agent.rendezvous.protocol.fields import (
    MalformedMessageError,
    boolean,
    count,
    host,
    items,
    list_of,
    optional,
    port,
    read_field,
    seconds,
    size,
    text,
)
from muster.agent.rendezvous.protocol.framing import Broadcast, Message
from muster.agent.rendezvous.protocol.payloads import build_recovered_round, read_recovery_state, read_report
from muster.agent.round import Round
from muster.agent.runtime.records import record


@record
class Successor:
    """The address of a member of the round that may take over when the leader is lost."""

    group_rank: int
    index: int | None
    host: str
    port: int


@record
class Welcome:
    """The leader has accepted the member."""

    leader_id: str
    listen_port: int
    """A port that only the leader's process listens on; 0: none."""


@record
class HeartbeatReply:
    """The leader has received a heartbeat."""

    number: int
    at_s: float
    """The leader's CLOCK_BOOTTIME, to be sent back."""
    ended: tuple[int, frozenset[int]] | None
    """A round, and the group ranks of it whose process end was seen."""


@record
class RoundSummary:
    """What every member, also one without an assignment, must know of a round to find the next leader."""

    recovery_state: RecoveryState
    successors: tuple[Successor, ...]
    is_spare: bool = False
    """The job is full: the member waits as a spare."""


@record
class RoundStart:
    """A round in which the member has an assignment."""

    summary: RoundSummary
    round: Round
    """Without the node index: the member fills it in."""


@record
class Rank0Started:
    """The workers of the node with global rank 0 have been started: see `interface.GlobalRank0Started`."""

    round: int


@record
class RoundCommitted:
    """Every member of the round has acknowledged it: older rounds are no quorum bases any more."""

    round: int


@record
class RoundBreak:
    """The round has ended: stop its workers."""

    round: int
    kind: BreakKind
    reason: str
    want_stacks: bool
    next_attempt: int
    startup_signature: str | None


@record
class JobEnd:
    """The job has ended."""

    succeeded: bool
    report: Report | None
    prints_report: bool


@record
class Exit:
    """All members have acknowledged the job's end: exit."""


@record
class RendezvousFailure:
    """No round was formed within the join timeout."""

    reason: str


@record
class Rejected:
    """This node is not accepted."""

    reason: str
    usage: bool
    """It is a mistake of the caller."""


@record
class Redirect:
    """Another leader knows a later round."""

    host: str
    port: int


@record
class Goodbye:
    """The leader closes this connection; its process has not ended."""

    reason: str


LeaderMessage = (
    Welcome
    | HeartbeatReply
    | RoundStart
    | RoundSummary
    | Rank0Started
    | RoundCommitted
    | RoundBreak
    | JobEnd
    | Exit
    | RendezvousFailure
    | Rejected
    | Redirect
    | Goodbye
)


def read_leader_message(message: Message) -> LeaderMessage | None:
    """Parse a leader's message; None for types of newer versions.

    Raises:
        MalformedMessageError: it is malformed.
    """
    read = _READERS.get(read_field(message, "type", text))
    return None if read is None else read(message)


# -- membership ---------------------------------------------------------------------------------------------------


def build_welcome(leader_id: str, listen_port: int) -> Message:
    """See `Welcome`."""
    return {"type": "welcome", "id": leader_id, "listen_port": listen_port}


def _read_welcome(message: Message) -> Welcome:
    return Welcome(leader_id=read_field(message, "id", text), listen_port=read_field(message, "listen_port", port))


def build_heartbeat_reply(reply: HeartbeatReply) -> Message:
    """See `HeartbeatReply`."""
    message: Message = {"type": "heartbeat_reply", "number": reply.number, "at_s": reply.at_s}
    if reply.ended is not None:
        number, ranks = reply.ended
        message["ended"] = [number, sorted(ranks)]
    return message


def _read_heartbeat_reply(message: Message) -> HeartbeatReply:
    ended = read_field(message, "ended", _read_ended) if "ended" in message else None
    number, at_s = read_field(message, "number", count), read_field(message, "at_s", seconds)
    return HeartbeatReply(number=number, at_s=at_s, ended=ended)


def _read_ended(value: Any) -> tuple[int, frozenset[int]]:
    number, ranks = items(2)(value)
    return count(number), frozenset(list_of(count)(ranks))


# -- rounds -------------------------------------------------------------------------------------------------------


def build_round_summary(
    form: FormRound, member_id: str, successors: tuple[Successor, ...], *, is_spare: bool
) -> Message:
    """See `RoundSummary`."""
    shared = _describe_round(form, successors)
    return {
        "type": "round_summary",
        **shared,
        "quorum_bases": _list_recovered_rounds(form, member_id),
        "is_spare": is_spare,
    }


def _describe_round(form: FormRound, successors: tuple[Successor, ...]) -> Message:
    places = [[one.group_rank, one.index, one.host, one.port] for one in successors]
    return {
        "round": form.round_number,
        "attempt": form.attempt,
        "startup_signature": form.startup_signature,
        "successors": places,
    }


def _list_recovered_rounds(form: FormRound, member_id: str) -> list[dict[str, Any]]:
    return [build_recovered_round(each.build_recovered(member_id)) for each in form.quorum_rounds]


def build_round_starts(form: FormRound, master_addr: str, successors: tuple[Successor, ...]) -> Iterator[Message]:
    """One `RoundStart` per assignment, in order. The size of each does not grow with the number of members."""
    broadcast = Broadcast(
        {
            "type": "round_start",
            **_describe_round(form, successors),
            "restarts_left": form.restarts_left,
            "size": len(form.assignments),
            "world_size": form.world_size,
            "master_addr": master_addr,
            "master_port": form.master_port,
        }
    )
    for assignment in form.assignments:
        yield broadcast.build_copy(
            group_rank=assignment.group_rank,
            rank_offset=assignment.rank_offset,
            role_rank_offset=assignment.role_rank_offset,
            role_world_size=assignment.role_world_size,
            quorum_bases=_list_recovered_rounds(form, assignment.id),
        )


def _read_round_summary(message: Message) -> RoundSummary:
    return RoundSummary(
        recovery_state=read_recovery_state(message),
        successors=read_field(message, "successors", list_of(_read_successor)),
        is_spare=read_field(message, "is_spare", boolean) if "is_spare" in message else False,
    )


def _read_successor(value: Any) -> Successor:
    rank, index, name, at = items(4)(value)
    return Successor(group_rank=count(rank), index=optional(count)(index), host=host(name), port=port(at))


def _read_round_start(message: Message) -> RoundStart:
    summary = _read_round_summary(message)
    round_ = Round(
        number=summary.recovery_state.round_number,
        attempt=summary.recovery_state.attempt,
        restarts_left=read_field(message, "restarts_left", count),
        group_rank=read_field(message, "group_rank", count),
        group_world_size=read_field(message, "size", size),
        rank_offset=read_field(message, "rank_offset", count),
        world_size=read_field(message, "world_size", size),
        role_rank_offset=read_field(message, "role_rank_offset", count),
        role_world_size=read_field(message, "role_world_size", size),
        master_addr=read_field(message, "master_addr", host),
        master_port=read_field(message, "master_port", port),
    )
    if round_.group_rank >= round_.group_world_size or round_.rank_offset >= round_.world_size:
        raise MalformedMessageError(f"group rank {round_.group_rank} of {round_.group_world_size}")
    return RoundStart(summary=summary, round=round_)


def build_rank0_started(number: int) -> Message:
    """See `Rank0Started`."""
    return {"type": "rank0_started", "round": number}


def build_round_committed(number: int) -> Message:
    """See `RoundCommitted`."""
    return {"type": "round_committed", "round": number}


def build_round_break(action: BreakRound) -> Message:
    """See `RoundBreak`."""
    return {
        "type": "round_break",
        "round": action.round_number,
        "kind": action.kind.value,
        "reason": action.reason,
        "want_stacks": action.want_stacks,
        "next_attempt": action.next_attempt,
        "startup_signature": action.startup_signature,
    }


def _read_round_break(message: Message) -> RoundBreak:
    return RoundBreak(
        round=read_field(message, "round", count),
        kind=read_field(message, "kind", _read_kind),
        reason=read_field(message, "reason", text),
        want_stacks=read_field(message, "want_stacks", boolean),
        next_attempt=read_field(message, "next_attempt", count),
        startup_signature=read_field(message, "startup_signature", optional(text)),
    )


def _read_kind(value: Any) -> BreakKind:
    try:
        return BreakKind(text(value))
    except ValueError:
        raise MalformedMessageError("not a kind of round break") from None


# -- the end ------------------------------------------------------------------------------------------------------


def build_job_end(*, succeeded: bool, report: Report | None) -> Broadcast:
    """See `JobEnd`; only `prints_report` differs between members."""
    report_json = None if report is None else report.to_json()
    return Broadcast({"type": "job_end", "succeeded": succeeded, "report": report_json})


def _read_job_end(message: Message) -> JobEnd:
    return JobEnd(
        succeeded=read_field(message, "succeeded", boolean),
        report=read_field(message, "report", optional(read_report)),
        prints_report=read_field(message, "prints_report", boolean),
    )


def build_exit() -> Message:
    """See `Exit`."""
    return {"type": "exit"}


def build_rendezvous_failure(reason: str) -> Message:
    """See `RendezvousFailure`."""
    return {"type": "rendezvous_failure", "reason": reason}


def build_rejection(reason: str, *, usage: bool = False) -> Message:
    """See `Rejected`."""
    return {"type": "rejected", "reason": reason, "usage": usage}


def read_rejection(message: Message) -> Rejected:
    """The inverse of `build_rejection`.

    Raises:
        MalformedMessageError: a field is invalid.
    """
    return Rejected(reason=read_field(message, "reason", text), usage=read_field(message, "usage", boolean))


def build_redirect(to_host: str, to_port: int) -> Message:
    """See `Redirect`."""
    return {"type": "redirect", "host": to_host, "port": to_port}


def build_goodbye(reason: str) -> Message:
    """See `Goodbye`."""
    return {"type": "goodbye", "reason": reason}


_READERS: dict[str, Callable[[Message], LeaderMessage]] = {
    "welcome": _read_welcome,
    "heartbeat_reply": _read_heartbeat_reply,
    "round_start": _read_round_start,
    "round_summary": _read_round_summary,
    "rank0_started": lambda message: Rank0Started(round=read_field(message, "round", count)),
    "round_committed": lambda message: RoundCommitted(round=read_field(message, "round", count)),
    "round_break": _read_round_break,
    "job_end": _read_job_end,
    "exit": lambda _message: Exit(),
    "rendezvous_failure": lambda message: RendezvousFailure(reason=read_field(message, "reason", text)),
    "rejected": read_rejection,
    "redirect": lambda message: Redirect(
        host=read_field(message, "host", host), port=read_field(message, "port", port)
    ),
    "goodbye": lambda message: Goodbye(reason=read_field(message, "reason", text)),
}
