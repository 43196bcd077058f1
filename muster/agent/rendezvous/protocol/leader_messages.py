"""What the leader writes to its members, and how they read it."""

from collections.abc import Callable, Iterator
from typing import Any

from muster.agent.diagnosis.report import Report
from muster.agent.rendezvous.consensus.actions import Break, Form
from muster.agent.rendezvous.consensus.members import Carry
from muster.agent.rendezvous.interface import BreakKind
from muster.agent.rendezvous.protocol.fields import (
    NonsenseError,
    count,
    host,
    items,
    many,
    optional,
    port,
    seconds,
    size,
    switch,
    take,
    text,
)
from muster.agent.rendezvous.protocol.framing import Circular, Message
from muster.agent.rendezvous.protocol.payloads import build_base, read_carry, read_report
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
class Answer:
    """The leader has heard a heartbeat."""

    number: int
    at_s: float
    """The leader's CLOCK_BOOTTIME, to be sent back."""
    ended: tuple[int, frozenset[int]] | None
    """A round, and the group ranks of it whose process end was seen."""


@record
class Roster:
    """What every member must know of a round to find its next leader, also one without a seat."""

    carry: Carry
    successors: tuple[Successor, ...]
    is_spare: bool = False
    """There is no seat as long as the others stay."""


@record
class Seated:
    """A round in which the member has a seat."""

    roster: Roster
    round: Round
    """Without the node index, which the member knows best."""


@record
class Opened:
    """Global rank 0 of the round has been started: see `RoundOpened`."""

    round: int


@record
class Settled:
    """Every member of the round has it: older ones are forgotten."""

    round: int


@record
class Broken:
    """The round is over: stop its workers."""

    round: int
    kind: BreakKind
    reason: str
    want_stacks: bool
    next_attempt: int
    early: str | None


@record
class Verdict:
    """The job is over."""

    succeeded: bool
    report: Report | None
    prints: bool


@record
class Exit:
    """All have the verdict: go."""


@record
class Hopeless:
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
class Bye:
    """The leader closes this connection, and lives on."""

    reason: str


Order = (
    Welcome
    | Answer
    | Seated
    | Roster
    | Opened
    | Settled
    | Broken
    | Verdict
    | Exit
    | Hopeless
    | Rejected
    | Redirect
    | Bye
)


def read_order(message: Message) -> Order | None:
    """What the leader's letter means; None for kinds of newer versions.

    Raises:
        NonsenseError: nobody of ours writes such a letter.
    """
    read = _READERS.get(take(message, "t", text))
    return None if read is None else read(message)


# -- members come -------------------------------------------------------------------------------------------------


def build_welcome(leader_id: str, listen: int) -> Message:
    """See `Welcome`."""
    return {"t": "welcome", "id": leader_id, "listen": listen}


def _read_welcome(message: Message) -> Welcome:
    return Welcome(leader_id=take(message, "id", text), listen=take(message, "listen", port))


def build_answer(answer: Answer) -> Message:
    """See `Answer`."""
    message: Message = {"t": "beat", "n": answer.number, "at": answer.at_s}
    if answer.ended is not None:
        number, ranks = answer.ended
        message["ended"] = [number, sorted(ranks)]
    return message


def _read_answer(message: Message) -> Answer:
    ended = take(message, "ended", _read_ended) if "ended" in message else None
    return Answer(number=take(message, "n", count), at_s=take(message, "at", seconds), ended=ended)


def _read_ended(value: Any) -> tuple[int, frozenset[int]]:
    number, ranks = items(2)(value)
    return count(number), frozenset(many(count)(ranks))


# -- rounds -------------------------------------------------------------------------------------------------------


def build_roster(form: Form, member_id: str, successors: tuple[Successor, ...], *, is_spare: bool) -> Message:
    """See `Roster`."""
    shared = _describe_round(form, successors)
    return {"t": "roster", **shared, "bases": _list_bases(form, member_id), "spare": is_spare}


def _describe_round(form: Form, successors: tuple[Successor, ...]) -> Message:
    places = [[one.group_rank, one.index, one.host, one.port] for one in successors]
    return {"round": form.number, "attempt": form.attempt, "early": form.early, "successors": places}


def _list_bases(form: Form, member_id: str) -> list[dict[str, Any]]:
    return [build_base(base.carried_by(member_id)) for base in form.bases]


def build_rounds(form: Form, master_addr: str, successors: tuple[Successor, ...]) -> Iterator[Message]:
    """A `Seated` for each seat, in their order; each of constant size, whatever the number of members."""
    circular = Circular(
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


def _read_roster(message: Message) -> Roster:
    return Roster(
        carry=read_carry(message),
        successors=take(message, "successors", many(_read_successor)),
        is_spare=take(message, "spare", switch) if "spare" in message else False,
    )


def _read_successor(value: Any) -> Successor:
    rank, index, name, at = items(4)(value)
    return Successor(group_rank=count(rank), index=optional(count)(index), host=host(name), port=port(at))


def _read_seated(message: Message) -> Seated:
    roster = _read_roster(message)
    round_ = Round(
        number=roster.carry.round,
        attempt=roster.carry.attempt,
        restarts_left=take(message, "restarts_left", count),
        group_rank=take(message, "group_rank", count),
        group_world_size=take(message, "size", size),
        rank_offset=take(message, "rank_offset", count),
        world_size=take(message, "world_size", size),
        role_rank_offset=take(message, "role_rank_offset", count),
        role_world_size=take(message, "role_world_size", size),
        master_addr=take(message, "master_addr", host),
        master_port=take(message, "master_port", port),
    )
    if round_.group_rank >= round_.group_world_size or round_.rank_offset >= round_.world_size:
        raise NonsenseError(f"group rank {round_.group_rank} of {round_.group_world_size}")
    return Seated(roster=roster, round=round_)


def build_opened(number: int) -> Message:
    """See `Opened`."""
    return {"t": "opened", "round": number}


def build_settled(number: int) -> Message:
    """See `Settled`."""
    return {"t": "settled", "round": number}


def build_break(output: Break) -> Message:
    """See `Broken`."""
    return {
        "t": "break",
        "round": output.number,
        "kind": output.kind.value,
        "reason": output.reason,
        "want_stacks": output.want_stacks,
        "next_attempt": output.next_attempt,
        "early": output.early,
    }


def _read_break(message: Message) -> Broken:
    return Broken(
        round=take(message, "round", count),
        kind=take(message, "kind", _read_kind),
        reason=take(message, "reason", text),
        want_stacks=take(message, "want_stacks", switch),
        next_attempt=take(message, "next_attempt", count),
        early=take(message, "early", optional(text)),
    )


def _read_kind(value: Any) -> BreakKind:
    try:
        return BreakKind(text(value))
    except ValueError:
        raise NonsenseError("no kind of break") from None


# -- the end ------------------------------------------------------------------------------------------------------


def build_verdict(*, succeeded: bool, report: Report | None) -> Circular:
    """See `Verdict`; only `prints` is each member's own."""
    return Circular({"t": "end", "succeeded": succeeded, "report": None if report is None else report.to_json()})


def _read_verdict(message: Message) -> Verdict:
    return Verdict(
        succeeded=take(message, "succeeded", switch),
        report=take(message, "report", optional(read_report)),
        prints=take(message, "prints", switch),
    )


def build_exit() -> Message:
    """See `Exit`."""
    return {"t": "exit"}


def build_hopeless(reason: str) -> Message:
    """See `Hopeless`."""
    return {"t": "give_up", "reason": reason}


def build_rejection(reason: str, *, usage: bool = False) -> Message:
    """See `Rejected`."""
    return {"t": "reject", "reason": reason, "usage": usage}


def read_rejection(message: Message) -> Rejected:
    """The inverse of `build_rejection`.

    Raises:
        NonsenseError: a field is not what it must be.
    """
    return Rejected(reason=take(message, "reason", text), usage=take(message, "usage", switch))


def build_redirect(to_host: str, to_port: int) -> Message:
    """See `Redirect`."""
    return {"t": "redirect", "host": to_host, "port": to_port}


def build_bye(reason: str) -> Message:
    """See `Bye`."""
    return {"t": "bye", "reason": reason}


_READERS: dict[str, Callable[[Message], Order]] = {
    "welcome": _read_welcome,
    "beat": _read_answer,
    "round": _read_seated,
    "roster": _read_roster,
    "opened": lambda message: Opened(round=take(message, "round", count)),
    "settled": lambda message: Settled(round=take(message, "round", count)),
    "break": _read_break,
    "end": _read_verdict,
    "exit": lambda _message: Exit(),
    "give_up": lambda message: Hopeless(reason=take(message, "reason", text)),
    "reject": read_rejection,
    "redirect": lambda message: Redirect(host=take(message, "host", host), port=take(message, "port", port)),
    "bye": lambda message: Bye(reason=take(message, "reason", text)),
}
