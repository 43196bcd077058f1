"""A model of Kueue for the double of the API server: one queue with a quota of pods.

It suspends what is created with a queue's label, and has a Workload for it. While there is quota it starts what
waits, the oldest first. What is admitted runs, also if another has suspended it. What has ended, or is deleted, gives
its quota back.

Source: pkg/controller/jobs/job, pkg/controller/jobs/jobset and pkg/controller/jobframework of kubernetes-sigs/kueue.
"""

import copy

from doubles.kubernetes_rules import Broken

QUEUE = "kueue.x-k8s.io/queue-name"
MINIMUM = "kueue.x-k8s.io/job-min-parallelism"
GROUP = "/apis/kueue.x-k8s.io/v1beta1"


class Kueue:
    """Install it as `cluster.kueue`. Call `reconcile` whenever its controller should act."""

    def __init__(self, cluster, quota):
        self.cluster = cluster
        self.quota = quota
        self.starts = []  # names of what it has started, or started again
        cluster.groups["kueue.x-k8s.io"] = ["v1beta1"]
        cluster.kinds["kueue.x-k8s.io/v1beta1"] = ["localqueues", "workloads"]
        queue = {"metadata": {"name": "gpu", "namespace": "team"}}
        cluster.add_object(GROUP, "team", "localqueues", queue)

    def add(self, key, item):
        """The webhook of the creation."""
        if QUEUE not in item["metadata"].get("labels", {}) or key[2] not in ("jobs", "jobsets"):
            return
        item["spec"]["suspend"] = True
        uid = item["metadata"]["uid"]
        owner = {"kind": item["kind"], "name": key[3], "uid": uid}
        metadata = {"name": f"{key[2]}-{key[3]}", "namespace": key[1], "ownerReferences": [owner]}
        conditions = [{"type": "QuotaReserved", "status": "False", "message": "insufficient unused quota"}]
        workload = {"metadata": metadata, "status": {"conditions": conditions}, "owner": key}
        self.cluster.add_object(GROUP, key[1], "workloads", workload)

    def check_update(self, old, new):
        """The webhook of a change."""
        moved = old.get("spec", {}).get("parallelism") != new.get("spec", {}).get("parallelism")
        if moved and MINIMUM in old["metadata"].get("annotations", {}) and not old["spec"].get("suspend"):
            raise Broken("spec.parallelism: Forbidden: cannot change when partial admission is enabled")

    def list_workloads(self):
        """The oldest first."""
        found = [item for key, item in self.cluster.objects.items() if key[0] == GROUP and key[2] == "workloads"]
        return sorted(found, key=lambda item: item["metadata"]["creationTimestamp"])

    def reconcile(self):
        """One pass of the controller."""
        with self.cluster.lock:
            used = sum(count_pods(self.find_owner(each)) for each in self.list_workloads() if self.is_admitted(each))
            for workload in self.list_workloads():
                owner = self.find_owner(workload)
                if has_ended(owner):
                    continue
                if not self.is_admitted(workload):
                    if used + count_pods(owner) > self.quota:
                        continue
                    used += count_pods(owner)
                    workload["status"]["conditions"] = [{"type": "Admitted", "status": "True"}]
                if owner["spec"].get("suspend"):
                    self.start(workload["owner"], owner)

    def has_ended(self, workload):
        """Whether it waits no more, and holds no quota."""
        return has_ended(self.find_owner(workload))

    def find_owner(self, workload):
        return self.cluster.objects[workload["owner"]]

    def is_admitted(self, workload):
        conditions = workload["status"]["conditions"]
        return conditions[0]["type"] == "Admitted" and not has_ended(self.find_owner(workload))

    def evict(self):
        """Preemption: all that runs is suspended, and waits again."""
        with self.cluster.lock:
            self.quota = 0
            for workload in self.list_workloads():
                if self.is_admitted(workload):
                    workload["status"]["conditions"] = [
                        {"type": "QuotaReserved", "status": "False", "message": "evicted"}
                    ]
                    self.set_suspend(workload["owner"], True)

    def start(self, key, item):
        self.starts.append(key[3])
        self.set_suspend(key, False)
        if key[2] == "jobsets":
            self.create_jobset_pods(key, item)

    def set_suspend(self, key, suspend):
        before = self.cluster.objects[key]["spec"].get("suspend")
        self.cluster.objects[key]["spec"]["suspend"] = suspend
        self.cluster.follow_suspend(key, before)

    def create_jobset_pods(self, key, item):
        """What the JobSet controller creates, without the Jobs in between."""
        for job in item["spec"]["replicatedJobs"]:
            template = copy.deepcopy(job["template"]["spec"]["template"])
            owner = {"kind": "JobSet", "name": key[3], "uid": item["metadata"]["uid"]}
            metadata = {**template["metadata"], "name": f"{key[3]}-{job['name']}-0-0", "namespace": key[1]}
            metadata["ownerReferences"] = [owner]
            pod = {"metadata": metadata, "spec": template["spec"], "status": {"phase": "Running"}}
            self.cluster.add_object("/api/v1", key[1], "pods", pod)


def has_ended(item):
    conditions = item.get("status", {}).get("conditions", ())
    return any(each["type"] in ("Complete", "Completed", "Failed") for each in conditions)


def count_pods(item):
    if item["kind"] == "Job":
        return min(item["spec"]["parallelism"], item["spec"]["completions"])
    return sum(job["template"]["spec"]["parallelism"] for job in item["spec"]["replicatedJobs"])
