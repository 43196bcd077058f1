"""What members write to their leader, and how the leader reads it."""

from collections.abc import Callable

from muster.agent.diagnosis.report import Failure, Stack
from muster.agent.rendezvous.consensus.events import Confirmed, Event, Failed, Idle, Left, Prepared, Stopped, Succeeded
from muster.agent.rendezvous.consensus.members import Carry
from muster.agent.rendezvous.protocol.fields import (
    count,
    host,
    many,
    optional,
    port,
    processes,
    seconds,
    switch,
    take,
    text,
)
from muster.agent.rendezvous.protocol.framing import Message
from muster.agent.rendezvous.protocol.payloads import build_carry, build_stack, read_carry, read_failure, read_stack
from muster.agent.runtime.records import record


@record
class Join:
    """A node asks to take part; it has no workers."""

    run_id: str
    id: str
    index: int | None
    nproc: int
    role: str
    host: str
    port: int
    """The MASTER_PORT it reserved for the next round."""
    listen: int
    """Where it accepts links after a takeover; 0: nowhere."""
    local_addr: str | None
    carry: Carry
    is_prepared: bool = True
    """False while it still imports what its workers need."""


@record
class Heartbeat:
    """A sign of life."""

    number: int
    echo_s: float | None
    """The leader's own time stamp of its last answer; None before the first."""


@record
class Started:
    """The workers of the node with global rank 0 have been started."""

    round: int


@record
class EndHeard:
    """The member has the job's end."""


Word = Join | Heartbeat | Started | EndHeard | Event


def read_word(member_id: str, message: Message) -> Word | None:
    """What a member's letter means; None for kinds of newer versions.

    Raises:
        NonsenseError: nobody of ours writes such a letter.
    """
    read = _READERS.get(take(message, "t", text))
    return None if read is None else read(member_id, message)


def build_join(join: Join) -> Message:
    """See `Join`."""
    return {
        "t": "join",
        "run_id": join.run_id,
        "id": join.id,
        "index": join.index,
        "nproc": join.nproc,
        "role": join.role,
        "host": join.host,
        "port": join.port,
        "listen": join.listen,
        "local_addr": join.local_addr,
        "prepared": join.is_prepared,
        "carry": build_carry(join.carry),
    }


def read_join(message: Message) -> Join:
    """The inverse of `build_join`.

    Raises:
        NonsenseError: a field is not what it must be.
    """
    return Join(
        run_id=take(message, "run_id", text),
        id=take(message, "id", text),
        index=take(message, "index", optional(count)),
        nproc=take(message, "nproc", processes),
        role=take(message, "role", text),
        host=take(message, "host", text),
        port=take(message, "port", port),
        listen=take(message, "listen", port),
        local_addr=take(message, "local_addr", optional(host)),
        carry=take(message, "carry", read_carry),
        is_prepared=take(message, "prepared", switch),
    )


def build_heartbeat(number: int, echo_s: float | None) -> Message:
    """See `Heartbeat`."""
    return {"t": "beat", "n": number, "echo": echo_s}


def build_confirmation(number: int) -> Message:
    """See `terms.Confirmed`."""
    return {"t": "got", "round": number}


def build_started(number: int) -> Message:
    """See `Started`."""
    return {"t": "started", "round": number}


def build_prepared() -> Message:
    """See `terms.Prepared`."""
    return {"t": "prepared"}


def build_success(number: int) -> Message:
    """See `terms.Succeeded`."""
    return {"t": "done", "round": number}


def build_failed(number: int, failures: tuple[Failure, ...]) -> Message:
    """See `terms.Failed`."""
    return {"t": "failed", "round": number, "failures": [failure.to_json() for failure in failures]}


def build_idle(number: int, failures: tuple[Failure, ...]) -> Message:
    """See `terms.Idle`."""
    return {"t": "idle", "round": number, "failures": [failure.to_json() for failure in failures]}


def build_stopped(
    number: int, master_port: int, failures: tuple[Failure, ...] = (), stacks: tuple[Stack, ...] = ()
) -> Message:
    """See `terms.Stopped`."""
    return {
        "t": "stopped",
        "round": number,
        "port": master_port,
        "failures": [failure.to_json() for failure in failures],
        "stacks": [build_stack(stack) for stack in stacks],
    }


def build_leave(reason: str) -> Message:
    """See `terms.Left`."""
    return {"t": "leave", "reason": reason}


def build_end_heard() -> Message:
    """See `EndHeard`."""
    return {"t": "ended"}


def _read_heartbeat(_member_id: str, message: Message) -> Heartbeat:
    return Heartbeat(number=take(message, "n", count), echo_s=take(message, "echo", optional(seconds)))


def _read_confirmation(member_id: str, message: Message) -> Confirmed:
    return Confirmed(id=member_id, round=take(message, "round", count))


def _read_success(member_id: str, message: Message) -> Succeeded:
    return Succeeded(id=member_id, round=take(message, "round", count))


def _read_leave(member_id: str, message: Message) -> Left:
    return Left(id=member_id, reason=take(message, "reason", text))


def _read_failed(member_id: str, message: Message) -> Failed:
    return Failed(id=member_id, round=take(message, "round", count), failures=_read_failures(message))


def _read_idle(member_id: str, message: Message) -> Idle:
    return Idle(id=member_id, round=take(message, "round", count), failures=_read_failures(message))


def _read_stopped(member_id: str, message: Message) -> Stopped:
    return Stopped(
        id=member_id,
        round=take(message, "round", count),
        port=take(message, "port", port),
        failures=_read_failures(message),
        stacks=take(message, "stacks", many(read_stack)),
    )


def _read_failures(message: Message) -> tuple[Failure, ...]:
    return take(message, "failures", many(read_failure))


_READERS: dict[str, Callable[[str, Message], Word]] = {
    "join": lambda _member_id, message: read_join(message),
    "beat": _read_heartbeat,
    "prepared": lambda member_id, _message: Prepared(id=member_id),
    "got": _read_confirmation,
    "started": lambda _member_id, message: Started(round=take(message, "round", count)),
    "done": _read_success,
    "leave": _read_leave,
    "failed": _read_failed,
    "idle": _read_idle,
    "stopped": _read_stopped,
    "ended": lambda _member_id, _message: EndHeard(),
}
