"""What a node decides about findings of its preflight: before its workers are started, and after."""

from functools import partial
from typing import Any

import pytest
from doubles import samples
from doubles.sent import unwrap

from muster._shared.preflight import Finding, Level
from muster.agent.node.actions import (
    Action,
    BeginRound,
    LocalFailure,
    PrintLine,
    ReachMaster,
    ReportFailed,
    SettleFailure,
    StartTimer,
    StartWorkers,
)
from muster.agent.node.decisions import CHECKS_LIMITS_S, decide
from muster.agent.node.events import (
    Event,
    FailureSettled,
    LocalChecked,
    RoundTimer,
    StoreLost,
    TimerExpired,
    TimerPurpose,
    WorkersGone,
    WorkerStarted,
)
from muster.agent.node.state import Joining, NodeRules, NodeState
from muster.agent.rendezvous.interface import BreakKind, Checked, NodeFacts, RoundBroken, RoundFormed

make_round = partial(samples.make_round, restarts_left=3)
ERROR = Finding(check="devices", level=Level.ERROR, found="7 devices answer", expected="8", advice="look")
WARNING = Finding(check="folders", level=Level.WARNING, found="the log folder is full")
FACTS = NodeFacts(workspace="abc", nproc=2)
PROBLEM = LocalFailure(local_rank=0, reason="7 devices answer, expected 8: look", check="devices")


class Node:
    """A node whose checks run; of two nodes, it is the second, unless a test says otherwise."""

    def __init__(self, group_rank: int = 1, group_world_size: int = 2, **rules: Any) -> None:
        own = {"checks": "quick", "compares_nodes": True, "reaches_master": True, "node_index": 1, "host": "b", **rules}
        self.group = {"group_rank": group_rank, "group_world_size": group_world_size, "world_size": 4}
        self.state = NodeState(rules=NodeRules(nproc=2, **own), phase=Joining(), is_prepared=True, is_unchecked=True)

    def send(self, *events: Event) -> list[Action]:
        """The actions of the last one."""
        actions: tuple[Action, ...] = ()
        for event in events:
            self.state, actions = decide(self.state, event)
        return list(unwrap(actions))

    def form(self, number: int = 1, attempt: int = 0) -> list[Action]:
        return self.send(RoundFormed(round=make_round(number=number, attempt=attempt, **self.group)))

    def break_round(self, number: int = 1, kind: BreakKind = BreakKind.MEMBERSHIP) -> None:
        self.send(RoundBroken(round_number=number, kind=kind, reason="x"), WorkersGone(round_number=number))


def kinds(actions: list[Action]) -> list[type]:
    return [type(each) for each in actions]


def test_workers_start_at_once_when_the_checks_are_over() -> None:
    node = Node(group_world_size=1, group_rank=0)
    assert node.send(LocalChecked(is_last=True)) == []
    assert kinds(node.form()) == [BeginRound, StartWorkers]


def test_workers_wait_for_the_checks_for_a_while() -> None:
    node = Node(group_world_size=1, group_rank=0)
    begin, timer = node.form()
    assert isinstance(begin, BeginRound)
    assert isinstance(timer, StartTimer)
    assert timer.delay_s == CHECKS_LIMITS_S["quick"]
    assert kinds(node.send(LocalChecked(site_checks=("/a",)))) == []  # those of the site are not over
    assert kinds(node.send(TimerExpired(timer=timer.timer))) == [StartWorkers]
    assert node.send(LocalChecked(is_last=True)) == []


def test_the_last_of_the_checks_starts_them() -> None:
    node = Node(group_world_size=1, group_rank=0)
    node.form()
    assert kinds(node.send(LocalChecked(is_last=True))) == [StartWorkers]
    assert node.send(TimerExpired(timer=RoundTimer(purpose=TimerPurpose.CHECKS, round_number=1))) == []


@pytest.mark.parametrize("is_early", [True, False], ids=["before the round", "after it"])
def test_an_error_is_the_failure_of_a_round_without_workers(is_early: bool) -> None:
    node = Node(group_world_size=1, group_rank=0)
    if is_early:
        assert node.send(LocalChecked(findings=(ERROR, WARNING), is_last=True)) == [
            PrintLine(text="preflight: node 1 (b): the log folder is full")
        ]
        actions = node.form()
    else:
        node.form()
        actions = node.send(LocalChecked(findings=(ERROR,), is_last=True))
    assert StartWorkers not in kinds(actions)
    [settle] = [each for each in actions if isinstance(each, SettleFailure)]
    assert settle.failure == PROBLEM
    [report] = node.send(FailureSettled(round_number=1, local_rank=0))
    assert isinstance(report, ReportFailed)
    assert report.failure.check == "devices"


def test_a_late_error_ends_the_attempt_of_workers_that_run() -> None:
    node = Node(group_world_size=1, group_rank=0)
    node.send(LocalChecked(site_checks=("/a",)))
    [_, timer] = node.form()
    assert isinstance(timer, StartTimer)
    node.send(TimerExpired(timer=timer.timer), *(WorkerStarted(round_number=1, local_rank=each) for each in range(2)))
    assert kinds(node.send(LocalChecked(findings=(ERROR,), is_last=True))) == [SettleFailure]


def test_a_second_error_is_printed() -> None:
    node = Node(group_world_size=1, group_rank=0)
    second = Finding(check="site", level=Level.ERROR, found="10-a: the disk is old")
    assert node.send(LocalChecked(findings=(ERROR, second), is_last=True)) == [
        PrintLine(text="preflight: node 1 (b): 10-a: the disk is old")
    ]


def test_a_node_without_an_index_has_its_host() -> None:
    node = Node(group_world_size=1, group_rank=0, node_index=None)
    assert node.send(LocalChecked(findings=(WARNING,), is_last=True)) == [
        PrintLine(text="preflight: b: the log folder is full")
    ]


# -- what takes other nodes --------------------------------------------------------------------------------------------


def list_shared(actions: list[Action]) -> list[type]:
    return [type(each) for each in actions if isinstance(each, Checked | ReachMaster)]


def test_nodes_are_compared_and_the_master_is_dialled_in_each_membership_but_not_in_each_attempt() -> None:
    node = Node()
    node.send(LocalChecked(facts=FACTS, is_last=True))
    actions = node.form()
    assert list_shared(actions) == [ReachMaster, Checked]
    assert Checked(round_number=1, facts=FACTS) in actions
    node.break_round()
    assert list_shared(node.form(2, attempt=1)) == []
    node.break_round(2)
    assert list_shared(node.form(3, attempt=1)) == [ReachMaster, Checked]


def test_facts_that_come_late_are_told_then() -> None:
    node = Node()
    assert list_shared(node.form()) == [ReachMaster]
    assert list_shared(node.send(LocalChecked(facts=FACTS, is_last=True))) == [Checked]


def test_facts_that_come_between_two_attempts_are_told_in_the_second() -> None:
    node = Node()
    node.form()
    node.break_round()
    assert list_shared(node.send(LocalChecked(facts=FACTS, is_last=True))) == []
    assert Checked in list_shared(node.form(2, attempt=1))


def test_the_node_with_rank_0_does_not_dial_itself() -> None:
    node = Node(group_rank=0)
    node.send(LocalChecked(facts=FACTS, is_last=True))
    assert list_shared(node.form()) == [Checked]


def test_a_job_of_one_node_is_compared_with_nothing() -> None:
    node = Node(group_rank=0, group_world_size=1)
    node.send(LocalChecked(facts=FACTS, is_last=True))
    assert list_shared(node.form()) == []


@pytest.mark.parametrize("is_waiting", [True, False])
def test_a_master_that_cannot_be_reached_is_the_rounds_failure(is_waiting: bool) -> None:
    node = Node()
    if not is_waiting:
        node.send(LocalChecked(is_last=True))
    node.form()
    actions = node.send(StoreLost(round_number=1, reason="no route", check="reach"))
    if is_waiting:
        assert actions == []
        actions = node.send(LocalChecked(is_last=True))
    [settle] = actions
    assert isinstance(settle, SettleFailure)
    assert settle.failure == LocalFailure(local_rank=0, reason="no route", check="reach")
