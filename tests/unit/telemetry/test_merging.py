"""What nodes have told at different moments is made comparable."""

import pytest
from doubles.samples import make_round

from muster._shared.console.summary import format_summary
from muster._shared.job_history import JobHistory
from muster._shared.job_view import JobState, NodeStatus, RankStatus
from muster._shared.records import replace
from muster.agent.runtime.event_log import EventRecord
from muster.agent.telemetry.merging import MergedNodes, _add_lag, build_status, find_bar


def make_rank(global_rank: int, node: int, step: int, rate: float | None = 7.0) -> RankStatus:
    return RankStatus(global_rank=global_rank, node=node, local_rank=0, step=step, rate=rate)


@pytest.mark.parametrize(("age_s", "lag"), [(0.0, 7), (0.4, 4), (1.0, 0), (2.0, 0)])
def test_steps_since_a_node_has_told_count_as_done(age_s: float, lag: int) -> None:
    ranks = [make_rank(0, 0, 100), make_rank(1, 1, 93)]
    assert [rank.lag_steps for rank in _add_lag(ranks, {0: 0.0, 1: age_s})] == [0, lag]


def test_a_rank_that_stands_still_is_behind_however_old_its_news_are() -> None:
    ranks = [make_rank(0, 0, 100), make_rank(1, 1, 93, rate=None)]
    assert [rank.lag_steps for rank in _add_lag(ranks, {0: 0.0, 1: 9.0})] == [0, 7]


def test_a_rank_of_another_node_that_has_just_begun_is_not_behind() -> None:
    """Its node has told after its first step, 0.9 s ago; the first node looks at its own ranks now."""
    begun = replace(make_rank(1, 1, 0, rate=None), still_s=0.01)
    ranks = [make_rank(0, 0, 17, rate=19.2), begun]
    assert [rank.lag_steps for rank in _add_lag(ranks, {0: 0.0, 1: 0.9})] == [0, 0]
    stands_still = [ranks[0], replace(begun, still_s=1.5)]
    assert [rank.lag_steps for rank in _add_lag(stands_still, {0: 0.0, 1: 0.9})] == [0, 17]


@pytest.mark.parametrize(("exit_code", "step"), [(None, 93), (1, 93), (0, 99)])
def test_a_job_that_has_succeeded_has_done_the_steps_that_its_leader_has_seen(exit_code: int | None, step: int) -> None:
    own = NodeStatus(node_index=0, node=0, step=99, most_step=101)
    nodes = (own, NodeStatus(node_index=1, node=1, step=93, most_step=93))
    ranks = (make_rank(0, 0, 99), make_rank(1, 1, 93))
    merged = MergedNodes(nodes=nodes, ranks=ranks, summaries=(), running=2, spare=0, lost=0)
    history = JobHistory()
    if exit_code is not None:
        history.state, history.exit_code = JobState.ENDED, exit_code
        history.has_ended_at_one_step = exit_code == 0
    status = build_status(make_round(), merged, history, None, slow_ranks=(), run_id="job", now_s=5.0)
    assert status.step == step


def test_of_a_job_of_one_round_nothing_was_before_a_restart() -> None:
    """Its leader's ranks were ahead of those of another node when that one failed."""
    history = JobHistory()
    history.write(build_record("round_formed", round=1, world_size=2, nodes=2))
    history.record_steps(80, 1.0, is_counted=True, total=300)
    history.write(build_record("job_ended", succeeded=False))
    ranks = (make_rank(0, 0, 80), make_rank(1, 1, 50))
    merged = MergedNodes(nodes=(), ranks=ranks, summaries=(), running=2, spare=0, lost=0)
    status = build_status(make_round(), merged, history, None, slow_ranks=(), run_id="job", now_s=5.0)
    assert (status.step, status.most_steps_done) == (50, None)


@pytest.mark.parametrize(
    ("last", "succeeds", "said"),
    [
        (11, False, "11 of 4000 steps, 62 before a restart"),
        (0, False, "0 of 4000 steps, 62 before a restart"),
        (0, True, "62 of 4000 steps"),
    ],
)
def test_of_a_job_that_has_ended_both_are_known_where_it_was_and_how_far_it_had_been(last, succeeds, said) -> None:
    history = JobHistory()
    history.record_steps(62, 1.0, is_counted=True, total=4000)
    history.write(build_record("round_formed", round=2, world_size=1, nodes=1))
    if last:
        history.record_steps(last, 3.0, is_counted=True, total=4000)
    history.write(build_record("job_ended", succeeded=succeeds))
    rank = make_rank(0, 0, 0) if not last else replace(make_rank(0, 0, last - 1), total=4000)
    ranks = (rank if last else replace(rank, step=None, rate=None),)
    merged = MergedNodes(nodes=(), ranks=ranks, summaries=(), running=1, spare=0, lost=0)
    status = build_status(make_round(), merged, history, None, slow_ranks=(), run_id="job", now_s=5.0)
    assert format_summary(status)[0].partition(";")[0] == said


def build_record(what: str, **detail: object) -> EventRecord:
    return EventRecord(time_s=4.0, monotonic_s=4.0, node=0, node_index=0, round=2, attempt=1, what=what, detail=detail)


@pytest.mark.parametrize(
    ("line", "bar"),
    [
        ("epoch 2:  43%|####3     | 430/1000 [00:10<00:13, 41.90it/s, loss=0.3]", (430, 1000, 41.9, "epoch 2")),
        (" 10%|#         | 1/10 [00:02<00:18,  2.00s/it]", (1, 10, 0.5, "")),
        (" 10%|#         | 1/10 [00:02<00:18,  4batch/s]", (1, 10, 4.0, "")),
        ("  0%|          | 0/10 [00:00<?, ?it/s]", (0, 10, None, "")),
        ("  0%|          | 1/10 [00:00<?, 0.00it/s]", (1, 10, None, "")),
        ("100%|##########| 10/10 [00:02<00:00, 4.1it/s]", None),
        ("  4%|4         | 40.0k/1.00M [00:02<00:00, 4.1MB/s]", None),
        ("loss 1/10 [", None),
    ],
    ids=range(8),
)
def test_a_bar_tells_step_total_rate_and_name(line: str, bar: tuple[int, int, float | None, str] | None) -> None:
    assert find_bar(line) == bar


@pytest.mark.parametrize(("name", "shown"), [("epoch 2: ", "epoch 2"), ("", "bar")])
def test_what_a_bar_says_is_said_to_be_the_bars(name: str, shown: str) -> None:
    """There may be one for each epoch. The optimizer's steps may be others: of accumulated gradients, of all epochs."""
    line = f"{name} 43%|####3     | 430/1000 [00:10<00:13, 50.00it/s]"
    rank = RankStatus(global_rank=0, node=0, local_rank=0, optimizer_steps=50, rate=7.0, last_line=line)
    merged = MergedNodes(nodes=(), ranks=(rank,), summaries=(), running=1, spare=0, lost=0)
    history = JobHistory()
    history.state = JobState.RUNNING
    status = build_status(make_round(), merged, history, None, slow_ranks=(), run_id="job", now_s=5.0)
    assert (status.bar, status.step, status.total, status.rate, status.eta_s) == (shown, 430, 1000, 50.0, 11.4)
