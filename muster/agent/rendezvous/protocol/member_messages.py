"""Messages from a member to its leader. Those that `consensus` decides on are in `consensus.events`."""

from typing import Annotated

from muster._shared.codec import MessageUnion
from muster._shared.fields import SPARSE, Count, Host, Name, Port, Processes, Range, RoundNumber, Seconds
from muster._shared.records import record
from muster.agent.rendezvous.consensus.events import MemberReport
from muster.agent.rendezvous.consensus.recovery import GroupRanks, RecoveryRecord, find_rank_contradiction
from muster.agent.rendezvous.interface import Saved, Summary
from muster.agent.rendezvous.protocol.job_rules import JobRules
from muster.agent.round import PartOffers

Duration = Annotated[float, Range(least=0.0, most=1e7)]


@record
class Join:
    """A node asks to take part, while none of its workers is alive."""

    run_id: Name
    id: Name
    index: Count | None
    nproc: Processes
    role: Name
    host: Name
    port: Port
    """The MASTER_PORT it reserved for the next round."""
    listen_port: Port
    """Port where it accepts links after a takeover; 0 if none."""
    local_addr: Host | None
    rules: JobRules
    """The rules with which it was started."""
    recovery: RecoveryRecord
    """What it knows of the job, so that nothing is lost with a leader."""
    group_ranks: GroupRanks
    """Its own ranks in the quorum rounds of that record."""
    highest_round: RoundNumber = 0
    """The highest round that it has heard of, if that is higher than the record's."""
    last_leader_id: Name | None = None
    """The last leader that it joined. That leader may have formed rounds that this node never received."""
    is_prepared: bool = True
    """False while it still imports what its workers need."""
    can_host_store: bool = False
    """Whether its agent would host the round's store, if it gets rank 0."""
    stop_limit_s: Duration = 60.0
    """The most time that it takes to stop its workers, by its own configuration."""
    offers: PartOffers = ()
    """What it has for features in the next round."""
    saved: Annotated[Saved | None, SPARSE] = None
    """What it has last reported of a checkpoint, which may have been lost with the link."""
    machine: Name = ""
    """The machine's boot id; "" if unknown."""
    machine_name: Name = ""
    """An administrator's name for the machine, if it is not the host; "" if unknown."""
    segment: Name = ""
    """Its NVLink domain; "" if unknown, or if ranks are not ordered by it."""

    def find_contradiction(self) -> str | None:
        """See `codec`."""
        return find_rank_contradiction(self.recovery, self.group_ranks)


@record
class Heartbeat:
    """The member is alive. The reply renews its lease."""

    number: Count
    echo_s: Seconds | None
    """The leader's own time stamp from its last reply; None before the first."""
    recovery_version: Count = 0
    """The version of the recovery record that this leader sent last; 0 if it has sent none."""


@record
class EndAcknowledged:
    """The member has received the job's end."""

    peak_bytes: Count = 0
    """The peak memory of its largest worker; 0 if unknown."""


MemberMessage = Join | Heartbeat | EndAcknowledged | Summary | MemberReport

MEMBER_MESSAGES: MessageUnion[MemberMessage] = MessageUnion(MemberMessage)
