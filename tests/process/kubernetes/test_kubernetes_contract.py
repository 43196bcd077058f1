"""What every adapter must do, of Kubernetes: the double of the API server, with a kubelet that runs processes."""

from typing import ClassVar

import pytest
from doubles.kubernetes_kubelet import run_kubelet

from muster.testing import SchedulerContract


class TestKubernetes(SchedulerContract):
    """Replicas are pods."""

    factory = "muster.schedulers.kubernetes:create_scheduler"
    cfg: ClassVar = {"namespace": "team"}
    image = "img"
    steps = (
        "muster.schedulers.kubernetes.api.objects:Objects.create",
        "muster.schedulers.kubernetes.api.objects:Objects.patch",
    )

    @pytest.fixture(autouse=True)
    def _pods(self, cluster, tmp_path):
        self.cluster = cluster
        with run_kubelet(cluster, tmp_path / "pods") as self.kubelet:
            yield

    def lose_replica(self, scheduler, app_id, index):
        self.kubelet.kill(self.cluster.find_pod(app_id.partition(":")[2], index))

    def list_left(self, app_id):
        name = app_id.rpartition(":")[2]
        with self.cluster.lock:
            found = [key for key in self.cluster.objects if key[3].startswith(name) and key[2] != "events"]
        return [*map(str, found), *(pod for pod in self.kubelet.running if pod.startswith(name))]
