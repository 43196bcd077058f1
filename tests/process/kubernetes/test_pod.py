"""Runs what the manifest says as a kubelet would, but here: the agent, its workspace, its token, its last words."""

import base64
import os
import socket
import subprocess
import sys

import pytest

from muster.components.dist import ddp
from muster.schedulers.kubernetes.live.pod_status import read_pod
from muster.schedulers.kubernetes.live.status import describe_report
from muster.schedulers.kubernetes.manifests.bundles import METADATA_KEY, pack_workspace
from muster.schedulers.kubernetes.manifests.request import build_request, with_token

FAILS = "import os, sys\nif os.environ['RANK'] == '1': raise ValueError('bad batch')\nimport time; time.sleep(600)\n"
TELLS = """\
import os, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], sys.argv[1:], os.getcwd(), flush=True)
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Kubelet:
    """Two pods of an Indexed Job, as processes of this machine."""

    def __init__(self, folder, documents):
        self.folder = folder
        self.kinds = {document["kind"]: document for document in documents}
        self.spec = self.kinds["Job"]["spec"]["template"]["spec"]
        (folder / "opt").mkdir()
        for name, content in self.kinds["ConfigMap"]["binaryData"].items():
            (folder / "opt" / name).write_bytes(base64.b64decode(content))

    def place(self, text, index):
        """Paths and names of a cluster, as they are here."""
        home = self.folder / f"pod-{index}"
        text = text.replace("/opt/muster", str(self.folder / "opt")).replace("/muster/", f"{home}/")
        return text.replace("/dev/termination-log", str(home / "last-words"))

    def environ(self, container, index):
        env = {"PATH": os.environ["PATH"]}
        for item in container["env"]:
            if "value" in item:
                env[item["name"]] = self.expand(self.place(item["value"], index), env)
            elif "secretKeyRef" in item["valueFrom"]:
                key = item["valueFrom"]["secretKeyRef"]
                assert key["name"] == self.kinds["Secret"]["metadata"]["name"]
                env[item["name"]] = base64.b64decode(self.kinds["Secret"]["data"][key["key"]]).decode()
            else:
                path = item["valueFrom"]["fieldRef"]["fieldPath"]
                env[item["name"]] = str(index) if "job-completion-index" in path else f"pod-{index}"
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

    def start(self, index):
        container = self.spec["containers"][0]
        for mount in container["volumeMounts"]:
            if mount["mountPath"].startswith("/muster/"):
                os.makedirs(self.place(mount["mountPath"], index), exist_ok=True)
        env = self.environ(container, index)
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
        """Both pods to their end: [(exit code, log)]."""
        pods = [self.start(index) for index in range(2)]
        try:
            codes = [pod.wait(timeout=100) for pod in pods]
        finally:
            for pod in pods:
                if pod.poll() is None:
                    pod.terminate()
                    pod.wait()
            logs = [(self.folder / f"log-{index}").read_text() for index in range(2)]
            print(*logs, sep="\n---\n")
        return list(zip(codes, logs, strict=True))


@pytest.fixture
def kubelet(tmp_path):
    def make(program, *args):
        workspace = tmp_path / "workspace"
        workspace.mkdir()
        (workspace / "main.py").write_text(program)
        key, content = pack_workspace(str(workspace))
        app = ddp(*args, script="main.py", image="img", j="2x1", rdzv_port=free_port(), start="cold")
        app.roles[0].metadata[METADATA_KEY] = key
        request = build_request(app, {}, name="main-x1", workspaces={key: content})
        return Kubelet(tmp_path, with_token(request, "a-token", "ns"))

    return make


def test_two_pods_run_the_users_code(kubelet, tmp_path):
    outcome = kubelet(TELLS, "$5", "$(NODE_INDEX)", "a b").run()
    assert [code for code, _ in outcome] == [0, 0], outcome
    for index, (_, log) in enumerate(outcome):
        # neither Kubernetes nor a shell has touched the arguments
        expected = f"rank {index} of 2 ['$5', '$(NODE_INDEX)', 'a b'] {tmp_path}/pod-{index}/work"
        assert expected in log
        assert "a-token" not in log


def test_a_pod_that_fails_leaves_its_report_for_describe(kubelet, tmp_path):
    outcome = kubelet(FAILS).run()
    assert [code for code, _ in outcome] == [1, 1], outcome
    for index in range(2):
        words = (tmp_path / f"pod-{index}" / "last-words").read_text()
        ended = {"exitCode": 1, "message": words}
        pod = {
            "metadata": {"name": f"pod-{index}"},
            "spec": {"containers": []},
            "status": {"phase": "Failed", "containerStatuses": [{"name": "main", "state": {"terminated": ended}}]},
        }
        assert "ValueError: bad batch" in describe_report(read_pod(pod).report)
        assert len(words.encode()) <= 4096


def test_an_empty_token_is_refused(kubelet):
    made = kubelet(TELLS)
    made.kinds["Secret"]["data"]["token"] = ""
    outcome = made.run()
    assert [code for code, _ in outcome] == [2, 2], outcome
