"""What the leader writes to its members, and how they read it."""

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
from muster.agent.rendezvous.protocol.payloads import build_base, read_recovery_state, read_report
from muster.agent.round import Round
from muster.agent.runtime.records import record


@record
class Successor:
    """Where a member of the round can be found that may lead when the leader is gone."""

    group_rank: int
    index: int | None
    host: str
    port: int


@record
class Welcome:
    """The leader has taken the member in."""

    leader_id: str
    listen: int
    """Where the leader's process, and nothing but it, listens; 0: nowhere."""


@record
class HeartbeatReply:
    """The leader has heard a heartbeat."""

    number: int
    at_s: float
    """The leader's CLOCK_BOOTTIME, to be sent back."""
    ended: tuple[int, frozenset[int]] | None
    """A round, and the group ranks of it whose process end was seen."""


@record
class RoundSummary:
    """What every member must know of a round to find its next leader, also one without a seat."""

    carry: RecoveryState
    successors: tuple[Successor, ...]
    is_spare: bool = False
    """There is no seat as long as the others stay."""


@record
class RoundStart:
    """A round in which the member has a seat."""

    roster: RoundSummary
    round: Round
    """Without the node index, which the member knows best."""


@record
class Rank0Started:
    """Global rank 0 of the round has been started: see `RoundOpened`."""

    round: int


@record
class RoundCommitted:
    """Every member of the round has it: older ones are forgotten."""

    round: int


@record
class RoundBreak:
    """The round is over: stop its workers."""

    round: int
    kind: BreakKind
    reason: str
    want_stacks: bool
    next_attempt: int
    early: str | None


@record
class JobEnd:
    """The job is over."""

    succeeded: bool
    report: Report | None
    prints: bool


@record
class Exit:
    """All have the verdict: go."""


@record
class RendezvousFailure:
    """The nodes did not come together in time."""

    reason: str


@record
class Rejected:
    """This node cannot take part."""

    reason: str
    usage: bool
    """It is the caller's mistake."""


@record
class Redirect:
    """Another leader knows a later round."""

    host: str
    port: int


@record
class Goodbye:
    """The leader closes this connection, and lives on."""

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
    """What the leader's letter means; None for kinds of newer versions.

    Raises:
        NonsenseError: nobody of ours writes such a letter.
    """
    read = _READERS.get(read_field(message, "t", text))
    return None if read is None else read(message)


# -- members come -------------------------------------------------------------------------------------------------


def build_welcome(leader_id: str, listen: int) -> Message:
    """See `Welcome`."""
    return {"t": "welcome", "id": leader_id, "listen": listen}


def _read_welcome(message: Message) -> Welcome:
    return Welcome(leader_id=read_field(message, "id", text), listen=read_field(message, "listen", port))


def build_heartbeat_reply(answer: HeartbeatReply) -> Message:
    """See `HeartbeatReply`."""
    message: Message = {"t": "beat", "n": answer.number, "at": answer.at_s}
    if answer.ended is not None:
        number, ranks = answer.ended
        message["ended"] = [number, sorted(ranks)]
    return message


def _read_heartbeat_reply(message: Message) -> HeartbeatReply:
    ended = read_field(message, "ended", _read_ended) if "ended" in message else None
    return HeartbeatReply(number=read_field(message, "n", count), at_s=read_field(message, "at", seconds), ended=ended)


def _read_ended(value: Any) -> tuple[int, frozenset[int]]:
    number, ranks = items(2)(value)
    return count(number), frozenset(list_of(count)(ranks))


# -- rounds -------------------------------------------------------------------------------------------------------


def build_round_summary(
    form: FormRound, member_id: str, successors: tuple[Successor, ...], *, is_spare: bool
) -> Message:
    """See `RoundSummary`."""
    shared = _describe_round(form, successors)
    return {"t": "roster", **shared, "bases": _list_bases(form, member_id), "spare": is_spare}


def _describe_round(form: FormRound, successors: tuple[Successor, ...]) -> Message:
    places = [[one.group_rank, one.index, one.host, one.port] for one in successors]
    return {"round": form.number, "attempt": form.attempt, "early": form.early, "successors": places}


def _list_bases(form: FormRound, member_id: str) -> list[dict[str, Any]]:
    return [build_base(base.carried_by(member_id)) for base in form.bases]


def build_round_starts(form: FormRound, master_addr: str, successors: tuple[Successor, ...]) -> Iterator[Message]:
    """A `RoundStart` for each seat, in their order; each of constant size, whatever the number of members."""
    circular = Broadcast(
        {
            "t": "round",
            **_describe_round(form, successors),
            "restarts_left": form.restarts_left,
            "size": len(form.seats),
            "world_size": form.world_size,
            "master_addr": master_addr,
            "master_port": form.master_port,
        }
    )
    for seat in form.seats:
        yield circular.address(
            group_rank=seat.group_rank,
            rank_offset=seat.rank_offset,
            role_rank_offset=seat.role_rank_offset,
            role_world_size=seat.role_world_size,
            bases=_list_bases(form, seat.id),
        )


def _read_round_summary(message: Message) -> RoundSummary:
    return RoundSummary(
        carry=read_recovery_state(message),
        successors=read_field(message, "successors", list_of(_read_successor)),
        is_spare=read_field(message, "spare", boolean) if "spare" in message else False,
    )


def _read_successor(value: Any) -> Successor:
    rank, index, name, at = items(4)(value)
    return Successor(group_rank=count(rank), index=optional(count)(index), host=host(name), port=port(at))


def _read_round_start(message: Message) -> RoundStart:
    roster = _read_round_summary(message)
    round_ = Round(
        number=roster.carry.round,
        attempt=roster.carry.attempt,
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
    return RoundStart(roster=roster, round=round_)


def build_rank0_started(number: int) -> Message:
    """See `Rank0Started`."""
    return {"t": "opened", "round": number}


def build_round_committed(number: int) -> Message:
    """See `RoundCommitted`."""
    return {"t": "settled", "round": number}


def build_round_break(output: BreakRound) -> Message:
    """See `RoundBreak`."""
    return {
        "t": "break",
        "round": output.number,
        "kind": output.kind.value,
        "reason": output.reason,
        "want_stacks": output.want_stacks,
        "next_attempt": output.next_attempt,
        "early": output.early,
    }


def _read_round_break(message: Message) -> RoundBreak:
    return RoundBreak(
        round=read_field(message, "round", count),
        kind=read_field(message, "kind", _read_kind),
        reason=read_field(message, "reason", text),
        want_stacks=read_field(message, "want_stacks", boolean),
        next_attempt=read_field(message, "next_attempt", count),
        early=read_field(message, "early", optional(text)),
    )


def _read_kind(value: Any) -> BreakKind:
    try:
        return BreakKind(text(value))
    except ValueError:
        raise MalformedMessageError("no kind of break") from None


# -- the end ------------------------------------------------------------------------------------------------------


def build_job_end(*, succeeded: bool, report: Report | None) -> Broadcast:
    """See `JobEnd`; only `prints` is each member's own."""
    return Broadcast({"t": "end", "succeeded": succeeded, "report": None if report is None else report.to_json()})


def _read_job_end(message: Message) -> JobEnd:
    return JobEnd(
        succeeded=read_field(message, "succeeded", boolean),
        report=read_field(message, "report", optional(read_report)),
        prints=read_field(message, "prints", boolean),
    )


def build_exit() -> Message:
    """See `Exit`."""
    return {"t": "exit"}


def build_rendezvous_failure(reason: str) -> Message:
    """See `RendezvousFailure`."""
    return {"t": "give_up", "reason": reason}


def build_rejection(reason: str, *, usage: bool = False) -> Message:
    """See `Rejected`."""
    return {"t": "reject", "reason": reason, "usage": usage}


def read_rejection(message: Message) -> Rejected:
    """The inverse of `build_rejection`.

    Raises:
        NonsenseError: a field is not what it must be.
    """
    return Rejected(reason=read_field(message, "reason", text), usage=read_field(message, "usage", boolean))


def build_redirect(to_host: str, to_port: int) -> Message:
    """See `Redirect`."""
    return {"t": "redirect", "host": to_host, "port": to_port}


def build_goodbye(reason: str) -> Message:
    """See `Goodbye`."""
    return {"t": "bye", "reason": reason}


_READERS: dict[str, Callable[[Message], LeaderMessage]] = {
    "welcome": _read_welcome,
    "beat": _read_heartbeat_reply,
    "round": _read_round_start,
    "roster": _read_round_summary,
    "opened": lambda message: Rank0Started(round=read_field(message, "round", count)),
    "settled": lambda message: RoundCommitted(round=read_field(message, "round", count)),
    "break": _read_round_break,
    "end": _read_job_end,
    "exit": lambda _message: Exit(),
    "give_up": lambda message: RendezvousFailure(reason=read_field(message, "reason", text)),
    "reject": read_rejection,
    "redirect": lambda message: Redirect(
        host=read_field(message, "host", host), port=read_field(message, "port", port)
    ),
    "bye": lambda message: Goodbye(reason=read_field(message, "reason", text)),
}
