"""`--interrupt-action ask`: histories of one node, from a Ctrl-C at the terminal to what the person has chosen."""

import signal
from typing import Any

import pytest
from doubles.node_history import RunningNode, show_history
from doubles.samples import make_round

from muster._shared.contract import AskOutcome
from muster._shared.records import replace
from muster._shared.reports import Answer
from muster.agent.node import actions as do
from muster.agent.node.events import Choice, PersonChose, SignalReceived, WorkerExited, WorkersGone
from muster.agent.node.request_decisions import TERMINAL_REQUEST, parse_choice
from muster.agent.rendezvous import interface as rdzv

ROUND = make_round(number=3, restarts_left=1)
CTRL_C = SignalReceived(signum=signal.SIGINT, is_at_terminal=True)
SAVE, STOP, CONTINUE = (PersonChose(choice=each) for each in Choice)
BROKEN = rdzv.RoundBroken(round_number=3, kind=rdzv.BreakKind.FAILURE, reason="rank 1 failed")


def answer(outcome: AskOutcome) -> rdzv.RequestAnswered:
    return rdzv.RequestAnswered(request=TERMINAL_REQUEST, answer=Answer(outcome=outcome, line=outcome.value))


def case(gives: str, *events: Any, before: tuple[Any, ...] = (), asks_at_interrupt: bool = True) -> Any:
    """What the node does at each of these events, and its phase after them."""
    return gives, events, before, asks_at_interrupt


DONE, REFUSED, LATE, LOST = (answer(AskOutcome[each]) for each in ("DONE", "REFUSED", "LATE", "LOST"))
ASKED = (CTRL_C, DONE)
"""The person is asked."""
SAVING = (*ASKED, SAVE, DONE)
"""The pause has ended, and the ranks are to stop."""
WORDS = {
    "ORDINARY": "EndQuestion line Leaving(Ctrl-C) SIGINT GRACE:30 SLOW:5",
    "ENDS": "Stopping, then 130",
}
"""What an ordinary Ctrl-C does, and the end of the question before it."""
CASES = {
    "Ctrl-C pauses the job and then asks": case("line Asked(pause, 60 s) | 'done' AskPerson | Running", CTRL_C, DONE),
    "a pause that is refused makes it an ordinary Ctrl-C": case("'refused' ORDINARY | ENDS", REFUSED, before=(CTRL_C,)),
    "one that is late": case("'late' ORDINARY | ENDS", LATE, before=(CTRL_C,)),
    "one whose leader is lost": case("'lost' ORDINARY | - | ENDS", LOST, WorkersGone(round_number=3), before=(CTRL_C,)),
    "save resumes and stops at one step; the ranks end by themselves": case(
        "Asked(resume, 60 s) | Asked(stop, 60 s) | - | Running", SAVE, DONE, DONE, before=ASKED
    ),
    "though the pause has ended": case(
        "Asked(resume, 60 s) | 'refused' Asked(stop, 60 s) | - | Running", SAVE, REFUSED, DONE, before=ASKED
    ),
    "ranks that never stop save a checkpoint and get the signal": case(
        "'refused' Asked(checkpoint, 60 s) | 'done' ORDINARY | ENDS", REFUSED, DONE, before=SAVING
    ),
    "a stop that is late makes it an ordinary Ctrl-C": case("'late' ORDINARY | ENDS", LATE, before=SAVING),
    "a stop whose leader is lost": case("'lost' ORDINARY | ENDS", LOST, before=SAVING),
    "stop is an ordinary Ctrl-C": case("ORDINARY | ENDS", STOP, before=ASKED),
    "continue resumes, and the next Ctrl-C asks again": case(
        "Asked(resume, 60 s) | EndQuestion | line Asked(pause, 60 s) | Running", CONTINUE, DONE, CTRL_C, before=ASKED
    ),
    "whatever the answer is: refused": case(
        "Asked(resume, 60 s) | 'refused' EndQuestion | line Asked(pause, 60 s) | Running",
        CONTINUE,
        REFUSED,
        CTRL_C,
        before=ASKED,
    ),
    "whatever the answer is: late": case(
        "Asked(resume, 60 s) | 'late' EndQuestion | line Asked(pause, 60 s) | Running",
        CONTINUE,
        LATE,
        CTRL_C,
        before=ASKED,
    ),
    "whatever the answer is: lost": case(
        "Asked(resume, 60 s) | 'lost' EndQuestion | line Asked(pause, 60 s) | Running",
        CONTINUE,
        LOST,
        CTRL_C,
        before=ASKED,
    ),
    "what is no choice asks again": case(
        "AskPerson | Asked(resume, 60 s) | Running", PersonChose(choice=None), CONTINUE, before=ASKED
    ),
    "a choice without a question": case("- | Running", STOP),
    "a second choice": case("Asked(resume, 60 s) | - | Running", CONTINUE, STOP, before=ASKED),
    "a second Ctrl-C kills while ranks pause": case("ORDINARY KillWorkers | ENDS", CTRL_C, before=(CTRL_C,)),
    "while the person is asked": case("ORDINARY KillWorkers | ENDS", CTRL_C, before=ASKED),
    "while the pause ends": case("ORDINARY KillWorkers | ENDS", CTRL_C, before=(*ASKED, SAVE)),
    "while ranks save and end": case("ORDINARY KillWorkers | ENDS", CTRL_C, before=(*SAVING, DONE)),
    "another signal ends the question": case(
        "EndQuestion line Leaving(signal) SIGTERM GRACE:30 SLOW:5 | - | Stopping, then 143",
        SignalReceived(signum=signal.SIGTERM),
        STOP,
        before=ASKED,
    ),
    "a round that ends while the person is asked: the job goes on": case(
        "EndQuestion line line ParkWorkers SIGTERM GRACE:30 SLOW:5 | - | Stopping, then Rejoin",
        BROKEN,
        SAVE,
        before=ASKED,
    ),
    "a round that ends while ranks pause makes it an ordinary Ctrl-C": case(
        "line ParkWorkers SIGTERM GRACE:30 SLOW:5 EndQuestion line Leaving(Ctrl-C) | ENDS", BROKEN, before=(CTRL_C,)
    ),
    "a round that ends while the pause ends": case(
        "line ParkWorkers SIGTERM GRACE:30 SLOW:5 EndQuestion line Leaving(Ctrl-C) | ENDS",
        BROKEN,
        before=(*ASKED, SAVE),
    ),
    "a round of another leader ends the question": case(
        "EndQuestion line KillWorkers | - | Stopping, then StartNext",
        rdzv.RoundFormed(round=replace(ROUND, number=4)),
        STOP,
        before=ASKED,
    ),
    # The node had lost contact with the job. The question stayed open, and its "continue" stopped the node.
    "workers that the guard kills end the question, and an answer ends no job": case(
        "RecordFencing line KillWorkers EndQuestion line | - | Stopping, then Rejoin",
        WorkerExited(round_number=3, local_rank=0, code=-9, fencings=1),
        CONTINUE,
        before=ASKED,
    ),
    "a round that ends after continue goes on": case(
        "Asked(resume, 60 s) | EndQuestion line ParkWorkers SIGTERM GRACE:30 SLOW:5 | Stopping, then Rejoin",
        CONTINUE,
        BROKEN,
        before=ASKED,
    ),
    "ranks that have saved end the job with its own code": case(
        "RecordJobFailure EndQuestion KillWorkers | Stopping, then 143",
        rdzv.JobEnded(succeeded=False, is_drained=True),
        before=(*SAVING, DONE),
    ),
    "not at the terminal": case(
        "line Leaving(Ctrl-C) SIGINT GRACE:30 SLOW:5 | ENDS", replace(CTRL_C, is_at_terminal=False)
    ),
    "a quit of the debugger": case(
        "line Leaving(why) SIGINT GRACE:30 SLOW:5 | ENDS", replace(CTRL_C, quit_reason="why")
    ),
    "the guard died": case("line Leaving(own) KillWorkers | ENDS", replace(CTRL_C, guard_died=True)),
    "SIGHUP": case(
        "line Leaving(signal) SIGHUP GRACE:30 SLOW:5 | Stopping, then 129", replace(CTRL_C, signum=signal.SIGHUP)
    ),
    "without the option nothing is asked": case(
        "line Leaving(Ctrl-C) SIGINT GRACE:30 SLOW:5 | ENDS", CTRL_C, asks_at_interrupt=False
    ),
    "a debugger that has the terminal gets Ctrl-C": case("InterruptWorker(1) | Running", replace(CTRL_C, foreground=1)),
}


@pytest.mark.parametrize("name", CASES)
def test_history(name: str) -> None:
    gives, events, before, asks_at_interrupt = CASES[name]
    node = RunningNode(ROUND, asks_at_interrupt=asks_at_interrupt)
    node.send(*before)
    for word, meaning in WORDS.items():
        gives = gives.replace(word, meaning)
    assert show_history(node, *events) == gives


def test_a_refusal_is_printed_once():
    """The leader's node also printed its notice of the same words."""
    refused = Answer(outcome=AskOutcome.REFUSED, line="rank 0 never called wait_while_paused")
    leader, other = (RunningNode(ROUND, asks_at_interrupt=True) for _ in range(2))
    leader.send(CTRL_C)
    told = leader.send(rdzv.Notice(text=f"muster pause: refused, because {refused.line}"))
    assert [f"refused, because {refused.line}" in each for each in [each.text for each in told]] == [True]
    other.send(CTRL_C)
    for node, count in ((leader, 0), (other, 1)):
        answered = node.send(rdzv.RequestAnswered(request=TERMINAL_REQUEST, answer=refused))
        assert answered.count(do.PrintLine(text=refused.line)) == count


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
