"""Jobs as their status shows them, for views and readers: of any size, that run, hang, crash, drain, and have ended.

Deterministic: the same call makes the same status. Times are around `NOW_S`, by the wall clock.
"""

from muster._shared.job_view import (
    LISTED_NODES,
    LISTED_RANKS,
    Goodput,
    JobEvent,
    JobState,
    JobStatus,
    NodeState,
    NodeStatus,
    RankState,
    RankStatus,
    Recovery,
    SlowRank,
)
from muster._shared.records import replace

NOW_S = 1_800_000_000.0
TOTAL = 20_000


def make_rank(global_rank: int, nproc: int, *, step: int = 8_120, gpus: bool = True) -> RankStatus:
    """A rank that runs."""
    return RankStatus(
        global_rank=global_rank,
        node=global_rank // nproc,
        local_rank=global_rank % nproc,
        step=step,
        total=TOTAL,
        rate=7.9,
        values=(("loss", round(0.31 + global_rank / 1000, 4)), ("lr", 1e-05)),
        still_s=0.1,
        cpu=0.97,
        memory_bytes=(3 << 30) + (global_rank << 20),
        gpu=0.93 if gpus else None,
        gpu_memory_bytes=61 << 30 if gpus else None,
        collective="all_reduce #8121 of default_pg" if global_rank % 4 else "",
        collective_s=0.02 if global_rank % 4 else None,
        last_line=f"epoch 3 step {step}: loss {0.31 + global_rank / 1000:.4f}",
    )


def make_job(ranks: int = 8, nodes: int = 1, *, gpus: bool = True) -> JobStatus:
    """A job in its second round that runs; `ranks` is divided by `nodes`. Rank 3, if there is one, is slow."""
    nproc = ranks // nodes
    steps = [8_120 - (rank == 3) for rank in range(ranks)]
    listed = tuple(make_rank(rank, nproc, step=steps[rank], gpus=gpus) for rank in range(ranks))
    listed = tuple(replace(rank, lag_steps=max(steps) - (rank.step or 0)) for rank in listed)
    shown = tuple(_make_node(node, nproc, listed, gpus=gpus) for node in range(nodes))
    return JobStatus(
        round=2,
        attempt=1,
        step=min(steps),
        total=TOTAL,
        rate=7.9,
        values=listed[0].values,
        time_s=NOW_S,
        run_id="train-x7k2p",
        since_s=NOW_S - 1_020.0,
        started_s=NOW_S - 1_200.0,
        restarts_left=2,
        eta_s=1_503.8,
        world_size=ranks,
        goodput=Goodput(
            fraction=0.89, productive_s=1_028.0, lost_s=(("start", 31.0), ("detect", 0.4), ("repeated", 95.6))
        ),
        nodes_running=nodes,
        nodes=shown if nodes <= LISTED_NODES else shown[:2],
        ranks=listed if ranks <= LISTED_RANKS else (),
        recoveries=(
            Recovery(
                round=2,
                attempt=1,
                cause=f"rank {ranks - 1} on host-{nodes - 1} exited with code 1",
                time_s=NOW_S - 1_030.0,
                cost_s=96.0,
            ),
        ),
        recovery_count=1,
        events=(
            JobEvent(time_s=NOW_S - 1_198.0, text=f"round 1 runs: {ranks} ranks on {nodes} nodes"),
            JobEvent(time_s=NOW_S - 1_030.0, text=f"rank {ranks - 1} on host-{nodes - 1} exited with code 1"),
            JobEvent(time_s=NOW_S - 1_020.0, text=f"round 2 runs: {ranks} ranks on {nodes} nodes"),
        ),
        slow_ranks=(
            SlowRank(
                global_rank=3,
                node=3 // nproc,
                host=f"host-{3 // nproc}",
                is_chronic=True,
                late_s=0.043,
                late_fraction=0.34,
                share=0.97,
            ),
        )
        if ranks > 3
        else (),
        peak_memory_bytes=(3 << 30) + (1 << 28),
        peak_memory_rank=0,
    )


def _make_node(node: int, nproc: int, ranks: tuple[RankStatus, ...], *, gpus: bool) -> NodeStatus:
    own = ranks[node * nproc : (node + 1) * nproc]
    steps = [rank.step or 0 for rank in own]
    return NodeStatus(
        node_index=node,
        node=node,
        host=f"host-{node}",
        age_s=0.4,
        ranks=nproc,
        first_rank=node * nproc,
        step=min(steps),
        most_step=max(steps),
        cpu=0.97 * nproc,
        memory_bytes=sum(rank.memory_bytes or 0 for rank in own),
        gpu=0.93 if gpus else None,
        gpu_memory_bytes=nproc * (61 << 30) if gpus else None,
        slowest=min(own, key=lambda rank: rank.step or 0) if len(ranks) > LISTED_RANKS else None,
    )


def make_starting(ranks: int = 8, nodes: int = 1) -> JobStatus:
    """No worker has done a step; its nodes have met."""
    running = make_job(ranks, nodes)
    return JobStatus(
        round=1,
        state=JobState.STARTING,
        time_s=NOW_S,
        run_id=running.run_id,
        since_s=NOW_S - 2.0,
        started_s=NOW_S - 2.0,
        restarts_left=3,
        world_size=ranks,
        nodes_running=nodes,
        nodes=tuple(replace(node, step=None, most_step=None, slowest=None) for node in running.nodes),
        ranks=tuple(
            RankStatus(
                global_rank=each.global_rank, node=each.node, local_rank=each.local_rank, state=RankState.STARTING
            )
            for each in running.ranks
        ),
    )


def make_waiting(nodes: int = 2) -> JobStatus:
    """Node 0 waits for the others."""
    return JobStatus(
        state=JobState.WAITING,
        time_s=NOW_S,
        run_id="train-x7k2p",
        reason=f"1 of {nodes} nodes are here",
        since_s=NOW_S - 40.0,
        started_s=NOW_S - 40.0,
        restarts_left=3,
        nodes_running=0,
        nodes_spare=1,
        nodes=(NodeStatus(node_index=0, host="host-0", state=NodeState.SPARE, age_s=0.2),),
    )


def make_hang(ranks: int = 8, nodes: int = 1) -> JobStatus:
    """Rank 1 has not entered a collective that the others wait in."""
    job = make_job(ranks, nodes)
    text = "rank 1 did not enter all_reduce #8121 of default_pg"
    shown = tuple(
        replace(
            each,
            rate=0.0,
            still_s=320.0,
            cpu=0.0,
            collective="" if each.global_rank == 1 else "all_reduce #8121 of default_pg",
            collective_s=None if each.global_rank == 1 else 319.0,
        )
        for each in job.ranks
    )
    event = JobEvent(time_s=NOW_S - 20.0, text=text)
    return replace(
        job,
        state=JobState.HUNG,
        reason=text,
        since_s=NOW_S - 20.0,
        rate=0.0,
        eta_s=None,
        ranks=shown,
        events=(*job.events, event),
    )


def make_crash(ranks: int = 8, nodes: int = 1) -> JobStatus:
    """The last rank has failed, its node is lost if there is another, and the next round has no workers yet."""
    job = make_job(ranks, nodes)
    text = f"rank {ranks - 1} on host-{nodes - 1} ended by SIGKILL"
    shown = tuple(
        replace(each, state=RankState.FAILED if each.global_rank == ranks - 1 else RankState.RUNNING, rate=0.0)
        for each in job.ranks
    )
    lost = nodes > 1
    known = tuple(
        replace(each, state=NodeState.LOST, age_s=4.0) if lost and each.node == nodes - 1 else each
        for each in job.nodes
    )
    return replace(
        job,
        state=JobState.RESTARTING,
        reason=text,
        since_s=NOW_S - 1.5,
        rate=0.0,
        eta_s=None,
        ranks=shown,
        nodes=known,
        nodes_running=nodes - lost,
        nodes_lost=int(lost),
        events=(*job.events, JobEvent(time_s=NOW_S - 1.5, text=text)),
        recoveries=(*job.recoveries, Recovery(round=3, attempt=2, cause=text, time_s=NOW_S - 1.5)),
        recovery_count=2,
    )


def make_drain(ranks: int = 8, nodes: int = 1) -> JobStatus:
    """All ranks stop at one step, because a node is preempted."""
    job = make_job(ranks, nodes)
    text = "host-0 is preempted: all ranks stop at step 8140"
    return replace(
        job,
        state=JobState.DRAINING,
        reason=text,
        since_s=NOW_S - 0.5,
        events=(*job.events, JobEvent(time_s=NOW_S - 0.5, text=text)),
    )


def make_paused(ranks: int = 8, nodes: int = 1) -> JobStatus:
    """All ranks wait at one step."""
    since_s = NOW_S - 60.0
    return replace(
        make_job(ranks, nodes), state=JobState.PAUSED, since_s=since_s, paused_since_s=since_s, rate=0.0, eta_s=None
    )


def make_ended(ranks: int = 8, nodes: int = 1, exit_code: int = 0) -> JobStatus:
    """It has ended: with its last step, or because rank 1 has failed."""
    job = make_job(ranks, nodes)
    reason = "" if exit_code == 0 else "rank 1 on host-0 exited with code 1; no restart is left"
    state = RankState.ENDED if exit_code == 0 else RankState.FAILED
    step = TOTAL - 1 if exit_code == 0 else job.step
    return replace(
        job,
        state=JobState.ENDED,
        reason=reason,
        since_s=NOW_S,
        exit_code=exit_code,
        step=step,
        rate=0.0,
        eta_s=None,
        ranks=tuple(
            replace(each, state=state, step=step, lag_steps=0, collective="", collective_s=None) for each in job.ranks
        ),
    )


SAMPLES = {
    "starting": make_starting,
    "running": make_job,
    "hung": make_hang,
    "restarting": make_crash,
    "draining": make_drain,
    "paused": make_paused,
    "ended": make_ended,
}
"""Each takes the number of ranks and of nodes."""
