"""What a role's policy decides: who goes on, who is started again, and when."""

import pytest
from supervised_apps import agents, begin, others

from muster._shared.role_policy import Restart, RolePolicy
from muster.schedulers.supervision.decisions import DrainRequested, GraceExpired, LingerExpired, PausePassed
from muster.schedulers.supervision.state import AppPhase, ReplicaId, ReplicaStatus
from muster.schedulers.wording.reasons import Code


def actors(replicas=2, **policy):
    return others(replicas, name="actor", policy=RolePolicy(**policy))


def test_a_role_that_is_not_critical_fails_alone():
    app = begin(agents(1), actors(critical=False))
    assert app.end("actor/0", 1) == ["stop actor/1"], "the learner is left alone"
    assert app.end("actor/1", 143) == []
    assert app.status("actor/1") is ReplicaStatus.CANCELLED
    [[reason]] = app.state.failed.values()
    assert (reason.code, reason.role, reason.causes[0].replica) == (Code.FAILED_ALONE, "actor", "actor/0")
    assert app.end("trainer/0", 0) == ["finish SUCCEEDED"]


def test_agents_that_are_not_critical_end_by_themselves_before_they_are_stopped():
    app = begin(agents(3, policy=RolePolicy(critical=False)), others(1))
    assert app.end("trainer/0", 1) == ["linger"]
    assert app.end("trainer/1", 1) == []
    assert app.decide_event(LingerExpired(number=app.state.lingering)) == ["stop trainer/2"]
    assert app.end("trainer/2", 143) == []
    assert app.end("main/0", 0) == ["finish SUCCEEDED"]


def test_a_preempted_node_of_one_role_concerns_no_other():
    app = begin(agents(2, min_replicas=1), actors(2, critical=False))
    assert app.end("trainer/1", 143) == ["start trainer/1"]
    assert app.end("trainer/1", 137) == []
    assert app.status("trainer/1") is ReplicaStatus.LOST


def test_a_critical_role_ends_all():
    app = begin(agents(1), actors(1, critical=False))
    assert app.end("trainer/0", 2) == ["stop actor/0"]
    assert app.end("actor/0", 143) == ["finish FAILED"]


def test_restarts_are_of_one_replica_and_have_a_limit():
    app = begin(others(1), actors(restart=Restart.ON_FAILURE, max_restarts=2))
    for count in (1, 2):
        assert app.end("actor/0", 1, ran_s=100.0) == ["pause actor/0 0"]
        assert app.decide_event(PausePassed(replica=ReplicaId("actor", 0))) == ["start actor/0"]
        assert app.state.reasons[1].count == count
    assert app.state.num_restarts == 2
    assert app.end("actor/1", 0) == [], "success is no failure"
    assert app.end("actor/0", 1) == ["stop main/0"]


def test_pauses_grow_while_ends_come_soon_and_begin_anew_after_a_long_run():
    app = begin(others(1), actors(1, restart=Restart.ALWAYS, critical=False, backoff_s=2.0))
    pauses = []
    for ran_s in (1.0, 1.0, 1.0, *(1.0,) * 5, 100.0, 1.0):
        [pause] = app.end("actor/0", 0, ran_s=ran_s)
        pauses.append(float(pause.split()[2]))
        app.decide_event(PausePassed(replica=ReplicaId("actor", 0)))
    assert pauses == [0.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 0.0, 0.0]


@pytest.mark.parametrize("code", [1, 69, 137, None])
def test_agents_are_started_again_however_they_fail(code):
    app = begin(agents(1, policy=RolePolicy(restart=Restart.ON_FAILURE)))
    assert app.end("trainer/0", code) == ["pause trainer/0 0"]


def test_what_another_try_cannot_mend_is_not_started_again():
    app = begin(agents(1, policy=RolePolicy(restart=Restart.ON_FAILURE)))
    assert app.end("trainer/0", 2) == ["finish FAILED"]
    app = begin(actors(1, restart=Restart.ALWAYS))
    assert app.end("actor/0", None, final=True) == ["finish FAILED"]


def test_a_role_ends_with_the_one_that_it_serves():
    app = begin(agents(2), actors(ends_with="trainer", restart=Restart.ALWAYS))
    assert app.end("actor/1", 0) == ["pause actor/1 0"]
    assert app.end("trainer/0", 0) == []
    assert app.end("trainer/1", 0) == ["stop actor/0"], "what waits is not started"
    assert app.decide_event(PausePassed(replica=ReplicaId("actor", 1))) == []
    assert app.decide_event(GraceExpired(number=app.state.grace_number)) == ["kill actor/0"]
    assert app.end("actor/0", 137) == ["finish SUCCEEDED"]


def test_a_role_ends_with_one_that_has_failed_and_is_not_critical():
    app = begin(others(1), others(1, name="judge", policy=RolePolicy(critical=False)), actors(1, ends_with="judge"))
    assert app.end("judge/0", 1) == ["stop actor/0"]
    assert app.end("actor/0", 143) == []
    assert app.end("main/0", 0) == ["finish SUCCEEDED"]


def test_a_grace_period_is_that_of_its_roles():
    app = begin(agents(1), actors(1))
    app.end("trainer/0", 2)
    assert app.decide_event(GraceExpired(number=app.state.grace_number, roles=("trainer",))) == []
    assert app.decide_event(GraceExpired(number=app.state.grace_number, roles=("actor",))) == ["kill actor/0"]


def test_a_role_that_is_restarted_with_the_app_has_not_failed_any_more():
    app = begin(others(1, max_retries=1), actors(2, critical=False))
    app.end("actor/0", 1)
    app.end("actor/1", 143)
    assert app.end("main/0", 1) == ["start main/0", "start actor/0", "start actor/1"]
    assert app.state.failed == {}
    assert app.end("actor/0", 1) == ["stop actor/1"]


def test_what_is_in_a_pause_when_its_role_fails_for_good_is_not_started():
    policy = RolePolicy(critical=False, restart=Restart.ON_FAILURE, max_restarts=1)
    app = begin(agents(2, policy=policy), others(1))
    app.end("trainer/0", 137)
    app.decide_event(PausePassed(replica=ReplicaId("trainer", 0)))
    assert app.end("trainer/1", 137) == ["pause trainer/1 0"]
    assert app.end("trainer/0", 1) == []
    assert app.decide_event(PausePassed(replica=ReplicaId("trainer", 1))) == []
    assert app.end("main/0", 0) == ["finish SUCCEEDED"]


def test_a_stop_that_reaches_nobody_leaves_what_was_in_a_pause_to_go_on():
    app = begin(agents(1), actors(1, critical=False, restart=Restart.ALWAYS))
    app.end("actor/0", 0)
    assert app.decide_event(DrainRequested(limit_s=5.0)) == ["linger"]
    assert app.decide_event(LingerExpired(number=app.state.lingering)) == ["start actor/0"]
    assert app.state.phase is AppPhase.RUNNING


def test_roles_that_serve_each_other_in_a_row_all_end():
    app = begin(
        others(1, name="c", policy=RolePolicy(ends_with="b")),
        others(1, name="b", policy=RolePolicy(ends_with="a", restart=Restart.ALWAYS)),
        others(1, name="a"),
    )
    app.end("b/0", 0)
    assert app.end("a/0", 0) == ["stop c/0"], "b was in a pause"
