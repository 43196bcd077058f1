"""What a member knows: one frozen record. `build_initial_state` makes the first one."""

from enum import Enum

from muster._shared.records import record
from muster.agent.config import RendezvousConfig
from muster.agent.rendezvous.consensus.actions import JobEnd
from muster.agent.rendezvous.consensus.recovery import RecoveryRecord
from muster.agent.rendezvous.interface import BreakKind, Saved
from muster.agent.rendezvous.member.events import Target
from muster.agent.rendezvous.member.recovery import MemberRecovery
from muster.agent.rendezvous.protocol.job_rules import JobRules, build_job_rules
from muster.agent.rendezvous.transport.links import LinkEnd

NEVER = float("inf")


class Phase(Enum):
    """The member's relation to its leader."""

    APART = "apart"
    """It has no link to a leader, and searches for one or will."""
    JOINING = "joining"
    """It has a link, but no leader has accepted it yet."""
    JOINED = "joined"
    ENDED = "ended"
    """The supervisor knows the end, or needs none."""


class Once(Enum):
    """A line that is printed once; some are printed once in each round."""

    RULES = "rules"
    NO_ANSWER = "no answer"
    TAKEN_PORT = "taken port"
    SPARE = "spare"
    WAIT = "wait"
    LOSS = "loss"
    """Corrected by a line once as many nodes are here as before."""


@record
class Connection:
    """The one link to a leader, or to a node that may accept this one."""

    is_local: bool
    """Whether the leader is on this node."""
    peer_host: str = ""
    silent_host: str = ""
    """See `Link`."""
    is_accepted: bool = False
    listen_port: int = 0
    """A port on which only the leader's process listens; 0 if none, or unknown."""


@record
class MemberState:
    """Everything from which the member's decisions follow."""

    config: RendezvousConfig
    own_id: str
    job_rules: JobRules
    recovery: MemberRecovery
    connection: Connection | None = None
    is_searching: bool = False
    """Whether a search runs. It also runs while this node leads, for as long as the node would give way."""
    is_takeover: bool = False
    """Whether this node leads, or is a candidate, because it found no better leader."""
    is_endpoint_elsewhere: bool = False
    """Whether this node leads although the job's endpoint is another machine's address."""
    first_target: Target | None = None
    """The address to ask first."""
    promise_until_s: float = -NEVER
    """Until when this member joins no leader except its last one, by CLOCK_BOOTTIME."""
    search_failure: LinkEnd | None = None
    """Why the search has found nothing yet."""
    refusal: LinkEnd | None = None
    """The first failure that waiting cannot repair. It says more than a refused connection after it."""
    is_running: bool = False
    """Whether workers of a round may be alive here: from RoundFormed to `Stopped`. The round is that of `recovery`."""
    saved: Saved | None = None
    """The last checkpoint that its workers have saved, for the next leader if the link is down."""
    kinds_posted: frozenset[BreakKind] = frozenset()
    """How that round has been broken."""
    is_prepared: bool = True
    has_reported_prepared: bool = True
    """Whether the leader knows it, or will with the next join."""
    printed: frozenset[Once] = frozenset()
    job_end: JobEnd | None = None
    peak_bytes: int = 0
    """The peak memory of the job's largest worker, according to the leader."""
    has_ended: bool = False

    @property
    def phase(self) -> Phase:
        """See `Phase`."""
        if self.has_ended:
            return Phase.ENDED
        if self.connection is None:
            return Phase.APART
        return Phase.JOINED if self.connection.is_accepted else Phase.JOINING

    @property
    def is_leading(self) -> bool:
        """Whether the leader is on this node."""
        return self.connection is not None and self.connection.is_local

    @property
    def leader_address(self) -> tuple[str, int] | None:
        """Where this node's leader listens, if that is another node. Nodes that search for it here are told."""
        found = self.connection
        return (found.peer_host, found.listen_port) if found is not None and found.listen_port else None


def build_initial_state(config: RendezvousConfig, own_id: str) -> MemberState:
    """Return the state before `Started`, with the last checkpoint of the job's earlier incarnations."""
    known = MemberRecovery(record=RecoveryRecord(checkpoint=config.checkpoint))
    return MemberState(config=config, own_id=own_id, job_rules=build_job_rules(config), recovery=known)


def find_endpoint(config: RendezvousConfig) -> tuple[str, int]:
    """Return where the job's nodes search for their leader."""
    return config.host or "localhost", config.port
