"""The supervisor's decisions as tables of events: no processes, no time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from supervised_apps import App, agents, begin, others

from muster._shared.role_policy import Restart, RolePolicy
from muster.schedulers.supervision.decisions import (
    Begin,
    CancelRequested,
    GraceExpired,
    KillExpired,
    KillRequested,
    LingerExpired,
    PausePassed,
    Stop,
    decide,
)
from muster.schedulers.supervision.state import AppPhase, Outcome, ReplicaId, ReplicaStatus, RetryScope, SupervisedRole
from muster.schedulers.wording.reasons import Code, Reason

SAID = Reason(code=Code.AGENT_SAID, text="no such script: x.py")


class TestNormalRun:
    def test_starts_all_and_succeeds_when_all_have(self):
        app = App(agents())
        assert app.state.app_state == "PENDING"
        assert app.begin() == ["start trainer/0", "start trainer/1"]
        assert app.state.app_state == "RUNNING"
        assert app.end("trainer/1", 0) == [], "each may be a job of its own"
        assert app.end("trainer/0", 0) == ["finish SUCCEEDED"]
        assert app.state.app_state == "SUCCEEDED"

    def test_roles_succeed_together(self):
        app = begin(agents(1), others(1))
        assert app.end("trainer/0", 0) == []
        assert app.end("main/0", 0) == ["finish SUCCEEDED"]

    def test_events_after_the_end_change_nothing(self):
        app = begin(agents(1))
        app.end("trainer/0", 0)
        before = app.state
        for event in (Begin(), CancelRequested(), KillRequested(), GraceExpired(number=1)):
            assert app.decide_event(event) == []
        assert app.end("trainer/0", 1) == []
        assert app.state == before


class TestAgentExitCodes:
    def test_a_failed_jobs_agents_end_by_themselves_before_they_are_stopped(self):
        app = begin(agents(3, max_retries=5))
        assert app.end("trainer/0", 1) == ["linger"]
        assert app.end("trainer/1", 1) == []
        assert app.decide_event(LingerExpired(number=app.state.lingering + 1)) == []
        assert app.decide_event(LingerExpired(number=app.state.lingering)) == ["stop trainer/2"]
        assert app.decide_event(LingerExpired(number=1)) == []
        assert app.end("trainer/2", 143) == ["finish FAILED"]
        statuses = [app.status(f"trainer/{index}") for index in range(3)]
        assert statuses == [ReplicaStatus.FAILED, ReplicaStatus.FAILED, ReplicaStatus.CANCELLED]

    def test_other_roles_are_stopped_at_once(self):
        app = begin(agents(2), others(2))
        assert app.end("trainer/0", 1) == ["linger", "stop main/0", "stop main/1"]
        assert app.end("main/0", 143) == []
        assert app.decide_event(GraceExpired(number=app.state.grace_number)) == ["kill main/1"]  # not the agent
        assert app.end("main/1", 137) == []
        assert app.end("trainer/1", 1) == ["finish FAILED"]
        statuses = [app.status(name) for name in ("trainer/1", "main/0", "main/1")]
        assert statuses == [ReplicaStatus.FAILED, ReplicaStatus.CANCELLED, ReplicaStatus.CANCELLED]

    def test_agents_that_linger_are_stopped_without_a_second_signal_to_the_others(self):
        app = begin(agents(2), others(1))
        app.end("trainer/0", 1)
        assert app.decide_event(LingerExpired(number=app.state.lingering)) == ["stop trainer/1"]
        assert app.decide_event(GraceExpired(number=app.state.grace_number)) == ["kill trainer/1", "kill main/0"]

    @pytest.mark.parametrize(
        ("request_", "expected"), [(CancelRequested(), ["stop trainer/1"]), (KillRequested(), ["kill trainer/1"])]
    )
    def test_a_request_ends_the_lingering(self, request_, expected):
        app = begin(agents(2))
        app.end("trainer/0", 1)
        number = app.state.lingering
        assert app.decide_event(request_) == expected
        assert app.decide_event(LingerExpired(number=number)) == []
        assert app.end("trainer/1", 143) == ["finish FAILED"]

    @pytest.mark.parametrize("exit_code", [2, 3, 64, 120, 126, 127])
    def test_final_codes_end_the_app_with_retries_left(self, exit_code):
        app = begin(agents(max_retries=5))
        assert app.end("trainer/0", exit_code) == ["stop trainer/1"]
        assert app.end("trainer/1", 143) == ["finish FAILED"]
        [reason] = app.state.reasons
        assert (reason.code, reason.replica, reason.exit_code) == (Code.REPLICA_FINAL, "trainer/0", exit_code)

    @pytest.mark.parametrize("exit_code", [69, 129, 130, 137, 139, None])
    def test_lost_replicas_are_started_again(self, exit_code):
        app = begin(agents(max_retries=1))
        assert app.end("trainer/1", exit_code) == ["start trainer/1"]
        assert app.state.num_restarts == 1
        assert app.state.reasons[0] == Reason(code=Code.AGENT_ENDED, replica="trainer/1", exit_code=exit_code)
        assert app.end("trainer/0", exit_code) == ["stop trainer/1"]
        assert app.end("trainer/1", 143) == ["finish FAILED"]
        assert app.list_codes() == [Code.AGENT_ENDED, Code.RETRIES_USED]

    def test_preempted_agents_are_started_again_without_retries(self):
        app = begin(agents(3, max_retries=0))
        for index in (1, 0, 2, 1):
            assert app.end(f"trainer/{index}", 143) == [f"start trainer/{index}"]
        assert app.state.reasons == (Reason(code=Code.PREEMPTED_AGAIN, replica="trainer/1"),)
        assert app.end("trainer/0", 137) == ["stop trainer/1", "stop trainer/2"]
        assert app.list_codes() == [Code.AGENT_ENDED, Code.NO_RETRIES]

    @pytest.mark.parametrize("scope", RetryScope)
    def test_agents_are_replaced_one_by_one_with_any_retry_policy(self, scope):
        app = begin(agents(3, max_retries=2, retry_scope=scope))
        assert app.end("trainer/0", 137) == ["start trainer/0"]
        assert app.state.reasons == (
            Reason(code=Code.AGENT_ENDED, replica="trainer/0", exit_code=137),
            Reason(code=Code.STARTED_AGAIN, count=1, total=2),
        )
        assert app.end("trainer/1", 137) == ["start trainer/1"]
        assert app.end("trainer/2", 137) == ["stop trainer/0", "stop trainer/1"]

    def test_reasons_have_what_a_driver_reports(self):
        app, memory = begin(agents()), Reason(code=Code.OUT_OF_MEMORY)
        app.end("trainer/1", 137, reasons=(memory,))
        assert app.state.reasons == (
            Reason(code=Code.AGENT_ENDED, replica="trainer/1", exit_code=137, causes=(memory,)),
            Reason(code=Code.NO_RETRIES, is_agent=True),
        )

    @pytest.mark.parametrize(
        ("reasons", "code"), [((SAID,), Code.REPLICA_REFUSED), ((), Code.REPLICA_FINAL)], ids=["said", "silent"]
    )
    def test_what_an_agent_says_about_its_command_line_is_the_reason(self, reasons, code):
        app = begin(agents(1, max_retries=3))
        assert app.end("trainer/0", 2, reasons=reasons) == ["finish FAILED"]
        assert app.state.reasons == (Reason(code=code, replica="trainer/0", exit_code=2, causes=reasons),)

    def test_the_reason_of_failed_workers_does_not_name_the_agent_that_ended_first(self):
        app = begin(agents(2))
        app.end("trainer/1", 1, reasons=(SAID,))
        assert app.state.reasons == (SAID,)

    def test_what_cannot_be_started_is_final(self):
        app = begin(agents(max_retries=3))
        app.end("trainer/0", 127, reasons=(SAID,), final=True)
        assert app.end("trainer/1", 143) == ["finish FAILED"]
        assert app.state.reasons == (Reason(code=Code.NEVER_STARTED, replica="trainer/0", causes=(SAID,)),)


class TestMinReplicas:
    def test_goes_on_with_fewer_and_succeeds(self):
        app = begin(agents(3, min_replicas=2))
        assert app.end("trainer/2", 137) == []
        assert app.status("trainer/2") is ReplicaStatus.LOST
        assert app.state.reasons[-1] == Reason(code=Code.GOES_ON, count=2, total=2)
        app.end("trainer/0", 0)
        assert app.end("trainer/1", 0) == ["finish SUCCEEDED"]

    def test_ends_completely_below_the_minimum(self):
        app = begin(agents(3, min_replicas=2))
        app.end("trainer/2", 137)
        assert app.end("trainer/1", 137) == ["stop trainer/0"]
        assert app.end("trainer/0", 143) == ["finish FAILED"]
        assert app.state.reasons[-1] == Reason(code=Code.TOO_FEW, count=1, total=2)

    def test_retries_come_first(self):
        app = begin(agents(3, min_replicas=1, max_retries=1))
        assert app.end("trainer/0", 137) == ["start trainer/0"]
        assert app.end("trainer/0", 137) == []

    def test_a_replica_that_succeeded_counts(self):
        app = begin(agents(2, min_replicas=1))
        app.end("trainer/0", 0)
        assert app.end("trainer/1", 137) == ["finish SUCCEEDED"]

    def test_final_codes_end_the_app(self):
        app = begin(agents(3, min_replicas=1))
        assert app.end("trainer/0", 2) == ["stop trainer/1", "stop trainer/2"]


class TestOtherRoles:
    """Roles without our agent keep TorchX's meaning of exit codes and retries."""

    @pytest.mark.parametrize("exit_code", [1, 2, 69, 137, 143, None])
    def test_every_failure_counts_the_same(self, exit_code):
        app = begin(others(1, max_retries=1))
        assert app.end("main/0", exit_code) == ["start main/0"]
        assert app.end("main/0", exit_code) == ["finish FAILED"]

    def test_application_stops_all_then_starts_all(self):
        app = begin(others(2, max_retries=1), others(1, name="side"))
        app.end("side/0", 0)
        assert app.end("main/0", 1) == ["stop main/1"]
        assert app.state.phase is AppPhase.RESTARTING
        assert app.end("main/1", 143) == ["start main/0", "start main/1", "start side/0"]
        assert app.state.phase is AppPhase.RUNNING
        assert app.state.num_restarts == 1

    def test_role_does_not_restart_other_roles(self):
        app = begin(others(2, max_retries=1, retry_scope=RetryScope.ROLE), others(1, name="side"))
        assert app.end("main/0", 1) == ["stop main/1"]
        assert app.end("side/0", 0) == []
        assert app.end("main/1", 143) == ["start main/0", "start main/1"]

    def test_replica_does_not_restart_other_replicas(self):
        app = begin(others(2, max_retries=1, retry_scope=RetryScope.REPLICA))
        assert app.end("main/0", 1) == ["start main/0"]

    def test_two_roles_restarting_at_once_wait_for_each_other(self):
        plan = [others(2, name=name, max_retries=1, retry_scope=RetryScope.ROLE) for name in ("a", "b")]
        app = begin(*plan)
        assert app.end("a/0", 1) == ["stop a/1"]
        assert app.end("b/0", 1) == ["stop a/1", "stop b/1"]
        assert app.end("a/1", 143) == []
        assert app.end("b/1", 143) == ["start a/0", "start a/1", "start b/0", "start b/1"]

    def test_a_restart_has_a_grace_period(self):
        app = begin(others(2, max_retries=1))
        app.end("main/0", 1)
        assert app.decide_event(GraceExpired(number=app.state.grace_number)) == ["kill main/1"]

    def test_failure_for_good_stops_the_other_roles(self):
        app = begin(others(1), others(2, name="side"))
        assert app.end("main/0", 7) == ["stop side/0", "stop side/1"]
        app.end("side/0", 143)
        assert app.end("side/1", 143) == ["finish FAILED"]


class TestCancel:
    def test_stops_all_at_once_and_reads_cancelled(self):
        app = begin(agents(3))
        assert app.decide_event(CancelRequested()) == ["stop trainer/0", "stop trainer/1", "stop trainer/2"]
        assert app.end("trainer/0", 143) == []
        assert app.end("trainer/1", 1) == []
        assert app.end("trainer/2", 0) == ["finish CANCELLED"]
        assert app.state.app_state == "CANCELLED"

    @pytest.mark.parametrize("is_interrupt", [True, False])
    def test_a_ctrl_c_is_passed_on(self, is_interrupt):
        app, failed = App(agents(1)), App(agents(2))
        cancel = CancelRequested(is_interrupt=is_interrupt)
        app.begin()
        failed.begin()
        failed.end("trainer/0", 1)
        for each in (app, failed):  # the agents of the second end by themselves, but may take long
            _, (stop,) = decide(each.plan, each.state, cancel)
            assert isinstance(stop, Stop)
            assert stop.is_interrupt is is_interrupt

    def test_one_grace_period_then_kill(self):
        app = begin(agents(2))
        app.decide_event(CancelRequested())
        app.end("trainer/0", 143)
        assert app.decide_event(GraceExpired(number=app.state.grace_number)) == ["kill trainer/1"]
        assert app.end("trainer/1", 137) == ["finish CANCELLED"]

    def test_what_a_kill_does_not_end_is_given_up_and_named(self):
        """An engine that never answers again kept the supervisor for ever."""
        app = begin(agents(5))
        app.decide_event(CancelRequested())
        app.end("trainer/0", 143)
        number = app.state.grace_number
        assert len(app.decide_event(GraceExpired(number=number))) == 4
        assert app.decide_event(KillExpired(number=number)) == ["finish CANCELLED"]
        names = tuple(f"trainer/{index}" for index in range(1, 5))
        given_up = Reason(code=Code.GIVEN_UP, replicas=names, limit_s=600.0)
        assert app.state.reasons == (Reason(code=Code.CANCELLED), given_up)
        assert app.status("trainer/4") is ReplicaStatus.LOST

    def test_a_kill_of_before_gives_nothing_up(self):
        app = begin(others(2, max_retries=1))
        app.end("main/0", 1)
        stale = app.state.grace_number
        assert app.decide_event(GraceExpired(number=stale)) == ["kill main/1"]
        assert app.decide_event(KillExpired(number=stale)) == []  # it is to be started again
        app.decide_event(CancelRequested())
        assert app.decide_event(KillExpired(number=stale)) == []

    def test_a_stale_grace_period_kills_no_replica(self):
        app = begin(others(2, max_retries=1))
        app.end("main/0", 1)
        stale = app.state.grace_number
        app.end("main/1", 143)
        assert app.decide_event(GraceExpired(number=stale)) == []
        app.decide_event(CancelRequested())
        assert app.decide_event(GraceExpired(number=stale)) == []

    def test_second_request_kills(self):
        app = begin(agents(2))
        app.decide_event(CancelRequested())
        assert app.decide_event(CancelRequested()) == []
        assert app.decide_event(KillRequested()) == ["kill trainer/0", "kill trainer/1"]

    def test_kill_without_cancel(self):
        app = begin(agents(1))
        assert app.decide_event(KillRequested()) == ["kill trainer/0"]
        assert app.end("trainer/0", 137) == ["finish CANCELLED"]

    @pytest.mark.parametrize("request_", [CancelRequested(), KillRequested()])
    def test_before_anything_was_started(self, request_):
        app = App(agents(2))
        assert app.decide_event(request_) == ["finish CANCELLED"]
        assert app.begin() == []

    def test_does_not_hide_a_failure(self):
        app = begin(agents(2))
        app.end("trainer/0", 2)
        assert app.decide_event(CancelRequested()) == []
        assert app.end("trainer/1", 143) == ["finish FAILED"]

    def test_during_a_restart_starts_nothing_more(self):
        app = begin(others(2, max_retries=1))
        app.end("main/0", 1)
        assert app.decide_event(CancelRequested()) == ["stop main/1"]
        assert app.end("main/1", 143) == ["finish CANCELLED"]


class TestSupervisorStartedAgain:
    def test_continues_in_the_recorded_state(self):
        app = begin(agents(2, max_retries=1))
        assert app.begin() == []
        assert app.end("trainer/0", None) == ["start trainer/0"]

    def test_stops_once_more_what_was_being_stopped(self):
        app = begin(agents(2))
        app.decide_event(CancelRequested())
        assert app.begin() == ["stop trainer/0", "stop trainer/1"]
        app.end("trainer/0", None)
        assert app.end("trainer/1", None) == ["finish CANCELLED"]


def split_name(name):
    role, _, index = name.partition("/")
    return role, int(index)


policies = st.builds(
    RolePolicy,
    critical=st.booleans(),
    ends_with=st.sampled_from(["", "r0"]),
    restart=st.sampled_from([None, *Restart]),
    max_restarts=st.integers(1, 3),
)
roles = st.builds(
    SupervisedRole,
    name=st.just("r"),
    replicas=st.integers(1, 4),
    runs_agent=st.booleans(),
    min_replicas=st.none() | st.just(1),
    max_retries=st.integers(0, 3),
    retry_scope=st.sampled_from(RetryScope),
    policy=policies,
)
plans = st.lists(roles, min_size=1, max_size=3).map(
    lambda found: [
        SupervisedRole(**{**vars(role), "name": f"r{index}", **({} if index else {"policy": RolePolicy()})})
        for index, role in enumerate(found)
    ]
)


class Carried:
    """Carries out actions: starts only what is not running, stops only what is."""

    def __init__(self):
        self.running, self.paused = set(), []

    def carry_out(self, done):
        for step in done:
            verb, _, name = step.partition(" ")
            if verb == "start":
                assert name not in self.running
                self.running.add(name)
            elif verb in ("stop", "kill"):
                assert name in self.running
            elif verb == "linger":
                assert self.running
            elif verb == "pause":
                self.paused.append(name.split()[0])
            else:
                assert not self.running


@given(plan=plans, data=st.data())
@settings(max_examples=200)
def test_every_history_ends_with_nothing_running(plan, data):
    """Whatever happens: it ends, and then nothing runs."""
    app, all_ = App(*plan), Carried()
    all_.carry_out(app.begin())
    for _ in range(400):
        if app.state.phase is AppPhase.ENDED:
            break
        assert all_.running or all_.paused, "an app that has not ended must have something running, or about to run"
        more = (["end"] * 3 if all_.running else []) + (["pause"] if all_.paused else [])
        what = data.draw(st.sampled_from([*more, "cancel", "kill", "grace"]))
        if what == "end":
            name = data.draw(st.sampled_from(sorted(all_.running)))
            all_.running.discard(name)
            all_.carry_out(app.end(name, data.draw(st.sampled_from([0, 1, 69, 137, 143, None]))))
        elif what == "grace":
            all_.carry_out(app.decide_event(LingerExpired(number=app.state.lingering)))
            all_.carry_out(app.decide_event(GraceExpired(number=app.state.grace_number)))
        else:
            requests = {"cancel": CancelRequested, "kill": KillRequested}
            passed = PausePassed(replica=ReplicaId(*split_name(all_.paused.pop()))) if what == "pause" else None
            all_.carry_out(app.decide_event(passed or requests[what]()))
    assert app.state.phase is AppPhase.ENDED
    assert isinstance(app.state.outcome, Outcome)
    for role in plan:
        assert app.state.retries.get(role.name, 0) <= role.max_retries
