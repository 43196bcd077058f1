"""Nodes at fault and restart storms, through the leader's pure state machine."""

import re

import pytest
from doubles.leader_history import Leader, failure, member, rules
from doubles.sent import show_sent

from muster._shared.records import replace
from muster._shared.reports import FailedCheck
from muster.agent.rendezvous.consensus.actions import JobEnd, Notify, RoundBreak, RoundStart
from muster.agent.rendezvous.consensus.events import Joined, MemberLost, Reported, RoundAcknowledged, TimerFired
from muster.agent.rendezvous.consensus.members import ConsensusRules, MemberRecord
from muster.agent.rendezvous.faulty_nodes import SUSPECTED_S, list_suspected, list_suspected_nodes
from muster.agent.rendezvous.interface import BreakKind
from muster.agent.rendezvous.report_messages import Failed, Stopped


def build_rules(*, spare: bool = False, policy: str = "", is_managed: bool = False, **more) -> ConsensusRules:
    made = rules(more.pop("min_nodes", 3), 3, max_restarts=9)
    return replace(made, policy=policy, is_managed=is_managed, **more)


def build_member(number: int, *, machine: str | None = None) -> MemberRecord:
    return replace(member(number), machine=f"boot{number}" if machine is None else machine)


TRACEBACK = 'Traceback (most recent call last):\n  File "main.py", line 3, in <module>\n    f()\nValueError: bad'


class Job(Leader):
    """Three nodes, or more, that train."""

    def __init__(self, rules_: ConsensusRules, nodes: int = 3, *, machine: str | None = None) -> None:
        self.breaks: list[RoundBreak] = []
        super().__init__(rules_)
        for number in range(nodes):
            self.feed(Joined(member=build_member(number, machine=machine)))
        self.notices: list[str] = []

    def feed(self, event, *, after_s: float = 0.0) -> list:
        actions = super().feed(event, after_s=after_s)
        self.notices = [*getattr(self, "notices", []), *(each.text for each in actions if isinstance(each, Notify))]
        self.breaks += [each for each in actions if isinstance(each, RoundBreak)]
        return actions

    @property
    def ranks(self) -> list[str]:
        return list(self.state.assignments)

    def fail(self, node: int, *, has_stepped: bool = False, **changes) -> RoundBreak | None:
        """A rank of the node that has this group rank fails; the break that those hear that stay."""
        number, sender = self.state.round_number, self.ranks[node]
        failed = failure(node, round=number, **{"cause": "crash", **changes})
        message = Failed(round_number=number, failures=(failed,), has_stepped=has_stepped)
        self.feed(Reported(id=sender, message=message))
        seen = [*self.actions, *self.wait(1.1 if failed.check else 0.5)]
        self.stop(has_stepped=has_stepped)
        return next((each for each in seen if isinstance(each, RoundBreak)), None)

    def report(self, node: int, **changes) -> list:
        """A node says at once what has failed there."""
        number = self.state.round_number
        failed = Failed(round_number=number, failures=(failure(node, round=number, **changes),))
        return self.feed(Reported(id=f"m{node}", message=failed))

    def stop(self, *, has_stepped: bool = False, **late) -> None:
        """All members stop their workers, those that leave end."""
        number = self.state.round_number
        for each in self.ranks:
            if each not in self.state.members:
                continue
            if self.state.members[each].is_leaving:
                self.feed(MemberLost(id=each, reason="connection closed"), after_s=0.01)
            else:
                stopped = Stopped(round_number=number, has_stepped=has_stepped, failures=late.get(each, ()))
                self.feed(Reported(id=each, message=stopped), after_s=0.01)
        for each in [one for one in self.state.members if self.state.members[one].is_leaving]:
            self.feed(MemberLost(id=each, reason="connection closed"), after_s=0.01)
        self.feed(TimerFired(round_number=self.state.round_number), after_s=0.5)


@pytest.fixture
def job() -> Job:
    return Job(build_rules(), nodes=4)


def test_a_node_whose_device_failed_is_the_last_choice_until_its_time_is_over(job: Job) -> None:
    assert job.ranks == ["m0", "m1", "m2"]
    job.fail(1, cause="device")
    assert job.ranks == ["m0", "m2", "m3"]  # a spare is here, so it has left
    job.join(build_member(1))
    job.fail(2, cause="network")  # of another node, which has done it once
    assert job.ranks == ["m0", "m2", "m3"]
    assert list_suspected(job.state) == {"m1"}
    job.now_s += SUSPECTED_S
    job.fail(2, cause="crash", exception="E: other", has_stepped=True)
    assert list_suspected(job.state) == set()
    assert job.ranks == ["m0", "m2", "m3"]  # members of the last round go before new ones


def test_without_a_spare_a_device_s_failure_restarts_where_it_is() -> None:
    job = Job(build_rules())
    broken = job.fail(1, cause="device")
    assert (broken.kind, broken.leaves) == (BreakKind.FAILURE, False)
    assert job.ranks == ["m0", "m1", "m2"]
    assert any("(h1) is suspected: it " in each for each in job.notices)
    assert ["node 1 (h1): " in each for each in list_suspected_nodes(job.state.restarts)] == [True]


def test_on_kubernetes_the_line_says_which_node_to_cordon() -> None:
    job = Job(build_rules(), nodes=0)
    for number in range(3):
        job.join(replace(build_member(number), machine_name=f"gpu-{number}"))
    job.fail(1, cause="device")
    assert any("; kubectl cordon gpu-1 " in each for each in job.notices)
    assert [each.partition(":")[0] for each in list_suspected_nodes(job.state.restarts)] == ["node 1 (gpu-1)"]


@pytest.mark.parametrize(
    ("more", "nodes", "ranks"),
    [
        ({}, 4, ["m0", "m2", "m3"]),
        ({}, 3, ["m0", "m1", "m2"]),  # nothing can take its place
        ({"min_nodes": 2}, 3, ["m0", "m2"]),
    ],
)
def test_elsewhere_a_spare_first(more: dict, nodes: int, ranks: list[str]) -> None:
    job = Job(build_rules(policy="exit 77: elsewhere", **more), nodes=nodes)
    if more:
        job.wait(3.1)
    job.fail(1, exit_code=77)
    assert job.ranks == ranks
    assert job.state.attempt == 1


def test_no_node_leaves_where_no_restart_is_left() -> None:
    job = Job(replace(build_rules(policy="exit 77: elsewhere", is_managed=True), max_restarts=0), nodes=4)
    broken = job.fail(1, exit_code=77)
    assert broken.kind is BreakKind.FINAL
    assert "77; no restarts are" in broken.reason


def test_elsewhere_then_what_the_scheduler_gives() -> None:
    job = Job(build_rules(policy="exit 77: elsewhere", is_managed=True))
    job.fail(1, exit_code=77)
    assert "m1" not in job.state.members
    assert not any(isinstance(each, RoundStart) for each in job.actions)
    job.join(replace(build_member(1), id="m1b"), after_s=1.0)
    assert job.ranks == ["m0", "m1b", "m2"]
    assert job.state.attempt == 1


VICTIM = {"cause": "network", "exception": "RuntimeError: Connection closed by peer"}
CHECK = FailedCheck(feature="preflight", name="devices", advice="--preflight off starts the job anyway")
FINDING = {"cause": "device", "check": CHECK, "reason": "7 devices answer, expected 8", "exit_code": None}


@pytest.mark.parametrize("is_late", [False, True], ids=["a spare is here", "it joins within a second"])
def test_a_node_whose_preflight_fails_leaves_to_a_spare(is_late: bool) -> None:
    """This uses no restart; the agent that its scheduler starts again there is no spare for the others."""
    job = Job(replace(build_rules(), max_restarts=0), nodes=3 if is_late else 4)
    job.report(1, **FINDING)
    if is_late:
        assert job.breaks == []
        job.join(build_member(3), after_s=0.5)
        job.wait(0.51)
    [broken] = job.breaks
    assert (broken.kind, broken.leaving, broken.is_free) == (BreakKind.FAILURE, ("m1",), True)
    said = "7 devices answer, expected 8; node 1 (h1) leaves: a spare node takes its place"
    assert broken.reason == f"preflight of node 1 (h1): {said}"
    job.stop()
    assert job.ranks == ["m0", "m2", "m3"]
    job.join(build_member(1))
    assert list_suspected(job.state) == {"m1"}
    broken = job.fail(1, **FINDING)  # the next one has no spare any more
    assert broken.kind is BreakKind.FINAL
    assert "not retried (--preflight off " in broken.reason


@pytest.mark.parametrize("min_nodes", [2, 3])
def test_without_a_spare_a_finding_of_the_preflight_ends_the_job(min_nodes: int) -> None:
    """Also an elastic one: what is started again there would break its rounds again and again."""
    job = Job(build_rules(min_nodes=min_nodes, is_managed=True))
    assert job.report(1, **FINDING) == []
    job.wait(1.01)
    [broken] = job.breaks
    assert broken.kind is BreakKind.FINAL


def test_of_two_nodes_whose_preflight_fails_one_leaves_to_the_only_spare_and_the_job_ends(job: Job) -> None:
    for node in (1, 2):
        job.report(node, **FINDING)
    job.stop()
    assert job.ranks == ["m0", "m2", "m3"]
    broken = job.fail(1, **FINDING)
    assert broken.kind is BreakKind.FINAL


SEGFAULT = {"exit_code": None, "signal": "SIGSEGV"}
ILLEGAL = {"exception": "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"}
HIP = {"exception": "RuntimeError: HIP error: unspecified launch failure"}
RESET = {"cause": "network", "exception": "ConnectionResetError: by peer"}
BAD = {"exception": "ValueError: bad", "traceback": TRACEBACK}


@pytest.mark.parametrize(
    ("failures", "suspected"),
    [
        pytest.param([{}], set(), id="once"),
        pytest.param([{}, {"exception": "E: another"}], {"m1"}, id="twice the first to fail without progress"),
        pytest.param([{}, {"has_stepped": True, "step": 4}], set(), id="progress between the two voids the first"),
        pytest.param([BAD] * 3, set(), id="the same exception is the program's"),
        *(
            pytest.param([each] * 2, {"m1"}, id=f"the same may be the node's: {number}")
            for number, each in enumerate((ILLEGAL, HIP, SEGFAULT, {"exit_code": 139}, RESET))  # 139: a shell ran it
        ),
    ],
)
def test_a_node_that_fails_again_and_again(job: Job, failures: list[dict], suspected: set[str]) -> None:
    for each in failures:
        job.fail(1, **each)
    assert list_suspected(job.state) == suspected
    assert job.ranks == (["m0", "m2", "m3"] if suspected else ["m0", "m1", "m2"])


@pytest.mark.parametrize("cause", ["usage", "data", "preemption", "time-limit"])
def test_what_the_program_does_is_no_fault_of_a_node(cause: str) -> None:
    job = Job(build_rules())
    for exception in ("A: 1", "B: 1", "C: 1"):
        job.fail(1, cause=cause, exception=exception)
    assert job.state.restarts.faults == ()


def test_what_several_nodes_do_in_the_same_way_is_no_fault_of_one() -> None:
    job = Job(build_rules())
    for _ in range(3):
        for node in (1, 2):
            job.report(node, cause="crash", exception="ValueError: bad")
        job.stop()
    assert job.state.restarts.faults == ()


def test_several_nodes_on_one_machine_are_told_apart() -> None:
    job = Job(build_rules(), nodes=4, machine="boot")
    job.fail(1, cause="device")
    job.join(build_member(1, machine="boot"))
    assert list_suspected(job.state) == {"m1"}


def test_another_agent_on_a_suspected_machine_is_suspected(job: Job) -> None:
    job.fail(1, cause="device")
    job.join(replace(build_member(7, machine="boot1")))
    assert list_suspected(job.state) == {"m7"}


def test_a_new_leader_knows_the_nodes_that_are_suspected() -> None:
    old = Job(build_rules())
    old.fail(1, cause="device")
    for each in old.ranks:
        old.feed(Reported(id=each, message=RoundAcknowledged(round_number=old.state.round_number)))
    known = old.state.recovery.value
    new = Leader(build_rules(min_nodes=2), takeover=True)
    for number in (0, 1, 2, 3):
        ranks = (number,) if number < 3 else (None,)
        new.feed(Joined(member=replace(build_member(number), recovery=known, group_ranks=ranks)))
    new.wait(5.0)
    assert list(new.state.assignments) == ["m0", "m2", "m3"]
    assert list_suspected(new.state) == {"m1"}
    assert new.state.restarts == old.state.restarts != Leader(build_rules()).state.restarts, "counts are the job's"


def test_what_was_reported_first_may_be_a_consequence() -> None:
    """Its peers notice the end of a rank before its agent does: the rule is about the rank."""
    job = Job(build_rules(policy="exit 77: elsewhere"), nodes=4)
    job.report(2, **VICTIM)
    job.stop(m1=(failure(1, round=1, cause="unknown", exit_code=77),))
    assert job.ranks == ["m0", "m2", "m3"]
    assert (job.state.attempt, job.state.restarts.repeats) == (1, 1)
    first, told = job.breaks  # the second to m1, which leaves, and to the others
    assert (first.is_provisional, first.reason.endswith("closed by peer)")) == (True, True)
    assert (told.ids, told.explains, told.kind) == (("m1", "m0", "m2"), True, BreakKind.FAILURE)
    assert told.cause == "unknown"
    assert "(h1) leaves: a spare" in told.reason
    assert job.notices == [each for each in job.notices if "leaves" not in each]  # the nodes print it


@pytest.mark.parametrize("max_restarts", [9, 0])
def test_no_node_leaves_and_no_job_ends_because_of_a_consequence(max_restarts: int) -> None:
    """What the user's rule says of the network is no answer to another rank's exit code."""
    policy = "network: elsewhere; exit 33: restart free" if max_restarts else "network: stop; exit 33: restart free"
    job = Job(replace(build_rules(policy=policy), max_restarts=max_restarts), nodes=4)
    job.report(2, **VICTIM)
    job.wait(0.5)
    job.stop(m1=(failure(1, round=1, cause="unknown", exit_code=33),))
    assert job.ranks == ["m0", "m1", "m2"]
    assert (job.state.attempt, job.state.restarts.free) == (1, 1)
    assert [(each.kind, each.is_provisional, each.explains) for each in job.breaks] == [
        (BreakKind.FAILURE, True, False),
        (BreakKind.FAILURE, False, True),
    ]
    assert "(h1) exited with code 33" in job.breaks[1].reason
    assert job.breaks[1].is_free


def test_what_stays_the_only_failure_is_the_cause() -> None:
    job = Job(build_rules())
    broken = job.fail(2, **VICTIM)
    first, told = job.breaks
    assert first == broken
    assert (told.reason, told.cause, told.ids) == (first.reason, "network", ("m0", "m1", "m2"))
    assert job.state.attempt == 1


def test_a_consequence_of_a_lost_node_is_told_as_that() -> None:
    job = Job(build_rules(min_nodes=2))
    job.report(2, **VICTIM)
    job.feed(MemberLost(id="m1", reason="connection closed"), after_s=0.1)
    told = job.breaks[-1]
    assert (told.ids, told.explains, told.kind) == (("m0", "m2"), True, BreakKind.MEMBERSHIP)
    assert "(h1) was lost: " in told.reason
    job.stop()
    assert (job.ranks, job.state.attempt) == (["m0", "m2"], 0)


def test_two_nodes_that_fail_at_once_do_not_both_leave_to_one_spare(job: Job) -> None:
    for node, age_s in ((1, 0.0), (2, 5.0)):  # what is reported second has failed first
        job.report(node, cause="device", age_s=age_s, exception=f"E{node}: x")
    job.stop()
    assert job.ranks == ["m0", "m2", "m3"]


def test_nor_does_a_consequence_hide_what_ends_the_job() -> None:
    job = Job(build_rules(policy="exit 77: stop"))
    job.report(2, **VICTIM)
    job.stop(m1=(failure(1, round=1, cause="unknown", exit_code=77),))
    [end] = [each for each in show_sent(job.actions) if isinstance(each, JobEnd)] or [job.state.phase.job_end]
    assert "77; --on 'exit 77: stop'" in end.report.value.reason


def test_a_report_says_which_nodes_are_suspected() -> None:
    job = Job(replace(build_rules(), max_restarts=1))
    job.fail(1, cause="device")
    job.fail(1, cause="device")
    end = job.state.phase.job_end
    assert ["2 attempts (device" in each for each in end.report.value.suspected] == [True]


# -- storms ------------------------------------------------------------------------------------------------------------


def test_rounds_that_break_again_and_again_wait_longer_and_longer() -> None:
    job, waits = Job(build_rules(max_restarts=100)), []
    for attempt in range(12):
        before = job.now_s
        job.fail(1, exception=f"E{'x' * attempt}: other")
        if not job.state.assignments or job.state.attempt == attempt:
            job.feed(TimerFired(round_number=job.state.round_number), after_s=job.next_due_s() - job.now_s)
        waits.append(job.now_s - before)
        assert job.state.attempt == attempt + 1
    assert all(each < 2 for each in waits[:5])
    assert [round(each) for each in waits[5:8]] == [5, 10, 20]
    first = next(each for each in job.notices if "within a minute" in each)
    assert re.findall(r"\d+ rounds|\d+ s", first) == ["6 rounds", "5 s"]


def test_a_step_ends_a_storm() -> None:
    job = Job(build_rules(max_restarts=100))
    for attempt in range(12):
        job.fail(1, exception=f"E{'x' * attempt}: other", has_stepped=attempt % 3 == 0)
    assert not [each for each in job.notices if "within a minute" in each]
    assert job.state.attempt == 12


def test_a_restart_that_is_free_uses_none_of_those_that_are_allowed() -> None:
    job = Job(replace(build_rules(policy="exit 33: restart free"), max_restarts=1))
    for _ in range(4):
        job.fail(1, exit_code=33, has_stepped=True)
    assert (job.state.attempt, job.state.restarts.free) == (4, 4)
    job.fail(1, exit_code=1)
    assert job.state.attempt == 5
    broken = job.fail(1, exit_code=1)
    assert broken.kind is BreakKind.FINAL
    report = job.state.phase.job_end.report.value
    assert (report.attempt, report.max_restarts) == (5, 5)  # one that is allowed, and four free ones
