"""A real cluster, named by KUBECONFIG, and an image with Python and torch, named by MUSTER_TEST_IMAGE.

The cluster needs: a namespace of our own (or MUSTER_TEST_NAMESPACE), and room for three small pods. It needs no
LoadBalancer, Ingress, storage class or operator. The image must exist on the nodes or be pulled
(MUSTER_TEST_PULL_POLICY, IfNotPresent by default, which is right for images loaded into kind, k3s or minikube).

With MUSTER_TEST_NAMESPACE, MUSTER_TEST_CLAIM names a volume claim there that several pods can write to; without it the
tests of preemption are skipped.
"""

import copy
import functools
import json
import os

import harness
import pytest
from harness import PROGRAMS, skip_or_fail

# Requests small enough for a single node that others use too; no limits.
SMALL = {"spec": {"containers": [{"name": "main", "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}}}]}}


def _missing():
    """Why these tests cannot run here; None if they can."""
    if not os.environ.get("KUBECONFIG"):
        return "KUBECONFIG is not set"
    if not os.environ.get("MUSTER_TEST_IMAGE"):
        return "MUSTER_TEST_IMAGE, an image with Python 3.10+ and torch, is not set"
    try:
        import kubernetes  # noqa: F401
    except ImportError:
        return "the kubernetes package is not installed"
    return None


@pytest.fixture(scope="session", autouse=True)
def _cluster_or_skip():
    reason = _missing()
    if reason is not None:
        skip_or_fail("kubernetes", reason)


wait_until = functools.partial(harness.wait_until, timeout_s=300.0, every_s=0.5)
"""Generous: images may have to be pulled, and the cluster needs time to detect and replace a lost pod."""


@pytest.fixture
def wait():
    """`wait_until`."""
    return wait_until


@pytest.fixture
def small():
    """A pod template that a test may change."""
    return copy.deepcopy(SMALL)


@pytest.fixture(scope="session")
def small_file(tmp_path_factory):
    """`small` as a file."""
    path = tmp_path_factory.mktemp("template") / "small.json"
    path.write_text(json.dumps(SMALL))
    return path


@pytest.fixture(scope="session")
def resources(_cluster_or_skip):
    """The cluster's objects, read by our own client: it works with all versions that we support."""
    from muster.schedulers.kubernetes.api.client import Client
    from muster.schedulers.kubernetes.api.connection import Access
    from muster.schedulers.kubernetes.api.objects import Objects

    client = Client(Access())
    yield Objects(client)
    client.close()


@pytest.fixture(scope="session")
def server_version(resources):
    """The cluster's, (1, 31)."""
    return resources.read_version()


@pytest.fixture
def needs_elastic(server_version):
    """Skips on servers that are too old for elastic jobs; other tests check the message."""
    if server_version < (1, 31):
        pytest.skip(f"elastic jobs need Kubernetes 1.31, this is {server_version[0]}.{server_version[1]}")


@pytest.fixture(scope="session")
def namespace(resources):
    """A namespace of our own, deleted afterwards; one named by MUSTER_TEST_NAMESPACE is kept."""
    given = os.environ.get("MUSTER_TEST_NAMESPACE")
    if given:
        yield given
        return
    name = f"muster-test-{os.urandom(3).hex()}"
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
    client = resources.client
    client.request("POST", "/api/v1/namespaces", what=name, verb="create", body=body)
    path = f"/api/v1/namespaces/{name}/serviceaccounts"
    # pods cannot be created before their service account
    wait_until(lambda: client.request("GET", path, what="accounts", verb="list").get("items"), "the service account")
    yield name
    client.request("DELETE", f"/api/v1/namespaces/{name}", what=name, verb="delete")


class Job:
    """One app on the cluster: its status, pods and logs."""

    def __init__(self, runner, resources, handle):
        self.runner = runner
        self.resources = resources
        self.handle = handle
        self.app_id = handle.rpartition("/")[2]
        self.namespace, self.name = self.app_id.split(":")[:2]

    def status(self):
        return self.runner.status(self.handle)

    def wait_for(self, *states):
        wanted = [str(state) for state in states]

        def reached():
            status = self.status()
            ended = status.is_terminal() and str(status.state) not in wanted
            assert not ended, f"{status.state} instead of {wanted}: {status.msg}\n{self.all_logs()}"
            return status if str(status.state) in wanted else None

        return wait_until(reached, f"{self.name} becomes {wanted}")

    def pods(self):
        from muster.schedulers.kubernetes.kube import POD

        return self.resources.list_all(POD, self.namespace, labels=f"app.kubernetes.io/instance={self.name}")

    def pod(self, index):
        """The pod of an index that is not being deleted."""
        label = "batch.kubernetes.io/job-completion-index"
        own = [item for item in self.pods() if item["metadata"]["labels"].get(label) == str(index)]
        live = [item for item in own if not item["metadata"].get("deletionTimestamp")]
        return max(live, key=lambda item: item["metadata"]["creationTimestamp"], default=None)

    def log(self, index=0):
        return "".join(self.runner.log_lines(self.handle, "main", index))

    def all_logs(self):
        return "\n".join(f"--- node {index}\n{self.log(index)}" for index in range(2))

    def wait_for_log(self, index, text, times=1):
        def find_text():
            content = self.log(index)
            ended = self.status().is_terminal() and content.count(text) < times and self.log(index).count(text) < times
            assert not ended, f"the app ended without {text!r} ({times}x):\n{self.all_logs()}"
            return content if content.count(text) >= times else None

        return wait_until(find_text, f"{text!r} in the log of node {index}")

    def kill_pod(self, index, grace_s=1):
        from muster.schedulers.kubernetes.kube import POD

        pod = self.pod(index)
        path = POD.build_path(self.namespace, pod["metadata"]["name"])
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": grace_s}
        self.resources.client.request("DELETE", path, what="pod", verb="delete", body=body)
        return pod

    def evict_pod(self, index):
        """What `kubectl drain` does to a pod."""
        from muster.schedulers.kubernetes.kube import POD

        pod = self.pod(index)
        name = pod["metadata"]["name"]
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": self.namespace}}
        path = POD.build_path(self.namespace, name) + "/eviction"
        self.resources.client.request("POST", path, what="eviction", verb="create", body=body)
        return pod

    def wait_for_replacement(self, index, old):
        def find_replacement():
            pod = self.pod(index)
            return pod if pod is not None and pod["metadata"]["uid"] != old["metadata"]["uid"] else None

        return wait_until(find_replacement, f"a new pod for node {index}")


@pytest.fixture
def start(resources, namespace, tmp_path):
    """Submits `dist.ddp` of a program of tests/programs with TorchX's runner; deletes the app afterwards."""
    from torchx.runner import get_runner

    from muster.components.dist import ddp

    jobs = []
    with get_runner() as runner:

        def submit(program, *args, j="2x1", workspace=None, template=SMALL, cfg=None, **changes):
            folder = workspace or tmp_path / f"workspace-{len(jobs)}"
            if workspace is None:
                folder.mkdir()
                (folder / program).write_bytes((PROGRAMS / program).read_bytes())
            given = {"image": os.environ["MUSTER_TEST_IMAGE"], "name": "main", "max_retries": 0, **changes}
            app = ddp(*args, script=program, j=j, **given)
            for role in app.roles:
                role.name = "main"
            options = {
                "namespace": namespace,
                "pod_template": json.dumps(template),
                "image_pull_policy": os.environ.get("MUSTER_TEST_PULL_POLICY", "IfNotPresent"),
                **(cfg or {}),
            }
            handle = runner.run(app, "kubernetes", options, workspace=f"file://{folder}")
            jobs.append(Job(runner, resources, handle))
            return jobs[-1]

        yield submit
        for job in jobs:
            runner._scheduler("kubernetes").delete(job.app_id)
