"""Jobs of Volcano: which node a pod of theirs is, and how a role of theirs is resized."""

import golden_state

from muster.schedulers.kubernetes import volcano_jobs
from muster.schedulers.kubernetes.live.pod_status import read_pod


def read_tasks():
    (job,) = (row["object"] for row in golden_state.read_rows("volcano") if row["plural"] == "jobs")
    return job["spec"]["tasks"]


def test_the_index_of_a_node():
    def index_of(task, label):
        labels = {**task["template"]["metadata"]["labels"], "volcano.sh/task-index": label}
        return read_pod({"metadata": {"name": "p", "labels": labels}, "spec": task["template"]["spec"]}).index

    lead, rest = read_tasks()
    assert [lead["name"], rest["name"]] == ["lead", "trainer"]
    assert [index_of(lead, "0"), index_of(rest, "0"), index_of(rest, "2")] == [0, 1, 3]


def test_a_resize_leaves_node_0_and_other_roles_alone():
    lead, rest = read_tasks()
    echo = {"name": "echo", "replicas": 1}
    changed = volcano_jobs.resize_tasks({"spec": {"tasks": [echo, lead, rest]}}, "trainer", 3)
    assert {task["name"]: task["replicas"] for task in changed["tasks"]} == {"echo": 1, "lead": 1, "trainer": 2}
    assert rest["replicas"] == 3, "what was read is not changed"
