"""Messages from a member to its leader. Those that `consensus` decides on are in `consensus.events`."""

from typing import Annotated

from muster._shared.codec import MessageUnion
from muster._shared.fields import Count, Host, Name, Port, Processes, Range, Seconds
from muster._shared.records import record
from muster.agent.rendezvous.consensus.events import MemberReport
from muster.agent.rendezvous.consensus.members import RecoveryState
from muster.agent.rendezvous.protocol.job_rules import JobRules

Duration = Annotated[float, Range(least=0.0, most=1e7)]


@record
class Join:
    """A node asks to take part; none of its workers is alive."""

    run_id: Name
    id: Name
    index: Count | None
    nproc: Processes
    role: Name
    host: Name
    port: Port
    """The MASTER_PORT it reserved for the next round."""
    listen_port: Port
    """Port where it accepts links after a takeover; 0: none."""
    local_addr: Host | None
    rules: JobRules
    """What it was started with."""
    recovery_state: RecoveryState
    is_prepared: bool = True
    """False while it still imports what its workers need."""
    can_host_store: bool = False
    """Its agent would host the round's store, if it gets rank 0."""
    stop_limit_s: Duration = 60.0
    """How long it takes at most to stop its workers, by its own configuration."""
    release: Name = ""
    """Of muster; "": an earlier one, which did not say."""


@record
class Heartbeat:
    """The member is alive. The reply renews its lease."""

    number: Count
    echo_s: Seconds | None
    """The leader's own time stamp from its last reply; None before the first."""


@record
class EndAcknowledged:
    """The member has received the job's end."""

    peak_bytes: Count = 0
    """The peak memory of its largest worker; 0: not known (it is of an earlier version)."""


MemberMessage = Join | Heartbeat | EndAcknowledged | MemberReport

MEMBER_MESSAGES: MessageUnion[MemberMessage] = MessageUnion(MemberMessage)
