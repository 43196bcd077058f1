"""Which message of a member changes anything: the table of the leader's decisions, and the filter before them."""

from typing import Any, get_args

import pytest
from doubles.samples import make_failure
from doubles.two_members import TwoMembers

from muster._shared.contract import AskKind
from muster._shared.records import replace
from muster.agent.rendezvous import interface as rdzv
from muster.agent.rendezvous.consensus.decisions import TABLE
from muster.agent.rendezvous.consensus.events import MemberReport, Reported, RoundAcknowledged
from muster.agent.rendezvous.consensus.state import Ending, Forming, JobState, RoundRunning
from muster.agent.rendezvous.report_messages import Failed, Idle, StacksTaken, Stopped

MESSAGES: list[Any] = [
    rdzv.Prepared(),
    rdzv.Leaving(reason="SIGTERM"),
    RoundAcknowledged(round_number=1),
    rdzv.AllStarted(round_number=1),
    rdzv.AllSucceeded(round_number=1),
    Failed(round_number=1, failures=(make_failure(node=1),)),
    Idle(round_number=1, failures=(make_failure(node=1),)),
    Stopped(round_number=1),
    rdzv.StoodStill(round_number=1, for_s=50.0),
    StacksTaken(round_number=1, number=1, stacks=()),
    rdzv.DrainAsked(round_number=1, reason="received SIGTERM", limit_s=5.0),
    rdzv.DrainReported(round_number=1, drain=1, report=rdzv.DrainReport(ceiling=4)),
    rdzv.DrainDone(round_number=1, drain=1),
    rdzv.Asked(round_number=1, request=1, kind=AskKind.PAUSE, limit_s=5.0),
    rdzv.Saved(round_number=1, step=3, path="/3"),
    rdzv.PartReport(round_number=1, feature="x", content="{}"),
]
PHASES: list[Any] = [Forming(since_s=0.0), RoundRunning(), Ending(job_end=None)]


def is_dropped(job: TwoMembers, before: JobState, message: Any, sender: str = "1") -> bool:
    """Tell whether the message changes no more than one of a node that is no member: what is due follows after both."""
    job.state = before
    idle_actions, idle_state = job.decide(Reported(id="none", message=rdzv.Prepared())), job.state
    job.state = before
    return job.decide(Reported(id=sender, message=message)) == idle_actions and job.state == idle_state


def name(value: Any) -> str:
    return type(value).__name__


def test_every_message_is_here() -> None:
    assert {type(message) for message in MESSAGES} == set(get_args(MemberReport))


@pytest.mark.parametrize("phase", PHASES, ids=name)
@pytest.mark.parametrize("message", MESSAGES, ids=name)
def test_a_phase_that_does_not_accept_a_message_drops_it_and_none_fails(message: Any, phase: Any) -> None:
    job = TwoMembers(hang_action="report")
    before = replace(job.state, phase=phase)
    dropped = is_dropped(job, before, message)
    if type(phase) not in TABLE[type(message)]:
        assert dropped


@pytest.mark.parametrize("message", MESSAGES, ids=name)
def test_what_is_outdated_or_of_an_absent_member_is_dropped(message: Any) -> None:
    job = TwoMembers(hang_action="report")
    assert is_dropped(job, job.state, message, sender="gone")
    if hasattr(message, "round_number"):
        assert is_dropped(job, job.state, replace(message, round_number=7))
        spare = replace(job.state, assignments=job.state.assignments.without("1"))
        assert is_dropped(job, spare, message), "it has no part in the round"
