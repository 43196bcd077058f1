"""Submission, state, cancel, delete and resize: no duplicates, no partial apps, no leftovers."""

import base64
import io
import re
import sys
import tarfile
import threading
import time

import pytest
import torchx
from doubles.kubernetes_apps import build_agent_role, leftovers, lose_responses, read_rights
from doubles.kubernetes_cluster import Fault, write_kubeconfig
from harness import wait_until
from torchx import specs
from torchx.runner import Runner
from torchx.specs.api import NONE, AppState

from muster._shared.control import CommandExit
from muster.cli.commands import main as run_muster
from muster.schedulers.errors import EngineError, SchedulerError
from muster.schedulers.kubernetes.api.objects import Objects
from muster.schedulers.kubernetes.running_apps import logs
from muster.schedulers.kubernetes.running_apps.app import parse_app_id
from muster.schedulers.wording.reasons import Code, Reason, has_code

JOBS, PODS = "/apis/batch/v1/namespaces/team/jobs", "/pods"


def build_app(nodes=2, least=None, max_retries=0, extra=()):
    role = build_agent_role(nodes=nodes, least=least, max_retries=max_retries)
    return specs.AppDef(name="app", roles=[role, *extra])


def echo_role():
    return specs.Role(name="echo", image="img", entrypoint="echo", resource=specs.Resource(cpu=1, gpu=0, memMB=64))


def submit(scheduler, app=None, **cfg):
    return scheduler.submit(app or build_app(), cfg)


def test_everything_is_created_in_order_and_owned(cluster, scheduler):
    app_id = submit(scheduler)
    assert app_id.startswith("team:app-")
    real = [
        path.split("?")[0].rpartition("/")[2]
        for verb, path in cluster.requests
        if verb == "POST" and "dryRun" not in path
    ]
    assert real == ["secrets", "configmaps", "services", "jobs"]
    (job,) = cluster.find("jobs")
    for plural in ("secrets", "configmaps", "services"):
        (item,) = cluster.find(plural)
        assert [owner["uid"] for owner in item["metadata"]["ownerReferences"]] == [job["metadata"]["uid"]]
    (secret,) = cluster.find("secrets")
    assert len(secret["data"]["token-trainer"]) > 40


@pytest.mark.parametrize(
    ("change", "is_told"),
    [
        ({}, True),
        ({"env": {"MUSTER_LOG_DIR": "/runs/logs"}}, False),
        ({"mounts": [specs.VolumeMount(src="data", dst_path="/data", read_only=True)]}, False),
        ({"mounts": []}, False),
        *(
            ({"mounts": [specs.VolumeMount(src=src, dst_path="/runs")]}, src == "pvc/runs")
            for src in ("pvc/runs", "configmap/x", "secret/x", "emptydir/", "emptydir/10Gi")
        ),
        ({"mounts": [specs.VolumeMount(src=src, dst_path=f"/{src}") for src in ("secret/x", "runs")]}, True),
    ],
)
def test_a_job_with_a_volume_is_told_how_it_keeps_the_path_of_its_checkpoint(scheduler, capsys, change, is_told):
    """A drain of all pods, and the job began at step 0, though its checkpoints lay on the volume."""
    app = build_app()
    vars(app.roles[0]).update({"mounts": [specs.VolumeMount(src="runs", dst_path="/runs")], **change})
    scheduler.submit_dryrun(app, {})
    line = "--env MUSTER_LOG_DIR=/runs/muster: it keeps"
    assert (line in capsys.readouterr().err) == is_told


def test_a_target_that_is_refused_gets_no_hint(scheduler, capsys):
    """The hint named a folder in it: `--env MUSTER_LOG_DIR=ck/muster`."""
    app = build_app()
    app.roles[0].mounts = [specs.VolumeMount(src="runs", dst_path="ck")]
    with pytest.raises(SchedulerError, match="'ck' is not"):
        scheduler.submit_dryrun(app, {})
    assert "MUSTER_LOG_DIR" not in capsys.readouterr().err


@pytest.mark.parametrize("image", [torchx.IMAGE, "registry.example/torch:2.13"])
def test_the_image_that_runs_if_none_is_given_is_named(scheduler, capsys, image):
    """TorchX's own image was pulled without a word, and it may lack what the script needs."""
    app = build_app()
    app.roles[0].image = image
    scheduler.submit_dryrun(app, {})
    line = f"pods run {torchx.IMAGE}, "
    assert (line in capsys.readouterr().err) == (image == torchx.IMAGE)


def test_a_delete_that_is_refused_halfway_says_what_is_deleted(cluster, scheduler, capsys):
    """The line of a missing right means that nothing was changed."""
    app_id = submit(scheduler, build_app(extra=[echo_role()]))
    name = app_id.partition(":")[2]
    cluster.faults.append(Fault("DELETE", f"/jobs/{name}-echo", 403, "no", "Forbidden"))
    assert run_muster(["delete", f"kubernetes://session/{app_id}"]) == CommandExit.LOST
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"not deleted: job/{name}-echo (" in line, line
    assert [job["metadata"]["name"] for job in cluster.find("jobs")] == [f"{name}-echo"]
    assert {"configmaps", "secrets", "services"} <= set(leftovers(cluster)), "what it needs is there"
    cluster.faults.append(Fault("DELETE", f"/jobs/{name}-echo", 403, "no", "Forbidden"))
    assert run_muster(["delete", f"kubernetes://session/{app_id}"]) == CommandExit.REFUSED, "nothing was changed"
    assert run_muster(["delete", f"kubernetes://session/{app_id}"]) == 0
    assert leftovers(cluster) == []


def test_what_the_cluster_collects_is_not_said_to_be_left(cluster, scheduler, capsys):
    app_id = submit(scheduler)
    name = app_id.partition(":")[2]
    cluster.faults.append(Fault("DELETE", "/secrets/", 403, "no", "Forbidden", times=2))
    assert run_muster(["delete", f"kubernetes://session/{app_id}"]) == CommandExit.LOST
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"muster: deleted: job/{name}"), line
    assert "not deleted" not in line
    assert f"not delete secret/{name}" in line, line
    assert leftovers(cluster) == []


def test_a_submission_that_cannot_set_the_owner_leaves_nothing(cluster, scheduler):
    cluster.faults.append(Fault("PATCH", "services", 403, "no", "Forbidden"))
    with pytest.raises(EngineError, match="to change service/"):
        submit(scheduler)
    assert leftovers(cluster) == []


def test_an_interrupted_submission_leaves_nothing(cluster, scheduler, monkeypatch):
    def interrupt(*_args, **_more):
        raise KeyboardInterrupt

    monkeypatch.setattr(Objects, "patch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        submit(scheduler)
    assert leftovers(cluster) == []


PREREQUISITES = ("secrets", "configmaps", "podgroups", "services")


@pytest.mark.parametrize("gang", ["native", "volcano"])
def test_what_a_killed_submission_left_is_deleted(cluster, scheduler, monkeypatch, gang, capsys):
    """It left no Job, so `muster delete` knew no such app."""
    from muster.schedulers.kubernetes.running_apps import submit as submission

    cluster.allowed = read_rights("pods start together")
    offer_gangs(cluster, gang)
    info = scheduler.submit_dryrun(build_app(), {})
    name = info.request.inputs.name
    create = submission._create

    def create_until_killed(app, document, attempted, **more):
        if document["kind"] == "Job":
            raise KeyboardInterrupt
        return create(app, document, attempted, **more)

    monkeypatch.setattr(submission, "_create", create_until_killed)
    monkeypatch.setattr(submission, "_roll_back", lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        scheduler.schedule(info)
    assert leftovers(cluster) == sorted(PREREQUISITES)
    handle = f"kubernetes://session/team:{name}"
    assert run_muster(["delete", handle]) == 0
    assert leftovers(cluster) == []
    assert run_muster(["delete", handle]) == 3
    assert f"{name!r} in namespace 'team'" in capsys.readouterr().err


@pytest.mark.parametrize("labels", [{}, {"app.kubernetes.io/instance": "web"}])
def test_a_name_that_is_no_app_of_ours_deletes_nothing(cluster, scheduler, labels):
    for plural in PREREQUISITES:
        group = "/api/v1" if plural != "podgroups" else "/apis/scheduling.k8s.io/v1alpha2"
        for name in ("web", "web-secret", "web-bundle", "web-workspace"):
            metadata = {"name": name, "namespace": "team", "labels": dict(labels)}
            cluster.add_object(group, "team", plural, {"metadata": metadata})
    before = leftovers(cluster)
    offer_gangs(cluster, "native")
    assert run_muster(["delete", "kubernetes://session/team:web"]) == 3
    scheduler.delete("team:web")
    assert leftovers(cluster) == before


SECRETS_HIDDEN = ("GET", r"/secrets\?", 403, "secrets is forbidden: cannot list resource", "Forbidden")


def test_without_the_right_to_list_secrets_none_is_left(cluster, scheduler):
    """The usual role: secrets may be created and deleted by name, not listed."""
    cluster.faults.append(Fault(*SECRETS_HIDDEN, times=10**6))
    cluster.faults.append(Fault("POST", r"jobs\?(?!.*dryRun)", 403, "exceeded quota: pods", "Forbidden"))
    with pytest.raises(SchedulerError, match="the namespace's quota"):
        submit(scheduler)
    assert leftovers(cluster) == []
    app_id = submit(scheduler)
    scheduler.delete(app_id)
    assert leftovers(cluster) == []


GANGS = {
    "native": ("scheduling.k8s.io", "v1alpha2"),
    "volcano": ("scheduling.volcano.sh", "v1beta1"),
}


def offer_gangs(cluster, gang):
    group, version = GANGS[gang]
    cluster.groups[group] = [version]
    cluster.kinds[f"{group}/{version}"] = ["podgroups"]


def run_every_operation(cluster, scheduler, **cfg):
    """Submits an app, runs every operation on it, and deletes it."""
    app_id = submit(scheduler, build_app(nodes=3, least=2), **cfg)
    name = app_id.partition(":")[2]
    created = sorted(plural for plural in leftovers(cluster) if plural != "pods")
    assert scheduler.describe(app_id).state is AppState.PENDING
    cluster.start_pod(cluster.find_pod(name, 0))
    cluster.write_log(cluster.find_pod(name, 0), "hello\n", 1)
    assert list(scheduler.log_iter(app_id, "trainer", 0)) == ["hello\n"]
    assert [app.app_id for app in scheduler.list()] == [app_id]
    scheduler.resize_app(app_id, 2, None)
    assert cluster.find("jobs")[0]["spec"]["parallelism"] == 2
    scheduler.cancel(app_id)
    assert list(scheduler.log_iter(app_id, "trainer", 0, should_tail=True))
    assert scheduler.describe(app_id).state is AppState.CANCELLED
    scheduler.delete(app_id)
    assert leftovers(cluster) == []
    return created


@pytest.mark.parametrize(("loses", "validate"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("gang", [None, *GANGS])
def test_the_rights_that_the_documentation_lists_suffice(cluster, scheduler, gang, loses, validate):
    kinds = ["configmaps", "jobs", "secrets", "services"]
    cluster.allowed = read_rights("pods start together")
    if gang is not None:
        offer_gangs(cluster, gang)
        kinds.insert(2, "podgroups")
    if loses:
        lose_responses(cluster, *kinds)
    assert run_every_operation(cluster, scheduler, validate_spec=validate) == kinds
    assert not [fault for fault in cluster.faults if fault.times and fault.method != "DELETE"], "all occurred"


@pytest.mark.parametrize("gang", GANGS)
def test_without_the_right_to_gangs_pods_start_one_by_one(cluster, scheduler, gang, capsys):
    cluster.allowed = read_rights()
    offer_gangs(cluster, gang)
    assert run_every_operation(cluster, scheduler) == ["configmaps", "jobs", "secrets", "services"]
    notice = f"create podgroups.{GANGS[gang][0]}: pods"
    assert notice in capsys.readouterr().err


def test_a_requested_gang_is_not_left_out(cluster, scheduler):
    cluster.allowed = read_rights()
    offer_gangs(cluster, "volcano")
    with pytest.raises(
        EngineError,
        match=r"create podgroup/.*: podgroups\.scheduling\.volcano\.sh .*gang=none",
    ):
        submit(scheduler, gang="volcano")
    assert leftovers(cluster) == []


@pytest.mark.parametrize("loses", [True, False])
def test_the_rights_that_the_documentation_lists_for_a_jobset(cluster, scheduler, loses):
    cluster.allowed = read_rights("`flavor=jobset`")
    cluster.kinds["jobset.x-k8s.io/v1alpha2"] = ["jobsets"]
    if loses:
        lose_responses(cluster, "secrets", "configmaps", "jobsets")
    app_id = submit(scheduler, build_app(nodes=3, least=2), flavor="jobset")
    assert leftovers(cluster) == ["configmaps", "jobsets", "secrets"]
    assert scheduler.describe(app_id).state is AppState.SUBMITTED
    scheduler.cancel(app_id)
    assert cluster.find("jobsets")[0]["spec"]["suspend"] is True
    assert [(app.app_id, app.state) for app in scheduler.list()] == [(app_id, AppState.CANCELLED)]
    assert scheduler.describe(app_id).state is AppState.CANCELLED
    scheduler.delete(app_id)
    assert leftovers(cluster) == []


@pytest.mark.parametrize("kind", ["secrets", "configmaps", "services", "jobs"])
def test_an_unacknowledged_object_is_removed(cluster, scheduler, kind):
    cluster.allowed = read_rights()
    cluster.faults.append(Fault("POST", rf"{kind}\?(?!.*dryRun)", 0, after=True))
    cluster.faults.append(Fault("POST", rf"{kind}\?(?!.*dryRun)", 503, "etcd is gone", times=1000))
    with pytest.raises(EngineError, match=r"create .* 503 etcd is"):
        submit(scheduler)
    assert leftovers(cluster) == []


@pytest.mark.parametrize("validate", [True, False])
def test_a_dry_run_submitted_twice_harms_nothing_of_the_first(cluster, scheduler, validate):
    """The account may not read Secrets: the existing one must not count as ours, nor be removed."""
    cluster.allowed = read_rights()
    info = scheduler.submit_dryrun(build_app(), {"validate_spec": validate})
    scheduler.schedule(info)
    before = leftovers(cluster)
    with pytest.raises(SchedulerError, match=r"secret/.* already exists"):
        scheduler.schedule(info)
    assert leftovers(cluster) == before


def test_a_kind_that_cannot_be_removed_keeps_no_other(cluster, scheduler, capsys):
    cluster.allowed = {**read_rights(), "services": {"create", "patch"}}
    cluster.faults.append(Fault("POST", r"jobs\?(?!.*dryRun)", 403, "exceeded quota: pods", "Forbidden"))
    with pytest.raises(SchedulerError, match="the namespace's quota"):
        submit(scheduler)
    [(*_, name)] = cluster.objects
    assert leftovers(cluster) == ["services"]
    printed = capsys.readouterr().err
    assert "not be removed (" in printed
    assert printed.endswith(f" kubectl -n team delete services/{name}\n")


@pytest.mark.parametrize("missing", ["jobs.batch", "pods", "secrets"])
def test_a_missing_right_is_named(cluster, scheduler, missing):
    cluster.allowed = {name: verbs for name, verbs in read_rights().items() if name != missing}
    with pytest.raises(EngineError, match=rf"allowed to \w+ .*{missing} .*right") as caught:
        submit(scheduler)
    assert "\n" not in str(caught.value)
    assert leftovers(cluster) == []


def test_the_server_checks_everything_before_anything_is_created(cluster, scheduler):
    cluster.faults.append(Fault("POST", r"jobs\?.*dryRun", 422, "spec.bad: Invalid", "Invalid"))
    with pytest.raises(SchedulerError, match=r"job/.*: spec\.bad: Invalid"):
        submit(scheduler)
    assert cluster.count("DELETE", "") == 0
    assert leftovers(cluster) == []
    assert submit(scheduler, validate_spec=False)
    assert cluster.count("POST", "dryRun") == 4


@pytest.mark.parametrize("status", [0, 500, 503, 504])
def test_a_lost_response_creates_nothing_twice(cluster, scheduler, status):
    for kind in ("secrets", "services", "jobs"):
        cluster.faults.append(Fault("POST", rf"{kind}\?(?!.*dryRun)", status, after=True))
    submit(scheduler)
    assert sorted(leftovers(cluster)) == ["configmaps", "jobs", "pods", "pods", "secrets", "services"]


def test_an_object_of_another_app_does_not_count_as_ours(cluster, scheduler):
    app = build_app()
    info = scheduler.submit_dryrun(app, {})
    name = info.request.parents[0]["metadata"]["name"]
    cluster.add_object("/apis/batch/v1", "team", "jobs", theirs(name))
    with pytest.raises(SchedulerError, match=rf"job/{name} already exists; "):
        scheduler.schedule(info)
    assert [item["metadata"]["name"] for item in cluster.find("jobs")] == [name]
    assert not cluster.find("secrets")


def theirs(name):
    template = {"metadata": {}, "spec": {"containers": []}}
    return {
        "metadata": {"name": name, "namespace": "team"},
        "spec": {"completions": 0, "parallelism": 0, "template": template},
    }


def test_too_many_requests_waits_for_the_time_in_retry_after(cluster, scheduler, clock):
    cluster.faults.append(Fault("POST", "jobs", 429, headers={"Retry-After": "7"}, times=2))
    submit(scheduler)
    assert len([seconds for seconds in clock.sleeps if seconds >= 7]) == 2
    assert len(cluster.find("jobs")) == 1


def test_expired_credentials_are_read_again(cluster, scheduler, tmp_path):
    app_id = submit(scheduler)
    cluster.token = "two"
    write_kubeconfig(tmp_path / "kubeconfig", cluster)
    assert scheduler.describe(app_id).state is AppState.PENDING
    cluster.token = "three"
    with pytest.raises(EngineError, match="log in again"):
        scheduler.describe(app_id)


def test_an_old_server_is_refused(cluster, scheduler):
    cluster.version = ("1", "28")
    with pytest.raises(
        SchedulerError,
        match=r"1\.29 or newer .* 1\.31 .* 1\.28",
    ):
        submit(scheduler)
    cluster.version = ("1", "30+")
    submit(scheduler)
    with pytest.raises(SchedulerError, match=r"the server is 1\.30"):
        submit(scheduler, build_app(nodes=2, least=1))


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        ({"flavor": "jobset"}, "JobSet is not installed in this cluster .*; install it, or use flavor=job"),
        ({"gang": "volcano"}, "Volcano is not installed in this cluster; use gang=none or gang=auto"),
        ({"queue": "q"}, "queue=q: Kueue is not installed in this cluster"),
        ({"context": "nope"}, "kubeconfig .*nope"),
        ({"kubeconfig": "/no/where"}, "kubeconfig '/no/where' does not exist"),
        ({"pod_monitor": True}, "pod_monitor=true: the Prometheus operator is not installed"),
    ],
)
def test_missing_parts_of_the_cluster_are_reported_before_anything_is_created(cluster, scheduler, cfg, message):
    with pytest.raises(EngineError, match=message) as caught:
        submit(scheduler, build_serving_app(), **cfg)
    assert "\n" not in str(caught.value)
    assert leftovers(cluster) == []


def build_serving_app():
    app = build_app()
    app.roles[0].args[2:2] = ["--metrics-port", "9464"]
    return app


def test_a_pod_monitor_goes_with_the_job(cluster, scheduler):
    cluster.groups["monitoring.coreos.com"] = ["v1"]
    cluster.kinds["monitoring.coreos.com/v1"] = ["podmonitors"]
    submit(scheduler, build_serving_app(), pod_monitor=True)
    [monitor] = cluster.find("podmonitors")
    assert [owner["kind"] for owner in monitor["metadata"]["ownerReferences"]] == ["Job"]


def test_a_queue_of_volcano_without_its_gang_is_answered_with_it(cluster, scheduler):
    """As in TorchX, whose `kubernetes` is Volcano and needs a queue."""
    offer_gangs(cluster, "volcano")
    message = "queue=q: Kueue is .* gang=volcano"
    with pytest.raises(EngineError, match=message):
        submit(scheduler, queue="q")
    assert leftovers(cluster) == []


def test_a_missing_queue_is_reported_with_the_existing_ones(cluster, scheduler):
    cluster.groups["kueue.x-k8s.io"] = ["v1beta1"]
    cluster.kinds["kueue.x-k8s.io/v1beta1"] = ["localqueues", "workloads"]
    cluster.add_object(
        "/apis/kueue.x-k8s.io/v1beta1", "team", "localqueues", {"metadata": {"name": "gpu", "namespace": "team"}}
    )
    with pytest.raises(SchedulerError, match=r"'team' .* 'gp'; .*: gpu"):
        submit(scheduler, queue="gp")
    submit(scheduler, queue="gpu")


def test_without_the_right_to_read_queues_none_is_checked(cluster, scheduler):
    cluster.groups["kueue.x-k8s.io"] = ["v1beta1"]
    cluster.kinds["kueue.x-k8s.io/v1beta1"] = ["localqueues", "workloads"]
    hidden = ("localqueues is forbidden", "Forbidden")
    cluster.faults.append(Fault("GET", "(localqueues|workloads)", 403, *hidden, times=10**6))
    app_id = submit(scheduler, queue="gpu")
    status = scheduler.describe(app_id)
    assert status.state is AppState.PENDING
    why = "this account may not list workloads.kueue.x-k8s.io, which say why"
    assert f"queue gpu; {why}" in status.msg, "no word of the queue or the right"


def test_without_the_right_to_read_events_the_state_is_shown(cluster, scheduler):
    app_id = submit(scheduler)
    cluster.faults.append(Fault("GET", "/events", 403, "events is forbidden", "Forbidden", times=10**6))
    status = scheduler.describe(app_id)
    assert status.state is AppState.PENDING
    assert "not list events" in status.msg, "it was empty"
    assert cluster.count("GET", "/events") == 1


@pytest.mark.parametrize(("quota", "code"), [(0, Code.NO_PODS), (1, Code.PODS_MISSING)])
def test_a_job_over_quota_says_so_with_the_rights_that_the_documentation_lists(cluster, scheduler, quota, code):
    """It was PENDING for ever, without a reason: the reason is an event."""
    cluster.allowed = read_rights()
    cluster.pod_quota = quota
    status = scheduler.describe(submit(scheduler))
    assert status.state is AppState.PENDING
    reason = next(each for each in status.facts.reasons if each.code is code)
    assert (reason.causes[0].code, reason.causes[0].word) == (Code.QUOTA_EXCEEDED, "FailedCreate")


def test_gangs_are_discovered(cluster, scheduler, capsys):
    submit(scheduler)
    told = capsys.readouterr().err
    assert "has no PodGroups" in told
    said = "room for 2 pods"
    assert said in told
    cluster.groups["scheduling.k8s.io"] = ["v1", "v1alpha2"]
    cluster.kinds["scheduling.k8s.io/v1alpha2"] = ["podgroups"]
    submit(scheduler)
    (group,) = cluster.find("podgroups")
    assert group["spec"]["schedulingPolicy"]["gang"]["minCount"] == 2
    assert group["metadata"]["ownerReferences"]


def test_in_cluster_the_pods_own_account_is_used(monkeypatch, tmp_path):
    from kubernetes.config import incluster_config

    from muster.schedulers.kubernetes.api import connection

    for name, text in (("token", "sa-token"), ("ca.crt", "certificate"), ("namespace", "team-b\n")):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    monkeypatch.setattr("muster.schedulers.kubernetes.kube.ACCOUNT_DIR", tmp_path)
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(EngineError, match="is configured"):
        connection.open_connection(connection.Access())
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    opened = connection.open_connection(connection.Access())
    assert (opened.host, opened.namespace) == ("https://10.0.0.1:443", "team-b")
    assert "sa-token" in "".join(opened.build_auth_headers().values())


# -- after submission -------------------------------------------------------------------------------------------------


def test_a_healthy_app_costs_two_requests(cluster, scheduler):
    app_id = submit(scheduler)
    for index in range(2):
        cluster.start_pod(cluster.find_pod(app_id.partition(":")[2], index))
    before = len(cluster.requests)
    scheduler.describe(app_id)
    assert len(cluster.requests) - before == 2


def test_pages_and_tokens_that_expire(cluster, scheduler):
    app_id = submit(scheduler, build_app(nodes=25))
    cluster.page_limit = 10
    cluster.expire_pages = True
    assert len(scheduler.describe(app_id).roles_statuses[0].replicas) == 25
    assert cluster.count("GET", "continue=10") == 2
    status = scheduler.describe(app_id)
    assert all(replica.hostname for replica in status.roles_statuses[0].replicas)


def test_why_there_are_no_pods(cluster, scheduler):
    app_id = submit(scheduler)
    name = app_id.partition(":")[2]
    for pod in cluster.find("pods"):
        cluster.delete_object(("/api/v1", "team", "pods", pod["metadata"]["name"]))
    event = {"metadata": {"name": "e"}, "type": "Warning", "reason": "FailedCreate", "message": "exceeded quota"}
    event["involvedObject"] = {"name": f"{name}-trainer"}
    cluster.add_object("/api/v1", "team", "events", event)
    # An event that only repeats a reason does not hide the one that explains it.
    bare = {"metadata": {"name": "f"}, "type": "Warning", "reason": "Failed", "message": "Error: ErrImagePull"}
    late = {"involvedObject": {"name": f"{name}-trainer"}, "lastTimestamp": "2026-01-01T00:00:00Z"}
    cluster.add_object("/api/v1", "team", "events", {**bare, **late})
    assert scheduler.describe(app_id).msg.startswith("no pods: FailedCreate: ")


def test_a_job_that_does_not_end_after_its_cancel_is_told_of(cluster, scheduler, clock, monkeypatch, capsys):
    """Nothing was said; and the wait took the machine's time, not the session's."""
    app_id = submit(scheduler)
    name = app_id.partition(":")[2]
    monkeypatch.setattr(cluster, "end_job", lambda *_args: None)
    capsys.readouterr()
    began_s = clock.now_s()
    scheduler.cancel(app_id)
    assert f"{name}-trainer has not ended" in capsys.readouterr().err
    assert clock.now_s() - began_s == pytest.approx(2)


def start_two(cluster, scheduler):
    """An app of two nodes on nodes `n0` and `n1` that have written a line each: its id and its name."""
    app_id = submit(scheduler)
    name = app_id.partition(":")[2]
    for index in range(2):
        pod = cluster.find_pod(name, index)
        pod["spec"]["nodeName"] = f"n{index}"
        cluster.start_pod(pod)
        cluster.write_log(pod, f"node {index}\n", 1)
    return app_id, name


def test_the_logs_of_a_cancelled_job_are_kept(cluster, scheduler, tmp_path, capsys):
    """They were gone with the pods, and what a pod writes after the cancel was lost."""
    app_id, name = start_two(cluster, scheduler)
    cluster.grace = lambda pod: (time.sleep(0.5), cluster.write_log(pod, "saved at step 7\n", 2))
    scheduler.cancel(app_id)
    wait_until(lambda: not cluster.find("pods"))
    assert f"is kept in {tmp_path}/state/muster/kubernetes-logs/team/{name}\n" in capsys.readouterr().err
    for index, tail in ((0, False), (1, True)):
        lines = [f"node {index}\n", "saved at step 7\n"]
        assert list(scheduler.log_iter(app_id, "trainer", index, should_tail=tail)) == lines
    scheduler.delete(app_id)
    assert not list((tmp_path / "state").rglob("*.log"))


def test_the_logs_of_pods_that_are_removed_at_once_are_kept(cluster, scheduler, capsys):
    """They were read after the stop, and there was no pod any more: `pods "..." not found`."""
    app_id, _ = start_two(cluster, scheduler)
    assert cluster.grace is None
    scheduler.cancel(app_id)
    assert not cluster.find("pods")
    assert "is kept in " in capsys.readouterr().err
    for index in range(2):
        assert list(scheduler.log_iter(app_id, "trainer", index)) == [f"node {index}\n"]


def start_again(cluster, scheduler):
    """Submit an app whose node 0 has a pod that failed, and one that runs. Both have written a line. Return its id."""
    app_id = submit(scheduler, build_app(max_retries=1))
    for second, text in ((1, "the first\n"), (2, "the second\n")):
        pod = cluster.find_pod(app_id.partition(":")[2], 0)
        cluster.start_pod(pod)
        cluster.write_log(pod, text, second)
        if second == 1:
            cluster.end_pod(pod, 137)
    return app_id


@pytest.mark.parametrize("tail", [False, True])
def test_the_log_of_a_cancelled_node_begins_with_its_failed_pod(cluster, scheduler, tail):
    """As long as the failed pod was there, the kept lines of the pod that the cancel had deleted were not printed."""
    app_id = start_again(cluster, scheduler)
    cluster.grace = lambda pod: (time.sleep(0.3), cluster.write_log(pod, "saved\n", 3))
    scheduler.cancel(app_id)
    wait_until(lambda: len(cluster.find("pods")) == 1)
    lines = ["the first\n", "the second\n", "saved\n"]
    assert list(scheduler.log_iter(app_id, "trainer", 0, should_tail=tail)) == lines
    scheduler.delete(app_id)
    assert list(logs.read_kept_logs(parse_app_id(app_id), "trainer", 0)) == []


def test_what_is_kept_of_a_pod_that_is_still_there_is_printed_once(cluster, scheduler, monkeypatch):
    app_id = start_again(cluster, scheduler)
    release = threading.Event()
    cluster.grace = lambda _pod: release.wait(60)
    monkeypatch.setattr(logs, "COLLECT_LIMIT_S", 0.5)
    scheduler.cancel(app_id)
    assert len(list_running(cluster)) == 1
    assert len(logs.read_kept_logs(parse_app_id(app_id), "trainer", 0)) == 1
    assert list(scheduler.log_iter(app_id, "trainer", 0)) == ["the first\n", "the second\n"]
    release.set()


def test_the_log_of_a_pod_that_goes_before_it_is_read_is_the_kept_one(cluster, scheduler):
    """A line said that the rest is lost."""
    app_id, _ = start_two(cluster, scheduler)
    lines = scheduler.log_iter(app_id, "trainer", 0)
    scheduler.cancel(app_id)
    assert not cluster.find("pods")
    assert list(lines) == ["node 0\n"]


def test_a_ctrl_c_while_logs_are_opened_leaves_a_stopped_job(cluster, scheduler, monkeypatch):
    app_id, _ = start_two(cluster, scheduler)

    def interrupt(*_args):
        raise KeyboardInterrupt

    monkeypatch.setattr(logs._Collection, "wait_open", interrupt)
    with pytest.raises(KeyboardInterrupt):
        scheduler.cancel(app_id)
    assert cluster.find("jobs")[0]["spec"]["activeDeadlineSeconds"] == 1


@pytest.mark.parametrize("answer", ["refused", "none"])
def test_a_node_that_does_not_answer_does_not_hold_up_a_cancel(cluster, scheduler, capsys, monkeypatch, answer):
    """It took 60 s, and the job went on for so long."""
    app_id, name = start_two(cluster, scheduler)
    lost = cluster.find_pod(name, 1)["metadata"]["name"]
    release = threading.Event()
    cluster.grace = lambda pod: release.wait(60 if pod["spec"]["nodeName"] == "n1" else 0.5)
    (cluster.dead_nodes if answer == "refused" else cluster.hanging_nodes).add("n1")
    monkeypatch.setattr(logs, "ANSWER_LIMIT_S", 1.0)
    scheduler.cancel(app_id)
    said = capsys.readouterr().err
    assert f" {lost} " in said
    assert "https://" not in said
    assert list(scheduler.log_iter(app_id, "trainer", 0)) == ["node 0\n"]
    release.set()


def test_a_ctrl_c_while_logs_are_collected_leaves_a_stopped_job_and_what_was_read(cluster, scheduler, monkeypatch):
    app_id, _ = start_two(cluster, scheduler)
    release = threading.Event()
    cluster.grace = lambda _pod: release.wait(60)
    collect = logs._Collection.wait_ended

    def interrupt(*args):
        monkeypatch.setattr(logs, "COLLECT_LIMIT_S", 1.0)
        collect(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(logs._Collection, "wait_ended", interrupt)
    with pytest.raises(KeyboardInterrupt):
        scheduler.cancel(app_id)
    assert cluster.find("jobs")[0]["spec"]["activeDeadlineSeconds"] == 1
    release.set()
    wait_until(lambda: not cluster.find("pods"))
    assert list(scheduler.log_iter(app_id, "trainer", 1)) == ["node 1\n"]


def test_without_the_right_to_stop_a_job_nothing_is_said_to_be_deleted(cluster, scheduler, capsys):
    """It said that Kubernetes deletes the pods and their logs, and nothing was stopped."""
    app_id, _ = start_two(cluster, scheduler)
    cluster.allowed = {**read_rights(), "jobs.batch": {"get", "list"}}
    capsys.readouterr()
    with pytest.raises(EngineError, match="to change job/"):
        scheduler.cancel(app_id)
    assert capsys.readouterr().err == ""
    assert len(list_running(cluster)) == 2


def test_logs_that_cannot_be_kept_do_not_keep_a_job_running(cluster, scheduler, capsys):
    app_id = submit(scheduler)
    cluster.start_pod(cluster.find_pod(app_id.partition(":")[2], 0))
    cluster.grace = lambda _pod: time.sleep(0.5)
    cluster.allowed = {name: verbs for name, verbs in read_rights().items() if name != "pods/log"}
    scheduler.cancel(app_id)
    assert cluster.find("jobs")[0]["spec"]["activeDeadlineSeconds"] == 1
    assert "not be kept; the" in capsys.readouterr().err


def submit_two_roles(scheduler):
    """An app whose plain role `echo` is about to fail; returns its id and its name."""
    app_id = submit(scheduler, build_app(extra=[echo_role()]))
    return app_id, app_id.partition(":")[2]


def fail_echo(cluster, name):
    for index in range(2):
        cluster.start_pod(cluster.find_pod(f"{name}-trainer", index))
    cluster.start_pod(cluster.find_pod(f"{name}-echo", 0))
    cluster.end_pod(cluster.find_pod(f"{name}-echo", 0), 5)


@pytest.fixture
def gone(cluster, clock):
    """The scheduler of a `torchx run` that has ended."""
    from muster.schedulers.kubernetes.scheduler import KubernetesScheduler

    return KubernetesScheduler("kubernetes", "gone", clock=clock)


def list_running(cluster):
    return [pod["metadata"]["name"] for pod in cluster.find("pods") if pod["status"]["phase"] == "Running"]


def wait_stopped(cluster):
    """The two seconds between two looks; the limit is for a machine that is busy."""
    for _ in range(600):
        if not list_running(cluster):
            return
        time.sleep(0.1)
    pytest.fail(f"still running: {list_running(cluster)}")


def test_the_process_that_submitted_an_app_stops_its_other_roles(cluster, scheduler, tmp_path, capsys):
    app_id, name = submit_two_roles(scheduler)
    assert "stops the others" in capsys.readouterr().err
    cluster.start_pod(cluster.find_pod(f"{name}-trainer", 0))
    cluster.write_log(cluster.find_pod(f"{name}-trainer", 0), "step 1\n", 1)
    cluster.grace = lambda _pod: wait_until(
        lambda: any("step 1" in each.read_text() for each in (tmp_path / "state").rglob("*.log")), what="the kept log"
    )
    fail_echo(cluster, name)
    wait_stopped(cluster)
    status = scheduler.describe(app_id)
    assert status.state is AppState.FAILED
    assert re.search(rf"node 0 \(pod {name}-echo-0-\w+\) exited .* 5", status.msg)
    assert "another role failed" in status.msg
    assert "still running" not in status.msg
    assert list(scheduler.log_iter(app_id, "trainer", 0)) == ["step 1\n"], "kept before the pod went"
    scheduler.close()
    assert f"{name}: role echo has" in capsys.readouterr().err


def test_a_command_that_ends_with_a_failed_role_leaves_no_other(cluster, scheduler, gone):
    """`torchx run --wait` ends as soon as it reads FAILED: its own look may not have come yet."""
    app_id, name = submit_two_roles(gone)
    fail_echo(cluster, name)
    gone.close()
    assert list_running(cluster) == []
    assert scheduler.describe(app_id).state is AppState.FAILED


@pytest.mark.parametrize("end", ["runs", "succeeds", "cancelled", "deleted"])
def test_nothing_is_stopped_in_an_app_that_has_not_failed(cluster, gone, end):
    app_id, name = submit_two_roles(gone)
    for index in range(2):
        cluster.start_pod(cluster.find_pod(f"{name}-trainer", index))
    cluster.start_pod(cluster.find_pod(f"{name}-echo", 0))
    if end == "succeeds":
        cluster.end_pod(cluster.find_pod(f"{name}-echo", 0), 0)
    elif end == "cancelled":
        gone.cancel(app_id)
    elif end == "deleted":
        gone.delete(app_id)
    before = len(cluster.requests)
    gone.close()
    assert {verb for verb, _ in cluster.requests[before:]} <= {"GET"}
    assert len(list_running(cluster)) == {"runs": 3, "succeeds": 2}.get(end, 0)


def test_a_server_that_is_gone_does_not_hold_up_the_end_of_a_command(cluster, gone):
    _, name = submit_two_roles(gone)
    fail_echo(cluster, name)
    cluster.allowed = {}
    gone.close()
    assert len(list_running(cluster)) == 2, "the account may not: `torchx status` says what still runs"


def test_looking_at_a_job_never_changes_it(cluster, scheduler, gone):
    """`describe` stopped the other roles of an app when one had failed, and so did a followed log."""
    app_id, name = submit_two_roles(gone)
    gone.close()
    fail_echo(cluster, name)
    before = len(cluster.requests)
    status = scheduler.describe(app_id)
    scheduler.list()
    lines = scheduler.log_iter(app_id, "trainer", 0, should_tail=True)
    threading.Timer(1, lambda: cluster.end_pod(cluster.find_pod(f"{name}-trainer", 0), 0)).start()
    list(lines)
    scheduler.close()
    assert {verb for verb, _ in cluster.requests[before:]} == {"GET"}
    assert status.state is AppState.FAILED
    assert re.search(rf"node 0 \(pod {name}-echo-0-\w+\) exited .* 5", status.msg)
    assert "trainer; `torchx cancel`" in status.msg


@pytest.mark.torchx
def test_the_runners_cancel_stops_the_other_role_of_a_failed_app(cluster, scheduler):
    """The status names `torchx cancel`, and TorchX did nothing: the app had ended."""
    app_id, name = submit_two_roles(scheduler)
    scheduler.close()
    fail_echo(cluster, name)
    assert "trainer; `torchx cancel`" in scheduler.describe(app_id).msg
    Runner("session", {"kubernetes": lambda _name, **_more: scheduler}).cancel(f"kubernetes://session/{app_id}")
    assert list_running(cluster) == []
    assert scheduler.describe(app_id).state is AppState.FAILED


@pytest.mark.parametrize("first", ["trainer", "echo"])
def test_the_time_limit_of_a_role_that_has_ended_leaves_the_others(cluster, scheduler, first):
    """The first role's Job owned the others: `ttl_s` after its end they were deleted, while they ran."""
    app_id = submit(scheduler, build_app(extra=[echo_role()]), ttl_s=60)
    name = app_id.partition(":")[2]
    pods = {"trainer": [cluster.find_pod(f"{name}-trainer", 0), cluster.find_pod(f"{name}-trainer", 1)]}
    pods["echo"] = [cluster.find_pod(f"{name}-echo", 0)]
    for pod in (*pods["trainer"], *pods["echo"]):
        cluster.start_pod(pod)
    for pod in pods.pop(first):
        cluster.end_pod(pod, 0)
    cluster.expire_jobs()
    [(other, running)] = pods.items()
    assert set(list_running(cluster)) == {pod["metadata"]["name"] for pod in running}
    assert {"configmaps", "secrets", "services"} <= set(leftovers(cluster)), "what the others need is there"
    status = scheduler.describe(app_id)
    assert status.state is AppState.RUNNING
    assert status.facts.reasons == (Reason(code=Code.ROLE_DELETED, role=first),)
    states = {role.role: {each.state for each in role.replicas} for role in status.roles_statuses}
    assert states == {first: {AppState.UNKNOWN}, other: {AppState.RUNNING}}
    with pytest.raises(SchedulerError, match="number of nodes"):
        scheduler.resize_app(app_id, 1, first)
    for pod in running:
        cluster.end_pod(pod, 0)
    assert scheduler.describe(app_id).state is AppState.UNKNOWN
    cluster.expire_jobs()
    assert leftovers(cluster) == []


@pytest.mark.parametrize("code", [0, 5])
def test_a_role_that_nobody_saw_end_is_not_said_to_have_succeeded(cluster, scheduler, gone, code):
    """`ttl_s` had deleted its Job, failed or not, and what was left had succeeded: so had the app."""
    app_id = submit(scheduler, build_app(extra=[echo_role()]), ttl_s=60)
    scheduler.close()  # the process that submitted it would stop the other role of one that has failed
    name = app_id.partition(":")[2]
    trainers = [cluster.find_pod(f"{name}-trainer", index) for index in range(2)]
    for pod in (*trainers, cluster.find_pod(f"{name}-echo", 0)):
        cluster.start_pod(pod)
    cluster.end_pod(cluster.find_pod(f"{name}-echo", 0), code)
    waits = type(gone)("kubernetes", "waits")
    seen = waits.describe(app_id).state
    assert seen is (AppState.FAILED if code else AppState.RUNNING)
    cluster.expire_jobs()
    for pod in trainers:
        cluster.end_pod(pod, 0)
    status = gone.describe(app_id)
    assert (status.state, has_code(status.facts.reasons, Code.ROLE_UNKNOWN)) == (AppState.UNKNOWN, True)
    states = {role.role: {each.state for each in role.replicas} for role in status.roles_statuses}
    assert states == {"trainer": {AppState.SUCCEEDED}, "echo": {AppState.UNKNOWN}}
    assert [app.state for app in gone.list()] == [AppState.UNKNOWN]
    assert list(gone.log_iter(app_id, "trainer", should_tail=True)) == []
    if code:
        status = waits.describe(app_id)
        assert (status.state, has_code(status.facts.reasons, Code.ROLE_FAILED)) == (AppState.FAILED, True)
    else:
        status = waits.describe(app_id)
        states = {role.role: {each.state for each in role.replicas} for role in status.roles_statuses}
        assert (status.state, status.msg) == (AppState.SUCCEEDED, NONE), "it has seen the end"
        assert states == {"trainer": {AppState.SUCCEEDED}, "echo": {AppState.SUCCEEDED}}
    assert [app.state for app in waits.list()] == [AppState.FAILED if code else AppState.SUCCEEDED], "as its status"
    runner = Runner("session", {"kubernetes": lambda _name, **_more: gone})
    handle = f"kubernetes://session/{app_id}"
    with pytest.raises(EngineError) as caught:  # it never returned
        runner.wait(handle, wait_interval=0.01)
    assert "ended as UNKNOWN: " in str(caught.value)
    assert runner.status(handle).state is AppState.UNKNOWN, "who only looks is told"
    waits.delete(app_id)
    assert waits._observer._ends == {}
    waits.close()


def test_a_role_whose_job_is_deleted_cannot_be_resized(cluster, scheduler):
    elastic = rename(build_app(nodes=3, least=1).roles[0], "eval")
    app_id = submit(scheduler, build_app(extra=[elastic]))
    [job] = [job for job in cluster.find("jobs") if job["metadata"]["name"].endswith("-eval")]
    cluster.delete_object(("/apis/batch/v1", "team", "jobs", job["metadata"]["name"]))
    assert run_muster(["resize", f"kubernetes://session/{app_id}", "2", "--role", "eval"]) == 4
    assert [job["spec"]["parallelism"] for job in cluster.find("jobs")] == [2]


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (("Killing", "Stopping container main"), Code.POD_DELETED),
        (("Preempted", "by a pod on node a"), Code.PREEMPTED),
    ],
)
def test_a_job_that_a_deleted_pod_has_failed_names_it(cluster, scheduler, event, code):
    """The pod does not exist any more, and the Job says only that it has failed."""
    app_id = submit(scheduler)
    name = app_id.partition(":")[2]
    pods = [cluster.find_pod(name, index) for index in range(2)]
    for pod in pods:
        cluster.start_pod(pod)
    cluster.remove_pod(pods[1], code=137, event=event)
    status = scheduler.describe(app_id)
    assert status.state is AppState.FAILED
    assert not cluster.find("pods")
    why = Reason(code=code, text=event[1])
    assert status.facts.reasons[0] == Reason(code=Code.POD_LOST, pods=(pods[1]["metadata"]["name"],), causes=(why,))


def test_a_deleted_pod_is_named_without_the_right_to_events(cluster, scheduler):
    app_id = submit(scheduler)
    name = app_id.partition(":")[2]
    for index in range(2):
        cluster.start_pod(cluster.find_pod(name, index))
    cluster.remove_pod(cluster.find_pod(name, 1), code=137)
    cluster.allowed = {kind: verbs for kind, verbs in read_rights().items() if kind != "events"}
    status = scheduler.describe(app_id)
    assert status.facts.reasons[0] == Reason(code=Code.POD_LOST_UNKNOWN, pods=(f"{name}-trainer-1-*",))


@pytest.mark.parametrize(("least", "code"), [(None, 137), (None, 143), (1, 137)])
def test_deleted_pods_count_as_restarts(cluster, scheduler, least, code):
    """A replaced pod that had been deleted was not counted: it does not exist any more.

    In an elastic job, which has no counters by index, nothing of the cluster's knows of one that ended with 143.
    """
    app_id = submit(scheduler, build_app(least=least, max_retries=3))
    name = app_id.partition(":")[2]
    for _ in range(2):
        for index in range(2):
            cluster.start_pod(cluster.find_pod(name, index))
        cluster.remove_pod(cluster.find_pod(name, 1), code=code)
    assert scheduler.describe(app_id).num_restarts == 2


def test_list(cluster, scheduler):
    first = submit(scheduler, build_app(extra=[echo_role()]))
    second = submit(scheduler)
    cluster.add_object("/apis/batch/v1", "team", "jobs", theirs("other"))
    scheduler.cancel(second)
    assert {app.app_id: app.state for app in scheduler.list()} == {first: AppState.PENDING, second: AppState.CANCELLED}


@pytest.mark.parametrize("flavor", ["job", "jobset"])
def test_list_shows_running_jobs_as_running(cluster, scheduler, flavor):
    """They were PENDING: parents do not tell whether a pod runs."""
    cluster.kinds["jobset.x-k8s.io/v1alpha2"] = ["jobsets"]
    waiting, running = submit(scheduler, flavor=flavor), submit(scheduler, flavor=flavor)
    name = running.partition(":")[2]
    if flavor == "job":
        cluster.start_pod(cluster.find_pod(name, 0))
    else:  # the double has no such controller
        (parent,) = (item for item in cluster.find("jobsets") if item["metadata"]["name"] == name)
        parent["status"] = {}
        labels = {"app.kubernetes.io/instance": name, "app.kubernetes.io/managed-by": "muster"}
        metadata = {"name": f"{name}-0", "namespace": "team", "labels": labels}
        pod = {"metadata": metadata, "spec": {"containers": []}, "status": {"phase": "Running"}}
        cluster.add_object("/api/v1", "team", "pods", pod)
    before = cluster.count("GET", "/pods?")
    states = {app.app_id: app.state for app in scheduler.list()}
    assert states[running] is AppState.RUNNING
    assert states[waiting] in (AppState.PENDING, AppState.SUBMITTED)
    assert cluster.count("GET", "/pods?") == before + 1
    cluster.allowed = {**read_rights(f"`flavor={flavor}`"), "pods": set()}
    assert {app.state for app in scheduler.list()} <= {AppState.PENDING, AppState.SUBMITTED}


def test_resize_is_one_patch_within_the_bounds(cluster, scheduler):
    app_id = submit(scheduler, build_app(nodes=4, least=2))
    assert run_muster(["resize", f"kubernetes://session/{app_id}", "3"]) == 0
    (job,) = cluster.find("jobs")
    assert (job["spec"]["parallelism"], job["spec"]["completions"]) == (3, 3)
    with pytest.raises(SchedulerError, match="2 to 4 nodes, not 5"):
        scheduler.resize_app(app_id, 5, None)


def test_a_resize_ends_no_node_that_runs_before_one_that_does_not(cluster, scheduler):
    """It ended the only node that had the job's state, and kept one whose pod was lost: the job began again at step 0.

    Which nodes stay is Kubernetes' choice, by their index.
    """
    app_id = submit(scheduler, build_app(nodes=2, least=1))
    cluster.start_pod(cluster.find_pod(f"{app_id.partition(':')[2]}-trainer", 1))
    with pytest.raises(SchedulerError, match=r"to 1 .* node 1, .* node 0, "):
        scheduler.resize_app(app_id, 1, None)
    cluster.start_pod(cluster.find_pod(f"{app_id.partition(':')[2]}-trainer", 0))
    scheduler.resize_app(app_id, 1, None)
    (job,) = cluster.find("jobs")
    assert job["spec"]["completions"] == 1


def rename(role, name):
    role.name = name
    return role


def test_resize_takes_the_only_elastic_role_or_the_one_it_is_given(cluster, scheduler, capsys):
    """It took the first role, whichever that was."""
    elastic = build_app(nodes=4, least=2).roles[0]
    app_id = submit(scheduler, build_app(extra=[echo_role(), rename(elastic, "eval")]))
    scheduler.resize_app(app_id, 3, None)
    assert {job["metadata"]["name"].rpartition("-")[2]: job["spec"]["parallelism"] for job in cluster.find("jobs")} == {
        "trainer": 2,
        "echo": 1,
        "eval": 3,
    }
    both = submit(scheduler, build_app(nodes=4, least=2, extra=[rename(build_app(nodes=3, least=1).roles[0], "eval")]))
    handle = f"kubernetes://session/{both}"
    assert run_muster(["resize", handle, "2"]) == 1
    assert "trainer, eval with --role" in capsys.readouterr().err
    assert run_muster(["resize", handle, "2", "--role", "eval"]) == 0
    sizes = {job["metadata"]["name"]: job["spec"]["completions"] for job in cluster.find("jobs")}
    name = both.partition(":")[2]
    assert (sizes[f"{name}-trainer"], sizes[f"{name}-eval"]) == (4, 2)


def test_an_app_that_does_not_exist(cluster, scheduler):
    assert scheduler.describe("team:nope") is None
    assert scheduler.exists("team:nope") is False
    scheduler.cancel("team:nope")
    with pytest.raises(SchedulerError, match="'nope'"):
        scheduler.resize_app("team:nope", 2, None)


def test_from_another_shell_with_context_and_kubeconfig_in_the_id(cluster, scheduler, tmp_path, monkeypatch):
    path = tmp_path / "other"
    write_kubeconfig(path, cluster, namespace="blue")
    app_id = submit(scheduler, kubeconfig=str(path), context="double")
    monkeypatch.delenv("KUBECONFIG")
    from muster.schedulers.kubernetes import create_scheduler

    other = create_scheduler("another")
    assert other.describe(app_id).state is AppState.PENDING
    other.close()


def test_a_dry_run_needs_no_cluster_no_credentials_and_no_client(scheduler, monkeypatch, tmp_path):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    assert "kind: Job" in str(scheduler.submit_dryrun(build_app(), {}))


def test_the_workspace_is_sent_with_the_app(cluster, scheduler, tmp_path, capsys):
    """In a Secret, without history and credentials, which were in a ConfigMap that others can read."""
    folder = tmp_path / "ws"
    (folder / ".git").mkdir(parents=True)
    for name in ("main.py", ".env", ".git/config", "Dockerfile.torchx"):
        (folder / name).write_text("print('hi')\n")
    app_id = scheduler.submit(build_app(extra=[echo_role()]), {}, workspace=f"file://{folder}")
    (config_map,) = cluster.find("configmaps")
    assert set(config_map["binaryData"]) == {"muster-agent.zip"}
    secret = next(item for item in cluster.find("secrets") if item["metadata"]["name"].endswith("-workspace"))
    (packed,) = secret["data"].values()
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(packed))) as archive:
        assert archive.getnames() == ["Dockerfile.torchx", "main.py"]
    printed = capsys.readouterr().err.splitlines()
    line = "muster: not sent with the workspace: .env, .git; the line !.env in .torchxignore would send .env"
    assert printed.count(line) == 1
    assert [text for text in printed if "Dockerfile.torchx is not used" in text and "image_repo" in text]
    assert [owner["kind"] for owner in secret["metadata"]["ownerReferences"]] == ["Job", "Job"]
    scheduler.delete(app_id)
    assert leftovers(cluster) == []
