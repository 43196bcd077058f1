"""`--interrupt-action ask`: histories of one node, from a Ctrl-C at the terminal to what the person has chosen."""

import signal

import pytest
from doubles.node_history import RunningNode
from doubles.samples import make_round

from muster._shared.contract import AskKind, AskOutcome
from muster._shared.records import replace
from muster._shared.reports import Answer
from muster.agent.node import actions as do
from muster.agent.node.events import Choice, PersonChose, SignalReceived, WorkerExited, WorkersGone
from muster.agent.node.request_decisions import TERMINAL_REQUEST, parse_choice
from muster.agent.node.state import NodeRules, Rejoin, Running, Stopping
from muster.agent.rendezvous import interface as rdzv

ROUND = make_round(number=3, restarts_left=1)
CTRL_C = SignalReceived(signum=signal.SIGINT, is_at_terminal=True)
SAVE, STOP, CONTINUE = (PersonChose(choice=each) for each in Choice)
BROKEN = rdzv.RoundBroken(round_number=3, kind=rdzv.BreakKind.FAILURE, reason="rank 1 exited with code 1")


class Node(RunningNode):
    """It asks at Ctrl-C."""

    def __init__(self, **rules) -> None:
        super().__init__(ROUND, asks_at_interrupt=True, **rules)

    def answer(self, outcome: AskOutcome):
        return self.send(
            rdzv.RequestAnswered(request=TERMINAL_REQUEST, answer=Answer(outcome=outcome, line=outcome.value))
        )


@pytest.fixture
def asked() -> Node:
    """A node of which the person is asked."""
    return pause()


def pause() -> Node:
    node = Node()
    node.send(CTRL_C)
    node.answer(AskOutcome.DONE)
    return node


def start_saving() -> Node:
    """The pause has ended, and the ranks are to stop."""
    node = pause()
    node.send(SAVE)
    node.answer(AskOutcome.DONE)
    return node


def request(kind: AskKind) -> rdzv.Asked:
    return rdzv.Asked(round_number=ROUND.number, request=TERMINAL_REQUEST, kind=kind, limit_s=60.0)


def list_kinds(actions):
    """Without lines: their words are tested where they matter."""
    return [type(each) for each in actions if not isinstance(each, do.PrintLine)]


STOPS = [do.EndQuestion, rdzv.Leaving, do.SignalWorkers]
"""What an ordinary Ctrl-C does, and the end of the question before it."""


def start_stopping(actions) -> bool:
    return list_kinds(actions)[:3] == STOPS


@pytest.fixture
def node():
    return Node()


def test_ctrl_c_pauses_the_job_and_then_asks(node):
    line, pause = node.send(CTRL_C)
    assert line == do.PrintLine(text="pausing all ranks at one step; Ctrl-C again kills")
    assert pause == request(AskKind.PAUSE)
    assert node.answer(AskOutcome.DONE) == [do.PrintLine(text="done"), do.AskPerson()]


@pytest.mark.parametrize("outcome", [each for each in AskOutcome if each is not AskOutcome.DONE])
def test_a_pause_that_fails_makes_it_an_ordinary_ctrl_c(outcome, node):
    node.send(CTRL_C)
    actions = node.answer(outcome)
    assert actions[0] == do.PrintLine(text=outcome.value)
    assert start_stopping(actions)
    assert isinstance(node.state.phase, Stopping)
    [finish] = node.send(WorkersGone(round_number=3)) or [node.state.phase.then]
    assert finish.code == 128 + signal.SIGINT


@pytest.mark.parametrize("outcome", [AskOutcome.DONE, AskOutcome.REFUSED], ids=["paused", "the pause has ended"])
def test_save_resumes_and_stops_at_one_step(outcome, asked):
    assert asked.send(SAVE) == [request(AskKind.RESUME)]
    assert asked.answer(outcome)[-1] == request(AskKind.STOP)
    assert asked.answer(AskOutcome.DONE) == []
    assert isinstance(asked.state.phase, Running), "the ranks end by themselves"


def test_ranks_that_never_stop_save_a_checkpoint_and_get_the_signal():
    node = start_saving()
    assert node.answer(AskOutcome.REFUSED)[-1] == request(AskKind.CHECKPOINT)
    saved = node.answer(AskOutcome.DONE)
    assert saved[0] == do.PrintLine(text="done"), "a node that leaves prints no notice of the leader"
    assert start_stopping(saved)


def test_a_refusal_is_printed_once():
    """The leader's node also printed its notice of the same words."""
    refused = Answer(outcome=AskOutcome.REFUSED, line="rank 0 never called wait_while_paused")
    leader, other = Node(), Node()
    leader.send(CTRL_C)
    told = leader.send(rdzv.Notice(text=f"muster pause: refused, because {refused.line}"))
    assert [f"refused, because {refused.line}" in each for each in [each.text for each in told]] == [True]
    other.send(CTRL_C)
    for node, count in ((leader, 0), (other, 1)):
        answered = node.send(rdzv.RequestAnswered(request=TERMINAL_REQUEST, answer=refused))
        assert answered.count(do.PrintLine(text=refused.line)) == count


@pytest.mark.parametrize("outcome", [AskOutcome.LATE, AskOutcome.LOST])
def test_a_stop_that_is_late_makes_it_an_ordinary_ctrl_c(outcome):
    node = start_saving()
    assert start_stopping(node.answer(outcome))


def test_stop_is_an_ordinary_ctrl_c(asked):
    assert start_stopping(asked.send(STOP))


@pytest.mark.parametrize("outcome", AskOutcome)
def test_continue_resumes_whatever_the_answer_is(outcome, asked):
    assert asked.send(CONTINUE) == [request(AskKind.RESUME)]
    assert list_kinds(asked.answer(outcome)) == [do.EndQuestion]
    assert isinstance(asked.state.phase, Running)
    assert request(AskKind.PAUSE) in asked.send(CTRL_C), "the next Ctrl-C asks again"


def test_what_is_no_choice_asks_again(asked):
    assert asked.send(PersonChose(choice=None)) == [do.AskPerson()]
    assert asked.send(CONTINUE) == [request(AskKind.RESUME)]


def test_a_choice_after_the_question_changes_nothing():
    assert Node().send(STOP) == []
    node = pause()
    node.send(CONTINUE)
    assert node.send(STOP) == []


@pytest.mark.parametrize("history", [(), (SAVE,), (None,)], ids=["pausing", "saving", "asked"])
def test_a_second_ctrl_c_kills(history, node):
    node.send(CTRL_C)
    if history:
        node.answer(AskOutcome.DONE)
        node.send(*filter(None, history))
    actions = node.send(CTRL_C)
    assert start_stopping(actions)
    assert do.KillWorkers in list_kinds(actions)


def test_a_second_ctrl_c_kills_also_while_the_ranks_save_and_end():
    node = start_saving()
    node.answer(AskOutcome.DONE)
    assert do.KillWorkers in list_kinds(node.send(CTRL_C))


def test_another_signal_ends_the_question(asked):
    assert start_stopping(asked.send(SignalReceived(signum=signal.SIGTERM)))
    assert asked.send(STOP) == []


def test_a_round_that_ends_while_the_person_is_asked_ends_the_question_and_the_job_goes_on(asked):
    actions = asked.send(BROKEN)
    assert actions[:2] == [
        do.EndQuestion(),
        do.PrintLine(text="the round has ended, and the pause with it; Ctrl-C asks again"),
    ]
    assert not isinstance(asked.state.phase.then, do.Finish)
    assert asked.send(SAVE) == []


@pytest.mark.parametrize("history", [(), (SAVE,)], ids=["pausing", "saving"])
def test_a_round_that_ends_while_the_job_is_asked_makes_it_an_ordinary_ctrl_c(history, node):
    node.send(CTRL_C)
    if history:
        node.answer(AskOutcome.DONE)
        node.send(*history)
    actions = node.send(BROKEN)
    assert do.AnswerPerson not in list_kinds(actions), "the terminal's request has no other person"
    assert isinstance(node.state.phase.then, do.Finish)
    assert node.state.phase.then.code == 128 + signal.SIGINT


def test_a_round_of_another_leader_ends_the_question(asked):
    assert do.EndQuestion in list_kinds(asked.send(rdzv.RoundFormed(round=replace(ROUND, number=4))))
    assert asked.state.interrupt is None


def test_workers_that_the_guard_kills_end_the_question_and_an_answer_ends_no_job(asked):
    """The asked had lost contact with the job. The question stayed open, and its "continue" stopped the asked."""
    fenced = asked.send(WorkerExited(round_number=3, local_rank=0, code=-9, fencings=1))
    assert do.EndQuestion() in fenced
    assert asked.send(CONTINUE) == []
    assert isinstance(asked.state.phase.then, Rejoin)


def test_a_round_that_ends_after_continue_goes_on(asked):
    asked.send(CONTINUE)
    asked.send(BROKEN)
    assert not isinstance(asked.state.phase.then, do.Finish)


def test_ranks_that_have_saved_end_the_job_with_its_own_code():
    node = start_saving()
    node.answer(AskOutcome.DONE)
    actions = node.send(rdzv.JobEnded(succeeded=False, is_drained=True))
    assert do.EndQuestion in list_kinds(actions)
    assert node.state.phase.then.code == 143


@pytest.mark.parametrize(
    "received",
    [
        replace(CTRL_C, is_at_terminal=False),
        replace(CTRL_C, quit_reason="why"),
        replace(CTRL_C, guard_died=True),
        replace(CTRL_C, signum=signal.SIGHUP),
    ],
)
def test_what_does_not_ask(received):
    assert rdzv.Leaving in list_kinds(Node().send(received))


def test_without_the_option_nothing_is_asked(node):
    node.state = replace(node.state, rules=NodeRules(nproc=2))
    assert rdzv.Leaving in list_kinds(node.send(CTRL_C))


def test_a_debugger_that_has_the_terminal_gets_ctrl_c():
    assert Node().send(replace(CTRL_C, foreground=1)) == [do.InterruptWorker(local_rank=1)]


@pytest.mark.parametrize(
    ("typed", "choice"),
    [
        ("\n", Choice.SAVE),
        ("", Choice.SAVE),  # Ctrl-D, or a terminal that is gone
        ("Yes\n", Choice.SAVE),
        ("n\n", Choice.STOP),
        (" NO ", Choice.STOP),
        (None, Choice.STOP),
        ("c", Choice.CONTINUE),
        ("continue\n", Choice.CONTINUE),
        ("q", None),
        ("not at all\n", None),
    ],
)
def test_what_was_typed(typed, choice):
    assert parse_choice(typed) is choice
