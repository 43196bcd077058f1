"""End to end on a real cluster: the adapter's guarantees, from the user's view."""

import copy
import json
import os
import re
import subprocess
import sys

import pytest
from harness import ROOT

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.timeout(900),
    # a kubeconfig with insecure-skip-tls-verify is its owner's choice
    pytest.mark.filterwarnings("ignore:Unverified HTTPS request"),
]

EXAMPLES = ROOT / "examples"
LABEL = "app.kubernetes.io/instance"


def torchx(*args):
    """TorchX's own command line, from another shell."""
    done = subprocess.run(
        [sys.executable, "-m", "torchx.cli.main", *args], capture_output=True, text=True, check=False, timeout=120
    )
    return done.stdout + done.stderr


@pytest.mark.torchx
def test_the_digits_example_on_two_nodes_of_two(start):
    job = start("train.py", "--epochs", "3", j="2x2", workspace=EXAMPLES / "digits")
    job.wait_for("SUCCEEDED")
    assert "4 workers on gloo" in job.log(0)
    assert "test accuracy" in job.log(0)
    assert len(job.pods()) == 2
    assert "State: SUCCEEDED" in torchx("status", job.handle)


@pytest.mark.torchx
def test_a_failing_script_gives_failed_with_the_exception_and_no_more_pods(start, wait):
    job = start("kubernetes_fails.py", max_retries=0)
    status = job.wait_for("FAILED")
    assert "ValueError: the batch was bad" in status.msg
    shown = torchx("status", job.handle)
    assert "State: FAILED" in shown
    assert "ValueError: the batch was bad" in shown
    pods = {pod["metadata"]["uid"] for pod in job.pods()}
    assert len(pods) <= 2
    # the Job controller deletes the pod that has not ended yet, with its log
    for index in range(2):
        told = re.compile(f"alive rank={index}|Kubernetes has removed")
        wait(lambda told=told, index=index: told.search(job.log(index)), f"node {index} has a log, or none any more")
    assert any(f"alive rank={index}" in job.log(index) for index in range(2))
    # the controller creates no more pods
    assert {pod["metadata"]["uid"] for pod in job.pods()} <= pods


def test_a_worker_that_crashes_is_restarted_in_place(start):
    job = start("kubernetes_crashes_once.py", max_retries=1)
    job.wait_for_log(0, "attempt=0")
    before = {pod["metadata"]["uid"] for pod in job.pods()}
    job.wait_for("SUCCEEDED")
    assert {pod["metadata"]["uid"] for pod in job.pods()} == before
    assert "attempt=1 rank=1" in job.log(1)


@pytest.mark.parametrize("index", [1, 0])
def test_a_pod_that_is_killed_is_replaced_and_the_job_goes_on(start, index):
    job = start("kubernetes_trains.py", "20", max_retries=2)
    for node in range(2):
        job.wait_for_log(node, "training")
    killed = job.kill_pod(index)
    replacement = job.wait_for_replacement(index, killed)
    host = replacement["spec"].get("hostname") or replacement["metadata"]["name"]
    assert host.startswith(f"{job.name}-main-{index}")
    job.wait_for("SUCCEEDED")
    survivor = job.log(1 - index)
    assert survivor.count("training") >= 2
    assert survivor.count("done") == 1


def test_a_drained_pod_is_replaced_and_does_not_count_as_a_retry(start):
    job = start("kubernetes_trains.py", "20", max_retries=0)
    for node in range(2):
        job.wait_for_log(node, "training")
    evicted = job.evict_pod(1)
    job.wait_for_replacement(1, evicted)
    job.wait_for("SUCCEEDED")
    assert "done rank=1" in job.log(1)


@pytest.mark.skipif("MUSTER_TEST_CLAIM" not in os.environ, reason="MUSTER_TEST_CLAIM names no volume claim")
@pytest.mark.parametrize("how", ["delete", "evict"])
def test_a_preempted_pod_of_three_stops_all_ranks_at_one_step_and_the_job_resumes(start, how):
    mounts = ["type=volume", f"src={os.environ['MUSTER_TEST_CLAIM']}", "dst=/data"]
    env = {"MUSTER_LOG_DIR": f"/data/muster-{os.urandom(3).hex()}"}
    job = start("docker_resumes.py", j="3x1", max_retries=0, mounts=mounts, env=env)
    for node in range(3):
        job.wait_for_log(node, "asks")
    old = job.evict_pod(1) if how == "evict" else job.kill_pod(1, grace_s=30)
    job.wait_for_replacement(1, old)
    job.wait_for("SUCCEEDED")
    resumed = {
        line.split("resumes from ")[1]
        for node in range(3)
        for line in job.log(node).splitlines()
        if "resumes from /data/" in line
    }
    assert len(resumed) == 1
    assert all("resumes from /data/" in job.log(node) for node in range(3))


def test_an_image_that_cannot_be_pulled_is_explained(start, wait):
    image = "registry.invalid/none/nothing:1"
    job = start("kubernetes_trains.py", "1", image=image)
    message = wait(lambda: next((text for text in [job.status().msg] if image in text), None), "the reason")
    assert re.search("[12] of 2 pods waits?: ", message)
    assert str(job.status().state) == "PENDING"


def test_a_pod_that_fits_nowhere_is_explained(start, wait, small):
    small["spec"]["containers"][0]["resources"]["requests"]["cpu"] = "100k"
    job = start("kubernetes_trains.py", "1", template=small)

    def explained():
        message = job.status().msg
        return "2 of 2 pods wait: " in message and "Insufficient cpu" in message

    wait(explained, "the reason")
    assert "Insufficient cpu" in torchx("status", job.handle)


def test_a_job_over_quota_is_explained(start, wait, resources, namespace):
    name = f"none-{os.urandom(3).hex()}"
    quotas = f"/api/v1/namespaces/{namespace}/resourcequotas"
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": name}, "spec": {"hard": {"pods": "0"}}}
    resources.client.request("POST", quotas, what="quota", verb="create", body=quota)

    def is_counted():
        found = resources.client.request("GET", f"{quotas}/{name}", what="quota", verb="get")
        return found.get("status", {}).get("hard")

    try:
        wait(is_counted, "the quota is in force")
        job = start("kubernetes_trains.py", "1")
        wait(lambda: f"exceeded quota: {name}" in job.status().msg, "the reason")
        assert str(job.status().state) == "PENDING"
    finally:
        resources.client.request("DELETE", f"{quotas}/{name}", what="quota", verb="delete")


@pytest.fixture
def account(resources, namespace):
    """A service account of pods with the right that `events=true` needs."""
    name = f"muster-events-{os.urandom(3).hex()}"
    roles = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
    group = "rbac.authorization.k8s.io"
    rules = [
        {"apiGroups": [""], "resources": ["events"], "verbs": ["create"]},
        {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["patch"]},
    ]
    subject = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
    binding = {"roleRef": {"apiGroup": group, "kind": "Role", "name": name}, "subjects": [subject]}
    made = [
        (f"/api/v1/namespaces/{namespace}/serviceaccounts", "v1", "ServiceAccount", {}),
        (f"{roles}/roles", f"{group}/v1", "Role", {"rules": rules}),
        (f"{roles}/rolebindings", f"{group}/v1", "RoleBinding", binding),
    ]
    for path, version, kind, rest in made:
        body = {"apiVersion": version, "kind": kind, "metadata": {"name": name}, **rest}
        resources.client.request("POST", path, what=kind, verb="create", body=body)
    yield name
    for path, _, kind, _ in made:
        resources.client.request("DELETE", f"{path}/{name}", what=kind, verb="delete")


def list_told(job, resources):
    """The Job's annotations, and the Events that `kubectl describe job` prints: those with its name and uid."""
    from muster.schedulers.kubernetes.kube import EVENT, JOB

    found = resources.read(JOB, job.namespace, f"{job.name}-main")
    items = resources.list_all(EVENT, job.namespace)
    about = [item for item in items if item["involvedObject"].get("uid") == found["metadata"]["uid"]]
    told = {item["reason"]: item["message"] for item in about if item["reason"].startswith("Muster")}
    return found["metadata"]["annotations"], told


def test_kubectl_describe_shows_the_root_cause(start, wait, resources, account):
    job = start("kubernetes_fails.py", cfg={"events": True, "service_account": account}, max_retries=1)
    job.wait_for("FAILED")
    # node 1 may have ended before node 0 has told it
    wait(lambda: "MusterFailed" in list_told(job, resources)[1], "node 0 has told the failure")
    annotations, told = list_told(job, resources)
    assert told.keys() == {"MusterRestarted", "MusterFailed"}
    assert "ValueError: the batch was bad" in told["MusterFailed"]
    assert annotations["muster.torchx/failed"].endswith(told["MusterFailed"])


@pytest.mark.torchx
def test_cancel_keeps_the_objects_and_delete_leaves_nothing(start, wait, resources):
    from muster.schedulers.kubernetes.kube import JOB, POD, Kind

    job = start("kubernetes_trains.py", "600")
    job.wait_for_log(0, "training")
    torchx("cancel", job.handle)
    job.wait_for("CANCELLED")
    wait(lambda: not [pod for pod in job.pods() if pod["status"]["phase"] == "Running"], "its pods end")
    assert "training" in job.log(0)
    listed = job.runner._scheduler("kubernetes").list_apps({"namespace": job.namespace})
    assert {app.app_id: str(app.state) for app in listed}[job.app_id] == "CANCELLED"
    job.runner._scheduler("kubernetes").delete(job.app_id)
    kinds = [JOB, POD, *(Kind(api_version="v1", kind=kind) for kind in ("Secret", "ConfigMap", "Service"))]

    def gone():
        return not any(resources.list_all(kind, job.namespace, labels=f"{LABEL}={job.name}") for kind in kinds)

    wait(gone, "nothing is left")
    assert job.status() is None


def resize(job, nodes):
    command = [sys.executable, "-m", "muster", "resize", job.handle, str(nodes)]
    subprocess.run(command, check=True, timeout=60)


@pytest.mark.usefixtures("needs_elastic")
def test_an_elastic_job_shrinks_and_goes_on(start):
    job = start("kubernetes_trains.py", "25", j="1:2x1", max_retries=2)
    job.wait_for_log(0, "world=2")
    resize(job, 1)
    job.wait_for_log(0, "world=1")
    job.wait_for("SUCCEEDED")
    assert len([pod for pod in job.pods() if pod["status"]["phase"] == "Succeeded"]) == 1


def test_a_role_that_fails_leaves_the_others_until_cancel(start, wait, resources, namespace):
    from torchx import specs

    image, small = os.environ["MUSTER_TEST_IMAGE"], specs.Resource(cpu=0, gpu=0, memMB=64)
    scripts = {"main": "sleep 3; echo cost: '$5' from ${replica_id}; exit 3", "beside": "sleep 3600"}
    roles = [
        specs.Role(name=name, image=image, entrypoint="/bin/sh", args=["-c", script], resource=small)
        for name, script in scripts.items()
    ]
    job = start("kubernetes_trains.py", "1")
    policy = os.environ.get("MUSTER_TEST_PULL_POLICY", "IfNotPresent")
    options = {"namespace": namespace, "image_pull_policy": policy, "grace_s": 5}
    handle = job.runner.run(specs.AppDef(name="roles", roles=roles), "kubernetes", options)
    job.runner._scheduler("kubernetes").close()  # the process that submitted it would stop the other role
    other = type(job)(job.runner, resources, handle)
    try:
        assert "exited with code 3" in other.wait_for("FAILED").msg
        assert "cost: $5 from 0" in other.log(0)
        assert "beside; `torchx cancel`" in other.status().msg
        job.runner.cancel(handle)
        running = ("Pending", "Running")
        wait(lambda: not [pod for pod in other.pods() if pod["status"]["phase"] in running], "the other role stops")
        assert str(other.status().state) == "FAILED"  # it had failed before it was cancelled
    finally:
        job.runner._scheduler("kubernetes").delete(other.app_id)
    job.wait_for("SUCCEEDED")


def test_the_server_accepts_what_a_dry_run_prints(resources, namespace, server_version, small):
    """`kubectl apply --dry-run=server --validate=strict`, without kubectl."""
    import yaml

    from muster.components.dist import ddp
    from muster.schedulers.kubernetes.manifests.request import build_request

    nodes = "1:4x8" if server_version >= (1, 31) else "4x8"
    app = ddp(script="main.py", j=nodes, image="img", mounts=["type=volume", "src=emptydir/1Gi", "dst=/data"])
    before, version = copy.deepcopy(app), ".".join(map(str, server_version))
    options = {"namespace": namespace, "pod_template": json.dumps(small), "kube_version": version, "dryrun": "full"}
    text = str(build_request(app, options, name="dry-x1"))
    assert app == before
    for document in yaml.safe_load_all(text):
        resources.create(document, dry_run=True)
