"""What members and leader write to one another, as dictionaries: the leader's reading and writing."""

from collections.abc import Iterator
from typing import Any

from muster.agent.rendezvous.terms import (
    Break,
    Confirmed,
    Event,
    Failed,
    Form,
    Idle,
    Left,
    Stopped,
    Succeeded,
)
from muster.agent.rendezvous.wire import Circular, Message
from muster.agent.report import Failure, Stack


def read_event(member_id: str, message: Message) -> Event | None:
    """What a member's message means; None for kinds of newer versions."""
    kind = message["t"]
    if kind == "got":
        return Confirmed(id=member_id, round=int(message["round"]))
    if kind == "done":
        return Succeeded(id=member_id, round=int(message["round"]))
    if kind == "leave":
        return Left(id=member_id, reason=str(message["reason"]))
    if kind == "failed":
        return Failed(id=member_id, round=int(message["round"]), failures=_read_failures(message))
    if kind == "idle":
        return Idle(id=member_id, round=int(message["round"]), failures=_read_failures(message))
    if kind == "stopped":
        return Stopped(
            id=member_id,
            round=int(message["round"]),
            port=int(message["port"]),
            failures=_read_failures(message),
            stacks=tuple(Stack(**stack) for stack in message["stacks"]),
        )
    return None


def _read_failures(message: Message) -> tuple[Failure, ...]:
    return tuple(Failure.from_json(failure) for failure in message["failures"])


def build_break(output: Break) -> Message:
    """The message of a break."""
    return {
        "t": "break",
        "round": output.number,
        "kind": output.kind.value,
        "reason": output.reason,
        "want_stacks": output.want_stacks,
        "next_attempt": output.next_attempt,
        "early": output.early,
    }


def build_roster(form: Form, member_id: str, successors: list[Any]) -> Message:
    """What every member must know of a round to find its next leader, also a spare."""
    return {"t": "roster", **_describe_round(form, successors), "bases": _list_bases(form, member_id)}


def _describe_round(form: Form, successors: list[Any]) -> Message:
    return {"round": form.number, "attempt": form.attempt, "early": form.early, "successors": successors}


def _list_bases(form: Form, member_id: str) -> list[dict[str, Any]]:
    return [base.to_json(member_id) for base in form.bases]


def build_rounds(form: Form, master_addr: str, successors: list[Any]) -> Iterator[Message]:
    """The messages of a round, in the order of its seats; each of constant size, whatever the number of members."""
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
