"""`muster` on apps of a cluster: over the websocket of `pods/exec`."""

import copy
import json
import re
from datetime import datetime

import pytest
from control_jobs import COMMANDS, list_answers
from doubles import kubernetes_apps as apps
from doubles.job_records import Job
from torchx import specs

from muster._shared.contract import FORMAT, AskKind, AskOutcome
from muster._shared.control import CommandExit, ControlError
from muster.cli import operations
from muster.cli.commands import main
from muster.schedulers.adapter import RoleKey
from muster.schedulers.errors import EngineError, RightError
from muster.schedulers.kubernetes.api.objects import Objects
from muster.schedulers.kubernetes.kube import APPDEF_ANNOTATION, CANCEL_ANNOTATION, POD
from muster.schedulers.wording.job_line import format_line
from muster.schedulers.wording.reasons import Code, Reason

RIGHTS = {**apps.RIGHTS, "pods/exec": {"create", "get"}}
SAVED = {"outcome": "done", "line": "all 8 ranks saved at step 1200 in 2.1 s", "step": 1200, "ranks": 8, "took_s": 2.1}
STOPPED = {"outcome": "done", "line": "all 8 ranks have stopped at step 1201 and ended, after 1.0 s", "step": 1201}


def encode(told):
    return json.dumps({"format": FORMAT, **told}).encode() + b"\n"


@pytest.fixture
def app(cluster, scheduler):
    """An app of two nodes whose pods run; its id."""
    role = apps.build_agent_role(max_retries=1)
    role.args[2:2] = ["--rdzv-id", specs.macros.app_id]
    app_id = scheduler.submit(specs.AppDef(name="app", roles=[role]), {})
    for index in range(2):
        cluster.start_pod(find_pod(cluster, app_id, index))
    return app_id


def find_pod(cluster, app_id, index):
    return cluster.find_pod(app_id.partition(":")[2], index)


def find_job(cluster, app_id):
    [job] = [job for job in cluster.find("jobs") if job["metadata"]["name"].startswith(app_id.partition(":")[2])]
    return job


def show_status(monkeypatch):
    """As `torchx status` does."""
    monkeypatch.setattr("muster.schedulers.runner.callers.shows_status", lambda: True)


HANG = {"what": "hang_named", "time_s": 1_800_000_000.0, "detail": {"text": "rank 1 (node 0, h) did not enter barrier"}}


def test_the_status_tells_of_a_hang_with_which_the_app_goes_on(cluster, scheduler, app, monkeypatch):
    cluster.allowed = RIGHTS
    cluster.run_command = lambda pod, command: (0, encode(HANG), b"")
    nodes = "2 of 2 nodes run"
    assert scheduler.describe(app).msg == nodes
    assert cluster.commands == [], "a program that looks again and again runs nothing in pods"
    show_status(monkeypatch)
    told = "rank 1 (node 0, h) did not enter barrier (reported at 2027-01-15 08:00:00 UTC)"
    told += "; `muster stacks` prints all stacks, `muster stop` ends the job"
    assert scheduler.describe(app).msg == f"{told}; {nodes}"
    [(pod, container, command)] = cluster.commands
    name = app.partition(":")[2]
    path = find_env(find_pod(cluster, app, 0), "MUSTER_LOG_DIR")
    assert (pod, container) == (find_pod(cluster, app, 0)["metadata"]["name"], "main")
    files = [f"{path}/{name}/{file}" for file in ("events.jsonl", "status.json")]
    assert command == ["tail", "-q", "-c", "262144", *files]


@pytest.mark.parametrize(("age_s", "told"), [(-5, "2 of 2 nodes run; step 79"), (5, "2 of 2 nodes run")])
def test_a_status_that_is_older_than_its_pod_is_not_told(cluster, scheduler, app, monkeypatch, age_s, told):
    """It is on a volume, and of the pod before: the status was "RUNNING (ended): … step 79 of 1200"."""
    created = find_pod(cluster, app, 0)["metadata"]["creationTimestamp"]
    written_s = datetime.fromisoformat(created.replace("Z", "+00:00")).timestamp() - age_s
    broken = {"what": "round_broken", "time_s": 1.0, "detail": {"kind": "membership", "reason": "node 1 was lost"}}
    formed = {"what": "round_formed", "time_s": 2.0}
    records = b"\n".join(map(encode, [broken, *([formed] if age_s < 0 else []), {"step": 79, "time_s": written_s}]))
    cluster.allowed = RIGHTS
    cluster.run_command = lambda pod, command: (0, records, b"")
    show_status(monkeypatch)
    assert scheduler.describe(app).msg.partition("; since")[0] == told


def test_while_node_0_does_not_run_the_next_node_tells_the_status(cluster, scheduler, app, monkeypatch):
    find_pod(cluster, app, 0)["status"]["phase"] = "Pending"
    cluster.allowed = RIGHTS
    cluster.run_command = lambda pod, command: (0, encode({"step": 812}), b"")
    show_status(monkeypatch)
    assert "step 812" in scheduler.describe(app).msg
    assert [pod for pod, *_ in cluster.commands] == [find_pod(cluster, app, 1)["metadata"]["name"]]


def find_env(pod, name):
    return next(each["value"] for each in pod["spec"]["containers"][0]["env"] if each["name"] == name)


@pytest.mark.parametrize("done", [(1, b"", b"tail: cannot open"), (0, b"\xff{", b""), None])
def test_a_status_that_cannot_read_the_records_tells_the_rest(cluster, scheduler, app, monkeypatch, done):
    show_status(monkeypatch)
    cluster.run_command = lambda pod, command: done
    status = scheduler.describe(app)
    assert (status.state.name, status.msg) == ("RUNNING", "2 of 2 nodes run")


def test_a_status_needs_no_right_to_run_commands(cluster, scheduler, app, monkeypatch):
    cluster.allowed = {kind: verbs for kind, verbs in RIGHTS.items() if kind != "pods/exec"}
    show_status(monkeypatch)
    status = scheduler.describe(app)
    assert (status.state.name, status.msg, cluster.commands) == ("RUNNING", "2 of 2 nodes run", [])


def test_a_status_counts_how_often_a_policy_had_commands_in_pods_started_again(cluster, scheduler):
    role = apps.build_agent_role(nodes=3)
    role.args[2:2] = ["--rdzv-id", specs.macros.app_id]
    role.metadata = {RoleKey.POLICY: {"restart": "on-failure"}}
    app_id = scheduler.submit(specs.AppDef(name="app", roles=[role]), {})
    for index in range(3):
        cluster.start_pod(find_pod(cluster, app_id, index))
    counts = [(0, b"4", b""), (1, b"", b"cat: no such file"), None]
    answers = {find_pod(cluster, app_id, index)["metadata"]["name"]: count for index, count in enumerate(counts)}

    def run(pod, command):
        if command[0] == "tail":
            return 0, encode({"step": 812}), b""
        assert command == ["cat", "/muster/scratch/restarts"]
        return answers[pod["metadata"]["name"]]

    cluster.run_command = run
    facts = scheduler.read_facts(app_id)
    assert [each.reasons for each in facts.replicas] == [(Reason(code=Code.RESTARTS, count=4),), (), ()]
    assert facts.jobs["trainer"].status.step == 812, "the wrapped command is the agent's"


def test_a_status_lists_the_pods_once(cluster, scheduler, app, monkeypatch):
    """The second list was for the records of a hang only; when it failed, the whole status was an error."""
    list_all, lists = Objects.list_all, []

    def record(self, kind, *args, **more):
        lists.append(kind)
        return list_all(self, kind, *args, **more)

    monkeypatch.setattr(Objects, "list_all", record)
    show_status(monkeypatch)
    status = scheduler.describe(app)
    assert (status.state.name, lists.count(POD), len(cluster.commands)) == ("RUNNING", 1, 1)


def test_any_running_pod_is_asked(cluster, scheduler, app):
    cluster.allowed = RIGHTS
    cluster.run_command = lambda pod, command: (0, encode(SAVED), b"")
    answer = scheduler.ask_app(app, AskKind.CHECKPOINT, 30.0)
    assert (answer.outcome, answer.step, answer.ranks) == (AskOutcome.DONE, 1200, 8)
    [(pod, container, command)] = cluster.commands
    assert (pod, container) == (find_pod(cluster, app, 0)["metadata"]["name"], "main")
    assert command[0] == "python3"
    assert command[1].endswith("/muster-agent.zip")
    assert command[2:] == ["ask", "job", "checkpoint", "--limit", "30"]


def test_the_next_pod_is_asked_when_one_does_not_answer(cluster, scheduler, app):
    first = find_pod(cluster, app, 0)["metadata"]["name"]

    def run(pod, command):
        if pod["metadata"]["name"] == first:
            return (3, b"", b"muster: no agent of the job answers here\n")
        return (0, encode(SAVED), b"")

    cluster.run_command = run
    assert scheduler.ask_app(app, AskKind.CHECKPOINT, 30.0).outcome is AskOutcome.DONE
    cluster.run_command = lambda pod, command: None if pod["metadata"]["name"] == first else run(pod, command)
    assert scheduler.ask_app(app, AskKind.CHECKPOINT, 30.0).outcome is AskOutcome.DONE
    assert len(cluster.commands) == 4
    cluster.run_command = lambda pod, command: (3, b"", b"muster: no agent of the job answers here\n")
    answer = scheduler.ask_app(app, AskKind.CHECKPOINT, 30.0)
    assert answer.outcome is AskOutcome.LOST
    assert "of trainer has" in answer.line


def test_a_pod_whose_container_is_being_restarted_is_no_obstacle(cluster, scheduler, app):
    """Its phase is still Running."""
    cluster.dead_containers = {find_pod(cluster, app, 0)["metadata"]["name"]}
    cluster.run_command = lambda pod, command: (0, encode(SAVED), b"")
    assert scheduler.ask_app(app, AskKind.CHECKPOINT, 30.0).outcome is AskOutcome.DONE
    cluster.allowed = RIGHTS
    cluster.run_command = lambda pod, command: (0, encode(STOPPED), b"")
    assert scheduler.stop_app(app, 30.0).line == STOPPED["line"]


def test_a_stop_is_recorded_before_it_is_asked_for(cluster, scheduler, app):
    seen = []

    def run(pod, command):
        if command[2:4] != ["ask", "job"]:
            return (0, b"usage", b"")
        job = find_job(cluster, app)
        seen.append((job["metadata"]["annotations"].get("muster.dev/cancelled"), dict(job["spec"])))
        return (0, encode(STOPPED), b"")

    annotations = set(find_job(cluster, app)["metadata"]["annotations"])
    cluster.allowed = RIGHTS
    cluster.run_command = run
    answer = scheduler.stop_app(app, 30.0)
    assert answer.line == STOPPED["line"]
    assert len(seen) == 1
    job = find_job(cluster, app)
    assert set(job["metadata"]["annotations"]) - annotations  # marked as cancelled
    assert job["spec"]["activeDeadlineSeconds"] == 1
    assert scheduler.describe(app).state.name == "CANCELLED"
    with pytest.raises(ControlError, match="has ended already") as ended:
        scheduler.stop_app(app, 30.0)
    assert ended.value.exit_code is CommandExit.ENDED


def test_ranks_that_agree_on_no_step_get_the_signal(cluster, scheduler, app):
    refusal = {"outcome": "refused", "line": "rank 1 has done step 7 and never called should_stop"}
    cluster.run_command = lambda pod, command: (0, encode(refusal), b"")
    answer = scheduler.stop_app(app, 30.0)
    assert answer.line.startswith(refusal["line"])
    assert answer.outcome is AskOutcome.DONE


@pytest.mark.parametrize(
    ("done", "line"),
    [
        ((126, b"", b"OCI runtime exec failed\n"), "cannot be asked: OCI runtime exec failed"),
        ((1, b"", b"Traceback\nIndexError: list index out of range\n"), "cannot be asked: IndexError: list index"),
        ((4, b"", b"muster: an agent of the job is here, and does not answer\n"), "is here, and does not answer"),
        ((0, b'{"outcome": "perhaps"}\n', b""), "gave no answer that can be read"),
        ((0, encode({"outcome": "unreached", "line": "not a request"}), b""), "not a request"),
    ],
)
def test_a_stop_that_cannot_be_asked_for_changes_nothing(cluster, scheduler, app, capsys, done, line):
    """The job was ended without its ranks having saved."""
    handle = f"kubernetes://torchx/{app}"
    cluster.allowed = RIGHTS
    cluster.run_command = lambda pod, command: done
    before = copy.deepcopy(find_job(cluster, app))
    assert main(["stop", handle]) == CommandExit.LOST
    told = capsys.readouterr().err
    assert re.search(f"{line}.*; `muster stop --now` ends the job.*; nothing was changed\n", told), told
    assert find_job(cluster, app) == before
    assert main(["stop", handle, "--now"]) == CommandExit.DONE
    assert scheduler.describe(app).state.name == "CANCELLED"
    assert main(["stop", handle, "--now"]) == CommandExit.ENDED


REACHED = (0, encode({"outcome": "done", "line": "an agent answers"}), b"")


@pytest.mark.parametrize("reached", [None, REACHED], ids=["before", "between"])
def test_a_stop_whose_way_to_the_nodes_breaks_is_withdrawn(cluster, scheduler, app, capsys, reached):
    """A kubelet that was silent counted as no agent, and the job was ended without its ranks having saved."""
    cluster.allowed = RIGHTS
    cluster.run_command = lambda pod, command: None if "stop" in command else reached
    before = copy.deepcopy(find_job(cluster, app))
    assert main(["stop", f"kubernetes://torchx/{app}", "--limit", "1"]) == CommandExit.LOST
    told = capsys.readouterr().err
    assert re.search("`muster stop --now` .* changed\n", told), told
    after = find_job(cluster, app)
    assert after["spec"] == before["spec"]
    assert after["metadata"]["annotations"] == before["metadata"]["annotations"]
    assert scheduler.describe(app).state.name == "RUNNING"


def test_a_stop_that_was_carried_out_without_an_answer_is_not_withdrawn(cluster, scheduler, app):
    def run(pod, command):
        if "stop" not in command:
            return REACHED
        pod["status"]["phase"] = "Succeeded"
        return None

    cluster.run_command = run
    assert scheduler.stop_app(app, 30.0).outcome is AskOutcome.DONE
    assert scheduler.describe(app).state.name == "CANCELLED"


def test_a_stop_of_a_job_that_has_not_started_says_so(cluster, scheduler, app):
    """It said that workers had not run for a second, and that all pods had got SIGTERM."""
    for index in range(2):
        find_pod(cluster, app, index)["status"]["phase"] = "Pending"
    answer = scheduler.ask_app(app, AskKind.CHECKPOINT, 5.0)
    assert (answer.outcome, "of trainer runs" in answer.line) == (AskOutcome.LOST, True)
    answer = scheduler.stop_app(app, 5.0)
    assert (answer.outcome, "it is cancelled" in answer.line) == (AskOutcome.DONE, True)
    assert scheduler.describe(app).state.name == "CANCELLED"


@pytest.mark.parametrize("command", ["stop", "pause"])
def test_without_the_right_nothing_is_changed(cluster, app, command, capsys):
    cluster.allowed = {**RIGHTS, "pods/exec": set()}
    before = dict(find_job(cluster, app)["metadata"])
    assert main([command, f"kubernetes://torchx/{app}"]) == CommandExit.REFUSED
    assert capsys.readouterr().err.endswith(" pods/exec\n")
    assert find_job(cluster, app)["metadata"] == before


def test_a_right_that_is_missing_after_the_stop_was_recorded_is_no_refusal(cluster, scheduler, app, monkeypatch):
    """ "Refused" means that nothing was changed."""
    cluster.run_command = lambda pod, command: (0, encode(STOPPED), b"")

    def refuse(_app, _by):
        raise RightError("c is not allowed to delete job/app")

    monkeypatch.setattr(scheduler, "_cancel", refuse)
    said = "the stop is recorded, and its pods were not told to end: c is not allowed to delete job/app"
    with pytest.raises(EngineError, match=f"^{said}$") as error:
        scheduler.stop_app(app, 30.0)
    assert not isinstance(error.value, RightError)


def test_a_large_answer_and_one_that_cannot_be_read(cluster, scheduler, app):
    own = {"node": 0, "text": "File x\n" * 9000}
    stacks = [{**own, "global_rank": rank, "local_rank": rank} for rank in range(20)]
    answer = {"outcome": "done", "line": "the stacks of 20 of 20 ranks, in 0.1 s", "stacks": stacks}
    cluster.run_command = lambda pod, command: (0, encode(answer), b"noise")
    assert [stack.global_rank for stack in scheduler.ask_app(app, AskKind.STACKS, 30.0).stacks] == list(range(20))
    cluster.run_command = lambda pod, command: (0, b'{"outcome": "perhaps"}\n', b"")
    assert "gave no answer" in scheduler.ask_app(app, AskKind.STACKS, 30.0).line
    cluster.run_command = lambda pod, command: (126, b"", b"OCI runtime exec failed\n")
    assert scheduler.ask_app(app, AskKind.STACKS, 30.0).line.endswith("runtime exec failed")


def submit_elastic(scheduler):
    return scheduler.submit(specs.AppDef(name="app", roles=[apps.build_agent_role(nodes=3, least=1)]), {})


def test_delete(cluster, scheduler, app):
    handle = f"kubernetes://torchx/{app}"
    operations.delete(handle)
    assert [
        plural for _, _, plural, _ in cluster.objects if plural in ("jobs", "services", "configmaps", "secrets")
    ] == []
    with pytest.raises(ControlError, match="no longer exists") as error:
        operations.delete(handle)
    assert error.value.exit_code is CommandExit.UNKNOWN


@pytest.mark.parametrize(
    "text", [None, "x", "eJyLNowFAAHTAOo=", "eJyrVkrLL8pNLFGyUjDUUVAqys9JLQayo6uV8hJzU4EspQql2thaAPInDAs="]
)
def test_a_damaged_annotation_is_one_line_and_the_app_can_be_deleted(cluster, scheduler, app, text, capsys):
    """Another program has changed it; the commands printed a traceback."""
    annotations = find_job(cluster, app)["metadata"]["annotations"]
    annotations[APPDEF_ANNOTATION] = text
    before = copy.deepcopy(find_job(cluster, app))
    handle = f"kubernetes://torchx/{app}"
    start = f"annotation muster.torchx/appdef of Job {before['metadata']['name']} "
    for words in (["pause", handle], ["stop", handle], ["resize", handle, "2"]):
        assert main(words) == CommandExit.LOST
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(f"muster: {start}"), line
        assert "`muster delete` removes" in line, line
    assert find_job(cluster, app) == before
    status = scheduler.describe(app)
    assert status.msg.startswith(start)
    assert status.state.name == "RUNNING"
    assert main(["delete", handle]) == 0
    assert cluster.find("jobs") == []


def test_an_unknown_app(cluster, capsys):
    """All commands name the context, as `muster status` does."""
    handle = "kubernetes://torchx/team:nosuch"
    assert main(["status", handle]) == CommandExit.UNKNOWN
    line = capsys.readouterr().err
    assert "'nosuch'" in line
    assert list_answers(handle, capsys) == dict.fromkeys(COMMANDS, (CommandExit.UNKNOWN, line))


def test_an_app_that_has_ended(cluster, scheduler, capsys):
    app = submit_elastic(scheduler)
    find_job(cluster, app)["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    before = copy.deepcopy(find_job(cluster, app))
    answers = list_answers(f"kubernetes://torchx/{app}", capsys)
    assert {code for code, _ in answers.values()} == {CommandExit.ENDED}, answers
    assert all(re.search("ended already.*: nothing", line) for _, line in answers.values()), answers
    assert find_job(cluster, app) == before


def test_an_app_that_another_shell_stops_is_refused(cluster, scheduler, app):
    find_job(cluster, app)["metadata"]["annotations"][CANCEL_ANNOTATION] = "muster stop"
    for refused in (lambda: scheduler.stop_app(app, 30.0), lambda: scheduler.ask_app(app, AskKind.PAUSE, 30.0)):
        with pytest.raises(ControlError, match="being stopped already") as error:
            refused()
        assert error.value.exit_code is CommandExit.REFUSED


def test_a_file_of_a_run_is_read_in_the_pod_of_its_node(cluster, scheduler, app):
    cluster.allowed = RIGHTS
    cluster.run_command = lambda pod, command: (0, "päge\n".encode(), b"")
    name = "node_1/attempt_0/0/stderr.log"
    assert scheduler.read_run_file(app, "trainer", 1, name, 100) == "päge\n".encode()
    [(pod, _, command)] = cluster.commands
    assert pod == find_pod(cluster, app, 1)["metadata"]["name"]
    path = find_env(find_pod(cluster, app, 1), "MUSTER_LOG_DIR")
    assert command == ["tail", "-c", "100", f"{path}/{app.partition(':')[2]}/{name}"]


def test_a_file_of_a_run_that_cannot_be_read_is_none(cluster, scheduler, app):
    cluster.allowed = RIGHTS
    cluster.run_command = lambda pod, command: (1, b"", b"tail: cannot open")
    assert scheduler.read_run_file(app, "trainer", 0, "events.jsonl", 100) is None
    assert scheduler.read_run_file(app, "trainer", 7, "events.jsonl", 100) is None
    assert scheduler.read_run_file(app, "other", 0, "events.jsonl", 100) is None
    cluster.allowed = {kind: verbs for kind, verbs in RIGHTS.items() if kind != "pods/exec"}
    with pytest.raises(EngineError, match="pods/exec"):
        scheduler.read_run_file(app, "trainer", 0, "events.jsonl", 100)
    cluster.end_pod(find_pod(cluster, app, 0), 0)
    assert scheduler.read_run_file(app, "trainer", 0, "events.jsonl", 100) is None


def test_the_line_of_a_command_looks_into_the_pod(cluster, scheduler, app):
    status = {"state": "running", "step": 812, "total": 1000, "rate": 7.9}
    cluster.allowed = RIGHTS
    cluster.run_command = lambda pod, command: (0, b'{"what": "notice", "time_s": 1.0}\n' + encode(status), b"")
    facts = scheduler.read_facts(app)
    told = r"RUNNING: 2 of 2 nodes run; step 812 of 1000, 7.9 a second; ETA 24 s"
    assert format_line(facts).startswith(told)
    [listed] = scheduler.list_apps({})
    assert listed.submitted_s == facts.submitted_s


def test_a_node_is_taken_away_and_no_other(cluster, scheduler, app):
    """What `muster rehearse --app` does."""
    cluster.allowed = {**RIGHTS, "pods": {*RIGHTS.get("pods", ()), "delete", "get", "list"}}
    names = [find_pod(cluster, app, index)["metadata"]["name"] for index in range(2)]
    assert scheduler.end_node(app, "trainer", 1)
    left = [pod["metadata"]["name"] for pod in cluster.find("pods") if not pod["metadata"].get("deletionTimestamp")]
    assert names[0] in left
    assert names[1] not in left
    with pytest.raises(ControlError, match="7 of trainer has"):
        scheduler.end_node(app, "trainer", 7)


def test_the_timeline_has_what_pods_that_run_have_and_says_whose_records_are_missing(
    cluster, scheduler, app, tmp_path, capsys
):
    cluster.allowed = RIGHTS
    job = Job()
    job.start()
    job.step(20)
    contents = {
        find_pod(cluster, app, index)["metadata"]["name"]: job.agents[index].print_lines() for index in range(2)
    }

    def run(pod, command):
        is_records = command[-1].endswith("/events.jsonl")
        return (0, contents[pod["metadata"]["name"]], b"") if is_records else (1, b"", b"tail: no such file")

    cluster.run_command = run
    words = ["timeline", f"kubernetes://test/{app}", "--json", "-o", str(tmp_path / "page.html")]
    assert main(words) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["missing"], facts["has_ended"], facts["steps"]) == ("", False, 20)

    cluster.end_pod(find_pod(cluster, app, 1), 0)
    assert main(words) == 0
    told = capsys.readouterr()
    missing = json.loads(told.out)["missing"]
    assert "MUSTER_LOG_DIR" in missing
    assert missing in told.err
    assert missing in (tmp_path / "page.html").read_text()

    cluster.end_pod(find_pod(cluster, app, 0), 0)
    assert main(words) == CommandExit.REFUSED
    told = capsys.readouterr().out
    assert "To keep them " in told
    assert "MUSTER_LOG_DIR" in told


def test_a_job_that_has_not_started_has_no_records_and_says_why(cluster, scheduler, capsys):
    app = submit_elastic(scheduler)
    assert main(["timeline", f"kubernetes://test/{app}"]) == CommandExit.REFUSED
    told = capsys.readouterr().err
    assert f"no node has records of {app}, which is PENDING: " in told
