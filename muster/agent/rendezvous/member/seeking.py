"""Decides how a member finds its leader and joins it, and what follows when the leader is lost.

Pure; see `decisions`.
"""

from muster._shared.codec import MalformedMessageError, read_host
from muster._shared.records import assert_never, replace
from muster.agent.rendezvous.interface import (
    Prepared,
)
from muster.agent.rendezvous.member import events as do
from muster.agent.rendezvous.member.rounds import (
    Decision,
    build_notice,
    cancel_timers,
    fail,
    fence,
    print_once,
    stop_search,
)
from muster.agent.rendezvous.member.state import NEVER, Connection, MemberState, Once, Phase, find_endpoint
from muster.agent.rendezvous.protocol import messages as down
from muster.agent.rendezvous.protocol.job_rules import describe_difference
from muster.agent.rendezvous.protocol.messages import DiscoveryRole, QueryReply
from muster.agent.rendezvous.transport.links import Cause
from muster.agent.runtime.limits import ENDPOINT_SEARCH_S, JOIN_ANSWER_LIMIT_S

SearchEvent = do.Started | do.LocalChecked | do.EndpointTried | do.Answered | do.SearchTurned | do.TimerFired
LossEvent = do.LeaderMalformed | do.LinkClosed | do.LeaderSilent | do.QuorumLost | do.LeaderEnded | do.OtherLeaderFound

ENDPOINT_RETRY_S = 0.2
"""How soon an endpoint in use is tried again if the workers' store also listens there."""
LINGER_S = 1.0
"""How long a member that knows the job's end stays for members whose leader ended before it sent the end."""
MALFORMED_PAUSE_S = 1.0
"""How soon a leader that sent a malformed message is asked again; it will probably send another."""


def decide_search(state: MemberState, event: SearchEvent, boottime_s: float) -> Decision:
    """Find a leader, or lead."""
    match event:
        case do.Started():
            return _on_started(state, event)
        case do.LocalChecked():
            return _on_local_checked(state, event)
        case do.EndpointTried():
            return _on_endpoint_taken(state, event.error) if event.error else _on_endpoint_opened(state)
        case do.Answered():
            return _on_answered(state, event, boottime_s)
        case do.SearchTurned():
            return _on_search_turned(state, event, boottime_s)
        case do.TimerFired():
            return _on_timer(state, event.kind)
        case _:
            assert_never(event)


def _on_timer(state: MemberState, kind: do.TimerKind) -> Decision:
    is_apart = state.connection is None
    if kind is do.TimerKind.DEADLINE:
        failure = state.refusal or state.search_failure
        why = "" if failure is None else f" ({failure.reason})"
        limit_s = state.config.join_timeout_s
        return fail(state, f"found no leader at {_show_endpoint(state)} within {limit_s:g} s{why}")
    if kind is do.TimerKind.JOIN:
        return _on_no_answer(state)
    if kind is do.TimerKind.ENDPOINT and is_apart:
        return _choose_role(state, is_local=True)
    return _start_search(state) if kind is do.TimerKind.PAUSE and is_apart else (state, ())


# -- the first role ----------------------------------------------------------------------------------------------------


def _on_started(state: MemberState, event: do.Started) -> Decision:
    """Lead if the endpoint is this machine's and free; otherwise search for the leader."""
    config = state.config
    state = replace(state, is_prepared=event.is_prepared)
    try:
        read_host(config.local_addr or "localhost")
    except MalformedMessageError as error:
        return fail(state, f"--local-addr {config.local_addr!r}: {error}", usage=True)
    if event.open_error:
        return fail(state, f"cannot open a listening socket: {event.open_error}")
    begun = (do.Wait(is_on=True), do.SetTimer(kind=do.TimerKind.DEADLINE, delay_s=config.join_timeout_s))
    if config.is_host is None and config.node_index is None:
        return state, (*begun, do.CheckLocal())
    is_local = config.node_index == 0 or config.listen_fd is not None
    # --rdzv-conf is_host overrides the resolved name
    state, actions = _choose_role(state, is_local=is_local if config.is_host is None else config.is_host)
    return state, (*begun, *actions)


def _choose_role(state: MemberState, *, is_local: bool) -> Decision:
    return (state, (do.OpenEndpoint(),)) if is_local else _start_search(state)


def _on_local_checked(state: MemberState, event: do.LocalChecked) -> Decision:
    """Handle whether the endpoint is local.

    With `is_check` this node leads; if the endpoint is elsewhere, join the leader there.
    """
    if not event.is_check:
        return _choose_role(state, is_local=event.is_local) if state.connection is None else (state, ())
    if event.is_local or not state.is_leading or event.has_formed_round:
        return state, ()
    return _start_search(replace(state, is_endpoint_elsewhere=True))


def _on_endpoint_opened(state: MemberState) -> Decision:
    config = state.config
    notices: tuple[do.Action, ...] = ()
    if config.max_nodes > 1 and not config.token:
        line = (
            f"rendezvous at {_show_endpoint(state)} has no MUSTER_TOKEN: any process that reaches it can join this job "
            "and run code in it; set one on all nodes, made with `openssl rand -hex 32`"
        )
        notices = (build_notice(line),)
    state, actions = _lead(state, takeover=False)
    # It leads only by its --node-rank, for the first time: perhaps a mistake.
    is_sure = config.node_index != 0 or config.listen_fd is not None or config.is_host is not None or config.incarnation
    return state, (*notices, *actions, *(() if is_sure else (do.CheckLocal(is_check=True),)))


def _on_endpoint_taken(state: MemberState, why: str) -> Decision:
    """Join the leader there, or try again if the workers' store listens at the endpoint.

    In that case no other node can lead there, and the guard ends a store that this node's last agent left behind.
    """
    if state.config.lends_endpoint:
        line = f"{why}: retrying until the join timeout; every node needs its own --node-rank"
        state, notices = print_once(state, Once.TAKEN_PORT, line)
        return state, (*notices, do.SetTimer(kind=do.TimerKind.ENDPOINT, delay_s=ENDPOINT_RETRY_S))
    line = f"{why}: looking for the job's leader there; if another program listens there, choose another port"
    notices = () if state.config.node_index is None else (build_notice(line),)
    state, actions = _start_search(state)
    return state, (*notices, *actions)


def _show_endpoint(state: MemberState) -> str:
    return "{}:{}".format(*find_endpoint(state.config))


# -- the search --------------------------------------------------------------------------------------------------------


def _start_search(state: MemberState) -> Decision:
    """Start the search, unless it is running already."""
    if state.is_searching:
        return state, ()
    state = replace(state, is_searching=True, search_failure=None)
    recovery, address = state.recovery, state.recovery.leader_address
    targets = [state.first_target] if state.first_target is not None else []
    if address is not None and address[1]:
        targets.append(do.Target(host=address[0], port=address[1]))
    targets += [
        do.Target(host=one.host, port=one.port, group_rank=one.group_rank)
        for one in recovery.successors
        if one.group_rank != recovery.group_rank
    ]
    host, port = find_endpoint(state.config)
    targets.append(do.Target(host=host, port=port))
    return state, (do.Search(targets=tuple(dict.fromkeys(targets))),)


def _may_give_way(state: MemberState, *, has_formed_round: bool) -> bool:
    """Return whether this node leads but joins a better leader that it finds."""
    return state.is_leading and not has_formed_round and (state.is_endpoint_elsewhere or state.is_takeover)


def _on_answered(state: MemberState, event: do.Answered, boottime_s: float) -> Decision:
    """Join the node that answered if it leads, or is a candidate with a lower rank than ours."""
    reply, recovery = event.reply, state.recovery
    gives_way = _may_give_way(state, has_formed_round=event.has_formed_round)
    is_free = state.connection is None or gives_way
    if reply.id == state.own_id or state.is_running or not is_free:
        return state, ()
    if reply.id != recovery.leader_id:
        if recovery.is_leaders_index(reply.index):
            # It started because the old leader's process ended.
            state = replace(state, promise_until_s=-NEVER)
        if boottime_s < state.promise_until_s:
            return state, ()
    if (difference := _find_difference(state, reply)) is not None:
        where = f"{event.target.host}:{event.target.port}"
        line = f"not joining the leader at {where}: it was started with {difference}"
        return print_once(state, Once.RULES, line)
    if not _is_better(state, reply):
        if reply.leader is None or not state.is_searching:
            return state, ()
        return state, (do.AddTarget(target=do.Target(host=reply.leader[0], port=reply.leader[1])),)
    leaving: tuple[do.Action, ...] = (do.DropLink(),)
    if gives_way:
        leaving = (*leaving, do.StopLeading(host=event.target.host, port=event.target.port))
    connection = Connection(is_local=False, peer_host=event.peer_host, silent_host=event.silent_host)
    state = replace(state, connection=connection, is_searching=False, search_failure=None, first_target=None)
    state, actions = _ask_to_join(state)
    return state, (*leaving, do.TakeLink(), *actions)


def _find_difference(state: MemberState, reply: QueryReply) -> str | None:
    """Return how a leader with an older round than ours was started differently, so that it could only refuse us.

    Such a leader was restarted with the wrong flags, and the leader of the last round's members is elsewhere. A node
    that was never part of a round joins, and is refused.
    """
    leads = reply.role in (DiscoveryRole.LEADER, DiscoveryRole.CANDIDATE)
    if not leads or reply.round_number >= state.recovery.round_number:
        return None
    return describe_difference(reply.rules.value, state.job_rules)


def _is_better(state: MemberState, reply: QueryReply) -> bool:
    if reply.role is DiscoveryRole.LEADER:
        return True
    own, own_group_rank = state.recovery.round_number, state.recovery.group_rank
    if reply.role is not DiscoveryRole.CANDIDATE:
        return False
    if own_group_rank is None:
        return True  # this node cannot take over: a candidate that knows less learns what this node knows
    if reply.round_number != own:
        return reply.round_number > own
    return reply.group_rank is not None and reply.group_rank < own_group_rank


def _on_search_turned(state: MemberState, event: do.SearchTurned, boottime_s: float) -> Decision:
    """Attempt a takeover if no member of a lower rank answers."""
    if not state.is_searching:
        return state, ()
    state = replace(state, search_failure=event.failure)
    state, notices = _report_refusal(state)
    if state.is_running or state.connection is not None or boottime_s < state.promise_until_s:
        return state, notices
    recovery = state.recovery
    group_rank = recovery.group_rank
    actions: tuple[do.Action, ...] = ()
    if group_rank is not None and any(one.group_rank == group_rank for one in recovery.successors):
        if all(rank >= group_rank for rank in event.unanswered):
            state, actions = _lead(state, takeover=True)
    elif event.has_endpoint and event.age_s > ENDPOINT_SEARCH_S:
        # Gather new nodes, even if this one was not in the last round.
        state, actions = _lead(state, takeover=recovery.round_number > 0)
    return state, (*notices, *actions)


def _report_refusal(state: MemberState) -> Decision:
    """Post a failure that waiting cannot repair at once, instead of at the join timeout."""
    failure = state.search_failure
    if failure is None or failure.cause is Cause.BROKEN or state.refusal is not None:
        return state, ()
    return replace(state, refusal=failure), (build_notice(f"cannot join the job at {failure.reason}"),)


# -- joining -----------------------------------------------------------------------------------------------------------


def _lead(state: MemberState, *, takeover: bool) -> Decision:
    state = replace(state, connection=Connection(is_local=True), is_takeover=takeover)
    state, actions = _ask_to_join(state)
    return state, (do.Lead(takeover=takeover), *actions)


def _ask_to_join(state: MemberState) -> Decision:
    """Ask to take part."""
    state = replace(state, has_reported_prepared=state.is_prepared)
    limit = do.SetTimer(kind=do.TimerKind.JOIN, delay_s=None if state.is_leading else JOIN_ANSWER_LIMIT_S)
    return state, (do.SendJoin(), limit)


def _on_no_answer(state: MemberState) -> Decision:
    connection, index = state.connection, state.config.node_index
    if connection is None or connection.is_accepted:
        return state, ()
    notices: tuple[do.Action, ...] = ()
    if index is not None:
        line = f"the leader at {connection.peer_host} does not answer: does another node have --node-rank {index}?"
        state, notices = print_once(state, Once.NO_ANSWER, line)
    state, actions = drop_leader(state, "it does not answer", promise_until_s=-NEVER)
    return state, (*notices, *actions)


def on_welcome(state: MemberState, connection: Connection, welcome: down.Welcome) -> Decision:
    """Handle that the leader has accepted this node."""
    recovery = state.recovery.with_leader(welcome.leader_id)
    notices: tuple[do.Action, ...] = ()
    if not connection.is_local:
        recovery = replace(recovery, leader_address=(connection.peer_host, welcome.listen_port))
        if state.config.lends_endpoint and connection.silent_host:
            why = f"{connection.silent_host}, an address of {state.config.master_addr}, does not answer"
            notices = (build_notice(f"{why}: MASTER_ADDR is {connection.peer_host} on this node"),)
        connection = replace(connection, listen_port=welcome.listen_port)
    connection = replace(connection, is_accepted=True)
    state = replace(state, recovery=recovery, connection=connection, refusal=None)
    state, prepared = report_prepared(state)
    return state, (*cancel_timers(), *notices, do.FollowLeader(), *prepared)


def report_prepared(state: MemberState) -> Decision:
    """Tell the leader that workers could start, unless the join said so."""
    if not state.is_prepared or state.has_reported_prepared or state.phase is not Phase.JOINED:
        return state, ()
    return replace(state, has_reported_prepared=True), (do.SendUp(message=Prepared()),)


# -- the leader is lost ------------------------------------------------------------------------------------------------


def on_leader_lost(state: MemberState, event: LossEvent) -> Decision:
    """Handle the loss of the leader, as reported by the link, the lease or another leader."""
    match event:
        case do.LeaderMalformed():
            notice = build_notice(f"the leader sent a malformed message ({event.error})")
            why, until_s = "it sent a malformed message", event.promise_until_s
            state, actions = drop_leader(state, why, promise_until_s=until_s, pause_s=MALFORMED_PAUSE_S)
            return state, (notice, *actions)
        case do.LinkClosed():
            return _on_link_closed(state, event)
        case do.LeaderSilent():
            return drop_leader(state, f"no message for {event.silence_s:g} s", promise_until_s=event.promise_until_s)
        case do.QuorumLost():
            return fence(state, "most nodes of the round cannot be reached and may continue without this one")
        case do.LeaderEnded():
            recovery = state.recovery.with_leader_end(event.led_rounds)
            return replace(state, promise_until_s=-NEVER, recovery=recovery), (do.AskAgain(),)
        case do.OtherLeaderFound():
            return give_way(state, event.host, event.port)
        case _:
            assert_never(event)


def _on_link_closed(state: MemberState, event: do.LinkClosed) -> Decision:
    """Handle a closed link: without a goodbye, the leader's process has ended or the connection broke."""
    recovery, may_have_ended = state.recovery, event.is_leased_elsewhere
    keeps_promise = may_have_ended or state.phase is Phase.JOINED
    state, actions = drop_leader(
        state, event.reason, promise_until_s=event.promise_until_s if keeps_promise else -NEVER
    )
    address = recovery.leader_address
    if may_have_ended and address is not None and address[1]:
        actions = (*actions, do.Probe(host=address[0], port=address[1], led_rounds=recovery.led_rounds))
    return state, actions


def drop_leader(state: MemberState, reason: str, *, promise_until_s: float, pause_s: float = 0.0) -> Decision:
    """Close the link, fence the workers, and search for a leader."""
    was_accepted = state.phase is Phase.JOINED
    is_told = Once.LOSS in state.printed
    printed = state.printed | {Once.LOSS}
    state = replace(state, connection=None, promise_until_s=promise_until_s, refusal=None, printed=printed)
    dropped = (do.DropLink(), *cancel_timers())
    if state.job_end is not None:
        return state, (*dropped, do.SetTimer(kind=do.TimerKind.LINGER, delay_s=LINGER_S))
    line = f"the leader was lost ({reason}): searching for it or its successor"
    told: tuple[do.Action, ...] = (build_notice(line, is_leader_lost=True),) if was_accepted and not is_told else ()
    if state.is_running:
        state, told = fence(state, line)
    deadline = do.SetTimer(kind=do.TimerKind.DEADLINE, delay_s=state.config.join_timeout_s)
    if pause_s:
        return state, (*dropped, *told, deadline, do.SetTimer(kind=do.TimerKind.PAUSE, delay_s=pause_s))
    state, searching = _start_search(state)
    return state, (*dropped, *told, deadline, *searching)


def give_way(state: MemberState, host: str, port: int) -> Decision:
    """Join another leader that knows a later round, and redirect this leader's members to it."""
    state, stopped = stop_search(replace(state, first_target=do.Target(host=host, port=port)))
    state, dropped = drop_leader(state, "another leader has replaced it", promise_until_s=-NEVER)
    return state, (do.StopLeading(host=host, port=port), *stopped, *dropped)
