"""Makes 19df633/kubernetes: the objects of real submissions to the double of the API server, after what became of them.

    env -i PATH="$PATH" .venv/bin/python tests/golden/makers/make_kubernetes.py            # TorchX 0.7.0
    env -i PATH="$PATH" .venv-nightly/bin/python tests/golden/makers/make_kubernetes.py    # writes nightly.yaml only

Comes after make_reports.py: a pod that failed has the last words of its job `failed`.
"""

import base64
import copy
import importlib.metadata
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from snapshot import DATA, GOLDEN, Marks
from torchx.specs import AppDef, BindMount, Resource, RetryPolicy, Role, VolumeMount
from torchx.specs.api import macros

sys.path.insert(0, str(GOLDEN.parent))
from doubles import kubernetes_api as double

from muster.schedulers.kubernetes import create_scheduler

TINY = Resource(cpu=1, gpu=0, memMB=128)


def train(nodes: int = 2, **more: Any) -> Role:
    args = ["-m", "muster.agent", "--nnodes", str(nodes), "--nproc-per-node", "1", "--rank0-env", macros.rank0_env]
    args += ["--node-rank", macros.replica_id, "--rdzv-id", macros.app_id, "train.py", "$HOME", "a b"]
    fields = {"name": "trainer", "image": "registry/image:1", "entrypoint": "python3", "args": args}
    env = {"LR": "0.1", "HF_TOKEN": "fake-token-of-the-role"}
    resource = Resource(cpu=2, gpu=1, memMB=1024, capabilities={"node.kubernetes.io/instance-type": "big"})
    return Role(**(fields | {"env": env, "num_replicas": nodes, "resource": resource, "max_retries": 3} | more))


def echo() -> Role:
    return Role(name="echo", image="registry/image:1", entrypoint="echo", args=["hello"], resource=TINY)


class Case:
    """One submission to an API server of its own."""

    def __init__(self, name: str, *roles: Role, **cfg: Any) -> None:
        self.name, self.roles, self.cfg = name, roles, cfg

    def __enter__(self) -> "Case":  # noqa: PYI034 - typing.Self is Python 3.11, nobody derives
        self._serving = double.serve()
        self.cluster = self._serving.__enter__()
        self.cluster.kinds["jobset.x-k8s.io/v1alpha2"] = ["jobsets"]
        self.folder = Path(tempfile.mkdtemp(prefix="golden-cluster-"))
        double.write_kubeconfig(self.folder / "kubeconfig", self.cluster)
        os.environ["KUBECONFIG"] = str(self.folder / "kubeconfig")
        (self.folder / "workspace").mkdir()
        program = shutil.copy(GOLDEN / "train.py", self.folder / "workspace")
        os.utime(program, (1.7e9, 1.7e9))  # it is part of the bundle's name
        self.scheduler = create_scheduler("torchx")
        app = AppDef(self.name, roles=list(self.roles), metadata={"team": "vision"})
        self.app_id = self.scheduler.submit(app, self.cfg, workspace=f"file://{self.folder}/workspace")
        self.app = self.app_id.partition(":")[2]
        return self

    def pod(self, index: int, role: str = "trainer") -> dict[str, Any]:
        return self.cluster.find_pod(f"{self.app}-{role}", index)

    def start(self, *indices: int, role: str = "trainer") -> None:
        for index in indices:
            self.cluster.start_pod(self.pod(index, role))

    def end(self, index: int, code: int, message: str = "", role: str = "trainer") -> None:
        self.cluster.end_pod(self.pod(index, role), code, message)

    def __exit__(self, *raised: object) -> None:
        self.scheduler.close()
        if raised == (None, None, None):
            self.save()
        self._serving.__exit__(*raised)
        shutil.rmtree(self.folder)

    def save(self) -> None:
        marks = Marks(USER="not in any object")
        marks.add(self.app, f"{self.name}-golden")
        rows = []
        for (group, namespace, plural, name), item in self.cluster.objects.items():
            document = {"group": group, "namespace": namespace, "plural": plural, "name": name, "object": reduce(item)}
            rows.append(yaml.safe_load(marks.apply(yaml.safe_dump(document, sort_keys=False))))
        share_specs(rows)
        text = yaml.safe_dump(rows, sort_keys=False, width=200)
        DATA.joinpath("kubernetes").mkdir(parents=True, exist_ok=True)
        (DATA / "kubernetes" / f"{self.name}.yaml").write_text(text)


def reduce(item: dict[str, Any]) -> dict[str, Any]:
    """The object without what is secret or large: the token, and the agent's zip."""
    item = copy.deepcopy(item)
    if "token" in item.get("data", {}):
        item["data"]["token"] = base64.b64encode(b"fake-rendezvous-token-of-an-app").decode()
    if "muster-agent.zip" in item.get("binaryData", {}):
        item["binaryData"]["muster-agent.zip"] = base64.b64encode(b"the agent").decode()
    return item


def share_specs(rows: list[dict[str, Any]]) -> None:
    """A pod's spec is its Job's template: one text in the file, by a YAML anchor."""
    templates = [row["object"]["spec"].get("template", {}).get("spec") for row in rows if row["plural"] == "jobs"]
    for row in rows:
        if row["plural"] == "pods":
            same = [spec for spec in templates if spec == row["object"]["spec"]]
            row["object"]["spec"] = same[0] if same else row["object"]["spec"]


def main() -> None:
    if importlib.metadata.version("torchx-nightly" if "nightly" in sys.prefix else "torchx") != "0.7.0":
        with Case("nightly", train(retry_policy=RetryPolicy.ROLE)) as case:
            case.start(0, 1)
        return
    shutil.rmtree(DATA / "kubernetes", ignore_errors=True)
    mounts = [
        BindMount(src_path="/data", dst_path="/data", read_only=True),
        VolumeMount(src="claim", dst_path="/scratch"),
    ]
    with Case("running", train(mounts=mounts), echo()) as case:
        case.start(0, 1)
        case.end(0, 143)
        case.start(0)
        case.start(0, role="echo")
    with Case("elastic", train(nodes=4, min_replicas=2)) as case:
        case.start(0, 1)
    with Case("succeeded", train()) as case:
        case.start(0, 1)
        case.end(0, 0)
        case.end(1, 0)
    with Case("failed", train()) as case:
        case.start(0, 1)
        case.end(1, 1, (DATA / "reports/failed/message").read_text())
    with Case("cancelled", train()) as case:
        case.start(0, 1)
        case.scheduler.cancel(case.app_id)
    with Case("jobset", train(), flavor="jobset"):
        pass


if __name__ == "__main__":
    main()
