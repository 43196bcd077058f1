"""What members write to their leader, and how the leader reads it."""

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
    rules: JobRules
    """What it was started with."""
    carry: RecoveryState
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
class EndAcknowledged:
    """The member has the job's end."""


MemberMessage = Join | Heartbeat | Started | EndAcknowledged | Event


def read_member_message(member_id: str, message: Message) -> MemberMessage | None:
    """What a member's letter means; None for kinds of newer versions.

    Raises:
        NonsenseError: nobody of ours writes such a letter.
    """
    read = _READERS.get(read_field(message, "t", text))
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
        "rules": describe_job_rules(join.rules),
        "carry": build_recovery_state(join.carry),
    }


def read_join(message: Message) -> Join:
    """The inverse of `build_join`.

    Raises:
        NonsenseError: a field is not what it must be.
    """
    return Join(
        run_id=read_field(message, "run_id", text),
        id=read_field(message, "id", text),
        index=read_field(message, "index", optional(count)),
        nproc=read_field(message, "nproc", processes),
        role=read_field(message, "role", text),
        host=read_field(message, "host", text),
        port=read_field(message, "port", port),
        listen=read_field(message, "listen", port),
        local_addr=read_field(message, "local_addr", optional(host)),
        rules=read_field(message, "rules", read_job_rules),
        carry=read_field(message, "carry", read_recovery_state),
        is_prepared=read_field(message, "prepared", boolean),
    )


def build_heartbeat(number: int, echo_s: float | None) -> Message:
    """See `Heartbeat`."""
    return {"t": "beat", "n": number, "echo": echo_s}


def build_round_acknowledgement(number: int) -> Message:
    """See `terms.RoundAcknowledged`."""
    return {"t": "got", "round": number}


def build_started(number: int) -> Message:
    """See `Started`."""
    return {"t": "started", "round": number}


def build_prepared() -> Message:
    """See `terms.Prepared`."""
    return {"t": "prepared"}


def build_succeeded(number: int) -> Message:
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
    """See `terms.Leaving`."""
    return {"t": "leave", "reason": reason}


def build_end_acknowledgement() -> Message:
    """See `EndAcknowledged`."""
    return {"t": "ended"}


def _read_heartbeat(_member_id: str, message: Message) -> Heartbeat:
    return Heartbeat(number=read_field(message, "n", count), echo_s=read_field(message, "echo", optional(seconds)))


def _read_round_acknowledgement(member_id: str, message: Message) -> RoundAcknowledged:
    return RoundAcknowledged(id=member_id, round=read_field(message, "round", count))


def _read_succeeded(member_id: str, message: Message) -> Succeeded:
    return Succeeded(id=member_id, round=read_field(message, "round", count))


def _read_leave(member_id: str, message: Message) -> Leaving:
    return Leaving(id=member_id, reason=read_field(message, "reason", text))


def _read_failed(member_id: str, message: Message) -> Failed:
    return Failed(id=member_id, round=read_field(message, "round", count), failures=_read_failures(message))


def _read_idle(member_id: str, message: Message) -> Idle:
    return Idle(id=member_id, round=read_field(message, "round", count), failures=_read_failures(message))


def _read_stopped(member_id: str, message: Message) -> Stopped:
    return Stopped(
        id=member_id,
        round=read_field(message, "round", count),
        port=read_field(message, "port", port),
        failures=_read_failures(message),
        stacks=read_field(message, "stacks", list_of(read_stack)),
    )


def _read_failures(message: Message) -> tuple[Failure, ...]:
    return read_field(message, "failures", list_of(read_failure))


_READERS: dict[str, Callable[[str, Message], MemberMessage]] = {
    "join": lambda _member_id, message: read_join(message),
    "beat": _read_heartbeat,
    "prepared": lambda member_id, _message: Prepared(id=member_id),
    "got": _read_round_acknowledgement,
    "started": lambda _member_id, message: Started(round=read_field(message, "round", count)),
    "done": _read_succeeded,
    "leave": _read_leave,
    "failed": _read_failed,
    "idle": _read_idle,
    "stopped": _read_stopped,
    "ended": lambda _member_id, _message: EndAcknowledged(),
}
