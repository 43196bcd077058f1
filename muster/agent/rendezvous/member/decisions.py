"""One node's part in rendezvous: a pure function `decide_member(state, event, boottime_s) -> (state, actions)`.

    APART --Started, TimerFired, Excluded--> ENDED
    APART --EndpointTried, Answered, SearchTurned--> JOINING
    JOINING --LeaderSent--> JOINED, APART, ENDED
    JOINING --TimerFired--> APART, ENDED
    JOINING --Excluded--> ENDED
    JOINING, JOINED --LeaderMalformed, LinkClosed, LeaderSilent, OtherLeaderFound--> APART
    JOINED --LeaderSent--> APART, ENDED
    JOINED --Answered--> JOINING
    JOINED --TimerFired, Excluded--> ENDED

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

from muster._shared.contract import AskOutcome
from muster._shared.records import replace
from muster._shared.reports import Answer
from muster._shared.transitions import Table, drop, go, on, on_with, stay
from muster.agent.rendezvous.consensus.actions import JobEnd, RecoveryChanged, RoundBreak, RoundStart, RoundSummary
from muster.agent.rendezvous.consensus.recovery import list_news
from muster.agent.rendezvous.interface import (
    AllStarted,
    Asked,
    Leaving,
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

_APART, _JOINING, _JOINED, _ENDED = Phase.APART, Phase.JOINING, Phase.JOINED, Phase.ENDED
_ACTIVE = (_APART, _JOINING, _JOINED)
_LINKED = (_JOINING, _JOINED)
_LOST = (_APART, _ENDED)


def _build_table() -> "Table[do.Event, Decision]":
    """Return which phase accepts which event, what handles it, and which phases may follow.

    All others are outdated and change nothing. After the end only `Leaving` is sent.
    """
    return (
        on(do.NodeSent, _on_node_sent, stay(*_ACTIVE, _ENDED))
        + on(do.LeaderSent, _on_leader_sent, stay(_JOINING, or_go=(_JOINED, *_LOST)), stay(_JOINED, or_go=_LOST))
        + on_with(do.Started, decide_search, stay(_APART, or_go=(_ENDED,)))
        + on_with(do.LocalChecked, decide_search, stay(*_ACTIVE))
        + on_with(do.EndpointTried, decide_search, stay(_APART, or_go=(_JOINING,)))
        + on_with(do.Answered, decide_search, stay(_APART, _JOINED, or_go=(_JOINING,)), stay(_JOINING))
        + on_with(do.SearchTurned, decide_search, stay(_APART, or_go=(_JOINING,)), stay(*_LINKED))
        + on_with(do.TimerFired, _on_timer_fired, stay(_JOINING, or_go=_LOST), stay(_APART, _JOINED, or_go=(_ENDED,)))
        + on(do.WaitDue, _on_wait_due, stay(*_ACTIVE))
        + on(do.Excluded, _on_excluded, go(*_ACTIVE, to=(_ENDED,)))
        + on(do.LeaderMalformed, on_leader_lost, go(*_LINKED, to=(_APART,)))
        + on(do.LinkClosed, on_leader_lost, go(*_LINKED, to=(_APART,)))
        + on(do.LeaderSilent, on_leader_lost, go(*_LINKED, to=(_APART,)))
        + on(do.QuorumLost, on_leader_lost, stay(_JOINED))
        + on(do.LeaderEnded, on_leader_lost, stay(*_ACTIVE))
        + on(do.OtherLeaderFound, on_leader_lost, go(*_ACTIVE, to=(_APART,)))
    )


def decide_member(state: MemberState, event: do.Event, boottime_s: float) -> Decision:
    """Handle one event. If the checkpoint of all ranks is new to this node, tell the supervisor of it first."""
    handler = TABLE.find(state.phase, event)
    if handler is None:
        return drop(state, state.phase, event)
    known = state.recovery.record
    state, actions = handler(state, event, boottime_s)
    news = list_news(known, state.recovery.record)
    return state, (*(do.Post(event=each) for each in news), *actions)


def _on_timer_fired(state: MemberState, event: do.TimerFired, boottime_s: float) -> Decision:
    return post_job_end(state) if event.kind is do.TimerKind.LINGER else decide_search(state, event, boottime_s)


def _on_wait_due(state: MemberState, event: do.WaitDue) -> Decision:
    if event.line is None:
        return state, ()
    return replace(state, printed=state.printed | {Once.WAIT}), (build_notice(event.line),)


def _on_excluded(state: MemberState, event: do.Excluded) -> Decision:
    return fail(state, event.reason)


# -- what the supervisor sends -----------------------------------------------------------------------------------------


def _on_node_sent(state: MemberState, event: do.NodeSent) -> Decision:
    """Pass the message on, unless it is about another round than the current one."""
    message = event.message
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


TABLE = _build_table()
