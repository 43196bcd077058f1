"""Runs a manifest's containers as processes, as a kubelet would: agent, workspace, token, termination message."""

import base64
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from harness import wait_until
from torchx.specs import AppDef, AppState

from muster.components.dist import ddp
from muster.schedulers.failure_report import describe_report
from muster.schedulers.kubernetes.labels import WORKSPACE_KEY
from muster.schedulers.kubernetes.live.pod_status import read_pod
from muster.schedulers.kubernetes.manifests.bundles import pack_workspace
from muster.schedulers.kubernetes.manifests.request import Additions, build_request, complete_documents

pytestmark = pytest.mark.torchx

PROGRAMS = Path(__file__).parents[2] / "programs"
ADDED = Additions(namespace="ns", secret="a-token", submission_id="s")
FAILS = "import os, sys\nif os.environ['RANK'] == '1': raise ValueError('bad batch')\nimport time; time.sleep(600)\n"
PRINTS = """\
import os, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], sys.argv[1:], os.getcwd(), flush=True)
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Kubelet:
    """The two pods of an Indexed Job (the first, or that of a role) as processes of this machine."""

    def __init__(self, folder, documents, role=""):
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.kinds = {document["kind"]: document for document in reversed(documents) if self.is_for(document, role)}
        self.names = {document["metadata"]["name"]: document for document in documents}
        self.spec = self.kinds["Job"]["spec"]["template"]["spec"]
        (folder / "opt").mkdir()
        (bundle,) = (volume["projected"] for volume in self.spec["volumes"] if "projected" in volume)
        for source in bundle["sources"]:
            named = self.names[(source.get("configMap") or source["secret"])["name"]]
            for name, content in (named.get("binaryData") or named["data"]).items():
                (folder / "opt" / name).write_bytes(base64.b64decode(content))

    @property
    def args(self):
        return self.spec["containers"][0]["args"]

    @staticmethod
    def is_for(document, role):
        return document["kind"] != "Job" or not role or document["metadata"]["name"].endswith(f"-{role}")

    def place(self, text, index):
        """Replaces the paths of a pod by those of this machine."""
        home = self.folder / f"pod-{index}"
        text = text.replace("/opt/muster", str(self.folder / "opt")).replace("/muster/", f"{home}/")
        return text.replace("/dev/termination-log", str(home / "termination-log"))

    def environ(self, container, index):
        env = {"PATH": os.environ["PATH"]}
        for item in container["env"]:
            if "value" in item:
                env[item["name"]] = self.expand(self.place(item["value"], index), env)
            elif "secretKeyRef" in item["valueFrom"]:
                key = item["valueFrom"]["secretKeyRef"]
                env[item["name"]] = base64.b64decode(self.names[key["name"]]["data"][key["key"]]).decode()
            else:
                path = item["valueFrom"]["fieldRef"]["fieldPath"]
                fields = {"metadata.name": f"pod-{index}", "metadata.namespace": "ns"}
                env[item["name"]] = fields.get(path, str(index))
        return env | {"TORCHX_RANK0_HOST": "127.0.0.1"}

    @staticmethod
    def expand(text, env):
        """Kubernetes' own rules for $(NAME) and $$."""
        out, rest = "", text
        while "$" in rest:
            before, _, rest = rest.partition("$")
            out += before
            if rest.startswith("$"):
                out, rest = out + "$", rest[1:]
            elif rest.startswith("(") and rest[1:].partition(")")[0] in env:
                name, _, rest = rest[1:].partition(")")
                out += env[name]
            else:
                out += "$"
        return out + rest

    def start(self, index, **more):
        container = self.spec["containers"][0]
        for mount in container["volumeMounts"]:
            if mount["mountPath"].startswith("/muster/"):
                os.makedirs(self.place(mount["mountPath"], index), exist_ok=True)
        env = self.environ(container, index) | more
        assert container["command"] == ["python3"]
        args = [self.expand(self.place(arg, index), env) for arg in container["args"]]
        with (self.folder / f"log-{index}").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, *args],
                env=env,
                cwd=self.place(container["workingDir"], index),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def run(self):
        """Runs both pods until they end: [(exit code, log)]."""
        codes = end_all([self.start(index) for index in range(2)])
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
    def make(program, *args, j="2x1"):
        workspace = tmp_path / "workspace"
        workspace.mkdir()
        (workspace / "main.py").write_text(program)
        key, content = pack_workspace(str(workspace))
        app = ddp(*args, script="main.py", image="img", j=j, max_retries=0, rdzv_port=free_port(), start="cold")
        app.roles[0].metadata[WORKSPACE_KEY] = key
        request = build_request(app, {}, name="main-x1", workspaces={key: content})
        return Kubelet(tmp_path, complete_documents(request, ADDED))

    return make


def test_two_pods_run_the_users_code(kubelet, tmp_path):
    outcome = kubelet(PRINTS, "$5", "$(MUSTER_POD_INDEX)", "a b").run()
    assert [code for code, _ in outcome] == [0, 0], outcome
    for index, (_, log) in enumerate(outcome):
        # neither Kubernetes nor a shell has changed the arguments
        expected = f"rank {index} of 2 ['$5', '$(MUSTER_POD_INDEX)', 'a b'] {tmp_path}/pod-{index}/work"
        assert expected in log
        assert "a-token" not in log


def test_a_pod_that_fails_leaves_its_report_for_describe(kubelet, tmp_path):
    outcome = kubelet(FAILS).run()
    assert [code for code, _ in outcome] == [1, 1], outcome
    for index in range(2):
        message = (tmp_path / f"pod-{index}" / "termination-log").read_text()
        ended = {"exitCode": 1, "message": message}
        pod = {
            "metadata": {"name": f"pod-{index}"},
            "spec": {"containers": []},
            "status": {"phase": "Failed", "containerStatuses": [{"name": "main", "state": {"terminated": ended}}]},
        }
        assert "ValueError: bad batch" in describe_report(read_pod(pod).report)
        assert len(message.encode()) <= 4096


NODES = 3


def test_a_preempted_pod_of_three_uses_no_retry_and_the_job_resumes(kubelet, cluster, scheduler, tmp_path):
    """The pods' processes are real; what the Job controller makes of their ends is the double's part."""
    pods = kubelet((PROGRAMS / "docker_resumes.py").read_text(), j=f"{NODES}x1")
    app = ddp(script="main.py", image="img", j=f"{NODES}x1", max_retries=0, name="main")
    app_id = scheduler.submit(app, {"namespace": "team"})
    (name,) = [key[3] for key in cluster.objects if key[2] == "jobs"]
    volume = {"MUSTER_LOG_DIR": str(tmp_path / "volume")}

    def run(code, *, preempted=None):
        running = [pods.start(index, **volume) for index in range(NODES)]
        if preempted is not None:
            logs = [tmp_path / f"log-{index}" for index in range(NODES)]
            wait_until(lambda: all("asks" in log.read_text() for log in logs), timeout_s=90, what="all ranks ask")
            running[preempted].terminate()
        codes = end_all(running)
        text = "\n---\n".join((tmp_path / f"log-{index}").read_text() for index in range(NODES))
        assert codes == [code] * NODES, text
        for index in range(NODES):
            cluster.end_pod(cluster.find_pod(name, index), code)
        return text

    first = run(143, preempted=1)
    [step] = set(re.findall(r"stops at step (\d+)", first))
    assert scheduler.describe(app_id).state == AppState.PENDING, "three new pods"
    assert run(0).count(f"resumes from /data/{step}") == NODES
    assert scheduler.describe(app_id).state == AppState.SUCCEEDED


def test_an_empty_token_is_refused(kubelet):
    made = kubelet(PRINTS)
    made.names["main-x1-secret"]["data"]["token-main"] = ""
    outcome = made.run()
    assert [code for code, _ in outcome] == [2, 2], outcome


PRINTS_JOB = """\
import os
print("of", *(os.environ[name] for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")), flush=True)
"""


@pytest.fixture
def roles(tmp_path):
    """The pods of two agent roles of one app, by role."""

    def make(join_timeout_s=600):
        workspace = tmp_path / "workspace"
        workspace.mkdir()
        (workspace / "main.py").write_text(PRINTS_JOB)
        key, content = pack_workspace(str(workspace))
        app = AppDef("app", roles=[])
        for name in ("actor", "critic"):
            conf = f"join_timeout={join_timeout_s}"
            (role,) = ddp(
                script="main.py", image="img", j="2x1", rdzv_port=free_port(), rdzv_conf=conf, start="cold"
            ).roles
            role.name = name
            role.metadata[WORKSPACE_KEY] = key
            app.roles.append(role)
        documents = complete_documents(build_request(app, {}, name="app-x1", workspaces={key: content}), ADDED)
        return {role.name: Kubelet(tmp_path / role.name, documents, role.name) for role in app.roles}

    return make


def test_two_agent_roles_are_two_jobs(roles):
    for name, made in roles().items():
        outcome = made.run()
        assert [code for code, _ in outcome] == [0, 0], outcome
        for index, (_, log) in enumerate(outcome):
            assert f"of {index} 2 app-x1-{name}" in log


def test_a_node_of_one_role_cannot_join_the_job_of_another(roles):
    """Even where the address and the run id are the same."""
    actor, critic = roles(join_timeout_s=8).values()
    critic.args[critic.args.index("--rdzv-id") + 1] = "app-x1-actor"
    port = actor.args[actor.args.index("--rdzv-port") + 1]
    assert end_all([actor.start(0), critic.start(1, MUSTER_RDZV_PORT=port)]) == [69, 69]
    assert "only 1 of at least 2 nodes joined" in (actor.folder / "log-0").read_text()
    assert "the other node has a different job token" in (critic.folder / "log-1").read_text()
