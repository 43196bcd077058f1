"""What a node tells of a round's break: the cause, also where a consequence of it has been reported first."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from doubles.node_bench import Bench, open_bench
from doubles.samples import make_round

from muster._shared.records import replace
from muster.agent.node.actions import PrintLine, StartTimer
from muster.agent.node.decisions import decide
from muster.agent.node.events import TimerPurpose
from muster.agent.node.state import Joining, NodeRules, NodeState
from muster.agent.rendezvous.interface import BreakKind, RoundBroken

VICTIM = RoundBroken(
    round_number=1, kind=BreakKind.FAILURE, reason="rank 2: Connection closed", cause="network", is_provisional=True
)
CAUSE = replace(VICTIM, reason="rank 1 exited with code 77", cause="unknown", is_provisional=False, explains=True)
VICTIM_LINE, CAUSE_LINE = (f"{each.reason}; restart 1 of 3" for each in (VICTIM, CAUSE))
LOSS = "node 1 (h1) was lost: connection closed"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Bench]:
    """One node whose round is broken by a consequence, and which has a second round."""
    with ExitStack() as stack:
        made = stack.enter_context(open_bench(monkeypatch, tmp_path))
        made.on("join", None, made.form)
        made.on("started", 1, lambda: made.at(5.0, lambda: made.post(VICTIM)))
        made.on("started", 2, lambda: made.at(5.0, lambda: made.end_job(succeeded=True)))
        yield made


def explain(bench: Bench, *explained: RoundBroken, after_s: float = 0.0) -> Callable[[], None]:
    """Once the node has stopped its workers: what the leader tells, and the next round."""

    def tell() -> None:
        for each in explained:
            bench.post(each)
        bench.form(2, 1)

    return lambda: bench.at(after_s, tell)


def read_break(bench: Bench) -> list[tuple[object, ...]]:
    """The records from the break to the next start."""
    names = [each.what for each in bench.records]
    first, last = names.index("round_broken"), names.index("round_formed", names.index("round_broken"))
    detail = bench.records[first].detail
    after = (name for name in names[first + 1 : last] if name != "worker_exited")
    return [(detail["kind"], detail["reason"], detail["cause"]), *((name,) for name in after)]


def test_the_cause_takes_the_place_of_its_consequence(bench: Bench) -> None:
    bench.on("stopped", 1, explain(bench, CAUSE))
    assert bench.run() == 0
    assert [line for line in bench.lines if "restart" in line] == [CAUSE_LINE]
    assert read_break(bench) == [("failure", CAUSE.reason, "unknown"), ("workers_stopped",)]
    broken, stopped = (next(r for r in bench.records if r.what == what) for what in ("round_broken", "workers_stopped"))
    assert broken.monotonic_s < stopped.monotonic_s
    assert stopped.duration_s == pytest.approx(stopped.monotonic_s - broken.monotonic_s)


def test_the_workers_are_stopped_at_once_all_the_same(bench: Bench) -> None:
    stopped: list[float] = []
    bench.on("stopped", 1, lambda: (stopped.append(bench.clock.now_s()), explain(bench, CAUSE, after_s=0.5)()))
    bench.run()
    broken = next(each for each in bench.records if each.what == "round_broken")
    assert stopped[0] - broken.monotonic_s < 0.2


def test_a_cause_that_comes_late_corrects_the_line(bench: Bench) -> None:
    """The line waits for a second, and the record with it."""
    bench.on("stopped", 1, explain(bench, CAUSE, after_s=3.0))
    bench.run()
    assert [line for line in bench.lines if "restart" in line] == [VICTIM_LINE, CAUSE_LINE]
    assert read_break(bench)[0][1] == VICTIM.reason


@pytest.mark.parametrize("after_s", [0.0, 3.0])
def test_what_stays_the_cause_is_told_once(bench: Bench, after_s: float) -> None:
    same = replace(VICTIM, is_provisional=False, explains=True)
    bench.on("stopped", 1, explain(bench, same, after_s=after_s))
    bench.run()
    assert [line for line in bench.lines if "restart" in line] == [VICTIM_LINE]
    assert [each.what for each in bench.records].count("round_broken") == 1


def test_without_an_explanation_the_next_round_ends_the_wait(bench: Bench) -> None:
    """Another leader leads by now."""
    bench.on("stopped", 1, explain(bench))
    bench.run()
    assert [line for line in bench.lines if "restart" in line] == [VICTIM_LINE]
    assert read_break(bench) == [("failure", VICTIM.reason, "network"), ("workers_stopped",)]


def test_a_consequence_of_a_lost_node_is_told_as_that(bench: Bench) -> None:
    lost = replace(CAUSE, kind=BreakKind.MEMBERSHIP, reason=LOSS, cause="")
    bench.on("stopped", 1, explain(bench, lost))
    bench.run()
    assert [line for line in bench.lines if "restart" in line or "lost" in line] == [LOSS]
    assert read_break(bench)[0] == ("membership", LOSS, "")


def test_the_end_of_the_job_needs_no_line(bench: Bench) -> None:
    """The report says it; the record has it, also of an agent that ends meanwhile."""

    def end() -> None:
        bench.post(replace(CAUSE, kind=BreakKind.FINAL, reason="rank 1 exited with code 77; all restarts are used"))
        bench.end_job(succeeded=False)

    bench.on("stopped", 1, end)
    assert bench.run() == 1
    assert [line for line in bench.lines if "restart" in line] == []
    broken = next(each for each in bench.records if each.what == "round_broken")
    assert broken.detail["kind"] == "final"
    assert [each.what for each in bench.records][-1] == "agent_ended"


def test_the_record_of_a_node_that_prints_nothing_waits_no_longer() -> None:
    """Its timer ends the wait where no leader is left that could explain the break."""
    other = make_round(2, number=1, group_rank=1, group_world_size=2, world_size=4)
    state = NodeState(rules=NodeRules(nproc=2), phase=Joining(last=other), is_prepared=True)
    _, actions = decide(state, VICTIM)
    assert [each.timer.purpose for each in actions if isinstance(each, StartTimer)] == [TimerPurpose.LINES]
    assert not [each for each in actions if isinstance(each, PrintLine)]
