"""One node's part in rendezvous: a pure function `decide_member(state, event, boottime_s) -> (state, actions)`.

    APART ----(leads, or a leader or a better candidate answers)----> JOINING --(Welcome)--> JOINED
      ^                                                                  |                     |
      +----------(the link closes, the leader is silent or gives way)----+---------------------+
    all --(JobEnded, RendezvousFailed)--> ENDED

The rules:

- A node leads at first if the job's endpoint is its own and free; otherwise it searches for the leader. The leader is
  the old one, the member of the lowest surviving rank of the last round, or the process at the job's endpoint.
- It joins, or leads, only while none of its workers is alive: running workers are stopped first.
- When the leader is lost, the others may continue without this node. So its workers are killed at once (FENCED), and
  the search starts. For the silence limit after the leader's last message it joins no other leader (`promise_until_s`),
  unless the process of the last one was seen to end.
- It becomes a candidate if no member of a lower rank answers, or, at the endpoint, if no node leads. `consensus.quorum`
  decides whether a candidate may form a round. A candidate, and a first leader whose endpoint turns out to be another
  machine's, still search: they join a better leader as long as they have formed no round.
- It keeps what it learns about rounds (`recovery`) and brings it to its next leader.

`seeking` has what concerns the search, the link and its loss. `rounds` has what the leader says of rounds and of the
job's end. The lease itself, which only counts time, is in `lease_renewal`; what follows when it ends is here.
"""

from collections.abc import Mapping

from muster._shared.contract import AskOutcome
from muster._shared.records import replace
from muster._shared.reports import Answer
from muster.agent.rendezvous.consensus.actions import JobEnd, RecoveryChanged, RoundBreak, RoundStart, RoundSummary
from muster.agent.rendezvous.consensus.recovery import list_news
from muster.agent.rendezvous.interface import (
    AllStarted,
    Asked,
    Leaving,
    NodeMessage,
    Prepared,
    RendezvousFailed,
    RequestAnswered,
    Saved,
)
from muster.agent.rendezvous.member import events as do
from muster.agent.rendezvous.member.rounds import (
    Decision,
    build_notice,
    fail,
    on_round_break,
    on_round_start,
    on_round_summary,
    post_job_end,
    record_recovery,
)
from muster.agent.rendezvous.member.seeking import (
    decide_search,
    drop_leader,
    give_way,
    on_leader_lost,
    on_welcome,
    report_prepared,
)
from muster.agent.rendezvous.member.state import NEVER, MemberState, Once, Phase
from muster.agent.rendezvous.protocol import messages as down
from muster.agent.rendezvous.report_messages import Stopped

NO_LISTENER = "cannot open a listening socket where other nodes reach this one"

_ALWAYS = frozenset(
    {
        do.NodeSent,
        do.Answered,
        do.SearchTurned,
        do.Excluded,
        do.LeaderEnded,
        do.OtherLeaderFound,
        do.WaitDue,
        do.TimerFired,
    }
)
_LINKED = _ALWAYS | {do.LeaderSent, do.LeaderMalformed, do.LinkClosed, do.LeaderSilent, do.LocalChecked}
ACCEPTED: Mapping[Phase, frozenset[type[do.Event]]] = {
    Phase.APART: _ALWAYS | {do.Started, do.LocalChecked, do.EndpointTried},
    Phase.JOINING: _LINKED,
    Phase.JOINED: _LINKED | {do.QuorumLost},
    Phase.ENDED: frozenset({do.NodeSent}),
}
"""Which phase accepts which event. All others are outdated and change nothing. After the end only `Leaving` is sent."""


def decide_member(state: MemberState, event: do.Event, boottime_s: float) -> Decision:
    """Handle one event. If the checkpoint of all ranks is new to this node, tell the supervisor of it first."""
    if type(event) not in ACCEPTED[state.phase]:
        return state, ()
    known = state.recovery.record
    state, actions = _handle(state, event, boottime_s)
    news = list_news(known, state.recovery.record)
    return state, (*(do.Post(event=each) for each in news), *actions)


def _handle(state: MemberState, event: do.Event, boottime_s: float) -> Decision:
    match event:
        case do.NodeSent():
            return _on_node_sent(state, event.message)
        case do.LeaderSent():
            return _on_leader_sent(state, event)
        case do.TimerFired(kind=do.TimerKind.LINGER):
            return post_job_end(state)
        case do.WaitDue():
            if event.line is None:
                return state, ()
            return replace(state, printed=state.printed | {Once.WAIT}), (build_notice(event.line),)
        case do.Excluded():
            return fail(state, event.reason)
        case (
            do.LeaderMalformed()
            | do.LinkClosed()
            | do.LeaderSilent()
            | do.QuorumLost()
            | do.LeaderEnded()
            | do.OtherLeaderFound()
        ):
            return on_leader_lost(state, event)
        case _:
            return decide_search(state, event, boottime_s)


# -- what the supervisor sends -----------------------------------------------------------------------------------------


def _on_node_sent(state: MemberState, message: NodeMessage) -> Decision:
    """Pass the message on, unless it is about another round than the current one."""
    is_accepted = state.connection is not None and state.connection.is_accepted
    match message:
        case Leaving():
            return state, (do.SendUp(message=message),) if is_accepted else ()
        case _ if state.has_ended:
            return state, ()
        case Prepared():
            return report_prepared(replace(state, is_prepared=True))
        case Asked() if not is_accepted or not _is_current(state, message.round_number):
            answer = Answer(outcome=AskOutcome.LOST, line="the leader was lost: ask again when the job goes on")
            return state, (do.Post(event=RequestAnswered(request=message.request, answer=answer)),)
        case _ if not _is_current(state, message.round_number):
            return state, ()
        case Stopped():
            return _on_stopped(state, message)
        case Saved():
            return replace(state, saved=message), (do.SendUp(message=message),) if is_accepted else ()
        case AllStarted() if state.recovery.group_rank != 0:
            return state, ()  # needed only from global rank 0's node
        case _:
            return state, (do.SendUp(message=message),) if is_accepted else ()


def _is_current(state: MemberState, round_number: int) -> bool:
    return state.is_running and state.recovery.round_number == round_number


def _on_stopped(state: MemberState, stopped: Stopped) -> Decision:
    """Report to the leader that no worker is left, or ask all addresses again now that this node may join."""
    state = replace(state, is_running=False)
    following = do.SendStopped(stopped=stopped) if state.phase is Phase.JOINED else do.AskAgain()
    return state, (do.Wait(is_on=True), do.EndRound(), following)


# -- what the leader sends ---------------------------------------------------------------------------------------------


def _on_leader_sent(state: MemberState, event: do.LeaderSent) -> Decision:
    connection, message = state.connection, event.message
    if connection is None:
        return state, ()
    match message:
        case down.Welcome():
            return on_welcome(state, connection, message)
        case down.HeartbeatReply():
            return (state if message.recovery is None else record_recovery(state, message.recovery.value)), ()
        case down.Redirect():
            return give_way(state, message.host, message.port)
        case down.Goodbye():
            return drop_leader(state, message.reason, promise_until_s=-NEVER)
        case RoundStart() if not event.is_reachable:
            return fail(state, NO_LISTENER)
        case _:
            return _on_job_message(state, message)


def _on_job_message(state: MemberState, message: down.JobMessage) -> Decision:
    match message:
        case RoundStart():
            return on_round_start(state, message)
        case RoundSummary():
            return on_round_summary(state, message)
        case RecoveryChanged():
            return record_recovery(state, message.recovery.value), ()
        case RoundBreak():
            return on_round_break(state, message)
        case JobEnd():
            return replace(state, job_end=message), (do.AcknowledgeEnd(),)
        case down.Exit():
            return post_job_end(replace(state, peak_bytes=message.peak_bytes))
        case RendezvousFailed() | down.Rejected():
            return fail(state, message.reason, usage=message.usage)
        case RequestAnswered():
            return state, (do.Post(event=message),)
        case _:
            return state, (do.Post(event=message),) if _is_current(state, message.round_number) else ()
