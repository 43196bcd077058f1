"""Builds the job's status from the nodes' reports and the job's history. Pure.

A job of many ranks is shown by its extremes. Nodes that are lost, behind, or silent come first, and only their reports
are unpacked.
"""

import math
from collections.abc import Mapping, Sequence

from muster._shared.contract import show_controls
from muster._shared.job_history import JobHistory
from muster._shared.job_view import (
    LISTED_NODES,
    LISTED_RANKS,
    MOST_SLOW_RANKS,
    JobState,
    JobStatus,
    NodeState,
    NodeStatus,
    RankStatus,
    SlowRank,
)
from muster._shared.records import NO_ITEMS, record, replace
from muster.agent.rendezvous.interface import JobMembers, MemberStatus
from muster.agent.round import Round
from muster.agent.telemetry.sampling import NodeSummary, Pause, count_steps, find_slowest, unpack

_MOST_S = 1e12
_BEGUN_S = 1.0
"""A rank without a rate that did a step within this time has begun; without a step for longer, it stands still."""


@record
class MergedNodes:
    """The merged reports of all nodes."""

    nodes: tuple[NodeStatus, ...]
    """At most `LISTED_NODES`."""
    ranks: tuple[RankStatus, ...]
    """The ranks of all listed nodes; empty for jobs that list no ranks."""
    summaries: tuple[NodeSummary, ...]
    """The unpacked summaries."""
    running: int
    spare: int
    lost: int
    is_complete: bool = True
    """Whether each listed node has reported on this round."""
    first: tuple[int, float] | None = None
    """How many steps the ranks had done when each had done its first one, and the seconds since; None if unknown."""
    ages_s: Mapping[int, float] = NO_ITEMS
    """Seconds since each node was looked at, by its group rank."""


def merge_nodes(
    own: NodeSummary, job: JobMembers | None, before: Mapping[int, MemberStatus], number: int, own_age_s: float = 0.0
) -> MergedNodes:
    """Merge what is known of the nodes.

    Args:
        own: this node's summary.
        job: what the leader knows; None if this node knows only itself.
        before: the members of the round when it began, by group rank. Those that are missing now are lost.
        number: the round's.
        own_age_s: seconds since the look of this node's summary.
    """
    if job is None:
        return MergedNodes(
            nodes=(own.node,),
            ranks=_add_lag(own.ranks, NO_ITEMS),
            summaries=(own,),
            running=1,
            spare=0,
            lost=0,
            first=_find_first({own.node.node: own}, NO_ITEMS),
        )
    members = {each.group_rank: each for each in job.members if each.group_rank is not None}
    lost = {rank: each for rank, each in before.items() if rank not in members}
    chosen = _choose(members, lost)
    # Until the first round, nodes only wait for it.
    spare = [each for each in job.members if chosen and each.group_rank is None]
    nodes: list[NodeStatus] = []
    summaries: dict[int | None, NodeSummary] = {}
    ages_s = {rank: own_age_s if each.is_leader else each.age_s for rank, each in chosen.items()}
    for rank in sorted(chosen):
        member = chosen[rank]
        found = own if member.is_leader else _unpack(member, number)
        state = NodeState.LOST if rank in lost else NodeState.RUNNING
        if found is not None:
            summaries[rank] = found
        nodes.append(_describe(member, rank, found, state, ages_s[rank]))
    spares = enumerate(spare[: LISTED_NODES - len(nodes)], len(members) + len(lost))
    nodes += [_describe(member, group_rank, None, NodeState.SPARE) for group_rank, member in spares]
    ranks = sorted((rank for each in summaries.values() for rank in each.ranks), key=lambda rank: rank.global_rank)
    return MergedNodes(
        nodes=tuple(nodes),
        ranks=_add_lag(ranks, ages_s),
        summaries=tuple(summaries.values()),
        running=len(members),
        spare=len(spare),
        lost=len(lost),
        is_complete=len(summaries) == len(chosen),
        first=_find_first(summaries, ages_s),
        ages_s=ages_s,
    )


def _find_first(summaries: Mapping[int | None, NodeSummary], ages_s: Mapping[int, float]) -> tuple[int, float] | None:
    """See `MergedNodes.first`. The argument has the nodes' reports and the seconds since, by group rank."""
    done = min((each.first_done for each in summaries.values()), default=0)
    ago_s = [each.first_ago_s + ages_s.get(-1 if rank is None else rank, 0.0) for rank, each in summaries.items()]
    return (done, min(ago_s)) if done else None


def _choose(members: Mapping[int, MemberStatus], lost: Mapping[int, MemberStatus]) -> dict[int, MemberStatus]:
    """Return the listed nodes: all, or the lost ones, the leader, and then those that are behind or silent."""
    everyone = {**members, **lost}
    if len(everyone) <= LISTED_NODES:
        return everyone

    def find_place(rank: int) -> tuple[bool, bool, int, float]:
        summary = everyone[rank].summary
        step = -1 if summary is None or summary.step is None else summary.step
        return rank not in lost, not everyone[rank].is_leader, step, -everyone[rank].age_s

    return {rank: everyone[rank] for rank in sorted(everyone, key=find_place)[:LISTED_NODES]}


def _unpack(member: MemberStatus, number: int) -> NodeSummary | None:
    summary = member.summary
    return None if summary is None or summary.round_number != number else unpack(summary.text)


def _describe(
    member: MemberStatus, group_rank: int, summary: NodeSummary | None, state: NodeState, age_s: float = 0.0
) -> NodeStatus:
    """Describe a node. What the leader knows takes precedence over the node's own report.

    Args:
        member: the node.
        group_rank: its own; of a spare a number above all of them. It is the index of a node that has none.
        summary: its report.
        state: its own.
        age_s: seconds since it was looked at.
    """
    return replace(
        NodeStatus(node_index=0) if summary is None else summary.node,
        node_index=group_rank if member.index is None else member.index,
        node=None if state is NodeState.SPARE else group_rank,
        host=show_controls(member.host),
        state=state,
        age_s=None if summary is None or state is NodeState.LOST else round(age_s, 1),
        ranks=member.nproc,
        suspicion=member.suspicion,
    )


def _add_lag(ranks: Sequence[RankStatus], ages_s: Mapping[int, float]) -> tuple[RankStatus, ...]:
    """Return how far ranks are behind the first one. Steps that a node may have done since its report count as done.

    A rank that has only begun to step has no known rate yet, and may be as fast as the fastest one.

    Args:
        ranks: those of all nodes.
        ages_s: seconds since each node's report, by its group rank.
    """
    if len(ranks) > LISTED_RANKS:
        return ()
    most = max((rank.step for rank in ranks if rank.step is not None), default=0)
    fastest = max((rank.rate or 0.0 for rank in ranks), default=0.0)
    least_s = min(ages_s.values(), default=0.0)

    def find_lag(rank: RankStatus) -> int:
        if rank.step is None:
            return 0
        has_begun = rank.rate is None and rank.still_s is not None and rank.still_s < _BEGUN_S
        rate = fastest if has_begun else rank.rate or 0.0
        return most - rank.step - math.ceil(rate * (ages_s.get(rank.node, least_s) - least_s))

    lags = map(find_lag, ranks)
    return tuple(replace(rank, lag_steps=lag) if lag > 0 else rank for rank, lag in zip(ranks, lags, strict=True))


def find_slowest_rank(merged: MergedNodes) -> RankStatus | None:
    """Find the slowest rank of the whole job."""
    slowest = [node.slowest for node in merged.nodes if node.slowest is not None]
    return find_slowest([*merged.ranks, *slowest])


def build_status(
    formed: Round,
    merged: MergedNodes,
    history: JobHistory,
    pause: Pause | None,
    *,
    kept: tuple[int, float] | None = None,
    slow_ranks: tuple[SlowRank, ...],
    run_id: str,
    now_s: float,
) -> JobStatus:
    """Return the status without the time of its writing; `now_s` is by the monotonic clock."""
    slowest = find_slowest_rank(merged)
    step = None if slowest is None else slowest.step
    total = None if slowest is None else slowest.total
    has_ended = history.state is JobState.ENDED
    if step is not None and has_ended and history.has_ended_at_one_step:
        # Other nodes' reports are seconds old, and their ranks have ended too.
        step = max([step, *(node.step or 0 for node in merged.nodes if node.node == formed.group_rank)])
    done, most_done = history.steps_done
    if has_ended and step is None and (done or most_done):  # the last round's script had none left, or did none
        step, total = done - 1 if done else None, history.total
    if history.state not in (JobState.RUNNING, JobState.PAUSED):
        pause = None
    state = history.state if pause is None else JobState.PAUSED
    rate = slowest.rate if slowest is not None and state is JobState.RUNNING and slowest.rate else 0.0
    bar = ""
    if step is None and state is JobState.RUNNING and merged.ranks and merged.ranks[0].global_rank == 0:
        found = find_bar(merged.ranks[0].last_line)
        if found is not None:
            step, total, bar_rate, name = found
            bar, rate = name or "bar", bar_rate or rate  # an optimizer's may differ
    steps_left = None if step is None or total is None else total - step - 1
    peak_bytes, peak_rank = max(((each.peak_bytes, each.peak_rank) for each in merged.summaries), default=(0, 0))
    status = JobStatus(
        round=formed.number,
        attempt=formed.attempt,
        state=state,
        paused_since_s=None if pause is None else round(pause.since_s, 3),
        step=step if pause is None else pause.step,
        total=total,
        bar=bar,
        most_steps_done=most_done if has_ended and most_done > (0 if step is None else step + 1) else None,
        optimizer_steps=slowest.optimizer_steps if slowest is not None and step is None else None,
        rate=rate,
        values=() if slowest is None else slowest.values,
        run_id=run_id,
        reason=show_controls(history.reason),
        since_s=round(history.since_s if pause is None else pause.since_s, 3),
        started_s=None if history.started_s is None else round(history.started_s, 3),
        exit_code=history.exit_code if has_ended else None,
        cause_class=history.cause_class,
        restarts_left=formed.restarts_left if history.restarts_left is None else history.restarts_left,
        eta_s=round(min(_MOST_S, steps_left / rate), 1)
        if steps_left is not None and steps_left >= 0 and rate > 0
        else None,
        world_size=formed.world_size,
        goodput=history.build_goodput(now_s),
        time_to_start_s=None if history.time_to_start_s is None else round(history.time_to_start_s, 2),
        failures=history.failures,
        nodes_running=merged.running,
        nodes_spare=merged.spare,
        nodes_lost=merged.lost,
        nodes=merged.nodes,
        ranks=merged.ranks,
        recoveries=history.recoveries,
        recovery_count=history.recovery_count,
        resize_count=history.resize_count,
        events=history.events,
        slow_ranks=slow_ranks[:MOST_SLOW_RANKS],
        snapshot_step=None if kept is None else kept[0],
        snapshot_s=None if kept is None else round(kept[1], 3),
        peak_memory_bytes=peak_bytes or None,
        peak_memory_rank=peak_rank if peak_bytes else None,
    )
    return status if status.still_s is None else replace(status, eta_s=None)


def find_bar(line: str) -> tuple[int, int, float | None, str] | None:
    """Return the step, total, rate and name of a tqdm progress bar that is not full; None if the line is not one.

    This is for people only, because there may be a bar for each epoch, and one that loads a model. A bar of bytes has
    units.

    >>> find_bar("epoch 2:  43%|####3     | 430/1000 [00:10<00:13, 41.90it/s, loss=0.3]")
    (430, 1000, 41.9, 'epoch 2')
    >>> find_bar(" 10%|#         | 1/10 [00:02<00:18,  2.00s/it]")
    (1, 10, 0.5, '')
    """
    if "%|" not in line:
        return None
    import re

    found = re.search(r"\| *(\d{1,15})/(\d{1,15}) \[(?:[^],]*, *(\d{1,9}(?:\.\d+)?)(s/)?)?", line)
    if found is None or int(found[1]) >= int(found[2]):
        return None
    number = float(found[3] or 0)
    name = line.partition("%|")[0].rpartition(":")[0].strip()
    return int(found[1]), int(found[2]), (1 / number if found[4] else number) if number else None, name


@record
class StepsDone:
    """The job's progress, now or at its first step."""

    rank: RankStatus
    """The rank that has done the fewest steps."""
    done: int
    """1 + that rank's step, or the steps of its optimizer."""
    at_s: float
    """When the last of the ranks did its step, or entered or left a phase, by this node's clock."""
    first: tuple[int, float] | None
    """How many steps were done when each rank of the round had done its first one, and when; None if unknown."""

    @property
    def is_counted(self) -> bool:
        """Whether the script counts the steps, across attempts."""
        return self.rank.step is not None


def find_steps(merged: MergedNodes, now_s: float) -> StepsDone | None:
    """Return the job's progress; None if a rank has done no step, or a node has not reported yet."""
    slowest = find_slowest_rank(merged)
    if slowest is None or not merged.is_complete or not all(count_steps(rank) for rank in (slowest, *merged.ranks)):
        return None
    done = count_steps(slowest)
    last = [slowest, *(rank for rank in merged.ranks if count_steps(rank) == done)]
    at_s = now_s - min(merged.ages_s.get(rank.node, 0.0) + (rank.still_s or 0.0) for rank in last)
    first = None if merged.first is None else (merged.first[0], min(at_s, now_s - merged.first[1]))
    return StepsDone(rank=slowest, done=done, at_s=at_s, first=first)
