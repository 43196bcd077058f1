"""A stop that is recorded before it is asked for: nothing is started again, and no replica is signalled at first."""

from muster.schedulers.supervision.decisions import (
    Begin,
    CancelRequested,
    DrainRequested,
    Finish,
    Linger,
    LingerExpired,
    ReplicaEnded,
    Start,
    Stop,
    build_state,
    decide,
)
from muster.schedulers.supervision.state import AppPhase, Outcome, ReplicaId, ReplicaStatus, SupervisedRole

PLAN = (SupervisedRole(name="r", replicas=2, runs_agent=True, max_retries=3),)
FIRST, SECOND = ReplicaId("r", 0), ReplicaId("r", 1)


def play(*events):
    state, actions = build_state(PLAN), ()
    for event in (Begin(), *events):
        state, actions = decide(PLAN, state, event)
    return state, actions


def ended(replica, code=143):
    return ReplicaEnded(replica=replica, exit_code=code)


def test_it_is_recorded_and_no_replica_is_signalled():
    state, actions = play(DrainRequested(limit_s=60.0))
    assert (state.phase, state.outcome, state.is_draining) == (AppPhase.ENDING, Outcome.CANCELLED, True)
    assert actions == (Linger(number=state.lingering, delay_s=60.0),)


def test_what_ends_then_is_not_started_again():
    state, actions = play(DrainRequested(limit_s=60.0), ended(FIRST))
    assert not any(isinstance(each, Start | Stop) for each in actions)
    assert state.replicas[FIRST].status is ReplicaStatus.CANCELLED
    state, actions = play(DrainRequested(limit_s=60.0), ended(FIRST), ended(SECOND, 137))
    assert actions == (Finish(outcome=Outcome.CANCELLED),)


def test_a_cancel_or_the_limit_stops_what_still_runs():
    state, _ = play(DrainRequested(limit_s=60.0), ended(FIRST))
    for event in (CancelRequested(), LingerExpired(number=state.lingering)):
        _, [stop] = decide(PLAN, state, event)
        assert (type(stop), stop.replicas) == (Stop, (SECOND,))


def test_a_second_one_changes_only_the_limit():
    state, _ = play(DrainRequested(limit_s=60.0))
    assert decide(PLAN, state, DrainRequested(limit_s=1.0)) == (state, (Linger(number=state.lingering, delay_s=1.0),))
    state, _ = decide(PLAN, state, CancelRequested())
    assert decide(PLAN, state, DrainRequested(limit_s=1.0)) == (state, ())


def test_after_the_limit_an_app_whose_agents_all_run_goes_on():
    """They were not asked, and would lose what they have not saved."""
    state, _ = play(DrainRequested(limit_s=60.0))
    state, actions = decide(PLAN, state, LingerExpired(number=state.lingering))
    assert (state.phase, state.outcome, state.is_draining, actions) == (AppPhase.RUNNING, None, False, ())
    _, [start] = decide(PLAN, state, ended(FIRST))
    assert (type(start), start.replicas) == (Start, (FIRST,))
    state, actions = decide(PLAN, state, DrainRequested(limit_s=60.0))
    assert (state.phase, actions) == (AppPhase.ENDING, (Linger(number=state.lingering, delay_s=60.0),))
