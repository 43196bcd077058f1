"""Messages from a member to its leader."""

from collections.abc import Callable

from muster.agent.diagnosis.report import Failure, Stack
from muster.agent.rendezvous.consensus.events import (
    Event,
    Failed,
    Idle,
    Leaving,
    Prepared,
    RoundAcknowledged,
    Stopped,
    Succeeded,
)
from muster.agent.rendezvous.consensus.members import RecoveryState
from muster.agent.rendezvous.protocol.fields import (
    boolean,
    count,
    host,
    list_of,
    optional,
    port,
    processes,
    read_field,
    seconds,
    text,
)
from muster.agent.rendezvous.protocol.framing import Message
from muster.agent.rendezvous.protocol.job_rules import JobRules, describe_job_rules, read_job_rules
from muster.agent.rendezvous.protocol.payloads import (
    build_recovery_state,
    build_stack,
    read_failure,
    read_recovery_state,
    read_stack,
)
from muster.agent.runtime.records import record


@record
class Join:
    """A node asks to take part; none of its workers is alive."""

    run_id: str
    id: str
    index: int | None
    nproc: int
    role: str
    host: str
    port: int
    """The MASTER_PORT it reserved for the next round."""
    listen_port: int
    """Port where it accepts links after a takeover; 0: none."""
    local_addr: str | None
    rules: JobRules
    """What it was started with."""
    recovery_state: RecoveryState
    is_prepared: bool = True
    """False while it still imports what its workers need."""


@record
class Heartbeat:
    """The member is alive. The reply renews its lease."""

    number: int
    echo_s: float | None
    """The leader's own time stamp from its last reply; None before the first."""


@record
class Started:
    """The workers of the node with global rank 0 have been started."""

    round: int


@record
class EndAcknowledged:
    """The member has received the job's end."""


MemberMessage = Join | Heartbeat | Started | EndAcknowledged | Event


def read_member_message(member_id: str, message: Message) -> MemberMessage | None:
    """Parse a member's message; None for types of newer versions.

    Raises:
        MalformedMessageError: it is malformed.
    """
    read = _READERS.get(read_field(message, "type", text))
    return None if read is None else read(member_id, message)


def build_join(join: Join) -> Message:
    """See `Join`."""
    return {
        "type": "join",
        "run_id": join.run_id,
        "id": join.id,
        "index": join.index,
        "nproc": join.nproc,
        "role": join.role,
        "host": join.host,
        "port": join.port,
        "listen_port": join.listen_port,
        "local_addr": join.local_addr,
        "is_prepared": join.is_prepared,
        "rules": describe_job_rules(join.rules),
        "recovery_state": build_recovery_state(join.recovery_state),
    }


def read_join(message: Message) -> Join:
    """The inverse of `build_join`.

    Raises:
        MalformedMessageError: a field is invalid.
    """
    return Join(
        run_id=read_field(message, "run_id", text),
        id=read_field(message, "id", text),
        index=read_field(message, "index", optional(count)),
        nproc=read_field(message, "nproc", processes),
        role=read_field(message, "role", text),
        host=read_field(message, "host", text),
        port=read_field(message, "port", port),
        listen_port=read_field(message, "listen_port", port),
        local_addr=read_field(message, "local_addr", optional(host)),
        rules=read_field(message, "rules", read_job_rules),
        recovery_state=read_field(message, "recovery_state", read_recovery_state),
        is_prepared=read_field(message, "is_prepared", boolean),
    )


def build_heartbeat(number: int, echo_s: float | None) -> Message:
    """See `Heartbeat`."""
    return {"type": "heartbeat", "number": number, "echo_s": echo_s}


def build_round_acknowledgement(number: int) -> Message:
    """See `events.RoundAcknowledged`."""
    return {"type": "round_acknowledged", "round": number}


def build_started(number: int) -> Message:
    """See `Started`."""
    return {"type": "started", "round": number}


def build_prepared() -> Message:
    """See `events.Prepared`."""
    return {"type": "prepared"}


def build_succeeded(number: int) -> Message:
    """See `events.Succeeded`."""
    return {"type": "succeeded", "round": number}


def build_failed(number: int, failures: tuple[Failure, ...]) -> Message:
    """See `events.Failed`."""
    return {"type": "failed", "round": number, "failures": [failure.to_json() for failure in failures]}


def build_idle(number: int, failures: tuple[Failure, ...]) -> Message:
    """See `events.Idle`."""
    return {"type": "idle", "round": number, "failures": [failure.to_json() for failure in failures]}


def build_stopped(
    number: int, master_port: int, failures: tuple[Failure, ...] = (), stacks: tuple[Stack, ...] = ()
) -> Message:
    """See `events.Stopped`."""
    return {
        "type": "stopped",
        "round": number,
        "port": master_port,
        "failures": [failure.to_json() for failure in failures],
        "stacks": [build_stack(stack) for stack in stacks],
    }


def build_leaving(reason: str) -> Message:
    """See `events.Leaving`."""
    return {"type": "leaving", "reason": reason}


def build_end_acknowledgement() -> Message:
    """See `EndAcknowledged`."""
    return {"type": "end_acknowledged"}


def _read_heartbeat(_member_id: str, message: Message) -> Heartbeat:
    echo_s = read_field(message, "echo_s", optional(seconds))
    return Heartbeat(number=read_field(message, "number", count), echo_s=echo_s)


def _read_round_acknowledgement(member_id: str, message: Message) -> RoundAcknowledged:
    return RoundAcknowledged(id=member_id, round_number=read_field(message, "round", count))


def _read_succeeded(member_id: str, message: Message) -> Succeeded:
    return Succeeded(id=member_id, round_number=read_field(message, "round", count))


def _read_leaving(member_id: str, message: Message) -> Leaving:
    return Leaving(id=member_id, reason=read_field(message, "reason", text))


def _read_failed(member_id: str, message: Message) -> Failed:
    return Failed(id=member_id, round_number=read_field(message, "round", count), failures=_read_failures(message))


def _read_idle(member_id: str, message: Message) -> Idle:
    return Idle(id=member_id, round_number=read_field(message, "round", count), failures=_read_failures(message))


def _read_stopped(member_id: str, message: Message) -> Stopped:
    return Stopped(
        id=member_id,
        round_number=read_field(message, "round", count),
        port=read_field(message, "port", port),
        failures=_read_failures(message),
        stacks=read_field(message, "stacks", list_of(read_stack)),
    )


def _read_failures(message: Message) -> tuple[Failure, ...]:
    return read_field(message, "failures", list_of(read_failure))


_READERS: dict[str, Callable[[str, Message], MemberMessage]] = {
    "join": lambda _member_id, message: read_join(message),
    "heartbeat": _read_heartbeat,
    "prepared": lambda member_id, _message: Prepared(id=member_id),
    "round_acknowledged": _read_round_acknowledgement,
    "started": lambda _member_id, message: Started(round=read_field(message, "round", count)),
    "succeeded": _read_succeeded,
    "leaving": _read_leaving,
    "failed": _read_failed,
    "idle": _read_idle,
    "stopped": _read_stopped,
    "end_acknowledged": lambda _member_id, _message: EndAcknowledged(),
}
