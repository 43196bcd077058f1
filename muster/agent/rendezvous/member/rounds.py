"""Decides what a member makes of the leader's rounds, and of the job's end. Pure; see `decisions`."""

from muster._shared.records import replace
from muster.agent.rendezvous.consensus.actions import RoundBreak, RoundStart, RoundSummary
from muster.agent.rendezvous.consensus.events import RoundAcknowledged
from muster.agent.rendezvous.consensus.recovery import RecoveryRecord
from muster.agent.rendezvous.interface import (
    BreakKind,
    JobEnded,
    Notice,
    RendezvousFailed,
    RoundBroken,
    RoundFormed,
)
from muster.agent.rendezvous.member import events as do
from muster.agent.rendezvous.member.state import MemberState, Once
from muster.agent.rendezvous.report_messages import Stopped
from muster.agent.rendezvous.round_messages import build_round

Decision = tuple[MemberState, tuple[do.Action, ...]]


def build_notice(text: str, *, is_leader_lost: bool = False) -> do.Post:
    """Return one line for the console (see `Notice`)."""
    return do.Post(event=Notice(text=text, is_leader_lost=is_leader_lost))


def print_once(state: MemberState, once: Once, text: str) -> Decision:
    """Return one line for the console, unless it was printed."""
    if once in state.printed:
        return state, ()
    return replace(state, printed=state.printed | {once}), (build_notice(text),)


def stop_search(state: MemberState) -> Decision:
    """Stop the search, if it is running."""
    return replace(state, is_searching=False, search_failure=None), (do.StopSearch(),)


def cancel_timers() -> tuple[do.Action, ...]:
    """Cancel the timers of the search, because a leader was found, or none is needed."""
    return tuple(do.SetTimer(kind=kind, delay_s=None) for kind in (do.TimerKind.DEADLINE, do.TimerKind.JOIN))


# -- rounds -----------------------------------------------------------------------------------------------------------


def record_recovery(state: MemberState, told: RecoveryRecord) -> MemberState:
    """Merge the leader's recovery record into what this node knows."""
    return replace(state, recovery=state.recovery.with_record(told))


def on_round_start(state: MemberState, start: RoundStart) -> Decision:
    """Begin the lease of a new round that this node takes part in, and have its workers started."""
    formed, hosts_rank_0 = build_round(start, state.config), start.group_rank == 0
    if state.config.lends_endpoint:
        formed = replace(formed, master_addr=_find_static_master(state), master_port=state.config.master_port)
    told: tuple[do.Action, ...] = ()
    nodes, rounds = formed.group_world_size, state.recovery.record.quorum_rounds
    is_back = Once.LOSS in state.printed and bool(rounds) and nodes >= rounds[-1].size
    if Once.WAIT in state.printed or is_back:  # corrects the last line
        goes_on = "goes on" if formed.number > 1 else "starts"
        told = (build_notice(f"{nodes} of {state.config.max_nodes} nodes are here: the job {goes_on}"),)
    state, stopped = stop_search(
        replace(
            state,
            recovery=state.recovery.with_round(start.facts.value, start.group_ranks),
            is_running=True,
            kinds_posted=frozenset(),
            printed=state.printed - {Once.WAIT, Once.SPARE, Once.LOSS},
        )
    )
    return state, (
        do.Wait(is_on=False),
        *told,
        do.BeginRound(hosts_rank_0=hosts_rank_0, is_alone=formed.group_world_size == 1),
        do.SendUp(message=RoundAcknowledged(round_number=formed.number)),
        *stopped,
        do.Post(event=RoundFormed(round=formed, is_held=not hosts_rank_0)),
    )


def _find_static_master(state: MemberState) -> str:
    """Return MASTER_ADDR as given, or the address that answered: torch's store would try only the silent one."""
    found = state.connection
    return state.config.master_addr if found is None or not found.silent_host else found.peer_host


def on_round_summary(state: MemberState, summary: RoundSummary) -> Decision:
    """Print once that a round was formed without this node, but not with every round that the others form."""
    state = replace(state, recovery=state.recovery.with_round(summary.facts.value, summary.group_ranks))
    if not summary.is_spare or Once.SPARE in state.printed:
        return state, ()
    line = f"all {state.config.max_nodes} nodes that --nnodes allows have joined: waiting as a spare"
    state, notices = print_once(state, Once.SPARE, line)
    return state, (do.Wait(is_on=False), *notices)


def on_round_break(state: MemberState, message: RoundBreak) -> Decision:
    """Have the workers of a round that has ended stopped, or report that there are none."""
    number = message.broken.round_number
    if number != state.recovery.round_number:
        return state, ()
    state = record_recovery(state, message.recovery.value)
    if message.broken.leaves or message.broken.explains:  # even if its workers have stopped
        return state, (do.Post(event=replace(message.broken, is_leader=state.is_leading)),)
    if not state.is_running:
        return state, (do.SendStopped(stopped=Stopped(round_number=number)),)
    return post_break(state, message.broken)


def post_break(state: MemberState, broken: RoundBroken) -> Decision:
    """Have the workers stopped, once for each kind of break."""
    if not state.is_running or broken.kind in state.kinds_posted:
        return state, ()
    state = replace(state, kinds_posted=state.kinds_posted | {broken.kind})
    if state.is_leading and broken.kind is BreakKind.MEMBERSHIP and not broken.is_join:
        state = replace(state, printed=state.printed | {Once.LOSS})
    return state, (do.Post(event=replace(broken, is_leader=state.is_leading)),)


def fence(state: MemberState, reason: str) -> Decision:
    """Kill this node's workers at once, because the other members may continue without it."""
    broken = RoundBroken(round_number=state.recovery.round_number, kind=BreakKind.FENCED, reason=reason)
    return post_break(state, broken)


# -- the end -----------------------------------------------------------------------------------------------------------


def post_job_end(state: MemberState) -> Decision:
    """Post the end of the job, which all members know."""
    job_end = state.job_end
    if job_end is None:
        return state, ()
    ended = JobEnded(
        succeeded=job_end.succeeded,
        report=None if job_end.report is None else job_end.report.value,
        prints_report=job_end.printer_id == state.own_id,
        is_leader=state.is_leading,
        is_drained=job_end.is_drained,
        peak_bytes=state.peak_bytes,
    )
    return _end(state, do.Post(event=ended))


def fail(state: MemberState, reason: str, *, usage: bool = False) -> Decision:
    """End rendezvous without success."""
    return _end(state, do.Post(event=RendezvousFailed(reason=reason, usage=usage)))


def _end(state: MemberState, post: do.Post) -> Decision:
    """End, but leave the link open until the supervisor closes it, because others may still learn of the end here."""
    state, stopped = stop_search(replace(state, has_ended=True))
    return state, (do.Wait(is_on=False), *stopped, do.StopRenewal(), *cancel_timers(), post)
