"""The tables of the four state machines: handlers do what they say, what they lack changes nothing, and the drawings.

MUSTER_WRITE_GOLDEN=1 writes the drawings into the docstrings of the reducers.
"""

import inspect
import logging
import os
import random
import signal
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
from doubles.two_members import TwoMembers
from hypothesis import given, settings
from supervised_apps import agents, begin, others
from unit.features import test_preflight_leader
from unit.node.test_decisions import AT_FAULT, RUNNING, any_event, broken, exited, expired, formed, gone, new_state
from unit.node.test_interrupt import CTRL_C
from unit.rendezvous import test_accepted, test_drain_simulation, test_elastic_drain_simulation, test_simulation
from unit.rendezvous.test_member_decisions import World

from muster._shared import transitions
from muster._shared.contract import AskOutcome
from muster._shared.records import replace
from muster._shared.reports import Answer
from muster._shared.role_policy import Restart, RolePolicy
from muster._shared.transitions import Table
from muster.agent.node import decisions as node
from muster.agent.node.events import AgentStarted, Choice, PersonChose, SignalReceived, TimerPurpose
from muster.agent.node.events import Event as NodeEvent
from muster.agent.node.request_decisions import TERMINAL_REQUEST
from muster.agent.node.state import Phase as NodePhase
from muster.agent.node.state import Starting
from muster.agent.rendezvous.consensus import decisions as consensus
from muster.agent.rendezvous.consensus.events import LeaderEvent, MemberReport, Reported
from muster.agent.rendezvous.consensus.state import JobState
from muster.agent.rendezvous.interface import Prepared, RendezvousFailed, RequestAnswered
from muster.agent.rendezvous.member import decisions as member
from muster.agent.rendezvous.member import events as do
from muster.agent.rendezvous.member.state import Phase as MemberPhase
from muster.agent.rendezvous.protocol.messages import Redirect
from muster.schedulers.supervision import decisions as supervision
from muster.schedulers.supervision.state import AppPhase, ReplicaId, RetryScope, SupervisedRole

FAILED = RendezvousFailed(reason="x")
DONE = Answer(outcome=AskOutcome.DONE, line="all wait")


# -- histories ---------------------------------------------------------------------------------------------------------


def play_node() -> None:
    """Any event after any history."""
    found: list[Any] = []

    @settings(max_examples=600, database=None, derandomize=True)
    @given(any_event())
    def collect(event: Any) -> None:
        found.append(event)

    collect()
    answered = RequestAnswered(request=TERMINAL_REQUEST, answer=DONE)
    ended = (exited(0), exited(1))
    always = (gone(), AT_FAULT, expired(TimerPurpose.START), PersonChose(choice=Choice.STOP), FAILED)
    begins = (
        (),
        (formed(is_held=True),),
        RUNNING,
        (*RUNNING, SignalReceived(signum=signal.SIGTERM, is_asked=True)),
        (*RUNNING, formed(2)),
        (*RUNNING, formed(2, is_held=True)),
        (*RUNNING, broken(), *ended, gone()),
        (*RUNNING, CTRL_C, *ended),
        (*RUNNING, CTRL_C, answered, *ended),
    )
    for seed in range(63):
        rng = random.Random(seed)
        state = replace(new_state(asks_at_interrupt=True, restart_backoff_s=rng.choice((0.0, 2.0))), phase=Starting())
        for event in (AgentStarted(), *begins[seed % len(begins)], *rng.choices(found, k=3)):
            for other in (*always, *rng.sample(found, 100)):
                node.decide(state, other)
            state, _ = node.decide(state, event)


def play_jobs() -> None:
    """The real decisions of leader and members, and in drains those of nodes."""
    for seed in range(40):
        test_simulation.Story(seed).play()
    for seed in range(10):
        test_drain_simulation.Story(seed).play()
        test_elastic_drain_simulation.Story(seed).play()


def play_messages() -> None:
    for message in test_accepted.MESSAGES:
        for phase in test_accepted.PHASES:
            job = TwoMembers(hang_action="report")
            test_accepted.is_dropped(job, replace(job.state, phase=phase), message)
    test_preflight_leader.test_other_code_ends_the_job_with_one_report()


def play_member() -> None:
    for seed in range(150):
        world = World(seed)
        member.decide_member(world.state, do.Started(open_error="no port"), world.now_s)
        world.play()
        member.decide_member(world.state, do.Excluded(reason="no other node reaches it"), world.now_s)
        member.decide_member(world.state, do.TimerFired(kind=do.TimerKind.DEADLINE), world.now_s)
        member.decide_member(world.state, do.LeaderSilent(silence_s=5.0, promise_until_s=0.0), world.now_s)
        member.decide_member(world.state, do.LeaderSent(message=Redirect(host="n1", port=1)), world.now_s)


def play_apps() -> None:
    """Apps to which anything happens."""
    policies = (RolePolicy(), RolePolicy(critical=False, ends_with="a"), RolePolicy(restart=Restart.ALWAYS))
    for seed in range(2000):
        rng = random.Random(seed)
        plan = [
            SupervisedRole(
                name=name,
                replicas=rng.choice((1, 2)),
                runs_agent=rng.random() < 0.5,
                min_replicas=rng.choice((None, 1)),
                max_retries=rng.choice((0, 2)),
                retry_scope=rng.choice([*RetryScope]),
                policy=policy,
            )
            for name, policy in (("a", RolePolicy()), ("b", rng.choice(policies)))
        ]
        state = supervision.build_state(plan)
        for _ in range(40):
            replicas = tuple(state.replicas)
            running = [*state.running()]
            draws = {
                supervision.Begin: {},
                supervision.ReplicaEnded: {
                    "replica": rng.choice(running or replicas),
                    "exit_code": rng.choice((0, 1, 69, 137, 143, None)),
                },
                supervision.PausePassed: {"replica": rng.choice(replicas)},
                supervision.Recover: {"replicas": tuple(running[: rng.choice((1, None))])},
                supervision.CancelRequested: {},
                supervision.DrainRequested: {"limit_s": 5.0},
                supervision.KillRequested: {},
                supervision.ResizeRequested: {"role": rng.choice("ab"), "replicas": rng.choice((1, 2))},
                supervision.GraceExpired: {"number": state.grace_number},
                supervision.LingerExpired: {"number": state.lingering},
                supervision.KillExpired: {"number": state.grace_number},
            }
            kind = rng.choice(
                [*draws, *[supervision.ReplicaEnded] * 9, *[supervision.Begin] * 2, *[supervision.Recover] * 2]
            )
            state, _ = supervision.decide(plan, state, kind(**draws[kind]))


def play_recoveries() -> None:
    """Nothing runs any more, and what was to start again is not there."""
    app = begin(agents(2, min_replicas=1))
    app.end("trainer/0", 0)
    app.decide_event(supervision.Recover(replicas=(ReplicaId("trainer", 1),)))
    assert app.begin() == ["finish SUCCEEDED"]
    app = begin(others(2, max_retries=1, retry_scope=RetryScope.ROLE), agents(1))
    app.end("main/0", 1)
    app.decide_event(supervision.Recover(replicas=(ReplicaId("main", 1),)))
    assert app.end("trainer/0", 2) == ["finish FAILED"]


# -- the machines ------------------------------------------------------------------------------------------------------


def find_phase(state: Any) -> Any:
    """A phase as tables name it."""
    return state.phase if isinstance(state.phase, MemberPhase | AppPhase) else type(state.phase)


def decide_app(state: Any, event: Any) -> Any:
    return supervision.decide((), state, event)


def do_due(state: JobState) -> Any:
    """What a leader does with any event."""
    return consensus.decide(state, Reported(id="none", message=Prepared()), 0.0)


@dataclass(frozen=True, kw_only=True)
class Machine:
    module: ModuleType
    kinds: tuple[type, ...]
    phases: tuple[Any, ...]
    decide: Callable[[Any, Any], Any]
    due: Any = field(default_factory=dict)
    decide_nothing: Callable[[Any], Any] = lambda state: (state, ())


MACHINES = {
    "node": Machine(module=node, kinds=get_args(NodeEvent), phases=get_args(NodePhase), decide=node.decide),
    "consensus": Machine(
        module=consensus,
        kinds=(*get_args(LeaderEvent), *get_args(MemberReport)),
        phases=get_args(inspect.get_annotations(JobState)["phase"]),
        decide=lambda state, event: consensus.decide(state, event, 0.0),
        decide_nothing=do_due,
        due={phase: then for due in consensus.DUE for phase, then in due.items()},
    ),
    "member": Machine(
        module=member,
        kinds=get_args(do.Event),
        phases=tuple(MemberPhase),
        decide=lambda state, event: member.decide_member(state, event, 0.0),
    ),
    "supervision": Machine(
        module=supervision, kinds=get_args(supervision.Event), phases=tuple(AppPhase), decide=decide_app
    ),
}
every_machine = pytest.mark.parametrize("name", MACHINES)


def name_phase(phase: Any) -> str:
    return phase.__name__ if isinstance(phase, type) else phase.name


# -- what handlers return ----------------------------------------------------------------------------------------------


class Watch:
    """Checks the decisions of a machine against its table; keeps a state of each phase, and an event of each kind."""

    def __init__(self, machine: Machine) -> None:
        self.states: dict[Any, Any] = {}
        self.events: dict[type, Any] = {}
        self.seen: set[tuple[Any, type, Any]] = set()
        self.table = Table(
            {
                kind: {phase: (self.check(kind, phase, *found), found[1]) for phase, found in row.items()}
                for kind, row in machine.module.TABLE.items()
            }
        )

    def check(self, kind: type, phase: Any, handler: Callable[..., Any], then: tuple[Any, ...]) -> Callable[..., Any]:
        def decide(state: Any, event: Any, *more: Any) -> Any:
            decided = handler(state, event, *more)
            after = find_phase(decided[0])
            assert after in then, f"{name_phase(phase)} --{kind.__name__}--> {name_phase(after)} is not in the table"
            self.seen.add((phase, kind, after))
            self.events[kind] = event
            self.states[phase], self.states[after] = state, decided[0]
            return decided

        return decide


@pytest.fixture(scope="module")
def watches() -> dict[str, Watch]:
    """Of all machines, after all histories."""
    watches = {name: Watch(machine) for name, machine in MACHINES.items()}
    due = MACHINES["consensus"].due

    def check_due(do_due: Callable[..., Any]) -> Callable[..., Any]:
        def decide(state: Any, now_s: float) -> Any:
            decided = do_due(state, now_s)
            assert find_phase(decided[0]) in due[find_phase(state)], do_due.__name__
            return decided

        return decide

    with pytest.MonkeyPatch.context() as patch:
        for name, watch in watches.items():
            patch.setattr(MACHINES[name].module, "TABLE", watch.table)
        for name in ("admit_newcomers", "form_or_end", "_check_join_timeout"):
            patch.setattr(consensus, name, check_due(getattr(consensus, name)))
        play_node()
        play_jobs()
        play_messages()
        play_member()
        play_apps()
        play_recoveries()
    return watches


@every_machine
def test_each_event_has_rows_and_phases_are_those_of_the_machine(name: str) -> None:
    machine = MACHINES[name]
    rows = machine.module.TABLE
    assert set(rows) == set(machine.kinds)
    assert {phase for row in rows.values() for phase in row} <= set(machine.phases)
    assert {after for row in rows.values() for _, then in row.values() for after in then} <= set(machine.phases)


@every_machine
def test_handlers_return_the_phases_that_the_table_allows(name: str, watches: dict[str, Watch]) -> None:
    """And each change that it allows is made in a history."""
    rows, watch = MACHINES[name].module.TABLE, watches[name]
    allowed = {(phase, kind, after) for kind, row in rows.items() for phase, (_, then) in row.items() for after in then}
    unseen = [(p, k, a) for p, k, a in allowed - watch.seen]
    lines = sorted(f"{name_phase(p)} --{k.__name__}--> {name_phase(a)}" for p, k, a in unseen if p is not a)
    assert not lines, "\n".join(lines)


# -- what is not accepted ----------------------------------------------------------------------------------------------


@every_machine
def test_a_pair_that_the_table_lacks_changes_nothing_and_is_recorded(
    name: str, watches: dict[str, Watch], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, transitions.__name__)
    machine, watch = MACHINES[name], watches[name]
    assert set(watch.states) == set(machine.phases)
    for kind, row in machine.module.TABLE.items():
        for phase in set(machine.phases) - set(row):
            state, event = watch.states[phase], watch.events[kind]
            nothing = machine.decide_nothing(state)
            caplog.clear()
            assert machine.decide(state, event) == nothing, (phase, event)
            assert [record.levelno for record in caplog.records] == [logging.DEBUG]
            assert f"{name_phase(phase)} does not accept {event!r}" in caplog.text


# -- drawings ----------------------------------------------------------------------------------------------------------


def draw(machine: Machine) -> str:
    """The changes of phase, those of the same events together."""
    moves: dict[tuple[Any, tuple[Any, ...]], list[str]] = {}
    for kind, row in machine.module.TABLE.items():
        for phase, (_, then) in row.items():
            moves.setdefault((phase, tuple(after for after in then if after is not phase)), []).append(kind.__name__)
    for phase, then in machine.due.items():
        moves.setdefault((phase, tuple(after for after in then if after is not phase)), []).append("what is due")
    lines: dict[tuple[tuple[Any, ...], tuple[str, ...]], list[Any]] = {}
    for (phase, then), kinds in moves.items():
        if then:
            lines.setdefault((then, tuple(kinds)), []).append(phase)
    order = {phase: number for number, phase in enumerate(machine.phases)}
    return "\n".join(
        textwrap.fill(
            f"{list_phases(phases)} --{', '.join(kinds)}--> {list_phases(then)}",
            width=116,
            initial_indent="    ",
            subsequent_indent="        ",
        )
        for (then, kinds), phases in sorted(lines.items(), key=lambda line: [order[phase] for phase in line[1]])
    )


def list_phases(phases: Any) -> str:
    return ", ".join(map(name_phase, phases))


@every_machine
def test_the_drawing_is_that_of_the_table(name: str) -> None:
    machine = MACHINES[name]
    path = Path(inspect.getfile(machine.module))
    source, drawing = path.read_text(), draw(machine)
    [found] = [part for part in source.split('"""')[1].split("\n\n") if "-->" in part]
    if os.environ.get("MUSTER_WRITE_GOLDEN"):
        path.write_text(source.replace(found, drawing, 1))
        return
    assert found == drawing, "to accept the change: MUSTER_WRITE_GOLDEN=1 writes it"
