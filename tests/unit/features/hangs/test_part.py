"""The watch in the real supervisor: it begins anew with each round, and reads before the workers get a signal."""

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from doubles.node_bench import Bench, open_bench

from muster.agent.features.hangs import servers
from muster.agent.features.hangs.servers import DEADLINE_S, JOIN_S, Answer, WorkerServer
from muster.agent.node.evidence import TEXTS_LIMIT_S
from muster.agent.node.worker_decisions import STACKS_LIMIT_S
from muster.agent.rendezvous.interface import BreakKind
from muster.agent.workers.program import get_stack_signal

Build = Callable[..., Bench]


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Build]:
    with ExitStack() as stack:
        yield lambda **config: stack.enter_context(open_bench(monkeypatch, tmp_path, **config))


def hang_timeout(build: Build) -> Bench:
    bench = build(hang_timeout_s=60.0)
    bench.on("join", None, bench.form)
    return bench


def test_idleness_of_one_round_is_not_reported_for_the_next(build: Build) -> None:
    """The watch begins anew with each round's workers."""
    bench = hang_timeout(build)
    bench.on("started", 1, lambda: bench.at(50.0, lambda: bench.break_round(1, BreakKind.MEMBERSHIP)))
    bench.on("stopped", 1, lambda: bench.form(2))
    bench.on("started", 2, lambda: bench.at(50.0, lambda: bench.end_job(succeeded=False)))
    assert bench.run() == 1
    assert bench.names("idle") == []


def test_in_a_hang_the_workers_get_no_signal_before_recorders_and_stacks_are_read(build, monkeypatch) -> None:
    """What torch knows of a hang ends with its process; and the signal for the stacks may end a sleep."""
    order: list[str] = []
    bench = hang_timeout(build)

    def read(places: dict[int, WorkerServer], handlers: tuple[str, ...] = ()) -> dict[int, Answer]:
        if not handlers:  # it is no look of the watch
            order.append("recorders")
        return {pid: Answer(is_answering=True) for pid in places}

    def send(pids: Iterable[int], signum: int) -> None:
        order.append("stacks" if signum == get_stack_signal() else signal.Signals(signum).name)
        bench.send_signal(pids, signum)

    monkeypatch.setattr(servers, "read_workers", read)
    monkeypatch.setattr("muster._shared.processes.send_signal", send)
    bench.on("idle", 1, lambda: bench.break_round(1, BreakKind.FINAL, stacks=True))
    bench.on("stopped", 1, lambda: bench.end_job(succeeded=False))
    assert bench.run() == 1
    assert list(dict.fromkeys(order))[:3] == ["recorders", "stacks", "SIGTERM"], order
    [[_, stacks]] = bench.details("stopped")
    assert [(stack.local_rank, stack.text != "", stack.view.is_answering) for stack in stacks] == [
        (0, True, True),
        (1, True, True),
    ]


def test_a_stop_waits_longer_than_recorders_and_stacks_may_take():
    """Else those that came in time would be lost with the others."""
    assert DEADLINE_S + JOIN_S + TEXTS_LIMIT_S < STACKS_LIMIT_S
