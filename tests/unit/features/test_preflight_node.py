"""When a node's findings hold its workers back, end an attempt or are printed, and what other nodes are told."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from doubles import samples

from muster._shared.preflight import Finding, Level
from muster._shared.reports import FailedCheck
from muster.agent.features.preflight import node as preflight
from muster.agent.features.preflight.flags import PreflightSettings
from muster.agent.features.preflight.messages import NodeFacts
from muster.agent.features.preflight.node import WAITS_S, MachineCheck, PreflightPart
from muster.agent.node.round_parts import Start
from muster.agent.runtime.loop import Awaited

make_round = partial(samples.make_round, restarts_left=3)
ERROR = Finding(check="devices", level=Level.ERROR, found="7 answer", expected="8", advice="look")
WARNING = Finding(check="folders", level=Level.WARNING, found="the log folder is full")
FACTS = NodeFacts(workspace="abc", nproc=2)
CHECK = FailedCheck(feature="preflight", name="devices", advice="--preflight off starts the job anyway", cause="device")
PROBLEM = ("7 answer, expected 8: look", CHECK)


class Look(Awaited[MachineCheck]):
    """Ends when the test says so."""

    def __init__(self) -> None:
        pass

    def watch(self, then: Any) -> None:
        self.end = then


class Node:
    """A node whose checks run; of two nodes, it is the second, unless a test says otherwise."""

    def __init__(self, group_rank: int = 1, group_world_size: int = 2, node_index: int | None = 1) -> None:
        self.group = {"group_rank": group_rank, "group_world_size": group_world_size, "world_size": 4}
        self.lines: list[str] = []
        self.sent: list[int] = []
        self.failed: list[tuple[Any, ...]] = []
        self.started: list[int] = []
        self.dialled: list[int] = []
        self.timers: list[tuple[float, Any]] = []
        rendezvous = SimpleNamespace(node_index=node_index, backend="muster")
        self.look = Look()
        context: Any = SimpleNamespace(
            config=SimpleNamespace(features={"preflight": PreflightSettings()}, node_name="b", rendezvous=rendezvous),
            loop=SimpleNamespace(
                clock=SimpleNamespace(wall_s=lambda: 5.0), call_later=lambda *timer: self.timers.append(timer)
            ),
            logs=SimpleNamespace(print_line=self.lines.append),
            event_log=SimpleNamespace(write=lambda *_, **__: None),
            children=None,
            early=self.look,
            send=lambda number, _content: self.sent.append(number),
            fail=lambda *failed: self.failed.append(failed),
        )
        self.part = PreflightPart(context)
        self.part._reach_master = lambda formed: self.dialled.append(formed.number)  # type: ignore[method-assign]

    def form(self, number: int = 1, attempt: int = 0) -> None:
        formed = make_round(number=number, attempt=attempt, **self.group)
        self.part.enter_round(formed)
        start = Start(lambda: self.started.append(number), lambda *why: self.failed.append(why), lambda: False)
        self.part.begin_round(formed, start)
        if not start.is_held and not self.failed:
            self.started.append(number)

    def end_look(self, *findings: Finding, facts: NodeFacts | None = None) -> None:
        self.look.end(MachineCheck(findings=findings, facts=facts))

    def begin_site_checks(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        """End the look but for the checks of the site, which the returned function ends."""
        given: list[Any] = []
        monkeypatch.setattr("muster.agent.features.preflight.site.SiteChecks", lambda *words: given.append(words[-1]))
        self.part._context.config.base_env = {}  # type: ignore[misc]
        self.look.end(MachineCheck(site_checks=("/a",)))
        return given[0]


def test_workers_wait_for_the_checks_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node()
    node.form()
    [(delay_s, stop_waiting)] = node.timers
    assert delay_s == WAITS_S["quick"]
    end_site = node.begin_site_checks(monkeypatch)
    assert node.started == []
    stop_waiting()
    assert node.started == [1]
    end_site(())
    assert node.started == [1]


@pytest.mark.parametrize("is_early", [True, False])
def test_the_last_of_the_checks_starts_them(is_early: bool) -> None:
    node = Node()
    for step in (node.end_look, node.form)[:: 1 if is_early else -1]:
        step()
    for _, stop_waiting in node.timers:
        stop_waiting()
    assert (node.started, len(node.timers)) == ([1], not is_early)


@pytest.mark.parametrize("is_early", [True, False], ids=["before the round", "after it"])
def test_an_error_is_the_failure_of_rounds_without_workers(is_early: bool) -> None:
    node = Node()
    for step in (lambda: node.end_look(ERROR, WARNING), node.form)[:: 1 if is_early else -1]:
        step()
    assert (node.started, node.failed) == ([], [PROBLEM])
    assert ["node 1 (b): " in each for each in node.lines] == [True]
    node.form(2, attempt=1)
    assert node.failed == [PROBLEM] * 2


def test_a_late_error_ends_the_attempt_of_workers_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node()
    node.form()
    end_site = node.begin_site_checks(monkeypatch)
    node.timers[0][1]()
    end_site((ERROR,))
    assert (node.started, node.failed) == ([1], [(1, *PROBLEM)])


SECOND = Finding(check="site", level=Level.ERROR, found="10-a: the disk is old")


@pytest.mark.parametrize(
    ("findings", "node_index", "named"),
    [((ERROR, SECOND), 1, "node 1 (b): 10-a: the"), ((WARNING,), None, "preflight: b: the ")],
    ids=["a second error", "a node without an index has its host"],
)
def test_a_finding_that_ends_nothing_is_printed(findings, node_index: int | None, named: str) -> None:
    node = Node(node_index=node_index)
    node.end_look(*findings)
    assert [named in each for each in node.lines] == [True]


# -- what takes other nodes --------------------------------------------------------------------------------------------


def test_nodes_are_compared_and_the_master_is_dialled_in_each_membership_but_not_in_each_attempt() -> None:
    node = Node()
    node.end_look(facts=FACTS)
    node.form()
    node.form(2, attempt=1)
    node.form(3, attempt=1)
    assert (node.sent, node.dialled) == ([1, 3], [1, 3])


def test_facts_that_come_late_are_told_then() -> None:
    node = Node()
    node.form()
    assert (node.sent, node.dialled) == ([], [1])
    node.end_look(facts=FACTS)
    assert node.sent == [1]


@pytest.mark.parametrize(("group_world_size", "sent"), [(2, [1]), (1, [])])
def test_the_node_with_rank_0_does_not_dial_itself_and_one_node_alone_is_compared_with_nothing(
    group_world_size: int, sent: list[int]
) -> None:
    node = Node(group_rank=0, group_world_size=group_world_size)
    node.end_look(facts=FACTS)
    node.form()
    assert (node.sent, node.dialled) == (sent, [])


def test_a_master_that_cannot_be_reached_is_the_rounds_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node()
    monkeypatch.setattr("muster.agent.features.preflight.reachability.find_obstacle", lambda *_: "no route")
    context = node.part._context
    context.config.rendezvous.silence_s = 1.0  # type: ignore[misc]
    context.loop.call_in_thread = lambda read, then, without: then(read())  # type: ignore[method-assign]
    preflight.PreflightPart._reach_master(node.part, make_round(number=1, **node.group))
    [(number, reason, check)] = node.failed
    assert (number, check.name, check.cause) == (1, "reach", "network")
    assert "here: no route; " in reason
