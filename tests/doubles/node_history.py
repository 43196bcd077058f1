"""A history of events through the pure state machine of a node."""

import signal
from collections.abc import Callable
from typing import Any

from doubles.sent import unwrap

from muster._shared.layouts import StatusPageLayout as Layout
from muster.agent.node import actions as do
from muster.agent.node.decisions import decide
from muster.agent.node.state import NodeRules, NodeState, Running, Stopping, Succeeded
from muster.agent.rendezvous import interface as rdzv
from muster.agent.round import Round


class RunningNode:
    """A node whose two workers run."""

    def __init__(self, formed: Round, **rules) -> None:
        self.number = formed.number
        phase = Running(round=formed, awaited=frozenset(), alive=frozenset({0, 1}))
        self.state = NodeState(rules=NodeRules(nproc=2, **rules), phase=phase)

    def send(self, *events) -> list:
        """Feed these events; the actions of the last one."""
        actions = ()
        for event in events:
            self.state, actions = decide(self.state, event)
        return unwrap(actions)


def show_kind(kind: int) -> str:
    """Of a drain; "": a stop."""
    return "" if kind == Layout.STOP else f", {Layout.KINDS[kind]}"


def show_ranks(local_ranks: frozenset[int] | None) -> str:
    """Of an action; "": all."""
    return "" if local_ranks is None else f"({', '.join(map(str, sorted(local_ranks)))})"


LEAVINGS = {"its ranks were told to stop": "told", "Ctrl-C (SIGINT)": "Ctrl-C"}
LEAVINGS |= {f"received {name}": "signal" for name in ("SIGTERM", "SIGHUP", "SIGUSR1")}
SHOWN: dict[type, Callable[[Any], object]] = {
    do.PrintLine: lambda each: "line" if " " in each.text else f"'{each.text}'",
    do.StartTimer: lambda each: f"{each.timer.purpose.name}:{each.delay_s:g}",
    do.WriteCommand: lambda each: (
        f"Write({each.drain}: {each.step}{', committed' * each.is_committed}{show_kind(each.kind)})"
    ),
    do.ReadSlots: lambda each: f"Read({each.drain}{show_kind(each.kind)})",
    do.AnswerPerson: lambda each: f"Answer({', '.join(map(str, each.requests))} {each.answer.outcome.value})",
    do.SendStacks: lambda each: f"SendStacks({each.number})",
    do.WriteDeadline: lambda each: f"Deadline({each.delay_s})",
    do.SignalWorkers: lambda each: signal.Signals(each.signum).name + show_ranks(each.local_ranks),
    do.ParkWorkers: lambda each: f"ParkWorkers{f'({each.count})' * (each.count != 2)}",
    do.LeaveRound: lambda each: f"Leave{show_ranks(each.local_ranks)}",
    do.InterruptWorker: lambda each: f"InterruptWorker({each.local_rank})",
    do.Finish: lambda each: f"Finish({each.code})",
    do.CollectStacks: lambda each: f"CollectStacks({'hang' * each.is_hang})",
    rdzv.Asked: lambda each: f"Asked({each.kind.value}, {each.limit_s:g} s)",
    rdzv.DrainAsked: lambda each: f"DrainAsked({each.limit_s:g})",
    rdzv.AllSucceeded: lambda each: f"AllSucceeded({each.drained_rank})",
    rdzv.Leaving: lambda each: f"Leaving({LEAVINGS.get(each.reason, each.reason) if each.is_planned else 'own'})",
    rdzv.DrainDone: lambda each: (
        f"Done({', '.join(f'{one.global_rank}: {one.step} since {one.silent_s:g}' for one in each.late)})"
    ),
    rdzv.DrainReported: lambda each: (
        f"Report({each.report.ceiling}; {', '.join(f'{one.global_rank}: {one.asked}' for one in each.report.ranks)})"
    ),
}
"""What of an action matters here."""


def show_history(node: RunningNode, *events: Any) -> str:
    """The actions of each event, all of the node's round, and the phase after them with what follows it."""
    shown = []
    for event in events:
        sent = node.send(event)
        assert {each.round_number for each in sent if hasattr(each, "round_number")} <= {node.number}
        actions = [SHOWN.get(type(each), lambda one: type(one).__name__)(each) for each in sent]
        shown.append(" ".join(map(str, actions)) or "-")
    phase = node.state.phase
    name = f"{type(phase).__name__}{' told' * (isinstance(phase, Succeeded) and phase.has_drain_step)}"
    if isinstance(phase, Stopping):
        name += f", then {phase.then.code if isinstance(phase.then, do.Finish) else type(phase.then).__name__}"
    return " | ".join([*shown, name])
