"""What one node does about requests of people. Pure, a part of `decisions`; imported at the first request.

A request is passed on to the leader, and the leader's answer back. With `--interrupt-action ask`, Ctrl-C at the
terminal also asks, as ice-learn's launcher does:

    Ctrl-C --pause--> all ranks wait at one step --AskPerson--> save: resume, stop: ranks that ask `should_stop` save
                                                                stop: the signal, as without the option
                                                                continue: resume

Ranks that never ask `should_stop` save a checkpoint instead, and then get the signal. If anything is refused, late or
lost, the job ends as without the option. A second Ctrl-C kills the workers, as always.
"""

from muster._shared.contract import AskKind, AskOutcome
from muster._shared.records import assert_never, replace
from muster._shared.reports import Answer
from muster.agent.node.actions import (
    Action,
    AnswerPerson,
    AskPerson,
    EndQuestion,
    PrintLine,
    PrintStacks,
    Send,
    SendStacks,
)
from muster.agent.node.events import Choice, PersonChose, Requested, SignalReceived
from muster.agent.node.state import Interrupt, InterruptStep, NodeState, Running, Stopping, Succeeded
from muster.agent.node.worker_decisions import OWN_REQUEST, Decision, RequestDecision
from muster.agent.rendezvous.interface import Asked, RequestAnswered, StacksWanted

TERMINAL_REQUEST = 1 << 40
"""The number of the terminal's requests; those of other people begin with 1."""

TERMINAL_LIMIT_S = 60.0
"""How long the ranks may take for each of the terminal's requests."""

_CHOICES = {
    **dict.fromkeys(("", "y", "yes"), Choice.SAVE),
    **dict.fromkeys(("n", "no"), Choice.STOP),
    **dict.fromkeys(("c", "continue"), Choice.CONTINUE),
}
"""Typed words and their choices. An empty line, or the end of the terminal, saves what can be saved."""

_KINDS = {
    InterruptStep.PAUSE: AskKind.PAUSE,
    InterruptStep.CONTINUE: AskKind.RESUME,
    InterruptStep.RESUME: AskKind.RESUME,
    InterruptStep.STOP: AskKind.STOP,
    InterruptStep.CHECKPOINT: AskKind.CHECKPOINT,
}


def decide_request(
    state: NodeState, event: Requested | RequestAnswered | StacksWanted | PersonChose
) -> RequestDecision:
    """Decide what follows. An answer to no open request changes nothing, nor does a choice after the question."""
    match event:
        case Requested():
            return *_send(state, event), None
        case RequestAnswered():
            return _on_answered(state, event)
        case StacksWanted():
            asked = state.find_round(event.round_number)
            return state, () if asked is None else (SendStacks(round=asked, number=event.number),), None
        case PersonChose():
            interrupt = state.interrupt
            if interrupt is None or interrupt.step is not InterruptStep.PERSON:
                return state, (), None
            return _on_choice(state, interrupt, event.choice)
        case _:
            assert_never(event)


def _send(state: NodeState, event: Requested) -> Decision:
    phase = state.phase
    if not isinstance(phase, Running | Succeeded):
        line = "no workers are running: they are being started or stopped"
        refused = Answer(outcome=AskOutcome.REFUSED, line=line, is_unchanged=True)
        return state, (AnswerPerson(requests=(event.request,), answer=refused),)
    number = phase.round.number
    asked = Asked(round_number=number, request=event.request, kind=event.kind, limit_s=event.limit_s)
    return replace(state, requests=state.requests | {event.request}), (Send(message=asked),)


def _on_answered(state: NodeState, event: RequestAnswered) -> RequestDecision:
    if event.request not in state.requests:
        return state, (), None
    state = replace(state, requests=state.requests - {event.request})
    if event.request == OWN_REQUEST:
        return *_print_stacks(state, event.answer), None
    if event.request == TERMINAL_REQUEST:
        return _follow_answer(state, event.answer)
    return state, (AnswerPerson(requests=(event.request,), answer=event.answer),), None


def end_requests(state: NodeState, line: str) -> Decision:
    """Answer all people, because no leader can do so any more."""
    asked = tuple(sorted(state.requests - {OWN_REQUEST, TERMINAL_REQUEST}))
    lost = AnswerPerson(requests=asked, answer=Answer(outcome=AskOutcome.LOST, line=line))
    return replace(state, requests=frozenset()), (lost,) if asked else ()


def _print_stacks(state: NodeState, answer: Answer) -> Decision:
    """Print what all ranks are doing, as the leader has collected it."""
    if answer.outcome is AskOutcome.REFUSED:
        phase = state.phase
        return state, (PrintStacks(round=phase.round),) if isinstance(phase, Running | Stopping) else ()
    from muster.agent.diagnosis.report_text import format_stacks

    return state, tuple(PrintLine(text=line) for line in (answer.line, *format_stacks(answer.stacks, missing=0)))


# -- Ctrl-C at the terminal -------------------------------------------------------------------------------------------


def begin_question(state: NodeState, event: SignalReceived) -> Decision:
    """Pause the job first, so that a save after the answer is of the step at which the person asked."""
    line = PrintLine(text="pausing all ranks at one step; Ctrl-C again kills")
    state, actions, _ = _ask_leader(state, Interrupt(signal=event), InterruptStep.PAUSE)
    return state, (line, *actions)


def parse_choice(typed: str | None) -> Choice | None:
    """Return what the person chooses; None if it is none of yes, no and continue.

    An end of file (Ctrl-D, or a terminal that is gone) is the default answer, as an empty line is. The person wanted to
    stop, saving loses nothing, and no other answer may ever follow. ice-learn ends there with an error, which loses
    what was not saved; `muster.elastic` saves as well. A terminal that is gone also sends SIGHUP, which ends the job.

    Args:
        typed: one line; "" is the end of file. None means that nothing can be typed, and Ctrl-C acts as without the
            option.
    """
    return Choice.STOP if typed is None else _CHOICES.get(typed.strip().lower())


def _ask_leader(state: NodeState, interrupt: Interrupt, step: InterruptStep) -> RequestDecision:
    if not isinstance(state.phase, Running | Succeeded):  # already stopping by another signal
        return _stop(state, interrupt)
    state = replace(state, interrupt=replace(interrupt, step=step))
    return *_send(state, Requested(request=TERMINAL_REQUEST, kind=_KINDS[step], limit_s=TERMINAL_LIMIT_S)), None


def _stop(state: NodeState, interrupt: Interrupt) -> RequestDecision:
    """End the question by the ordinary effect of Ctrl-C."""
    return state, (), interrupt.signal


def _follow_answer(state: NodeState, answer: Answer) -> RequestDecision:
    interrupt = state.interrupt
    if interrupt is None:
        return state, (), None
    # The leader reports the others' outcome, which a leaving node would not print.
    is_printed = interrupt.step in (InterruptStep.PAUSE, InterruptStep.CHECKPOINT)
    is_printed = is_printed or answer.outcome is not AskOutcome.DONE
    is_printed = is_printed and answer.line not in interrupt.notice  # on the leader's own console
    told = (PrintLine(text=answer.line),) if is_printed else ()
    state, actions, stop = _find_next(state, interrupt, answer.outcome)
    return state, (*told, *actions), stop


def _find_next(state: NodeState, interrupt: Interrupt, outcome: AskOutcome) -> RequestDecision:
    is_done = outcome is AskOutcome.DONE
    match interrupt.step:
        case InterruptStep.PAUSE if is_done:
            return replace(state, interrupt=replace(interrupt, step=InterruptStep.PERSON)), (AskPerson(),), None
        case InterruptStep.CONTINUE:
            return replace(state, interrupt=None), (EndQuestion(),), None
        case InterruptStep.RESUME:  # even after the pause has ended
            return _ask_leader(state, interrupt, InterruptStep.STOP)
        case InterruptStep.STOP if is_done:
            return replace(state, interrupt=replace(interrupt, step=InterruptStep.END)), (), None
        case InterruptStep.STOP if outcome is AskOutcome.REFUSED:
            return _ask_leader(state, interrupt, InterruptStep.CHECKPOINT)
        case InterruptStep.PAUSE | InterruptStep.STOP | InterruptStep.CHECKPOINT:
            return _stop(state, interrupt)
        case InterruptStep.PERSON | InterruptStep.END:  # expects no answer
            return state, (), None
        case _:
            assert_never(interrupt.step)


def _on_choice(state: NodeState, interrupt: Interrupt, choice: Choice | None) -> RequestDecision:
    match choice:
        case None:
            return state, (AskPerson(),), None
        case Choice.SAVE:
            return _ask_leader(state, interrupt, InterruptStep.RESUME)
        case Choice.STOP:
            return _stop(state, interrupt)
        case Choice.CONTINUE:
            return _ask_leader(state, interrupt, InterruptStep.CONTINUE)
        case _:
            assert_never(choice)


def end_round_of_question(state: NodeState, interrupt: Interrupt) -> RequestDecision:
    """End a pause with its round: a choice holds, and a person who is being asked is informed."""
    told: tuple[Action, ...] = ()
    match interrupt.step:
        case InterruptStep.PERSON:
            told = (PrintLine(text="the round has ended, and the pause with it; Ctrl-C asks again"),)
        case InterruptStep.CONTINUE | InterruptStep.END:
            pass
        case InterruptStep.PAUSE | InterruptStep.RESUME | InterruptStep.STOP | InterruptStep.CHECKPOINT:
            return _stop(state, interrupt)
        case _:
            assert_never(interrupt.step)
    return replace(state, interrupt=None), (EndQuestion(), *told), None
