"""Runs a manifest's containers as processes, as a kubelet would: agent, workspace, token, termination message."""

import base64
import os
import re
import shutil
import subprocess
import sys

import pytest
from doubles.kubernetes_kubelet import Kubelet
from harness import LIMIT_S, PROGRAMS, find_free_port, wait_until

from muster.components.dist import ddp
from muster.schedulers.kubernetes.kube import APPDEF_ANNOTATION, SUBMISSION_ANNOTATION, WORKSPACE_KEY
from muster.schedulers.kubernetes.manifests.bundles import pack_workspace
from muster.schedulers.kubernetes.manifests.request import build_request, complete_documents

ADDED = {"namespace": "ns", "secret": "a-token", "submission_id": "s"}
PRINTS = """\
import os, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], sys.argv[1:], os.getcwd(), flush=True)
"""


class Pods:
    """The two pods of an Indexed Job as processes of this machine."""

    def __init__(self, folder, documents):
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.kinds = {document["kind"]: document for document in documents}
        self.names = {document["metadata"]["name"]: document for document in documents}
        self.spec = self.kinds["Job"]["spec"]["template"]["spec"]
        (folder / "opt").mkdir()
        (bundle,) = (volume["projected"] for volume in self.spec["volumes"] if "projected" in volume)
        for source in bundle["sources"]:
            named = self.names[(source.get("configMap") or source["secret"])["name"]]
            for name, content in (named.get("binaryData") or named["data"]).items():
                (folder / "opt" / name).write_bytes(base64.b64decode(content))

    def place(self, text, index):
        """Replaces the paths of a pod by those of this machine."""
        return Kubelet.place(text.replace("/opt/muster", str(self.folder / "opt")), self.folder / f"pod-{index}")

    def environ(self, container, index):
        env = {"PATH": os.environ["PATH"]}
        for item in container["env"]:
            if "value" in item:
                env[item["name"]] = Kubelet.expand(self.place(item["value"], index), env)
            elif "secretKeyRef" in item["valueFrom"]:
                key = item["valueFrom"]["secretKeyRef"]
                env[item["name"]] = base64.b64decode(self.names[key["name"]]["data"][key["key"]]).decode()
            else:
                path = item["valueFrom"]["fieldRef"]["fieldPath"]
                fields = {"metadata.name": f"pod-{index}", "metadata.namespace": "ns"}
                env[item["name"]] = "" if ".annotations" in path else fields.get(path, str(index))
        return env | {"TORCHX_RANK0_HOST": "127.0.0.1"}

    def start(self, index, **more):
        container = self.spec["containers"][0]
        for mount in container["volumeMounts"]:
            if mount["mountPath"].startswith("/muster/"):
                os.makedirs(self.place(mount["mountPath"], index), exist_ok=True)
        env = self.environ(container, index) | more
        assert container["command"] == ["python3"]
        args = [Kubelet.expand(self.place(arg, index), env) for arg in container["args"]]
        with (self.folder / f"log-{index}").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, *args],
                env=env,
                cwd=self.place(container["workingDir"], index),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def run(self, **more):
        """Runs both pods, with more variables, until they end: [(exit code, log)]."""
        codes = end_all([self.start(index, **more) for index in range(2)])
        logs = [(self.folder / f"log-{index}").read_text() for index in range(2)]
        print(*logs, sep="\n---\n")
        return list(zip(codes, logs, strict=True))


def end_all(pods):
    """Waits for processes; returns their exit codes. Leaves none behind if one does not end."""
    try:
        return [pod.wait(timeout=100) for pod in pods]
    finally:
        for pod in pods:
            if pod.poll() is None:
                pod.terminate()
                pod.wait()


@pytest.fixture
def kubelet(tmp_path):
    def make(program, *args, j="2x1", cfg=None, max_retries=0, **changes):
        workspace = tmp_path / "workspace"
        workspace.mkdir()
        (workspace / "main.py").write_text(program)
        key, content = pack_workspace(str(workspace))
        app = ddp(
            *args,
            script="main.py",
            image="img",
            j=j,
            max_retries=max_retries,
            rdzv_port=find_free_port(),
            start="cold",
            **changes,
        )
        app.roles[0].metadata[WORKSPACE_KEY] = key
        request = build_request(app, cfg or {}, name="main-x1", workspaces={key: content})
        return Pods(tmp_path, complete_documents(request, **ADDED))

    return make


def test_two_pods_run_the_users_code(kubelet, tmp_path):
    outcome = kubelet(PRINTS, "$5", "$(MUSTER_POD_INDEX)", "a b", "--api_key=$(A)c").run()
    assert [code for code, _ in outcome] == [0, 0], outcome
    for index, (_, log) in enumerate(outcome):
        # neither Kubernetes nor a shell has changed the arguments
        arguments = "['$5', '$(MUSTER_POD_INDEX)', 'a b', '--api_key=$(A)c']"
        expected = f"rank {index} of 2 {arguments} {tmp_path}/pod-{index}/muster/work"
        assert expected in log
        assert "a-token" not in log


def test_the_first_pod_after_a_drain_of_all_says_what_was_lost_with_the_others(kubelet):
    """The new pods began at step 0, and nothing said why."""
    pods = kubelet(PRINTS)
    lost = "the job begins anew"
    (_, first), (_, second) = pods.run(MUSTER_DRAINED_PODS="1")
    assert "--env MUSTER_LOG_DIR=FOLDER keeps it" in first
    assert lost not in second
    assert lost not in pods.run(MUSTER_DRAINED_PODS="2")[0][1]


STEPS_AND_FAILS = """\
import os, time
from muster import worker
for step in range(20):
    worker.step(step, total=50)
    time.sleep(0.1)
if os.environ["RANK"] == "1":
    raise ValueError("no access with " + os.environ["HF_TOKEN"])
time.sleep(600)
"""


@pytest.fixture
def account(double, tmp_path):
    """An API server behind TLS, and what a pod is given to reach it."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl makes a certificate")
    folder = tmp_path / "account"
    folder.mkdir()
    key, authority = folder / "server.key", folder / "ca.crt"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=double"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(authority)]
    subprocess.run(command, check=True, capture_output=True, timeout=LIMIT_S)
    with double.serve(certificate=(authority, key)) as cluster:
        (folder / "token").write_text(cluster.token)
        host, port = cluster.url.removeprefix("https://").split(":")
        cluster.environ = {"MUSTER_ACCOUNT_DIR": str(folder), "KUBERNETES_SERVICE_HOST": host}
        cluster.environ["KUBERNETES_SERVICE_PORT"] = port
        yield cluster


RIGHTS = {"jobs.batch": {"patch"}, "events": {"create"}}


def add_job(account, pods, allowed=RIGHTS):
    """The job in the cluster; its account has exactly the documented rights."""
    job = account.add_object("/apis/batch/v1", "ns", "jobs", pods.kinds["Job"])
    account.allowed = allowed
    return job


def describe_events(account, job):
    """What `kubectl describe job` finds: Events with the job's name and uid."""
    named = [(each["involvedObject"], each) for each in account.find("events")]
    wanted = {"apiVersion": "batch/v1", "kind": "Job", "namespace": "ns"}
    wanted |= {name: job["metadata"][name] for name in ("name", "uid")}
    return [(each["type"], each["reason"], each["message"]) for about, each in named if about == wanted]


def read_annotations(job):
    shown = {name: text for name, text in job["metadata"]["annotations"].items() if name != APPDEF_ANNOTATION}
    return {name.removeprefix("muster.torchx/"): text for name, text in shown.items() if name != SUBMISSION_ANNOTATION}


def test_a_restart_and_the_root_cause_become_events_and_annotations_of_the_job(kubelet, account):
    pods = kubelet(STEPS_AND_FAILS, cfg={"events": True}, max_retries=1, env={"HF_TOKEN": "hf_verysecret"})
    job = add_job(account, pods)
    outcome = pods.run(**account.environ)
    assert [code for code, _ in outcome] == [1, 1], outcome
    events = describe_events(account, job)
    assert [(kind, reason) for kind, reason, _ in events] == [
        ("Warning", "MusterRestarted"),
        ("Warning", "MusterFailed"),
    ]
    restarted, failed = (message for _, _, message in events)
    assert "2 nodes with 2 ranks, " in restarted
    assert "access with ***)" in failed
    annotations = read_annotations(job)
    assert annotations["failed"].endswith(f"Z {failed}")
    assert annotations["restarted"].endswith(f"Z {restarted}")
    assert re.search(r"Z step \d+ of 50", annotations["progress"])
    # Of some forty steps: the first, the last, one with each event, and one every 30 s.
    assert account.count("PATCH", "/jobs/") <= 8
    assert "hf_verysecret" not in str(account.find("events")) + str(annotations)


def test_a_drain_and_the_change_of_size_that_follows_are_events(kubelet, account, tmp_path):
    program = (PROGRAMS / "resize_steps.py").read_text()
    pods = kubelet(program, str(tmp_path), j="1:2x1", cfg={"events": True}, max_retries=1)
    job = add_job(account, pods)
    running = [pods.start(index, **account.environ) for index in range(2)]
    try:
        logs = [pods.folder / f"log-{index}" for index in range(2)]
        wait_until(lambda: all("of 2 begins" in log.read_text() for log in logs), what="both train")
        wait_until(lambda: "progress" in read_annotations(job), what="its progress is known")
        running[1].terminate()
        wait_until(lambda: "resized" in read_annotations(job), what="the job goes on")
    finally:
        (tmp_path / "finish").touch()
        codes = end_all(running)
        print(*(path.read_text() for path in sorted(tmp_path.glob("log-*"))), sep="\n---\n")
    assert codes[0] == 0
    (first, drain, step), (second, resized, sizes) = describe_events(account, job)
    assert (first, drain, second, resized) == ("Normal", "MusterDrain", "Normal", "MusterResized")
    assert re.fullmatch(r".* step \d+", step)
    assert re.match(r".* 1 node with 1 rank, .*\(pod-1\) leaves", sizes)


@pytest.mark.parametrize("program", [STEPS_AND_FAILS, "raise SystemExit(3)"])
def test_without_the_right_one_line_says_so_and_the_job_is_as_without_events(kubelet, account, program):
    """Also if the account is refused only when the job ends."""
    pods = kubelet(program, cfg={"events": True}, max_retries=1, env={"HF_TOKEN": "hf_verysecret"})
    job = add_job(account, pods, allowed={})
    (code, log), (other, _) = pods.run(**account.environ)
    assert (code, other) == (1, 1)
    line = 'jobs.batch "main-x1-main" is forbidden'
    assert log.count(line) == log.count("no Events") == 1
    assert account.count("PATCH", "/jobs/") == 1
    assert read_annotations(job) == {}


def test_events_survive_failures_of_the_api_server(kubelet, account, double):
    pods = kubelet(STEPS_AND_FAILS, cfg={"events": True}, max_retries=1, env={"HF_TOKEN": "hf_verysecret"})
    job = add_job(account, pods)
    account.faults = [double.Fault("PATCH", "/jobs/", 0), double.Fault("POST", "/events", 500, after=True)]
    assert [code for code, _ in pods.run(**account.environ)] == [1, 1]
    assert [reason for _, reason, _ in describe_events(account, job)] == ["MusterRestarted", "MusterFailed"]
