"""What people are told of an app on Kubernetes, seen on a real cluster: states, refusals, and logs that are gone."""

import pytest
from doubles.kubernetes_apps import RIGHTS, build_agent_role
from doubles.kubernetes_cluster import Fault
from torchx import specs
from torchx.specs.api import AppState, AppStatus

from muster._shared.control import CommandExit
from muster.cli.commands import main
from muster.schedulers.errors import EngineError
from muster.schedulers.wording.reasons import Code, has_code


@pytest.fixture
def start(cluster, scheduler):
    """Submits an app of two nodes on nodes `n0` and `n1`, whose pods run; returns its id."""

    def submit(least=None, max_retries=2):
        role = build_agent_role(least=least, max_retries=max_retries)
        app_id = scheduler.submit(specs.AppDef(name="app", roles=[role]), {})
        for index in range(2):
            pod = find_pod(cluster, app_id, index)
            pod["spec"]["nodeName"] = f"n{index}"
            cluster.start_pod(pod)
        return app_id

    return submit


def find_pod(cluster, app_id, index):
    return cluster.find_pod(app_id.partition(":")[2], index)


def show(status):
    """The text of `torchx status`."""
    shown = AppStatus(status.state, status.num_restarts, status.msg, roles=status.roles_statuses)
    shown.structured_error_msg = status.structured_error_msg
    return shown.format()


def list_states(status):
    return [replica.state for replica in status.roles_statuses[0].replicas]


def test_a_replica_that_a_resize_has_ended_is_cancelled(cluster, scheduler, start):
    """It was PENDING for ever."""
    app_id = start(least=1)
    scheduler.resize_app(app_id, 1, None)
    status = scheduler.describe(app_id)
    assert list_states(status) == [AppState.RUNNING, AppState.CANCELLED]
    assert (status.state, status.msg) == (AppState.RUNNING, "1 of 1 node runs")
    assert status.facts.replicas[1].reasons[0].code is Code.RESIZED_AWAY
    cluster.end_pod(find_pod(cluster, app_id, 0), 0)
    status = scheduler.describe(app_id)
    assert (status.state, list_states(status)) == (AppState.SUCCEEDED, [AppState.SUCCEEDED, AppState.CANCELLED])
    resumed = start(least=1)
    scheduler.resize_app(resumed, 1, None)
    scheduler.resize_app(resumed, 2, None)
    assert list_states(scheduler.describe(resumed)) == [AppState.RUNNING, AppState.PENDING]


def test_a_job_whose_pods_were_all_deleted_is_not_told_as_one_that_never_ran(cluster, scheduler, start):
    """It was PENDING since its submission, without a reason. The pods of an elastic job do not count earlier ones, and
    Kubernetes keeps events for an hour."""
    app_id = start(least=1)
    for index in range(2):
        cluster.remove_pod(find_pod(cluster, app_id, index))
    status = scheduler.describe(app_id)
    assert status.state is AppState.RUNNING
    assert has_code(status.facts.reasons, Code.RAN_BEFORE)
    for item in cluster.find("events"):
        cluster.delete_object(("/api/v1", "team", "events", item["metadata"]["name"]))
    assert scheduler.describe(app_id).state is AppState.RUNNING
    assert [app.state for app in scheduler.list()] == [AppState.RUNNING]


def test_muster_status_says_of_a_replica_what_torchx_status_says(cluster, scheduler, start, capsys):
    """It said a bare CANCELLED."""
    app_id = start(max_retries=0)
    name = find_pod(cluster, app_id, 1)["metadata"]["name"]
    cluster.end_pod(find_pod(cluster, app_id, 1), 137)
    main(["status", f"kubernetes://session/{app_id}"])
    lines = capsys.readouterr().out.splitlines()
    why = "CANCELLED (it has no pod, because the job has ended)"
    assert lines[1:3] == [f"  trainer/0  {why}", f"  trainer/1  FAILED (was ended by SIGKILL)  {name}"]
    assert f"*trainer[0]:{why}" in show(scheduler.describe(app_id))
    assert "no reply file" not in show(scheduler.describe(app_id)), "TorchX writes it behind one without an error"


@pytest.mark.parametrize("words", [["resize", "1"], ["delete"]])
def test_missing_rights_end_with_1_and_the_whole_reason(cluster, start, capsys, words):
    """They ended with 6, "no agent answers", and of the server's reason only the beginning was there."""
    app_id = start(least=1)
    cluster.allowed = {**RIGHTS, "jobs.batch": {"get", "list"}}
    handle = f"kubernetes://session/{app_id}"
    assert main([words[0], handle, *words[1:]]) == CommandExit.REFUSED
    said = capsys.readouterr().err
    assert "forbidden: User " in said


@pytest.mark.parametrize("kubelet", ["gone", "silent"])
def test_the_log_of_a_node_that_is_gone_is_one_line_soon(cluster, scheduler, clock, start, monkeypatch, kubelet):
    """It blocked for 57 s, and printed the API server's request to the kubelet."""
    app_id = start()
    name = find_pod(cluster, app_id, 1)["metadata"]["name"]
    cluster.write_log(find_pod(cluster, app_id, 0), "hello\n", 1)
    (cluster.dead_nodes if kubelet == "gone" else cluster.hanging_nodes).add("n1")
    monkeypatch.setattr("muster.schedulers.kubernetes.running_apps.logs.ANSWER_LIMIT_S", 1.0)
    began_s = clock.now_s()
    [line] = scheduler.log_iter(app_id, "trainer", 1)
    why = " (no route to host)" if kubelet == "gone" else ""
    assert line == f"[muster] cannot read log of {name}: its node does not answer{why}\n"
    assert clock.now_s() - began_s <= 1
    assert list(scheduler.log_iter(app_id, "trainer", 0)) == ["hello\n"]


@pytest.mark.parametrize("fault", [0, 503])
def test_a_server_that_is_away_is_not_taken_for_a_node(cluster, scheduler, start, fault):
    """It said that the node does not answer."""
    app_id = start()
    cluster.faults.append(Fault("GET", "/log[?]|/version", fault, times=10**6))
    with pytest.raises(EngineError, match="cannot be reached" if fault == 0 else "responded with 503"):
        list(scheduler.log_iter(app_id, "trainer", 1))


def test_an_account_that_may_not_read_the_version_is_told_of_the_node(cluster, scheduler, start):
    app_id = start()
    cluster.dead_nodes.add("n1")
    cluster.faults.append(Fault("GET", "/version", 403, times=10**6))
    [line] = scheduler.log_iter(app_id, "trainer", 1)
    assert "does not answer" in line


def test_a_followed_log_goes_on_in_the_pod_that_replaces_one_of_a_dead_node(cluster, scheduler, start):
    app_id = start()
    lost = find_pod(cluster, app_id, 1)
    cluster.dead_nodes.add("n1")
    lines = iter(scheduler.log_iter(app_id, "trainer", 1, should_tail=True))
    cluster.end_pod(lost, 137)
    new = find_pod(cluster, app_id, 1)
    cluster.start_pod(new)
    cluster.write_log(new, "again\n", 1)
    said = next(lines)
    assert f"{lost['metadata']['name']}: its node" in said
    assert next(lines) == "again\n"
    for index in range(2):
        cluster.end_pod(find_pod(cluster, app_id, index), 0)
    assert list(lines) == []


def test_a_text_of_the_kubelet_ends_with_a_newline(cluster, scheduler, start):
    """The next replica's first line stood behind it."""
    app_id = start()
    text = 'failed to try resolving symlinks in path "/var/log/pods/x/0.log": lstat: no such file or directory'
    cluster.logs[find_pod(cluster, app_id, 0)["metadata"]["name"]] = [(0, text.encode())]
    assert list(scheduler.log_iter(app_id, "trainer", 0)) == [f"{text}\n"]


def test_a_drain_that_ends_both_pods_is_one_restart(cluster, scheduler, start):
    """An eviction stops all ranks at one step, and all pods are replaced: it counted as two."""
    app_id = start(max_retries=0)
    evicted = [{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}]
    cluster.remove_pod(find_pod(cluster, app_id, 1), 143, event=("Evicted", "drain"), conditions=evicted)
    assert scheduler.describe(app_id).num_restarts == 1
    cluster.end_pod(find_pod(cluster, app_id, 0), 143)
    assert scheduler.describe(app_id).num_restarts == 1
    for index in range(2):
        cluster.start_pod(find_pod(cluster, app_id, index))
        cluster.end_pod(find_pod(cluster, app_id, index), 143)
    assert scheduler.describe(app_id).num_restarts == 2


def test_while_one_of_two_nodes_joins_again_the_message_says_so(cluster, scheduler, start):
    app_id = start()
    cluster.remove_pod(find_pod(cluster, app_id, 1), 137)
    status = scheduler.describe(app_id)
    assert (status.state, *(each.code for each in status.facts.reasons)) == (AppState.RUNNING, Code.PODS_START)
    waiting = find_pod(cluster, app_id, 1)
    cluster.delete_object(("/api/v1", "team", "pods", waiting["metadata"]["name"]))
    [reason] = scheduler.describe(app_id).facts.reasons
    assert (reason.code, reason.count) == (Code.PODS_REPLACED_SOON, 1)
    cluster.allowed = {kind: verbs for kind, verbs in RIGHTS.items() if kind != "events"}
    reason, hidden = scheduler.describe(app_id).facts.reasons
    assert (reason.code, hidden.code) == (Code.PODS_REPLACED_SOON, Code.EVENTS_HIDDEN)


def test_if_the_cluster_keeps_no_report_the_status_names_the_command_that_finds_it(cluster, scheduler, start, capsys):
    """The status named no cause."""
    app_id = start(max_retries=0)
    rule = "=" * 70
    root = "  rank      : 0 (local rank 0 on node 0)"
    for text in ("[trainer0|n0.r0]:ModuleNotFoundError: x", rule, "JOB FAILED  app: rank 0 on node 0", root, rule):
        cluster.write_log(find_pod(cluster, app_id, 0), f"{text}\n", 1)
    cluster.end_pod(find_pod(cluster, app_id, 0), 1)
    assert has_code(scheduler.describe(app_id).facts.reasons, Code.REPORT_NOT_KEPT)
    assert main(["log", f"kubernetes://session/{app_id}"]) == 0
    assert "JOB FAILED  app: rank 0 on node 0\n" in capsys.readouterr().out
