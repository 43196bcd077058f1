"""The state of an app never goes back to an earlier one, whatever its engine reports next: for all adapters.

What a queue takes back waits again: a job of Slurm's that is queued again, a Job of Kubernetes that is suspended. An
app that has ended stays as it ended.
"""

import itertools
import random
from collections.abc import Container
from types import SimpleNamespace
from typing import Any

import pytest
from torchx.specs import AppState, is_terminal

from muster._shared.role_policy import RolePolicy
from muster.schedulers.adapter.supervised import _find_state
from muster.schedulers.docker.running_apps import orphaned_apps
from muster.schedulers.docker.spec import Label
from muster.schedulers.kubernetes.kube import CANCEL_ANNOTATION
from muster.schedulers.kubernetes.running_apps.pod_status import read_pod
from muster.schedulers.kubernetes.running_apps.status import Observation, decide_state, has_run
from muster.schedulers.slurm import reasons, running_apps
from muster.schedulers.supervision import decisions
from muster.schedulers.supervision.decisions import ReplicaEnded
from muster.schedulers.supervision.state import ReplicaId, RetryScope, SupervisedRole

HISTORIES = 100
ORDER = (AppState.SUBMITTED, AppState.PENDING, AppState.RUNNING)


def check_order(states: list[AppState], taken_back: Container[int] = ()) -> None:
    """Check each state against the one before. `taken_back`: where a queue has taken the app back, which waits."""
    for index, (before, after) in enumerate(itertools.pairwise(states), start=1):
        if is_terminal(before):
            assert after is before, states
        elif index in taken_back:
            assert after is AppState.PENDING, states
        else:
            assert after not in ORDER[: ORDER.index(before)], states


class Job:
    """A Job of two nodes, its pods and its controller. What they do has no order, and each step can be seen.

    `loses`: pods are deleted, too, of which only a process that has seen them knows.
    """

    CANCEL_KEEPS_PODS = True

    def __init__(self, rng: random.Random, *, loses: bool) -> None:
        self.rng, self.loses = rng, loses
        self.status: dict[str, Any] = {}
        self.marks: dict[str, str] = {}
        self.pods: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
        self.is_queued = False
        self.now = 0

    def step(self) -> None:
        self.now += 1
        index = self.rng.randrange(2)
        last = self.pods[index][-1] if self.pods[index] else None
        phase = None if last is None else last["status"]["phase"]
        if self.rng.random() < 0.03 and (self.loses or self.CANCEL_KEEPS_PODS):
            self.cancel()
        elif not self.marks and self.rng.random() < 0.05:
            self.is_queued = not self.is_queued  # by its queue; it takes the pods one by one
        elif not self.status:
            self.status = {"startTime": "2026-01-01T00:00:00Z"}
        elif self.marks and self.rng.random() < 0.3:
            self.end_cancelled()
        elif self.is_suspended():
            self.pods[index].clear()
        elif phase in (None, "Failed"):
            self.create_pod(index)
        elif phase == "Pending":
            last["status"]["phase"] = self.rng.choice(["Running", "Pending", "Succeeded"])  # soon over: never seen
        elif phase == "Running":
            self.end_pod(index, last)
        elif all(pods and pods[-1]["status"]["phase"] == "Succeeded" for pods in self.pods.values()):
            self.end("Complete", "")

    def is_suspended(self) -> bool:
        return self.is_queued

    def cancel(self) -> None:
        self.marks = {CANCEL_ANNOTATION: "torchx cancel"}
        self.is_queued = False  # what waits in a queue is deleted instead

    def end_cancelled(self) -> None:
        self.end("Failed", "DeadlineExceeded")

    def create_pod(self, index: int) -> None:
        labels = {
            "app.kubernetes.io/component": "trainer",
            "batch.kubernetes.io/job-completion-index": str(index),
        }
        name = f"app-x1-trainer-{index}-{self.now}"
        metadata: dict[str, Any] = {"name": name, "uid": name, "labels": labels}
        metadata["creationTimestamp"] = f"2026-01-01T00:{self.now:02}:00Z"
        spec = {"containers": [{"name": "main"}]}
        self.pods[index].append({"metadata": metadata, "spec": spec, "status": {"phase": "Pending"}})

    def end_pod(self, index: int, pod: dict[str, Any]) -> None:
        how = self.rng.choice(["stays", "succeeds", "fails", "drained", *["deleted"] * self.loses])
        if how == "succeeds":
            pod["status"]["phase"] = "Succeeded"
        elif how != "stays":
            code = {"fails": 137}.get(how, 143)
            ended = [{"name": "main", "state": {"terminated": {"exitCode": code}}}]
            pod["status"] = {"phase": "Failed", "containerStatuses": ended}
        if how == "deleted":
            self.pods[index].clear()  # also those before it

    def end(self, kind: str, reason: str) -> None:
        self.status["conditions"] = [{"type": kind, "status": "True", "reason": reason}]

    def build(self) -> dict[str, Any]:
        metadata = {"name": "app-x1-trainer", "labels": {}, "annotations": self.marks}
        spec = {"parallelism": 2, "completions": 2, "suspend": self.is_suspended()}
        return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec, "status": self.status}

    def observe(self, *, ran: bool) -> Observation:
        pods = [read_pod(pod) for pods in self.pods.values() for pod in pods]
        return Observation(parents=[self.build()], pods=pods, ran_before=ran)


class JobSet(Job):
    """A JobSet. A cancel suspends it, and a pod that fails makes it create all pods again."""

    CANCEL_KEEPS_PODS = False

    def is_suspended(self) -> bool:
        return self.is_queued or bool(self.marks)

    def end_cancelled(self) -> None:
        """Nothing: it stays suspended."""

    def end_pod(self, index: int, pod: dict[str, Any]) -> None:
        if self.rng.random() < 0.3:
            self.status["restarts"] = self.status.get("restarts", 0) + 1
            for pods in self.pods.values():
                pods.clear()
        else:
            super().end_pod(index, pod)

    def build(self) -> dict[str, Any]:
        return {**super().build(), "apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet"}


@pytest.mark.parametrize("kind", [Job, JobSet])
@pytest.mark.parametrize("loses", [False, True])
def test_of_kubernetes(kind: type[Job], *, loses: bool) -> None:
    """At its end every job was RUNNING, PENDING, SUCCEEDED: its pods end before the controller has seen it."""
    ends, taken_back = set(), 0
    for seed in range(HISTORIES):
        job, states, ran, queued = kind(random.Random(seed), loses=loses), list[AppState](), False, set[int]()
        while not (states and is_terminal(states[-1])) and job.now < 50:
            job.step()
            seen = job.observe(ran=ran)
            ran = loses and has_run(seen)  # as the session knows it
            if job.is_queued and not any(pod.phase == "Running" for pod in seen.pods):
                queued.add(len(states))
            states.append(decide_state(seen))
        check_order(states, queued)
        taken_back += (AppState.RUNNING, AppState.PENDING) in itertools.pairwise(states)
        ends.add(states[-1])
    assert ends >= {AppState.SUCCEEDED, *[AppState.CANCELLED] * (loses or kind is Job)}
    assert taken_back


def test_of_a_supervisor() -> None:
    """local_cwd, Docker, ssh and held."""
    for seed in range(HISTORIES):
        rng = random.Random(seed)
        scopes = [*RetryScope]
        plan = [
            SupervisedRole(
                name=name, replicas=2, runs_agent=rng.random() < 0.5, max_retries=2, retry_scope=rng.choice(scopes)
            )
            for name in ("a", "b")
        ]
        state, states = decisions.build_state(plan), [_find_state(None, None)]
        for step in range(30):
            replica = ReplicaId(rng.choice("ab"), rng.randrange(2))
            ended = ReplicaEnded(replica=replica, exit_code=rng.choice([0, 0, 1, 69, 137, 143, None]))
            stop = decisions.CancelRequested()
            event: decisions.Event = ended if rng.random() < 0.95 else stop
            states.append(_find_state(SimpleNamespace(app=state), None))  # type: ignore[arg-type]
            state, _ = decisions.decide(plan, state, event if step else decisions.Begin())
        check_order(states)


def test_of_docker_without_a_supervisor() -> None:
    """Of an app of another home folder only the containers are known."""
    for seed in range(HISTORIES):
        rng = random.Random(seed)
        found, states = [make_container(replica, 0) for replica in (0, 1)], []
        for _ in range(20):
            states.append(orphaned_apps.find_app_state(found))  # type: ignore[arg-type]
            each = rng.choice(found)
            if each.running:
                each.running, each.status = False, "exited"
                each.exit_code = rng.choice([0, 137])
                if each.exit_code and each.labels[Label.INCARNATION] == "0":  # the supervisor of the other home
                    found.append(make_container(int(each.labels[Label.REPLICA]), 1))
            elif each.status == "created":
                each.running, each.status = True, "running"
        check_order(states)


def make_container(replica: int, incarnation: int) -> SimpleNamespace:
    labels = {Label.ROLE: "w", Label.REPLICA: str(replica), Label.INCARNATION: str(incarnation)}
    return SimpleNamespace(labels=labels, running=False, status="created", exit_code=0)


@pytest.mark.parametrize("is_recorded", [False, True])
def test_of_slurm(*, is_recorded: bool) -> None:
    """Each job is queued again once. After its end Slurm forgets it, and only the records of its nodes are left."""
    before = ["PENDING", "CONFIGURING"]
    while_running = ["RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT", "COMPLETING"]
    again = ["REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "PENDING"]
    ends = [name for name, state in reasons.STATES.items() if is_terminal(state)]
    for seed in range(HISTORIES):
        rng = random.Random(seed)
        run = [rng.choice(before) for _ in range(3)] + [rng.choice(while_running) for _ in range(5)]
        entries = [*run, rng.choice(again), *run, *[rng.choice(ends)] * 2]
        status = rng.choice(["succeeded", "failed", "lost", "cancelled"])
        states = [find_slurm_state(entry, status if is_recorded else None) for entry in entries]
        check_order(states, {len(run)})
        if is_recorded:
            assert is_terminal(find_slurm_state(None, status)), "it says no more who cancelled the job"


def find_slurm_state(entry: str | None, status: str | None) -> AppState:
    replica = ReplicaId("w", 0)
    known = SimpleNamespace(status=SimpleNamespace(value=status))
    node = SimpleNamespace(record=SimpleNamespace(app=SimpleNamespace(replicas={replica: known})))
    role = SimpleNamespace(name="w", runs_agent=True, needed=1, policy=RolePolicy())
    return running_apps.App(
        spec=SimpleNamespace(roles=[role]),  # type: ignore[arg-type]
        folder=None,  # type: ignore[arg-type]
        entry=entry and running_apps.QueueEntry(job_id="7", state=entry),
        runs=() if status is None else ("7.0",),
        nodes={} if status is None else {replica: node},  # type: ignore[dict-item]
        is_cancelled=False,
    ).state
