"""What a supervisor decides when an elastic role is to have another number of nodes."""

import dataclasses

import pytest
from supervised_apps import agents, make_folder, others
from supervised_apps import begin as begin_app

from muster.schedulers.errors import SchedulerError
from muster.schedulers.runner.roles import find_elastic_role
from muster.schedulers.supervision.app_folder import AppRecord
from muster.schedulers.supervision.decisions import (
    Begin,
    CancelRequested,
    GraceExpired,
    KillRequested,
    LingerExpired,
    Recover,
    ResizeRequested,
)
from muster.schedulers.supervision.machine import Machine
from muster.schedulers.supervision.state import AppPhase, Outcome, ReplicaId, ReplicaStatus, RetryScope
from muster.schedulers.wording.reasons import Code, Reason

LAST = ReplicaId("trainer", 2)


def elastic(**more):
    return agents(3, min_replicas=1, **more)


def begin(*plan):
    return begin_app(*(plan or (elastic(max_retries=2),)))


def check_record(app, tmp_path):
    """The next supervisor reads the same state."""
    folder = make_folder(tmp_path / "a", roles=(elastic(),))
    folder.write_record(AppRecord(app=app.state, machine=Machine.here()))
    assert folder.read_record().app == app.state


def resize(app, replicas, role="trainer"):
    return app.decide_event(ResizeRequested(role=role, replicas=replicas))


@pytest.mark.parametrize("exit_code", [143, 137, 1, 69, None])
def test_a_node_that_was_taken_away_stays_away_however_it_ends(exit_code):
    app = begin()
    assert resize(app, 2) == ["stop trainer/2"]
    assert app.end("trainer/2", exit_code) == []
    assert app.status("trainer/2") is ReplicaStatus.CANCELLED
    assert (app.state.phase, app.state.retries, app.state.leaving) == (AppPhase.RUNNING, {}, ())
    assert app.state.reasons == (Reason(code=Code.RESIZED, role="trainer", total=3, count=2),)
    assert app.end("trainer/0", 0) == ["linger"]
    assert app.end("trainer/1", 0) == ["finish SUCCEEDED"]


def test_growing_starts_what_is_missing_without_a_retry():
    app = begin()
    resize(app, 1)
    for name in ("trainer/2", "trainer/1"):
        app.end(name, 143)
    assert resize(app, 3) == ["start trainer/1", "start trainer/2"]
    assert (app.state.retries, app.state.sizes) == ({}, {"trainer": 3})


def test_a_node_that_is_wanted_again_while_it_ends_is_started_when_it_has_ended():
    app = begin()
    resize(app, 2)
    assert resize(app, 3) == []
    assert app.end("trainer/2", 137) == ["start trainer/2"]
    assert (app.state.retries, app.state.leaving) == ({}, ())


def test_a_node_is_told_once_and_killed_after_the_grace_period():
    app = begin()
    assert resize(app, 2) == ["stop trainer/2"]
    assert resize(app, 1) == ["stop trainer/1"]
    assert app.decide_event(GraceExpired(number=1)) == []  # of the first request: the second began a new period
    assert app.decide_event(GraceExpired(number=2)) == ["kill trainer/2", "kill trainer/1"]
    assert app.end("trainer/1", 137) == []
    assert app.decide_event(GraceExpired(number=2)) == ["kill trainer/2"]


def test_a_lost_node_that_the_role_has_is_started_again():
    app = begin(elastic())
    app.end("trainer/1", 137)
    assert app.status("trainer/1") is ReplicaStatus.LOST
    assert resize(app, 2) == ["stop trainer/2", "start trainer/1"]


def test_nodes_that_leave_do_not_count_as_those_that_are_needed():
    app = begin(agents(3, min_replicas=2))
    resize(app, 2)
    assert app.end("trainer/1", 137) == ["stop trainer/0", "stop trainer/2"]
    assert app.state.outcome is Outcome.FAILED
    assert app.end("trainer/2", 143) == []
    assert app.status("trainer/2") is ReplicaStatus.CANCELLED


@pytest.mark.parametrize("replicas", [0, 4, -1])
def test_a_number_that_is_not_allowed_changes_nothing(replicas):
    app = begin()
    before = app.state
    assert resize(app, replicas) == []
    assert app.state == dataclasses.replace(before, resizes=1)


def test_roles_of_a_fixed_size_and_an_app_that_ends_do_not_change():
    app = begin(agents(2), others(2))
    assert resize(app, 1) == resize(app, 1, "main") == resize(app, 1, "nope") == []
    app = begin()
    app.decide_event(CancelRequested())
    assert resize(app, 1) == []
    assert app.state.sizes == {}


def test_a_cancel_tells_a_node_that_leaves_again_and_a_kill_kills_it():
    app = begin()
    resize(app, 2)
    assert app.decide_event(CancelRequested()) == ["stop trainer/0", "stop trainer/1", "stop trainer/2"]
    assert app.decide_event(KillRequested()) == ["kill trainer/0", "kill trainer/1", "kill trainer/2"]


def test_a_restart_of_the_whole_app_leaves_out_what_was_taken_away():
    app = begin(elastic(), others(1, max_retries=1, retry_scope=RetryScope.APPLICATION))
    resize(app, 2)
    app.end("trainer/2", 143)
    assert app.end("main/0", 1) == ["stop trainer/0", "stop trainer/1"]
    assert resize(app, 1) == []
    app.end("trainer/0", 143)
    assert app.end("trainer/1", 143) == ["start trainer/0", "start main/0"]
    assert app.status("trainer/1") is ReplicaStatus.CANCELLED


def test_the_next_supervisor_tells_the_node_again_and_knows_the_size(tmp_path):
    app = begin()
    resize(app, 1)
    app.end("trainer/1", 143)
    check_record(app, tmp_path)
    assert app.decide_event(Begin()) == ["stop trainer/2"]
    assert app.end("trainer/2", None) == []
    assert resize(app, 2) == ["start trainer/1"]


# -- the job had succeeded by then ---------------------------------------------------------------------------------


def expire(app):
    return app.decide_event(LingerExpired(number=app.state.lingering))


@pytest.mark.parametrize("exit_code", [143, 69, None])
def test_a_node_that_was_started_too_late_to_take_part_ends_with_the_job(exit_code):
    app = begin()
    resize(app, 2)
    app.end("trainer/2", 143)
    assert resize(app, 3) == ["start trainer/2"]
    assert app.end("trainer/0", 0) == ["linger"]
    assert app.end("trainer/1", 0) == []
    assert resize(app, 2) == []  # nothing changes any more
    assert expire(app) == ["stop trainer/2"]
    assert app.end("trainer/2", exit_code) == ["finish SUCCEEDED"]
    assert app.status("trainer/2") is ReplicaStatus.CANCELLED
    assert (app.state.retries, app.state.sizes) == ({}, {"trainer": 3})


@pytest.mark.parametrize("exit_code", [69, 137, None])
def test_what_is_lost_after_the_job_has_succeeded_is_not_started_again(exit_code):
    app = begin()
    app.end("trainer/2", 137)
    assert app.state.retries == {"trainer": 1}
    assert app.end("trainer/0", 0) == ["linger"]
    assert app.end("trainer/2", exit_code) == []
    assert app.end("trainer/1", 0) == ["finish SUCCEEDED"]
    assert app.state.retries == {"trainer": 1}


def test_a_late_node_that_does_not_heed_the_stop_is_killed():
    app = begin()
    app.end("trainer/0", 0)
    app.end("trainer/1", 0)
    assert expire(app) == ["stop trainer/2"]
    assert app.decide_event(GraceExpired(number=app.state.grace_number)) == ["kill trainer/2"]
    assert app.end("trainer/2", 137) == ["finish SUCCEEDED"]


def test_a_node_that_leaves_when_the_job_succeeds_keeps_its_grace_period():
    app = begin()
    resize(app, 2)
    assert app.end("trainer/0", 0) == ["linger"]
    assert app.end("trainer/1", 0) == []
    assert app.decide_event(GraceExpired(number=1)) == ["kill trainer/2"]
    assert expire(app) == []  # it was told
    assert app.end("trainer/2", 137) == ["finish SUCCEEDED"]


def test_a_job_that_has_succeeded_ends_no_other_role():
    app = begin(elastic(), others(1))
    assert app.end("trainer/0", 0) == ["linger"]
    assert expire(app) == ["stop trainer/1", "stop trainer/2"]
    app.end("trainer/1", 0)
    assert app.end("trainer/2", 0) == []
    assert app.end("main/0", 0) == ["finish SUCCEEDED"]
    app = begin(elastic(), others(2))
    assert app.end("main/0", 0) == [], "the exit code of another program says nothing of its neighbours"
    assert app.end("trainer/0", 0) == ["linger"]
    assert app.end("main/1", 1) == ["stop trainer/1", "stop trainer/2"], "an app that ends waits for nothing"


def test_a_role_that_starts_again_with_the_app_is_not_over():
    app = begin(elastic(), others(1, max_retries=1, retry_scope=RetryScope.APPLICATION))
    for index in range(3):
        app.end(f"trainer/{index}", 0)
    assert app.end("main/0", 1) == ["start trainer/0", "start trainer/1", "start trainer/2", "start main/0"]
    assert app.state.over == ()


def test_the_next_supervisor_knows_that_the_job_has_succeeded(tmp_path):
    app = begin()
    app.end("trainer/0", 0)
    check_record(app, tmp_path)
    assert app.decide_event(Begin()) == ["linger"]
    assert app.end("trainer/1", 0) == []
    assert app.decide_event(Recover(replicas=(LAST,))) == []
    assert app.begin() == ["finish SUCCEEDED"]


def test_the_role_is_the_only_elastic_one_or_the_one_that_is_named():
    both = [elastic(), dataclasses.replace(elastic(), name="eval"), others(2)]
    assert find_elastic_role("app", both[1:], None, 2).name == "eval"
    assert find_elastic_role("app", both, "trainer", 1).name == "trainer"
    for roles, name, nodes, text in [
        (both, None, 2, "app 'app' has several elastic roles: choose one of trainer, eval with --role"),
        (both, "nope", 2, "app 'app' has no role 'nope'; it has: trainer, eval, main"),
        (both, "main", 2, r"app 'app' has a fixed number of nodes \(role 'main': 2\)"),
        (both, "eval", 4, "role 'eval' of 'app' can have 1 to 3 nodes, not 4"),
        (both, "eval", 0, "role 'eval' of 'app' can have 1 to 3 nodes, not 0"),
    ]:
        with pytest.raises(SchedulerError, match=text):
            find_elastic_role("app", roles, name, nodes)
