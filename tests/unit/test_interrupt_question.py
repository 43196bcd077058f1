"""What follows each answer to the question at Ctrl-C."""

import pytest

from muster._contract import AskKind, AskOutcome
from muster.agent.control.question import Then, choose_next, parse_choice


@pytest.mark.parametrize(
    ("asked", "outcome", "then"),
    [
        (AskKind.PAUSE, AskOutcome.DONE, Then.PERSON),
        (AskKind.PAUSE, AskOutcome.REFUSED, Then.INTERRUPT),
        (AskKind.PAUSE, AskOutcome.LATE, Then.INTERRUPT),
        (AskKind.PAUSE, AskOutcome.LOST, Then.INTERRUPT),
        (AskKind.RESUME, AskOutcome.DONE, AskKind.STOP),
        (AskKind.RESUME, AskOutcome.REFUSED, AskKind.STOP),  # the pause has ended by itself
        (AskKind.STOP, AskOutcome.DONE, Then.END),
        (AskKind.STOP, AskOutcome.REFUSED, AskKind.CHECKPOINT),
        (AskKind.STOP, AskOutcome.LATE, Then.INTERRUPT),
        (AskKind.CHECKPOINT, AskOutcome.DONE, Then.INTERRUPT),
        (AskKind.CHECKPOINT, AskOutcome.REFUSED, Then.INTERRUPT),
    ],
)
def test_what_follows_an_answer(asked, outcome, then):
    assert choose_next(asked, outcome, continues=False) is then


@pytest.mark.parametrize("outcome", AskOutcome)
def test_a_job_that_is_to_continue_does(outcome):
    assert choose_next(AskKind.RESUME, outcome, continues=True) is Then.GO_ON


@pytest.mark.parametrize(
    ("typed", "choice"),
    [("\n", "y"), ("", "y"), ("Yes\n", "y"), ("n\n", "n"), (" NO ", "n"), ("c", "c"), ("continue\n", "c"), ("q", None)],
)
def test_what_was_typed(typed, choice):
    assert parse_choice(typed) == choice
