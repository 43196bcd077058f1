"""The state of an app never goes back to an earlier one, whatever its engine reports next: for all adapters.

What a queue takes back waits again: a job of Slurm's that is queued again, a Job of Kubernetes that is suspended.
"""

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
from torchx.specs import AppState, is_terminal

from muster.schedulers.adapter.supervised import _find_state
from muster.schedulers.docker.live import unregistered
from muster.schedulers.docker.spec import Label
from muster.schedulers.kubernetes.labels import CANCEL_ANNOTATION
from muster.schedulers.kubernetes.live.pod_status import read_pod
from muster.schedulers.kubernetes.live.status import Observation, decide_state, has_run
from muster.schedulers.slurm import live, words
from muster.schedulers.supervision import decisions, events
from muster.schedulers.supervision.events import ReplicaEnded
from muster.schedulers.supervision.state import ReplicaId, RetryScope, SupervisedRole

HISTORIES = 100
ORDER = (AppState.SUBMITTED, AppState.PENDING, AppState.RUNNING)


def check_order(states: list[AppState]) -> None:
    for before, after in itertools.pairwise(states):
        assert after not in (ORDER if is_terminal(before) else ORDER[: ORDER.index(before)]), states


class Job:
    """A Job of two nodes, its pods and its controller. What they do has no order, and each step can be seen."""

    def __init__(self, rng: random.Random, *, loses: bool) -> None:
        self.rng, self.loses = rng, loses
        self.status: dict[str, Any] = {}
        self.marks: dict[str, str] = {}
        self.pods: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
        self.now = 0

    def step(self) -> None:
        self.now += 1
        index = self.rng.randrange(2)
        last = self.pods[index][-1] if self.pods[index] else None
        phase = None if last is None else last["status"]["phase"]
        if self.rng.random() < 0.03:
            self.marks = {CANCEL_ANNOTATION: "torchx cancel"}
        elif not self.status:
            self.status = {"startTime": "2026-01-01T00:00:00Z"}
        elif self.marks and self.rng.random() < 0.3:
            self.end("Failed", "DeadlineExceeded")
        elif phase in (None, "Failed"):
            self.create_pod(index)
        elif phase == "Pending":
            last["status"]["phase"] = self.rng.choice(["Running", "Pending", "Succeeded"])  # soon over: never seen
        elif phase == "Running":
            self.end_pod(index, last)
        elif all(pods and pods[-1]["status"]["phase"] == "Succeeded" for pods in self.pods.values()):
            self.end("Complete", "")

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

    def observe(self, *, ran: bool) -> Observation:
        metadata = {"name": "app-x1-trainer", "labels": {}, "annotations": self.marks}
        spec = {"parallelism": 2, "completions": 2}
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec, "status": self.status}
        pods = [read_pod(pod) for pods in self.pods.values() for pod in pods]
        return Observation(parents=[job], pods=pods, ran_before=ran)


@pytest.mark.parametrize("loses", [False, True])
def test_of_kubernetes(*, loses: bool) -> None:
    """At its end every job was RUNNING, PENDING, SUCCEEDED: its pods end before the controller has seen it."""
    ends = set()
    for seed in range(HISTORIES):
        job, states, ran = Job(random.Random(seed), loses=loses), list[AppState](), False
        while not (states and is_terminal(states[-1])) and job.now < 50:
            job.step()
            seen = job.observe(ran=ran)
            ran = loses and has_run(seen)  # as the session knows it
            states.append(decide_state(seen))
        check_order(states)
        ends.add(states[-1])
    assert ends >= {AppState.SUCCEEDED, AppState.CANCELLED}


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
        state, states = decisions.build_state(plan), [_find_state(None, "")]
        for step in range(30):
            replica = ReplicaId(rng.choice("ab"), rng.randrange(2))
            ended = ReplicaEnded(replica=replica, exit_code=rng.choice([0, 0, 1, 69, 137, 143, None]), reason="")
            stop = events.CancelRequested(reason="cancelled")
            event: events.Event = ended if rng.random() < 0.95 else stop
            states.append(_find_state(SimpleNamespace(app=state), ""))  # type: ignore[arg-type]
            state, _ = decisions.decide(plan, state, event if step else events.Begin())
        check_order(states)


def test_of_docker_without_a_supervisor() -> None:
    """Of an app of another home folder only the containers are known."""
    for seed in range(HISTORIES):
        rng = random.Random(seed)
        found, states = [make_container(replica, 0) for replica in (0, 1)], []
        for _ in range(20):
            states.append(unregistered.find_app_state(found))  # type: ignore[arg-type]
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
    """One incarnation: what is queued again waits again."""
    before = ["PENDING", "CONFIGURING"]
    while_running = ["RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT", "COMPLETING"]
    ends = [name for name, state in words.STATES.items() if is_terminal(state)]
    for seed in range(HISTORIES):
        rng = random.Random(seed)
        told = [rng.choice(before) for _ in range(3)] + [rng.choice(while_running) for _ in range(5)]
        status = rng.choice(["succeeded", "failed", "lost", "cancelled"])
        replica = ReplicaId("w", 0)
        known = SimpleNamespace(status=SimpleNamespace(value=status))
        node = SimpleNamespace(record=SimpleNamespace(app=SimpleNamespace(replicas={replica: known})))
        role = SimpleNamespace(name="w", runs_agent=True, needed=1)
        entries = [*told, *[rng.choice(ends)] * 2, *([None] if is_recorded else [])]
        states = [
            live.App(
                spec=SimpleNamespace(roles=[role]),  # type: ignore[arg-type]
                folder=None,  # type: ignore[arg-type]
                entry=entry and live.QueueEntry(job_id="7", state=entry),
                runs=("7.0",) if is_recorded else (),
                nodes={replica: node} if is_recorded else {},  # type: ignore[dict-item]
                is_cancelled=False,
            ).state
            for entry in entries
        ]
        check_order(states)
