"""`muster status` and `muster list`, with schedulers of the tests."""

import json
import os
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from torchx.specs import AppDef, AppState, Role
from torchx.specs.api import NONE, ReplicaStatus

from muster._shared.control import CommandExit, ControlError
from muster._shared.job_view import JobState, JobStatus, NodeState, NodeStatus
from muster._shared.reports import Failure, Report
from muster.cli import commands, operations, overview
from muster.cli.history import log_folder
from muster.cli.top import agent_requests
from muster.schedulers.adapter.scheduler import ListedApp, PluginScheduler
from muster.schedulers.errors import EngineError, NotConfiguredError
from muster.schedulers.supervision.registry import find_state_dir, record_last_remote
from muster.schedulers.wording.facts import AppFacts
from muster.schedulers.wording.reasons import Code, JobFacts, Reason

NOW_S = time.time()


class Apps:
    """A scheduler that has these apps: states by id, oldest first."""

    describe_unknown = PluginScheduler.describe_unknown

    def __init__(self, backend, states, problem=None):
        self.backend, self.states, self.problem, self.read, self.closed = backend, states, problem, [], 0

    def list_apps(self, cfg):
        if self.problem is not None:
            raise self.problem
        ages = dict(zip(self.states, range(len(self.states), 0, -1), strict=True))
        return [ListedApp(app_id=each, state=None, submitted_s=NOW_S - 3600 * ages[each]) for each in self.states]

    def read_facts(self, app_id):
        self.read.append(app_id)
        state = self.states.get(app_id)
        if isinstance(state, Exception):
            raise state
        if state is None:
            return None
        replica = ReplicaStatus(id=0, state=state, role="t", hostname="node\x1b[2J")
        app = AppDef(name="a", roles=[Role(name="t", image="")])
        why = (Reason(code=Code.FOREIGN_TEXT, text="why"),)
        return AppFacts(app_id=app_id, app=app, state=state, replicas=[replica], reasons=why, ui_url="file:///l")

    def close(self):
        self.closed += 1


@pytest.fixture
def serve(monkeypatch):
    def serve(*schedulers):
        known = {each.backend: each for each in schedulers}

        def create(name):
            if name not in known:
                raise ControlError(f"{name!r} is not made with the seam", CommandExit.USAGE)
            return known[name]

        monkeypatch.setattr(overview, "create_scheduler", create)
        monkeypatch.setattr(operations, "create_scheduler", create)
        monkeypatch.setattr(overview, "list_properties", lambda: [*known, "slurm"])
        place = SimpleNamespace(scheduler="one")
        monkeypatch.setattr(operations, "find_app", lambda word, env: SimpleNamespace(**vars(place), app_id=word))
        return known

    return serve


def mark_others(scheduler, others):
    """Make these apps those of another home folder. They are newer than the others."""
    list_apps = scheduler.list_apps
    scheduler.list_apps = lambda cfg: [replace(each, has_other_home=each.app_id in others) for each in list_apps(cfg)]


def test_logs_without_a_link_are_told_in_words(serve, capsys):
    one = Apps("one", {"a": AppState.RUNNING})
    read = one.read_facts
    one.read_facts = lambda app_id: replace(read(app_id), ui_url=None, logs="in the pods")
    serve(one)
    commands.main(["status", "a"])
    assert capsys.readouterr().out.splitlines()[-1].split(":")[1] == " in the pods"


def test_the_newest_jobs_of_all_schedulers_first(serve, capsys):
    one = Apps("one", {"old": AppState.SUCCEEDED, "mid": AppState.FAILED, "gone": None})
    two = Apps("two", {"new": AppState.RUNNING})
    serve(one, two)
    assert commands.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["two://torchx/new", "one://torchx/mid", "one://torchx/old"]
    assert "RUNNING: why; " in lines[0]
    assert (lines[1].split()[1:3], lines[1].split()[-3:]) == (["2", "h"], ["ago", "FAILED:", "why"])
    assert (one.closed, two.closed) == (1, 1)


def test_only_the_newest_are_read(serve, capsys):
    one = Apps("one", {f"a{index}": AppState.SUCCEEDED for index in range(30)})
    serve(one)
    assert commands.main(["list", "-n", "2"]) == 0
    assert one.read == ["a28", "a29"]
    assert capsys.readouterr().out.splitlines()[-1].split()[0] == "28"


def test_schedulers_that_are_not_reachable_are_named(serve, capsys):
    serve(Apps("one", {"a": AppState.FAILED}), Apps("two", {}, EngineError("no engine answers")))
    assert commands.main(["list"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("one://torchx/a")
    assert (err.startswith("muster: two: "), "no engine answers" in err, "slurm" in err) == (True, True, False)
    assert commands.main(["list", "-s", "two"]) == CommandExit.LOST
    assert commands.main(["list", "-s", "slurm", "--json"]) == CommandExit.LOST
    data = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (data["apps"], [*data["not_reachable"]], data["exit_code"]) == ([], ["slurm"], 6)


def test_a_scheduler_that_is_not_configured_is_named_only_if_it_is_asked_for(serve, capsys):
    """A person without a cluster read at each `list` that there is none."""
    serve(Apps("one", {"a": AppState.FAILED}), Apps("two", {}, NotConfiguredError("no cluster is configured")))
    assert commands.main(["list"]) == 0
    assert capsys.readouterr().err == ""
    assert commands.main(["list", "-s", "two"]) == CommandExit.LOST
    assert capsys.readouterr().err.startswith("muster: two: ")


def test_a_cluster_to_which_a_job_was_submitted_from_here_is_missed(serve, capsys, tmp_path, monkeypatch):
    """`last` was a job of a cluster of which `muster list` said nothing."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    record_last_remote(find_state_dir(os.environ), "kubernetes", "team:train-9")
    serve(Apps("one", {"a": AppState.FAILED}), Apps("kubernetes", {}, NotConfiguredError("no cluster is configured")))
    assert commands.main(["list"]) == 0
    assert capsys.readouterr().err == "muster: kubernetes: no cluster is configured\n"


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_jobs_of_another_home_take_no_place_of_a_job_of_this_one(words, serve, capsys):
    """They counted for the limit: the older ones of this home were not shown, and the counts were wrong."""
    one = Apps("one", {**dict.fromkeys(("a", "b", "c"), AppState.RUNNING), **dict.fromkeys("fghij", AppState.FAILED)})
    mark_others(one, "fghij")
    serve(one)
    assert commands.main(["list", "-n", "2", *words]) == 0
    out = capsys.readouterr().out
    if words == ["--json"]:
        assert [each["handle"] for each in json.loads(out)["apps"]] == ["one://torchx/c", "one://torchx/b"]
        return
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["one://torchx/c", "one://torchx/b"]
    assert [line.split()[0] for line in lines[2:]] == ["6"]


def test_a_scheduler_that_does_not_answer_holds_the_others_up_no_longer_than_its_limit(serve, capsys, monkeypatch):
    hangs = Apps("hangs", {})
    hangs.list_apps = lambda cfg: time.sleep(30)
    serve(Apps("one", {"a": AppState.FAILED}), hangs)
    monkeypatch.setattr(overview, "_ANSWER_LIMIT_S", 0.2)
    assert commands.main(["list"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("one://torchx/a")
    assert (err.startswith("muster: hangs: "), "0.2 s" in err) == (True, True)


def test_an_app_that_cannot_be_read_has_a_line_all_the_same(serve, capsys):
    serve(Apps("one", {"a": EngineError("its folder is\nnot yours")}))
    assert commands.main(["list"]) == 0
    assert capsys.readouterr().out.endswith(": its folder is not yours\n")


def test_no_jobs(serve, capsys):
    serve(Apps("one", {}))
    assert commands.main(["list"]) == 0
    assert capsys.readouterr().out == "no jobs\n"


@pytest.mark.parametrize(
    ("state", "code"),
    [
        (AppState.SUCCEEDED, 0),
        (AppState.FAILED, 1),
        (AppState.CANCELLED, 7),
        (AppState.UNKNOWN, 8),
        (AppState.RUNNING, 10),
        (AppState.PENDING, 11),
        (AppState.SUBMITTED, 11),
    ],
)
def test_the_exit_code_says_the_state(serve, capsys, state, code):
    serve(Apps("one", {"a": state}))
    assert commands.main(["status", "a"]) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"one://torchx/a  {state.name}: why")
    why = " (the job was cancelled)" if state is AppState.CANCELLED else ""
    assert lines[1:] == [f"  t/0  {state.name}{why}  node\\x1b[2J", "  logs: file:///l"]
    assert commands.main(["status", "a", "--json"]) == code
    data = json.loads(capsys.readouterr().out)
    assert (data["handle"], data["state"], data["exit_code"]) == ("one://torchx/a", state.name, code)
    words = "the job was cancelled" if state is AppState.CANCELLED else None
    reasons = [{"code": "job_cancelled", "facts": {}, "words": words}] if words else []
    told = {"id": 0, "state": state.name, "host": "node\x1b[2J", "reason": words, "reasons": reasons}
    assert data["roles"] == [{"role": "t", "critical": True, "replicas": [told]}]


def test_status_says_why_each_replica_has_failed(serve, capsys):
    """Its JSON had no reasons, and its lines had none for replicas that failed."""
    one = Apps("one", {"a": AppState.FAILED})
    read = one.read_facts
    error = json.dumps({"message": {"message": "was evicted", "errorCode": 1, "extraInfo": {"timestamp": "1"}}})
    known = [
        (AppState.FAILED, error),
        (AppState.CANCELLED, NONE),
        (AppState.FAILED, NONE),
        (AppState.FAILED, "by (it)"),
    ]
    replicas = [
        ReplicaStatus(id=index, state=state, role="t", hostname="h", structured_error_msg=text)
        for index, (state, text) in enumerate(known)
    ]
    one.read_facts = lambda app_id: replace(read(app_id), replicas=replicas)
    serve(one)
    assert commands.main(["status", "a", "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)["roles"][0]["replicas"]
    reasons = ["was evicted", "stopped when the job failed", None, "by (it)"]
    assert [each["reason"] for each in rows] == reasons
    assert commands.main(["status", "a"]) == 1
    shown = [f" ({reason})" if reason else "" for reason in reasons]
    lines = [f"  t/{each['id']}  {each['state']}{why}  h" for each, why in zip(rows, shown, strict=True)]
    assert capsys.readouterr().out.splitlines()[1:-1] == lines


def test_the_node_at_fault_and_those_that_ended_because_of_it_are_told_apart(serve, capsys):
    one = Apps("one", {"a": AppState.FAILED})
    read = one.read_facts
    place = {"node": 1, "node_index": 1, "host": "h", "local_rank": 0, "global_rank": 8, "attempt": 0, "round": 1}
    failure = Failure(**place, pid=7, time_s=1e9, exit_code=3, exception="ValueError: bad batch 17")
    report = Report(reason="rank 8 on node 1 (h) exited with code 3", failures=(failure,))
    replicas = [ReplicaStatus(id=index, state=AppState.FAILED, role="t", hostname="h") for index in range(2)]
    one.read_facts = lambda app_id: replace(read(app_id), replicas=replicas, reports={"t": report})
    serve(one)
    assert commands.main(["status", "a", "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)["roles"][0]["replicas"]
    assert [each["reasons"][0]["code"] for each in rows] == ["ended_with", "worker_failed"]
    assert [each["reasons"][0]["facts"].get("rank") for each in rows] == [None, 8]


def test_an_app_that_is_not_known_is_one_line(serve, capsys):
    serve(Apps("one", {}))
    assert commands.main(["status", "x"]) == CommandExit.UNKNOWN
    assert capsys.readouterr().err.startswith("muster: one ")


def test_every_state_of_torchx_has_an_exit_code():
    assert set(overview.STATE_CODES) == set(AppState)


def test_the_help_of_list_names_its_exit_codes(capsys):
    with pytest.raises(SystemExit):
        commands.main(["list", "--help"])
    assert "exit code: 0 done; 2 " in capsys.readouterr().out


def test_nodes_by_hand_are_called_by_their_index():
    """The agents number those without --node-rank. All of them were called job/0."""
    nodes = tuple(NodeStatus(node_index=index, node=node) for index, node in ((7, 0), (6, 1), (5, None)))
    status = JobStatus(nodes=nodes, nodes_running=2, nodes_spare=1)
    assert [each.id for each in log_folder._list_nodes("job", status)] == [7, 6, 5]


def test_top_names_lost_nodes_as_the_status_does(monkeypatch):
    """Its line was built without what the agents report: "2 of 2 nodes run"."""
    replicas = [ReplicaStatus(id=at, state=AppState.RUNNING, role="t", hostname="h") for at in range(2)]
    status = JobStatus(
        nodes=(NodeStatus(node_index=1, host="h", state=NodeState.LOST),), nodes_lost=1, step=3, state=JobState.WAITING
    )
    app = AppDef(name="a", roles=[Role(name="t", image="")])
    facts = AppFacts(
        app_id="a", app=app, state=AppState.RUNNING, replicas=replicas, jobs={"t": JobFacts(status=status)}
    )
    monkeypatch.setattr(agent_requests, "read_app", lambda handle: (handle, facts))
    assert agent_requests.Jobs().read_job("a").line.endswith("(node 1)")
