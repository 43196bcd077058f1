"""What the tests of Kubernetes submit, the rights that the pages name, and a clock."""

import itertools
import re
import threading
from pathlib import Path

from doubles.kubernetes_cluster import Fault
from torchx import specs

RIGHTS_PAGE = Path(__file__).resolve().parents[2] / "docs" / "kubernetes-cluster.md"

RIGHTS = {
    "jobs.batch": {"create", "get", "list", "patch", "delete"},
    "pods": {"list"},
    "pods/log": {"get"},
    "events": {"list"},
    "secrets": {"create", "patch", "delete"},
    "configmaps": {"create", "patch", "delete"},
    "services": {"create", "patch", "delete"},
}
"""All but those of commands that ask a running job: these need `pods/exec`, too."""


def build_agent_role(
    name: str = "trainer", *, nodes: int = 2, least: int | None = None, max_retries: int = 0
) -> specs.Role:
    """A role of our agent: a pod for each of its nodes, at least `least` of them."""
    return specs.Role(
        name=name,
        image="img",
        entrypoint="python3",
        args=["-m", "muster.agent", "--nnodes", str(nodes), "--node-rank", specs.macros.replica_id, "main.py"],
        num_replicas=nodes,
        min_replicas=least,
        max_retries=max_retries,
        resource=specs.Resource(cpu=1, gpu=0, memMB=128),
    )


class RecordedClock:
    """A clock whose sleeps take no time and are recorded."""

    def __init__(self) -> None:
        self.sleeps: list[float] = []
        self.lock = threading.Lock()

    def now_s(self) -> float:
        return sum(self.sleeps)

    def sleep(self, seconds: float) -> None:
        with self.lock:
            self.sleeps.append(seconds)


def leftovers(cluster):
    """Kinds of the objects that exist; events end by themselves."""
    return sorted(plural for _, _, plural, _ in cluster.objects if plural != "events")


def read_rights(*needed):
    """The rights that the page lists as always needed, and those of the rows whose last cell has one of the words.

    In the form of `Cluster.allowed`. Those always needed were tried with RBAC on Kubernetes 1.36, as a pod's account.
    """
    lines = RIGHTS_PAGE.read_text().splitlines()
    rights = {}
    for line in lines[lines.index("| verbs | resources | needed |") + 2 :]:
        if not line.startswith("|"):
            return rights
        verbs, resources, when = (cell.strip() for cell in line.strip("|").split("|"))
        if any(word in when for word in ("always", *needed)):
            for resource in re.findall("`([^`]+)`", resources):
                rights[resource] = set(verbs.split(", "))
    raise AssertionError("the page ends in its table of rights")


def lose_responses(cluster, *kinds):
    """The next request of each sort that changes an object of these kinds is carried out, but its response is lost."""
    for method, kind in itertools.product(("POST", "PATCH", "DELETE"), kinds):
        cluster.faults.append(Fault(method, rf"/{kind}[/?](?!.*dryRun)", 0, after=True))


def find_pod_templates(part):
    """Yield the pod templates in documents, whatever their kinds."""
    for key, value in part.items() if isinstance(part, dict) else enumerate(part):
        if key == "template" and "containers" in value["spec"]:
            yield value
        elif isinstance(value, dict | list | tuple):
            yield from find_pod_templates(value)
