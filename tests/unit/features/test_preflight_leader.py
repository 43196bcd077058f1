"""What the leader makes of what the nodes' preflight has read."""

import pytest
from doubles.two_members import TwoMembers

from muster._shared.codec import encode_message
from muster._shared.records import replace
from muster.agent.features.preflight.messages import LIMIT_BYTES, NodeFacts
from muster.agent.rendezvous.consensus.actions import JobEnd, Notify, RoundBreak
from muster.agent.rendezvous.consensus.events import Reported
from muster.agent.rendezvous.interface import BreakKind, PartReport
from muster.agent.rendezvous.report_messages import Stopped


class Job(TwoMembers):
    """A leader of two nodes; node 1's message comes half a second after node 0's."""

    def __init__(self) -> None:
        super().__init__("restart")

    def report(self, node: int, facts: NodeFacts) -> list:
        content = encode_message(facts, LIMIT_BYTES)
        report = PartReport(round_number=self.number, feature="preflight", content=content)
        return self.decide(Reported(id=str(node), message=report))

    def check(self, first: NodeFacts, second: NodeFacts, clocks_s: tuple[float, float] = (1000.0, 1000.5)) -> list:
        actions: list = []
        for node, facts in enumerate((first, second)):
            self.now_s = 10.0 + node * 0.5
            actions += self.report(node, replace(facts, clock_s=clocks_s[node]))
        return actions


def lines(actions: list) -> list[str]:
    return [each.text for each in actions if isinstance(each, Notify)]


ALIKE = NodeFacts(workspace="a", versions=(("torch", "2.13.0"), ("NCCL", "2.27.7")), nproc=8, devices=8)


def test_nodes_that_are_alike_have_no_finding() -> None:
    assert Job().check(ALIKE, ALIKE) == []


def test_what_one_of_them_does_not_know_is_no_finding() -> None:
    assert Job().check(ALIKE, NodeFacts(nproc=4)) == []


def test_nothing_is_said_before_all_have_told() -> None:
    job = Job()
    assert job.report(1, ALIKE) == []


def test_other_code_ends_the_job_with_one_report() -> None:
    job = Job()
    actions = job.check(NodeFacts(workspace="a"), NodeFacts(workspace="b"))
    [broken] = [each.broken for each in actions if isinstance(each, RoundBreak)]
    assert broken.kind is BreakKind.FINAL
    assert broken.reason.startswith("preflight: the workspace ")
    assert all(name in broken.reason for name in ("node 1 (h)", "node 0 (h)", "--preflight off"))
    for node in range(2):
        actions = job.decide(Reported(id=str(node), message=Stopped(round_number=job.number)))
    [ended] = [each for each in actions if isinstance(each, JobEnd)]
    assert ended.report.value.reason == broken.reason


def test_other_code_that_is_known_between_two_rounds_ends_the_job_too() -> None:
    job = Job()
    for node in range(2):
        job.decide(Reported(id=str(node), message=Stopped(round_number=job.number)))  # fenced: its round ends
        actions = job.report(node, NodeFacts(workspace=str(node)))
    assert [each.succeeded for each in actions if isinstance(each, JobEnd)] == [False]


@pytest.mark.parametrize(
    ("other", "line"),
    [
        (
            NodeFacts(versions=(("torch", "2.12.0"),)),
            "torch of node 1 (h) is 2.12.0, expected 2.13.0 as of node 0 (h): use the same image or environment on all",
        ),
        (
            NodeFacts(nproc=8, devices=7),
            "node 1 (h) has 7 devices, expected 8 as the others: look at `nvidia-smi` and `dmesg` (Xid) on that node",
        ),
    ],
)
def test_other_differences_are_lines(other: NodeFacts, line: str) -> None:
    job = Job()
    [said] = lines(job.check(ALIKE, other))
    assert said.startswith(f"preflight: {line}")
    assert job.check(ALIKE, other) == []  # said once


def test_another_script_without_a_workspace_is_a_line() -> None:
    [line] = lines(Job().check(NodeFacts(script="a"), NodeFacts(script="b")))
    assert "node 1 (h) differs" in line


@pytest.mark.parametrize(
    ("clocks_s", "found"),
    [
        ((1000.0, 1000.5), ""),
        ((1000.0, 1002.0), ""),
        ((1000.0, 1007.5), "the clock of node 1 (h) is 7.0 s ahead of that of node 0 (h), expected at most 3 s"),
        ((1000.0, 940.5), "the clock of node 1 (h) is 1 min behind that of node 0 (h), expected at most 3 s"),
    ],
)
def test_clocks_are_compared_by_arrival(clocks_s: tuple[float, float], found: str) -> None:
    said = lines(Job().check(ALIKE, ALIKE, clocks_s))
    assert [f"preflight: {found}: " in each for each in said] == [True] * bool(found)
