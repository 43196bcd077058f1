"""Decides what a supervisor does with the replicas of its app: pure, from state and event to new state and actions.

    PENDING --CancelRequested, DrainRequested, KillRequested--> ENDED
    PENDING, RESTARTING --Begin--> RUNNING
    RUNNING --Begin--> ENDED
    RUNNING --ReplicaEnded--> RESTARTING, ENDING, ENDED
    RUNNING, RESTARTING --CancelRequested, DrainRequested, KillRequested--> ENDING, ENDED
    RESTARTING --ReplicaEnded--> RUNNING, ENDING, ENDED
    ENDING --ReplicaEnded, Recover, KillExpired--> ENDED
    ENDING --LingerExpired--> RUNNING

There are two kinds of roles. A role of our agent has exit codes with a meaning (`contract.ExitCode`). 1 and 2 are
final. 69 and an end by signal are lost replicas, which are started again one by one, at most `max_retries` per role,
because the agents of the others keep running. 143 means preempted. When one node is preempted, the agents of all may
end with it after they have saved at one step, so it uses no retry. Any other role keeps TorchX's meaning: every failure
may be retried `max_retries` times, and its RetryPolicy says whether the replica, the role or the whole app starts
again. Without retries left, the app continues as long as `min_replicas` of the role run or have succeeded. Otherwise
the supervisor stops what still runs, and the app has failed: an app never keeps running with some of its parts missing.

A role may have a policy (`_shared.role_policy`). One that is not critical may fail for good: what still runs of it is
stopped, and the app goes on. Its replicas may be started again whenever they end, each alone, after a pause that grows.
A role that serves another is stopped once that one has ended.

An elastic role of our agent can be resized. It then has its replicas with the lowest indices. The others are stopped,
and stay stopped however they end. Those that it has again are started, whatever became of them before, without a retry.

The first agent of an elastic role that exits with 0 says that the job of its role has succeeded. The others know it and
end at the same time. What was started too late to take part, by a resize or in place of a lost replica, would wait for
a leader that is gone. It is stopped after `LINGER_S`, and of that role nothing is started again.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, TypeAlias

from muster._shared.contract import NEVER_RETRY, ExitCode
from muster._shared.records import assert_never, record
from muster._shared.role_policy import MOST_BACKOFF_S, RolePolicy
from muster._shared.transitions import Table, drop, go, on, on_with, stay
from muster.schedulers.supervision.state import (
    AppPhase,
    Outcome,
    ReplicaId,
    ReplicaState,
    ReplicaStatus,
    RetryScope,
    SupervisedApp,
    SupervisedRole,
)
from muster.schedulers.wording.reasons import Code, Reason, Reasons

_PENDING, _RUNNING, _RESTARTING, _ENDING, _ENDED = AppPhase
_STARTED = (_RUNNING, _RESTARTING)
_END = go(_PENDING, to=(_ENDED,)), go(*_STARTED, to=(_ENDING, _ENDED))
_MAY_END = stay(_ENDING, or_go=(_ENDED,))


def _build_table() -> "Table[Event, Decision]":
    """Return which phase accepts which event, what handles it, and which phases may follow."""
    return (
        on(Begin, _begin, go(_PENDING, to=(_RUNNING,)), stay(_RUNNING, or_go=(_ENDED,)))
        + on(Begin, _repeat_stop, stay(_RESTARTING, or_go=(_RUNNING,)), stay(_ENDING))
        + on_with(ReplicaEnded, _handle_replica_ended, stay(*_STARTED, or_go=(*_STARTED, _ENDING, _ENDED)), _MAY_END)
        + on(PausePassed, _start_again, stay(*_STARTED))
        + on(Recover, _recover, stay(_PENDING, *_STARTED), _MAY_END)
        + on(CancelRequested, _cancel, *_END)
        + on(CancelRequested, _cancel_again, stay(_ENDING))
        + on(DrainRequested, _drain, *_END)
        + on(DrainRequested, _change_drain, stay(_ENDING))
        + on(KillRequested, _kill, *_END, stay(_ENDING))
        + on_with(ResizeRequested, _resize, stay(_PENDING, *_STARTED, _ENDING))
        + on(GraceExpired, _handle_grace_expired, stay(_PENDING, *_STARTED, _ENDING))
        + on(LingerExpired, _stop_late, stay(_PENDING, *_STARTED))
        + on(LingerExpired, _end_lingering, stay(_ENDING, or_go=(_RUNNING,)))
        + on(KillExpired, _give_up, _MAY_END)
    )


@record
class Begin:
    """Start replicas that wait. In a supervisor that was started again, also repeat a stop that was in progress."""


@record
class ReplicaEnded:
    """A replica has ended."""

    replica: ReplicaId
    exit_code: int | None
    """128+n if signal n ended it. None: not known (the container vanished, the supervisor had died)."""
    reasons: Reasons = ()
    """Why, beside the exit code: out of memory, no such file, the report of its job."""
    final: bool = False
    """Another try would be useless: the command does not exist, the image is gone."""
    ran_s: float = 0.0
    """Since its start, as far as this supervisor has seen it."""


@record
class PausePassed:
    """The pause before a replica is started again has passed."""

    replica: ReplicaId


@record
class Recover:
    """A person continues the app, whose supervisor had died. These replicas have ended since.

    How they ended is not known.
    """

    replicas: tuple[ReplicaId, ...]


@record
class CancelRequested:
    """A request to stop the app, politely first."""

    reasons: Reasons = (Reason(code=Code.CANCELLED),)
    is_interrupt: bool = False
    """A Ctrl-C at the command that the app belongs to, not a cancel from elsewhere."""


@record
class DrainRequested:
    """The app ends, and its agents are asked to stop all ranks at one step: they get no signal before `limit_s`."""

    limit_s: float
    reasons: Reasons = (Reason(code=Code.STOPPED),)


@record
class KillRequested:
    """A request to kill the app at once."""

    reasons: Reasons = (Reason(code=Code.KILLED),)


@record
class ResizeRequested:
    """A request to change the number of replicas of an elastic role."""

    role: str
    replicas: int


@record
class GraceExpired:
    """The grace period of this number has passed."""

    number: int
    roles: tuple[str, ...] = ()
    """Those that have a grace period of this length. (): all."""


@record
class LingerExpired:
    """The time in which agents of a failed job end by themselves has passed."""

    number: int


@record
class KillExpired:
    """Since the kill that had this number `decisions.KILL_LIMIT_S` have passed."""

    number: int


Event: TypeAlias = (
    Begin
    | ReplicaEnded
    | PausePassed
    | Recover
    | CancelRequested
    | DrainRequested
    | KillRequested
    | ResizeRequested
    | GraceExpired
    | LingerExpired
    | KillExpired
)


@record
class Start:
    """Start these replicas, in order."""

    replicas: tuple[ReplicaId, ...]


@record
class Pause:
    """Do nothing yet. PausePassed is due after `delay_s`."""

    replica: ReplicaId
    delay_s: float


@record
class Stop:
    """Ask these replicas to end, all at once. GraceExpired with `number` is due after the grace period of each role."""

    replicas: tuple[ReplicaId, ...]
    number: int
    is_interrupt: bool = False
    """A person has pressed Ctrl-C: see `ReplicaDriver.stop`."""


@record
class Linger:
    """Do nothing yet. LingerExpired with `number` is due after `delay_s`."""

    number: int
    delay_s: float


@record
class Kill:
    """End these replicas now. KillExpired with `number` is due `KILL_LIMIT_S` later."""

    replicas: tuple[ReplicaId, ...]
    number: int


@record
class Finish:
    """Nothing runs any more, so record the outcome and exit."""

    outcome: Outcome


Action: TypeAlias = Start | Pause | Stop | Linger | Kill | Finish
"""What the supervisor does with the replicas of its app."""

Decision: TypeAlias = tuple[SupervisedApp, tuple[Action, ...]]
Plan: TypeAlias = Sequence[SupervisedRole]

_ALL_ROLES: Final = "*"
"""No role has this name."""

LINGER_S: Final = 5.0
"""How long agents may still run after one has reported that its job has succeeded, or has failed for good.

The others of its role know it and end at the same time, and one of them prints the report. An immediate stop could
truncate the report, so they get this long before they are stopped. Other roles know nothing of it. After a failure
they are stopped at once.
"""

KILL_LIMIT_S: Final = 600.0
"""How long an app that ends waits for the ends of replicas that were killed. What the kernel cannot end, or an engine
that never answers again, must not keep its supervisor running for ever: it would not even end by SIGTERM."""


def build_state(plan: Plan) -> SupervisedApp:
    """Return the state of an app before any replica has been started."""
    return SupervisedApp(
        replicas={ReplicaId(role.name, index): ReplicaState() for role in plan for index in range(role.replicas)}
    )


def decide(plan: Plan, state: SupervisedApp, event: Event) -> Decision:
    """Decide what follows from an event.

    Args:
        plan: the app's roles, in order.
        state: as the last call returned it.
        event: what happened.

    Returns:
        The new state, and actions to carry out in order. Outdated events change nothing.
    """
    handler = TABLE.find(state.phase, event)
    if handler is None or _is_outdated(state, event):
        return drop(state, state.phase, event)
    return _end_serving(plan, *handler(state, event, plan))


def _is_outdated(state: SupervisedApp, event: Event) -> bool:
    """Return whether an event is about an earlier period, or about a replica that does not run (any more)."""
    match event:
        case ReplicaEnded():
            known = state.replicas.get(event.replica)
            return known is None or known.status is not ReplicaStatus.RUNNING
        case LingerExpired():
            return event.number != state.lingering
        case GraceExpired() | KillExpired():
            return event.number != state.grace_number
        case PausePassed():
            return state.replicas[event.replica].status is not ReplicaStatus.WAITING
        case Begin() | Recover() | CancelRequested() | DrainRequested() | KillRequested() | ResizeRequested():
            return False
        case _:
            assert_never(event)


def _repeat_stop(state: SupervisedApp, _event: Begin) -> Decision:
    roles = state.restarting if state.phase is AppPhase.RESTARTING else None
    return _advance(*_stop(replace(state, lingering=0, lingering_role=""), state.running(roles)))


def _begin(state: SupervisedApp, _event: Begin) -> Decision:
    state, stops = _stop(state, state.leaving)
    state, starts = _start(replace(state, phase=AppPhase.RUNNING), _list_by_status(state, ReplicaStatus.WAITING))
    state, lingers = _let_end(state) if state.phase is AppPhase.RUNNING else (state, ())
    return state, (*stops, *starts, *lingers)


def _recover(state: SupervisedApp, event: Recover) -> Decision:
    """Start again what its role still has, without a retry. Start nothing if the app is ending."""
    ends = state.phase is AppPhase.ENDING
    for each in event.replicas:
        status = ReplicaStatus.CANCELLED if ends else _choose_restart(state, each)
        state = _set_status(state, each, status, None)
    state = replace(state, leaving=tuple(each for each in state.leaving if each not in event.replicas))
    if ends:
        return _advance(state)
    return replace(state, reasons=(Reason(code=Code.SUPERVISOR_REPLACED, count=len(event.replicas) or None),)), ()


def _handle_replica_ended(state: SupervisedApp, event: ReplicaEnded, plan: Plan) -> Decision:
    was_leaving = event.replica in state.leaving
    state = replace(state, leaving=tuple(each for each in state.leaving if each != event.replica))
    if state.phase is AppPhase.ENDING:
        has_failed = _lingers(state, event.replica) and not state.is_draining and not was_leaving
        bad = ReplicaStatus.FAILED if has_failed else ReplicaStatus.CANCELLED
        status = ReplicaStatus.SUCCEEDED if event.exit_code == 0 else bad
        return _advance(_set_status(state, event.replica, status, event.exit_code))
    if event.replica.role in state.restarting:
        return _advance(_set_status(state, event.replica, _choose_restart(state, event.replica), event.exit_code))
    role = next(each for each in plan if each.name == event.replica.role)
    used = state.replicas[event.replica].restarts
    may_restart = role.name not in state.over and not was_leaving and not event.final
    if may_restart and role.policy.restarts(event.exit_code, used, runs_agent=role.runs_agent):
        return _pause(state, event, role.policy)
    if event.exit_code == 0:
        return _handle_success(role, _set_status(state, event.replica, ReplicaStatus.SUCCEEDED, 0))
    is_late = role.name in state.over and not event.final and not _is_final(role, event.exit_code)
    if was_leaving or is_late:
        # After a final failure, other agents report it too.
        status = _choose_restart(state, event.replica)
        state = _set_status(state, event.replica, status, event.exit_code)
        return _start(state, (event.replica,)) if status is ReplicaStatus.WAITING else _advance(state)
    return _handle_failure(role, state, event)


def _pause(state: SupervisedApp, event: ReplicaEnded, policy: RolePolicy) -> Decision:
    """Have a replica started again, at once if it ran for long."""
    known = state.replicas[event.replica]
    quick_ends = known.quick_ends + 1 if event.ran_s < MOST_BACKOFF_S else 0
    known = replace(known, restarts=known.restarts + 1, quick_ends=quick_ends)
    state = replace(state, replicas={**state.replicas, event.replica: known})
    if event.exit_code != 0:
        what = _explain_end(event, Code.REPLICA_ENDED)
        again = Reason(code=Code.RESTARTED, count=known.restarts, total=policy.max_restarts)
        state = replace(state, reasons=(what, again))
    state = _set_status(state, event.replica, ReplicaStatus.WAITING, event.exit_code)
    return state, (Pause(replica=event.replica, delay_s=policy.find_pause_s(quick_ends)),)


def _start_again(state: SupervisedApp, event: PausePassed) -> Decision:
    return (state, ()) if event.replica.role in state.restarting else _start(state, (event.replica,))


def _handle_success(role: SupervisedRole, state: SupervisedApp) -> Decision:
    if not role.is_elastic or role.name in state.over:  # others' replicas may be separate jobs
        return _advance(state)
    return _advance(*_let_end(replace(state, over=(*state.over, role.name))))


def _let_end(state: SupervisedApp) -> Decision:
    """Begin the time in which agents whose job has succeeded end by themselves, if any still runs."""
    if not state.running(state.over):
        return state, ()
    number = max(state.grace_number, state.lingering) + 1  # a running grace period goes on
    return replace(state, lingering=number), (Linger(number=number, delay_s=LINGER_S),)


def _stop_late(state: SupervisedApp, _event: LingerExpired) -> Decision:
    """Stop agents of a job that has succeeded, which were started too late to take part."""
    left = tuple(each for each in state.running(state.over) if each not in state.leaving)
    return _stop(replace(state, lingering=0, leaving=(*state.leaving, *left)), left)


def _handle_failure(role: SupervisedRole, state: SupervisedApp, event: ReplicaEnded) -> Decision:
    if event.final or _is_final(role, event.exit_code):
        state = _set_status(state, event.replica, ReplicaStatus.FAILED, event.exit_code)
        lingers = role.runs_agent and not event.final and event.exit_code == ExitCode.WORKERS_FAILED
        return _fail(role, state, _explain_final(event), lingers=lingers)
    if role.runs_agent and event.exit_code == ExitCode.TERMINATED:
        state = _set_status(state, event.replica, ReplicaStatus.WAITING, event.exit_code)
        state = replace(state, reasons=(Reason(code=Code.PREEMPTED_AGAIN, replica=str(event.replica)),))
        return _start(state, (event.replica,))
    what = _explain_end(event, Code.AGENT_ENDED if role.runs_agent else Code.REPLICA_ENDED)
    used = state.retries.get(role.name, 0)
    if used < role.max_retries:
        again = Reason(code=Code.STARTED_AGAIN, count=used + 1, total=role.max_retries)
        state = replace(state, retries={**state.retries, role.name: used + 1}, reasons=(what, again))
        return _retry(role, _set_status(state, event.replica, ReplicaStatus.WAITING, event.exit_code), event.replica)
    spent = Reason(code=Code.NO_RETRIES, is_agent=role.runs_agent)
    if most := role.max_retries or role.policy.max_restarts:
        spent = Reason(code=Code.RETRIES_USED, count=most)
    left = _count_good(state, role.name) - 1
    if left < role.needed:
        state = _set_status(state, event.replica, ReplicaStatus.FAILED, event.exit_code)
        needs = (Reason(code=Code.TOO_FEW, count=left, total=role.needed),) if role.min_replicas is not None else ()
        return _fail(role, state, (what, spent, *needs))
    goes_on = Reason(code=Code.GOES_ON, count=left, total=role.needed)
    state = replace(state, reasons=(what, spent, goes_on))
    return _advance(_set_status(state, event.replica, ReplicaStatus.LOST, event.exit_code))


def _fail(role: SupervisedRole, state: SupervisedApp, reasons: Reasons, *, lingers: bool = False) -> Decision:
    """End the app, or only the role if it is not critical."""
    if role.policy.critical:
        return _end(state, Outcome.FAILED, reasons, lingering_role=role.name if lingers else "")
    if role.name in state.failed:
        return _advance(state)
    failed = Reason(code=Code.FAILED_ALONE, role=role.name, causes=reasons)
    state = replace(state, failed={**state.failed, role.name: (failed,)}, reasons=())
    return _advance(*_let_end(_close_role(state, role.name))) if lingers else _end_role(state, role.name)


def _close_role(state: SupervisedApp, role: str) -> SupervisedApp:
    """Start nothing of a role again."""
    for each in _list_of(state, role, ReplicaStatus.WAITING):
        state = _set_status(state, each, ReplicaStatus.CANCELLED, state.replicas[each].exit_code)
    return replace(state, over=(*state.over, role))


def _end_role(state: SupervisedApp, role: str) -> Decision:
    """Stop what runs of a role, and start nothing of it again."""
    state = _close_role(state, role)
    running = tuple(each for each in state.running([role]) if each not in state.leaving)
    return _advance(*_stop(replace(state, leaving=(*state.leaving, *running)), running))


def _end_serving(plan: Plan, state: SupervisedApp, actions: tuple[Action, ...]) -> Decision:
    """Stop the roles that serve one which has ended."""
    for role in plan:
        served = role.policy.ends_with
        if state.phase is not AppPhase.RUNNING or not served or role.name in state.over:
            continue
        if served in state.failed or not _list_of(state, served, ReplicaStatus.RUNNING, ReplicaStatus.WAITING):
            state, more = _end_role(state, role.name)
            return _end_serving(plan, state, (*actions, *more))  # others may serve this one
    return state, actions


def _explain_end(event: ReplicaEnded, code: Code) -> Reason:
    return Reason(code=code, replica=str(event.replica), exit_code=event.exit_code, causes=event.reasons)


def _is_final(role: SupervisedRole, exit_code: int | None) -> bool:
    """Return whether starting the replica again is useless: an agent's exit, unless with 69 or by a signal."""
    if not role.runs_agent or exit_code is None:
        return False
    return exit_code in NEVER_RETRY or (exit_code != ExitCode.RENDEZVOUS and exit_code <= 128)


def _explain_final(event: ReplicaEnded) -> Reasons:
    if event.final:
        return (Reason(code=Code.NEVER_STARTED, replica=str(event.replica), causes=event.reasons),)
    if event.reasons and event.exit_code == ExitCode.WORKERS_FAILED:
        return event.reasons  # they name the node whose worker failed, which may be another one
    is_refused = event.reasons and event.exit_code in NEVER_RETRY
    return (_explain_end(event, Code.REPLICA_REFUSED if is_refused else Code.REPLICA_FINAL),)


def _retry(role: SupervisedRole, state: SupervisedApp, replica: ReplicaId) -> Decision:
    if role.scope is RetryScope.REPLICA:
        return _start(state, (replica,))
    restarting = {role.name} if role.scope is RetryScope.ROLE else {each.role for each in state.replicas}
    restarting |= set(state.restarting)
    state = replace(
        state,
        over=tuple(each for each in state.over if each not in restarting),
        failed={each: why for each, why in state.failed.items() if each not in restarting},
    )
    replicas = {
        each: replace(known, status=_choose_restart(state, each))
        if each.role in restarting and known.status is not ReplicaStatus.RUNNING
        else known
        for each, known in state.replicas.items()
    }
    state = replace(state, replicas=replicas, phase=AppPhase.RESTARTING, restarting=tuple(sorted(restarting)))
    return _advance(*_stop(state, state.running(restarting)))


def _choose_restart(state: SupervisedApp, replica: ReplicaId) -> ReplicaStatus:
    """Return the status of a replica that would be started again, if its role (still) has it and goes on."""
    is_started = state.is_wanted(replica) and replica.role not in state.over
    return ReplicaStatus.WAITING if is_started else ReplicaStatus.CANCELLED


def _resize(state: SupervisedApp, event: ResizeRequested, plan: Plan) -> Decision:
    """Change nothing if the request is not allowed: the command has said why, or sees that the app ends."""
    state = replace(state, resizes=state.resizes + 1)
    role = next((each for each in plan if each.name == event.role and each.is_elastic), None)
    if state.phase is AppPhase.ENDING or role is None or role.name in state.over:
        return state, ()
    if not role.needed <= event.replicas <= role.replicas:
        return state, ()
    before = state.sizes.get(role.name, role.replicas)
    state = replace(state, sizes={**state.sizes, role.name: event.replicas})
    if before != event.replicas:
        resized = Reason(code=Code.RESIZED, role=role.name, total=before, count=event.replicas)
        state = replace(state, reasons=(resized,))
    ended = (ReplicaStatus.WAITING, ReplicaStatus.LOST, ReplicaStatus.CANCELLED)
    replicas = {
        each: replace(known, status=_choose_restart(state, each))
        if each.role == role.name and known.status in ended
        else known
        for each, known in state.replicas.items()
    }
    state = replace(state, replicas=replicas)
    if state.phase is AppPhase.PENDING or role.name in state.restarting:
        return state, ()  # started later
    left = tuple(each for each in state.running([role.name]) if not state.is_wanted(each) and each not in state.leaving)
    state, stops = _stop(replace(state, leaving=(*state.leaving, *left)), left)
    waiting = _list_of(state, role.name, ReplicaStatus.WAITING)
    state, starts = _start(state, waiting) if waiting else (state, ())
    return state, (*stops, *starts)


def _end(
    state: SupervisedApp, outcome: Outcome, reasons: Reasons, *, lingering_role: str = "", is_interrupt: bool = False
) -> Decision:
    """Stop everything at once, but one role perhaps after lingering. Replicas that wait are never started."""
    replicas = {
        each: replace(known, status=ReplicaStatus.CANCELLED) if known.status is ReplicaStatus.WAITING else known
        for each, known in state.replicas.items()
    }
    state = replace(state, replicas=replicas, phase=AppPhase.ENDING, restarting=(), lingering=0)
    state = replace(state, outcome=outcome, reasons=reasons)
    is_for_all = lingering_role == _ALL_ROLES
    lingering = state.running(None if is_for_all else [lingering_role]) if lingering_role else ()
    if not lingering:
        return _advance(*_stop(state, state.running(), is_interrupt=is_interrupt))
    number = state.grace_number + 1
    state = replace(state, grace_number=number, lingering=number, lingering_role=lingering_role)
    state, stops = _stop(state, tuple(each for each in state.running() if each not in lingering))
    return state, (Linger(number=number, delay_s=LINGER_S), *stops)


def _cancel(state: SupervisedApp, event: CancelRequested) -> Decision:
    return _end(state, Outcome.CANCELLED, event.reasons, is_interrupt=event.is_interrupt)


def _cancel_again(state: SupervisedApp, event: CancelRequested) -> Decision:
    return _stop_lingering(state, is_interrupt=event.is_interrupt) if state.lingering else (state, ())


def _change_drain(state: SupervisedApp, event: DrainRequested) -> Decision:
    """Change the limit of a drain."""
    lingers = state.is_draining and state.lingering != 0
    return state, (Linger(number=state.lingering, delay_s=event.limit_s),) if lingers else ()


def _drain(state: SupervisedApp, event: DrainRequested) -> Decision:
    """Start nothing again from now on: the agents end by themselves."""
    state, actions = _end(state, Outcome.CANCELLED, event.reasons, lingering_role=_ALL_ROLES)
    if state.phase is AppPhase.ENDED or not state.lingering:
        return state, actions
    state = replace(state, lingering_role="", draining=len(state.running()))
    return state, (Linger(number=state.lingering, delay_s=event.limit_s),)


def _end_lingering(state: SupervisedApp, _event: LingerExpired) -> Decision:
    """Stop what lingers. After a drain let the app go on if none of its agents has ended: they were not asked."""
    if not state.is_draining or len(state.running()) < state.draining:
        return _stop_lingering(state)
    state = replace(state, phase=AppPhase.RUNNING, outcome=None, lingering=0, draining=0)
    paused = [
        each
        for each in _list_by_status(state, ReplicaStatus.CANCELLED)
        if _choose_restart(state, each) is ReplicaStatus.WAITING
    ]
    state, starts = _start(state, tuple(paused))
    state, lingers = _let_end(replace(state, reasons=(Reason(code=Code.GOES_ON_UNASKED),)))
    return state, (*starts, *lingers)


def _stop_lingering(state: SupervisedApp, *, is_interrupt: bool = False) -> Decision:
    lingering = tuple(each for each in state.running() if _lingers(state, each))
    return _stop(replace(state, lingering=0, lingering_role=""), lingering, is_interrupt=is_interrupt)


def _lingers(state: SupervisedApp, replica: ReplicaId) -> bool:
    return state.phase is AppPhase.ENDING and state.lingering != 0 and state.lingering_role in ("", replica.role)


def _kill(state: SupervisedApp, event: KillRequested) -> Decision:
    if state.phase is not AppPhase.ENDING:
        state, actions = _end(state, Outcome.CANCELLED, event.reasons)
        if state.phase is AppPhase.ENDED:
            return state, actions
    running = state.running()
    return replace(state, lingering=0, lingering_role=""), (Kill(replicas=running, number=state.grace_number),)


def _handle_grace_expired(state: SupervisedApp, event: GraceExpired) -> Decision:
    due = state.running() if state.phase is AppPhase.ENDING else (*state.running(state.restarting), *state.leaving)
    stopped = tuple(each for each in due if (not event.roles or each.role in event.roles) and not _lingers(state, each))
    return state, (Kill(replicas=stopped, number=event.number),) if stopped else ()


def _give_up(state: SupervisedApp, _event: KillExpired) -> Decision:
    left = state.running()
    if not left:
        return state, ()
    for each in left:
        state = _set_status(state, each, ReplicaStatus.LOST, None)
    given_up = Reason(code=Code.GIVEN_UP, replicas=tuple(map(str, left)), limit_s=KILL_LIMIT_S)
    return _advance(replace(state, reasons=(*state.reasons, given_up)))


def _advance(state: SupervisedApp, actions: tuple[Action, ...] = ()) -> Decision:
    """Change the phase if the replicas that it waits for have ended."""
    if state.phase is AppPhase.ENDING and not state.running():
        assert state.outcome is not None  # noqa: S101  # set together with the phase
        ended = replace(state, phase=AppPhase.ENDED)
        return ended, (*actions, Finish(outcome=state.outcome))
    if state.phase is AppPhase.RESTARTING and not state.running(state.restarting):
        state = replace(state, phase=AppPhase.RUNNING, restarting=())
        state, starts = _start(state, _list_by_status(state, ReplicaStatus.WAITING))
        return state, (*actions, *starts)
    if state.phase is AppPhase.RUNNING and not _list_by_status(state, ReplicaStatus.RUNNING, ReplicaStatus.WAITING):
        ended = replace(state, phase=AppPhase.ENDED, outcome=Outcome.SUCCEEDED)
        return ended, (*actions, Finish(outcome=Outcome.SUCCEEDED))
    return state, actions


def _start(state: SupervisedApp, replicas: tuple[ReplicaId, ...]) -> Decision:
    if not replicas:
        return _advance(state)
    marked = {
        each: replace(state.replicas[each], status=ReplicaStatus.RUNNING, starts=state.replicas[each].starts + 1)
        for each in replicas
    }
    return replace(state, replicas={**state.replicas, **marked}), (Start(replicas=replicas),)


def _stop(state: SupervisedApp, replicas: tuple[ReplicaId, ...], *, is_interrupt: bool = False) -> Decision:
    if not replicas:
        return state, ()
    number = state.grace_number + 1
    return replace(state, grace_number=number), (Stop(replicas=replicas, number=number, is_interrupt=is_interrupt),)


def _set_status(
    state: SupervisedApp, replica: ReplicaId, status: ReplicaStatus, exit_code: int | None
) -> SupervisedApp:
    known = replace(state.replicas[replica], status=status, exit_code=exit_code)
    return replace(state, replicas={**state.replicas, replica: known})


def _list_by_status(state: SupervisedApp, *statuses: ReplicaStatus) -> tuple[ReplicaId, ...]:
    return tuple(each for each, known in state.replicas.items() if known.status in statuses)


def _list_of(state: SupervisedApp, role: str, *statuses: ReplicaStatus) -> tuple[ReplicaId, ...]:
    return tuple(each for each in _list_by_status(state, *statuses) if each.role == role)


def _count_good(state: SupervisedApp, role: str) -> int:
    """Count the replicas of a role that run, are about to run, or have succeeded."""
    good = (ReplicaStatus.RUNNING, ReplicaStatus.WAITING, ReplicaStatus.SUCCEEDED)
    return sum(
        1
        for each, known in state.replicas.items()
        if each.role == role and known.status in good and each not in state.leaving
    )


TABLE = _build_table()
