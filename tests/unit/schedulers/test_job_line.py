"""The one line of a job: what it says, in which order, and what it leaves out."""

import time
from dataclasses import replace
from datetime import datetime

import pytest
import yaml
from torchx.specs import AppDef, AppState, Role
from torchx.specs.api import NONE, ReplicaStatus

from muster._shared.contract import RoleKey
from muster._shared.job_view import JobState, JobStatus, NodeState, NodeStatus, RankStatus
from muster.schedulers.adapter.status import build_status, parse_status
from muster.schedulers.wording.facts import AppFacts, ExplainedReplica
from muster.schedulers.wording.job_line import build_data, find_eta_s, format_line, format_message
from muster.schedulers.wording.reasons import Code, JobFacts, Reason
from muster.schedulers.wording.words import word

NOW_S = float(int(time.time()) - 600)
CLOCK = f"{datetime.fromtimestamp(NOW_S).astimezone():%H:%M}"
RESIZED = Reason(code=Code.RESIZED, role="t", total=3, count=2)
FAILED = Reason(code=Code.JOB_FAILED, text="rank 3 failed")
SLEEPS = Reason(code=Code.HANGS, text="rank 1 sleeps", at_s=NOW_S)
STATUS = JobStatus(step=800, total=1000, rate=8.0, values=(("loss", 0.31),), restarts_left=2, since_s=NOW_S)
JOB = JobFacts(attempt=1, status=STATUS)


def build_facts(state=AppState.RUNNING, running=2, nodes=2, **changes):
    states = [AppState.RUNNING] * running + [AppState.PENDING] * (nodes - running)
    replicas = [ReplicaStatus(id=index, state=each, role="t", hostname="h") for index, each in enumerate(states)]
    app = AppDef(name="a", roles=[Role(name="t", image="", num_replicas=nodes)])
    return AppFacts(**{"app_id": "a-1", "app": app, "state": state, "replicas": replicas, **changes})


def test_all_that_is_known_in_the_order_of_its_weight():
    facts = build_facts(jobs={"t": JOB}, reasons=(RESIZED,))
    told = (
        f"{word(RESIZED)}; attempt 1, 2 restarts left; 2 of 2 nodes run; step 800 of 1000, 8.0 a second, loss 0.31; "
        "ETA 25 s"
    )
    assert format_line(facts) == f"RUNNING: {told}; since {CLOCK}"
    assert format_message(facts) == f"{told}; since {CLOCK}", "TorchX prints the state itself"
    assert build_status(facts).msg == format_message(facts)


def test_a_response_of_torchx_is_told_as_it_is():
    facts = build_facts(jobs={"t": JOB}, reasons=(RESIZED,))
    assert parse_status(build_status(facts)) is facts


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (JobFacts(), ""),
        (JobFacts(status=JobStatus(restarts_left=0)), "attempt 0, no restarts allowed; "),
        (JobFacts(status=JobStatus(restarts_left=1)), "attempt 0, 1 restart left; "),
        (JobFacts(attempt=3), "attempt 3; "),
    ],
)
def test_attempts_are_named_where_something_is_known(job, words):
    assert format_line(build_facts(jobs={"t": job})) == f"RUNNING: {words}2 of 2 nodes run"


def test_what_all_roles_have_in_common_is_said_once():
    jobs = dict.fromkeys("ab", JobFacts(status=JobStatus(restarts_left=0)))
    assert format_line(build_facts(jobs=jobs)).startswith("RUNNING: each role: attempt 0, no restarts allowed; 2 of ")
    assert "b: attempt 1" in format_line(build_facts(jobs={**jobs, "b": JobFacts(attempt=1)}))


@pytest.mark.parametrize(
    ("reason", "line"),
    [
        (Reason(code=Code.CANCELLED), "CANCELLED"),
        (Reason(code=Code.SUPERVISOR_SIGNALLED, signal="SIGTERM"), "CANCELLED: its supervisor got SIGTERM"),
        (Reason(code=Code.STOPPED), "CANCELLED: stopped (muster stop)"),
    ],
)
def test_the_reason_does_not_repeat_the_state(reason, line):
    facts = build_facts(AppState.CANCELLED, reasons=(reason,))
    assert format_line(facts) == line
    assert format_message(facts) == word(reason), "TorchX prints the state elsewhere"


def make_members(members, spare=0, world_size=None, lost=(), **changes):
    nodes = tuple(NodeStatus(node_index=at, node=at, ranks=2) for at in range(members))
    nodes += tuple(NodeStatus(node_index=at, node=at, state=NodeState.LOST) for at in lost)
    size = 2 * members if world_size is None else world_size
    return JobStatus(nodes=nodes, nodes_running=members, nodes_spare=spare, world_size=size, **changes)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (make_members(3), ""),
        (make_members(2), ", 1 of them takes no part"),
        (make_members(1), ", 2 of them take no part"),
        (make_members(2, spare=1), ", 1 of them is a spare"),
        (make_members(1, spare=2), ", 2 of them are spares"),
        (make_members(1, spare=1, nodes_lost=1), ", 1 of them is a spare, 1 of them takes no part, 1 is lost"),
        (make_members(2, state=JobState.WAITING), ""),
        (make_members(1, world_size=6), ""),  # with torch's rendezvous each node knows only its own ranks
        (JobStatus(), ""),
    ],
    ids=range(9),
)
def test_a_node_that_runs_without_a_part_in_the_job_is_counted(status, words):
    """The job went on without it, or it has not joined yet: "3 of 3 nodes run" said nothing of that."""
    facts = build_facts(running=3, nodes=3, jobs={"t": JobFacts(status=status)})
    assert format_line(facts) == f"RUNNING{' (waiting)' * (status.state is JobState.WAITING)}: 3 of 3 nodes run{words}"


def test_what_is_not_known_is_left_out():
    assert format_line(build_facts(AppState.SUBMITTED, running=0)) == "SUBMITTED"
    assert format_message(build_facts(AppState.SUBMITTED, running=0)) == ""
    assert build_status(build_facts(AppState.SUBMITTED, running=0)).msg == NONE
    assert format_line(build_facts(running=1, nodes=1)) == "RUNNING: 1 of 1 node runs"
    assert format_line(build_facts(running=1)) == "RUNNING: 1 of 2 nodes runs"


def test_what_agents_told_last_is_not_in_the_line_of_an_app_that_has_ended():
    job = JobFacts(attempt=1, status=STATUS, trouble=(SLEEPS,))
    ended = build_facts(AppState.FAILED, jobs={"t": job}, reasons=(FAILED,), since_s=NOW_S)
    assert format_line(ended) == f"FAILED: rank 3 failed; ended at {CLOCK}"
    assert build_data(ended)["jobs"]["t"]["step"] == 800


def test_an_app_that_has_ended_says_how_long_it_ran():
    ended = build_facts(AppState.FAILED, reasons=(FAILED,), since_s=NOW_S, submitted_s=NOW_S - 7380)
    assert format_line(ended) == f"FAILED: rank 3 failed; ended at {CLOCK} after 2 h 3 min"
    assert format_message(ended) == "rank 3 failed", "TorchX's message of an end is the reason alone"


def test_a_job_that_runs_says_what_it_does():
    status = JobStatus(state=JobState.PAUSED, paused_since_s=NOW_S, step=7)
    line = format_line(build_facts(jobs={"t": JobFacts(status=status, trouble=(SLEEPS,))}))
    assert line == f"RUNNING (paused): paused at step 7 since {CLOCK}; {word(SLEEPS)}; 2 of 2 nodes run"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "step 30 of 600, no step for 24 s, loss 0.31"),
        ({"state": JobState.PAUSED}, "paused at step 30"),
        ({"step": 31}, "step 31 of 600, 0.8 a second, loss 0.31; ETA 11 min 51 s"),
    ],
)
def test_a_job_that_stands_still_says_so_instead_of_a_rate(changes, words):
    """It said nothing for 50 s, and its rate and ETA were those of a job that goes on."""
    ranks = tuple(
        RankStatus(global_rank=rank, node=rank, local_rank=0, step=step, still_s=22.0, is_still=rank == 1)
        for rank, step in enumerate((31, 30))
    )
    nodes = (NodeStatus(node_index=0, node=0), NodeStatus(node_index=1, node=1, age_s=1.6))
    given = {"step": 30, "total": 600, "rate": 0.8, "ranks": ranks, "nodes": nodes, "values": (("loss", 0.31),)}
    facts = build_facts(jobs={"t": JobFacts(status=JobStatus(**{**given, **changes}))})
    assert words in format_line(facts)
    still_s = build_data(facts)["jobs"]["t"]["still_s"]
    assert still_s == (None if changes else pytest.approx(23.6))


def test_of_several_roles_each_is_named():
    jobs = {"t": JobFacts(attempt=1, status=JobStatus(step=3)), "e": JobFacts()}
    assert format_line(build_facts(jobs=jobs)) == "RUNNING: t: attempt 1; 2 of 2 nodes run; t: step 3"


def test_restarts_of_a_role_are_counted():
    facts = build_facts()
    facts.app.roles[0].metadata[RoleKey.POLICY] = {"critical": False}
    replicas = [
        ExplainedReplica(**vars(each), reasons=(Reason(code=Code.RESTARTS, count=each.id + 1),))
        for each in facts.replicas
    ]
    assert format_line(replace(facts, replicas=replicas)) == (
        "RUNNING: 2 of 2 nodes run; t (not critical) restarted 3 times"
    )


def test_no_escape_sequence_reaches_a_terminal():
    facts = build_facts(reasons=(Reason(code=Code.SCRIPT_SAID, text="\x1b]52;c;eA==\x07"),))
    assert "\x1b" not in format_line(facts) + format_message(facts) + str(build_data(facts)["reasons"][0]["words"])


def test_an_eta_needs_a_total_and_a_rate():
    assert find_eta_s(STATUS) == 25.0
    for changes in ({"total": None}, {"rate": 0.0}, {"step": None}, {"step": 1000}, {"state": JobState.PAUSED}):
        given = {"step": 800, "total": 1000, "rate": 8.0, **changes}
        assert find_eta_s(JobStatus(**given)) is None


def test_programs_get_the_same_as_values():
    data = build_data(build_facts(jobs={"t": JOB}, submitted_s=5.0, reasons=(RESIZED,)))
    assert data["line"] == format_line(build_facts(jobs={"t": JOB}, reasons=(RESIZED,)))
    resized = {"code": "resized", "facts": {"role": "t", "total": 3, "count": 2}, "words": word(RESIZED)}
    assert (data["reason"], data["reasons"]) == (word(RESIZED), [resized])
    assert data["nodes"] == {"all": 2, "running": 2, "spare": 0, "lost": 0, "apart": 0}
    assert (data["state"], data["since_s"], data["submitted_s"]) == ("RUNNING", NOW_S, 5.0)
    job = data["jobs"]["t"]
    assert (job["state"], job["attempt"], job["restarts_left"]) == ("running", 1, 2)
    assert (job["step"], job["eta_s"]) == (800, 25.0)
    untold = build_data(build_facts(AppState.SUCCEEDED, jobs={"t": JobFacts()}))["jobs"]["t"]
    assert (untold["state"], untold["step"]) == (None, None)


def test_nodes_that_have_ended_for_good_are_lost_also_if_the_leader_has_not_counted_them():
    """A round that would know of the last one is never formed: the job waits for nodes."""
    states = [AppState.FAILED, AppState.FAILED, AppState.RUNNING]
    replicas = [ReplicaStatus(id=index, state=each, role="t", hostname="h") for index, each in enumerate(states)]
    for told, failed in ((1, replicas), (2, replicas), (2, replicas[2:])):
        job = JobFacts(status=JobStatus(nodes_lost=told))
        assert build_data(build_facts(replicas=failed, jobs={"t": job}))["nodes"]["lost"] == 2


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (None, "1 is lost (node 1)"),  # agents that cannot be asked: the line said "1 of 2 nodes runs" alone
        (JobStatus(), "1 is lost (node 1)"),
        (make_members(1, nodes_lost=1), "1 is lost (node 1)"),
        (make_members(1, nodes_lost=2), "2 are lost (node 1 and 1 more)"),
        (make_members(1, nodes_lost=1, lost=(3,)), "2 are lost (nodes 1, 3)"),
    ],
)
def test_lost_nodes_are_named_wherever_the_line_is_printed(status, words):
    states = [AppState.RUNNING, AppState.FAILED]
    replicas = [ReplicaStatus(id=index, state=each, role="t", hostname="h") for index, each in enumerate(states)]
    facts = build_facts(replicas=replicas, jobs={} if status is None else {"t": JobFacts(status=status)})
    line = f"RUNNING: 1 of 2 nodes runs, {words}"
    assert format_line(facts) == line
    assert format_line(facts, shows_progress=False) == line, "`muster top` shows the progress apart"


def test_lost_nodes_of_several_roles_have_the_names_of_their_roles():
    replicas = [ReplicaStatus(id=1, state=AppState.FAILED, role=role, hostname="h") for role in "ab"]
    replicas.append(ReplicaStatus(id=0, state=AppState.RUNNING, role="a", hostname="h"))
    assert format_line(build_facts(replicas=replicas)) == "RUNNING: 1 of 3 nodes runs, 2 are lost (a/1, b/1)"
    replicas = [ReplicaStatus(id=index, state=AppState.FAILED, role="t", hostname="h") for index in range(9)]
    assert format_line(build_facts(replicas=replicas)).endswith("9 are lost (nodes 0, 1, 2, 3, 4, 5, 6, 7 and 1 more)")


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ([(0, "h-a")], "1 is lost (on h-a)"),
        ([(0, "h-a"), (0, "h-b")], "2 are lost (on h-a, h-b)"),
        ([(0, "h-a"), (0, "h-a")], "2 are lost (on h-a)"),
        ([(2, "h-c")], "1 is lost (node 2)"),
    ],
)
def test_a_lost_node_whose_number_another_one_has_now_is_named_by_its_host(lost, words):
    """Each number counted once: of two lost nodes, one was not in the line."""
    nodes = [(0, AppState.RUNNING, "h"), *((index, AppState.FAILED, host) for index, host in lost)]
    replicas = [ReplicaStatus(id=index, state=state, role="t", hostname=host) for index, state, host in nodes]
    facts = build_facts(replicas=replicas)
    assert format_line(facts) == f"RUNNING: 1 of {len(nodes)} nodes runs, {words}"
    assert build_data(facts)["nodes"]["lost"] == len(lost)


def test_torchx_dumps_states_by_their_names():
    """Each replica's state was `!!python/object/apply:torchx.specs.api.AppState [5]` at the end of `torchx run`."""
    build_status(build_facts(AppState.FAILED))
    assert yaml.dump({"state": AppState.FAILED}) == "state: FAILED\n"
