"""One app in many situations, on every scheduler: what its adapter derives, and the line that people read.

Each adapter's own code reads what its scheduler reports in the situation: exit codes, files, pods, Slurm's answers. The
file has a cell for each adapter: its line, and below it each reason with its facts. Equal cells are told once.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
from docker_samples import build_container
from docker_samples import build_facts as build_container_facts
from doubles.samples import write_report
from supervised_apps import App, agents, build_spec
from torchx.specs import AppDef, Role

from muster._shared.contract import FORMAT, Env, LogNames
from muster.schedulers.adapter import AgentReports, RecordReader
from muster.schedulers.adapter.supervised import build_supervised_facts
from muster.schedulers.docker.running_apps import orphaned_apps
from muster.schedulers.docker.running_apps.exit_evidence import explain_end
from muster.schedulers.docker.spec import REPORT_FILE, Label
from muster.schedulers.failure_report import explain_start_failure
from muster.schedulers.kubernetes.kube import APPDEF_ANNOTATION, CANCEL_ANNOTATION
from muster.schedulers.kubernetes.manifests.bundles import encode_app
from muster.schedulers.kubernetes.running_apps.pod_status import explain_event, read_pod
from muster.schedulers.kubernetes.running_apps.status import Observation
from muster.schedulers.kubernetes.running_apps.status import build_facts as build_cluster_facts
from muster.schedulers.node_program.frames import LOST, STATE_NAME
from muster.schedulers.processes.capture import log_path
from muster.schedulers.processes.driver import ProcessDriver
from muster.schedulers.runner.app_codec import dump_app
from muster.schedulers.slurm import node, running_apps
from muster.schedulers.slurm.client import QueueEntry
from muster.schedulers.ssh.driver import SshDriver
from muster.schedulers.supervision import decisions
from muster.schedulers.supervision.app_folder import AppFolder, AppRecord
from muster.schedulers.supervision.client import find_loss
from muster.schedulers.supervision.driver import EventQueue
from muster.schedulers.supervision.machine import Machine
from muster.schedulers.supervision.state import AppPhase, ReplicaId, ReplicaState, ReplicaStatus, SupervisedApp
from muster.schedulers.wording.facts import AppFacts
from muster.schedulers.wording.job_line import format_line
from muster.schedulers.wording.reasons import Code, Reason, list_facts, to_data, walk

GOLDEN = Path(__file__).with_name("situations.txt")
APP = AppDef(name="app", roles=[Role(name="trainer", image="img", num_replicas=2)])
REASON = "rank 1 on node 1 (h) exited with code 3 (ValueError: boom)"
FAILURE = {"host": "h", "node": 1, "node_index": 1, "global_rank": 1, "exception": "ValueError: boom"}
REPORT = write_report(REASON, {**FAILURE, "exit_code": 3})
OOM_REPORT = write_report(
    "rank 1 on node 1 (h) was ended by SIGKILL", {**FAILURE, "exception": None, "cause": "host-oom"}
)
REFUSED = "--nproc-per-node 0: must be 1 or more"
NO_PYTHON = 'exec: "python3": executable file not found in $PATH'
MAY_30 = 1_780_142_400.0


# -- the adapters: what a scheduler reports goes in, facts come out ---------------------------------------------------


class Local:
    """local_cwd."""

    driver_type: Callable[..., ProcessDriver] = ProcessDriver

    def __init__(self, folder: Path, *, retries: int = 1, begun: bool = True) -> None:
        plan = {"command": ["python3"], "env": {Env.LOG_DIR: str(folder / "trainer")}, "cwd": str(folder)}
        self.app = App(agents(2, max_retries=retries))
        details = {"replicas": {"trainer": [plan, plan]}, "base_env": {}, "token": "t", "continues": "requeue"}
        details |= {"hosts": ["h0", "h1"], "ssh": {}, "may_lose": False, "shared": True}
        self.spec = build_spec(folder, roles=self.app.plan, description=dump_app(APP), details=details)
        self.words, self.lost, self.jobs = AgentReports(), None, {}
        self.folder = AppFolder(folder)
        self.folder.state_dir.mkdir(parents=True)
        self.driver = self.driver_type(spec=self.spec, event_queue=Mock())
        self.driver.close(succeeded=True)  # its socket
        if begun:
            self.app.begin()

    def explain(self, replica: ReplicaId, code: int, *, report: str = "", stderr: str = "") -> tuple[Any, Any]:
        """What the driver says of a process that has left these."""
        path = self.folder.role_dir("trainer") / "run" / LogNames.REPORT
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(report)
        errors = log_path(self.folder.replica_dir(replica), "stderr")
        errors.parent.mkdir(parents=True, exist_ok=True)
        errors.write_text(stderr and f"muster: {stderr}\n")
        return self.driver.explain_end(replica, code)

    def end(self, index: int, code: int, **left: Any) -> None:
        code, reasons = self.explain(ReplicaId("trainer", index), code, **left)
        self.app.end(f"trainer/{index}", code, reasons=reasons)

    def refuse_start(self, error: str) -> None:
        said = (Reason(code=Code.COULD_NOT_START, text=error),)  # of a `StartError`, in `Supervisor`
        self.app.end("trainer/0", None, reasons=said, final=True)

    def ask(self, request: str) -> None:
        asked = {"cancel": decisions.CancelRequested(), "stop": decisions.DrainRequested(limit_s=1.0)}
        self.app.decide_event(asked[request])

    def tell(self, job: Any) -> None:
        self.words = AgentReports(jobs={"trainer": job})

    def record(self) -> AppRecord:
        return AppRecord(app=self.app.state, machine=Machine.here())

    def lose_supervisor(self) -> None:
        with patch("muster.schedulers.supervision.client.is_lost", lambda *_: True):  # no process held its lock
            self.lost = find_loss(self.folder, replace(self.record(), submitted_s=MAY_30))

    def build(self) -> AppFacts:
        for index, known in enumerate(self.app.state.replicas.values()):
            if known.status is ReplicaStatus.RUNNING and self.app.state.phase is AppPhase.ENDING:
                self.app.end(f"trainer/{index}", 143)
        return build_supervised_facts(self.spec, self.record(), self.words, lost=self.lost)


class Ssh(Local):
    driver_type = SshDriver

    def lose(self, index: int, **facts: Any) -> None:
        path = self.folder.replica_dir(ReplicaId("trainer", index)) / STATE_NAME
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"lost": [to_data(Reason(code=Code.LINK_LOST, **facts))]}))
        self.end(index, LOST)


class Docker(Local):
    def explain(self, replica: ReplicaId, code: int, *, report: str = "", stderr: str = "", **state: Any) -> Any:
        """What the driver finds in a container that has ended."""
        engine = Mock()
        engine.copy_out = lambda _container, path, _limit: report.encode() if path == REPORT_FILE else None
        engine.logs = lambda _container, **_: [(2, f"muster: {stderr}\n".encode())] if stderr else []
        facts = build_container_facts(exit_code=code, **state)
        error_file = self.folder.state_dir / LogNames.ERROR
        reasons, _ = explain_end(engine, facts, build_container(), error_file, has_init=False)
        return code, reasons

    def refuse_start(self, error: str) -> None:
        reason = explain_start_failure(error, "img", "python3", runs_agent=True)
        self.app.end("trainer/0", 127, reasons=(reason,), final=True)

    def lose_engine(self) -> None:
        self.words = AgentReports(trouble=(Reason(code=Code.NO_ENGINE, host="unix:///docker.sock"),))

    def remove(self, index: int) -> None:
        self.app.end(f"trainer/{index}", 137, reasons=(Reason(code=Code.CONTAINER_REMOVED),))


class _QuietDriver(node.SlurmDriver):
    def start(self, *_: object) -> dict[str, Any]:  # type: ignore[override]
        return {}


class Slurm(Local):
    """A supervisor for each node; Slurm's answers are `entry`."""

    driver_type = _QuietDriver

    def __init__(self, folder: Path, *, retries: int = 1, begun: bool = True) -> None:
        super().__init__(folder, retries=retries)
        self.entry: QueueEntry | None = QueueEntry(job_id="7", state="RUNNING", nodes=("n0", "n1"))
        self.runs = ("7.0",) if begun else ()
        (self.folder.state_dir / node.JOBS_NAME).write_text("7\n")
        self.nodes: list[node.NodeSupervisor] = []
        self.posted: list[Any] = []
        for index in range(2 if begun else 0):
            replica = ReplicaId("trainer", index)
            at = node.NodeFolder(folder, "7.0", replica)
            at.state_dir.mkdir(parents=True)
            running = {replica: ReplicaState(status=ReplicaStatus.RUNNING, starts=1)}
            at.write_record(
                AppRecord(app=SupervisedApp(replicas=running, phase=AppPhase.RUNNING), machine=Machine.here())
            )
            allocation = node.Allocation(job_id="7", restarts="0", task=index, hosts=("n0", "n1"), end_s=None)
            queue = EventQueue()
            queue.post = self.posted.append  # type: ignore[method-assign]
            self.nodes.append(node.NodeSupervisor(at, self.spec, queue, self.driver, allocation))  # type: ignore[arg-type]

    def end(self, index: int, code: int, **left: Any) -> None:
        replica = ReplicaId("trainer", index)
        code, reasons = self.explain(replica, code, **left)
        self.nodes[index].handle_event(decisions.ReplicaEnded(replica=replica, exit_code=code, reasons=reasons))

    def ask(self, request: str) -> None:
        self.folder.request_file.write_text(request)
        self.set(state="CANCELLED")

    def set(self, **known: Any) -> None:
        self.entry = QueueEntry(**{"job_id": "7", "nodes": ("n0", "n1"), **known})

    def queue(self, reason: str) -> None:
        self.set(state="PENDING", reason=reason, nodes=())

    def forget(self) -> None:
        self.entry, self.runs, self.nodes = None, (), []

    def leave(self, how: str, *args: object) -> None:
        """End both nodes as Slurm's signal or the time limit lets them."""
        for index, each in enumerate(self.nodes):
            getattr(each, how)(*args)
            while self.posted:
                each.handle_event(self.posted.pop(0))
            self.end(index, 143)
            each.close()

    def build(self) -> AppFacts:
        known = {
            each._allocation.task: running_apps.NodeState(node=f"n{at}", record=each.record)
            for at, each in enumerate(self.nodes)
        }
        app = running_apps.App(
            spec=self.spec,
            folder=self.folder,
            entry=self.entry,
            runs=self.runs,
            nodes={ReplicaId("trainer", index): each for index, each in known.items()},
            is_cancelled=self.folder.request_file.exists(),
        )
        facts = running_apps.build_facts(app, self.words, None)
        for each in self.nodes:
            each._event_queue.close()
        return facts


class Kubernetes:
    """Pods and a Job as the API server has them."""

    def __init__(self, _folder: Path, **_options: object) -> None:
        self.pods: list[dict[str, Any]] = []
        annotations = {APPDEF_ANNOTATION: encode_app(APP)}
        self.job: dict[str, Any] = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": "app-x1-trainer", "annotations": annotations, "labels": {}, "uid": "u"},
            "spec": {"completions": 2, "parallelism": 2},
            "status": {"active": 2, "conditions": []},
        }
        self.more: dict[str, Any] = {}

    def put(self, index: int, phase: str = "Running", *, at: int = 0, deleted: bool = False, **status: Any) -> None:
        container = {"name": "main", "image": "img", "command": ["python3"], "args": ["-m", "muster.agent", "x.py"]}
        container["resources"] = {"limits": {"memory": "2048Mi"}}  # type: ignore[assignment]
        labels = {"app.kubernetes.io/component": "trainer", "batch.kubernetes.io/job-completion-index": str(index)}
        metadata = {"name": f"app-x1-trainer-{index}-{at}", "uid": f"{index}-{at}", "labels": labels}
        metadata |= {"creationTimestamp": f"2026-01-01T00:00:0{at}Z"}
        metadata |= {"deletionTimestamp": "2026-01-01T00:01:00Z"} if deleted else {}
        spec = {"nodeName": "node-a", "containers": [container]}
        self.pods.append({"metadata": metadata, "spec": spec, "status": {"phase": phase, **status}})

    def wait(self, **status: Any) -> None:
        for index in range(2):
            self.put(index, "Pending", **status)

    def fail(self, code: int, *, word: str = "Error", message: str = "", **status: Any) -> None:
        ended = {"exitCode": code, "reason": word, "message": message, "finishedAt": "2026-01-01T00:00:09Z"}
        self.put(1, "Failed", containerStatuses=[{"name": "main", "state": {"terminated": ended}}], **status)

    def conclude(self, kind: str, word: str, text: str = "") -> None:
        self.job["status"]["conditions"].append({"type": kind, "status": "True", "reason": word, "message": text})

    def annotate(self, by: str) -> None:
        self.job["metadata"]["annotations"][CANCEL_ANNOTATION] = by

    def suspend(self) -> None:
        self.job.update(spec={"suspend": True})

    def warn(self, text: str) -> None:
        self.observe(warnings={"app-x1-trainer": explain_event("FailedCreate", text)})

    def observe(self, **more: Any) -> None:
        self.more.update(more)

    def tell(self, job: Any) -> None:
        self.put(0)
        self.put(1)
        self.observe(jobs={"trainer": job})

    def build(self) -> AppFacts:
        return build_cluster_facts(
            "ns:app-x1", Observation(parents=[self.job], pods=[*map(read_pod, self.pods)], **self.more)
        )


# -- the situations ---------------------------------------------------------------------------------------------------

ADAPTERS: dict[str, Any] = {
    "local_cwd": Local,
    "local_docker": Docker,
    "ssh": Ssh,
    "slurm": Slurm,
    "kubernetes": Kubernetes,
}
Cell = Callable[[Any], object] | str
SITUATIONS: dict[str, Callable[[str], Cell]] = {}
OPTIONS: dict[str, dict[str, Any]] = {}
"""Of the adapters' apps, other than the usual one retry."""


def situation(name: str, supervised: Cell, options: Mapping[str, Any] | None = None, /, **own: Cell) -> None:
    """Add a row. `supervised` is for the adapters with a supervisor; a text says why it cannot happen there."""
    SITUATIONS[name] = lambda adapter: own.get(adapter, supervised)
    OPTIONS[name] = dict(options or {})


def do(name: str, *args: Any, **more: Any) -> Callable[[Any], object]:
    return lambda world: getattr(world, name)(*args, **more)


def all_of(*calls: Callable[[Any], object]) -> Callable[[Any], object]:
    return lambda world: [call(world) for call in calls]


def tell_events(*told: Mapping[str, Any], **status: Any) -> Callable[[Any], object]:
    """The agents have recorded this, and both nodes run."""
    lines = b"".join(json.dumps({"time_s": MAY_30, **each}).encode() + b"\n" for each in told)
    page = json.dumps({"format": FORMAT, **status}).encode() if status else b""
    return lambda world: world.tell(RecordReader(lambda _names: (lines, page)).job)


def end_slurm(state: str, *calls: Callable[[Any], object]) -> Callable[[Any], object]:
    return all_of(*calls, do("set", state=state))


def fail_pod(reason: str, *args: Any, **more: Any) -> Callable[[Any], object]:
    """A pod fails, and the Job with it."""
    return all_of(do("fail", *args, **more), do("conclude", "Failed", reason))


def disrupt(reason: str, text: str) -> Callable[[Any], object]:
    """The cluster ends a pod, and its successor waits."""
    why = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": text}
    return all_of(do("put", 0), do("fail", 143, conditions=[why]), do("put", 1, "Pending", at=1))


def unschedulable(text: str, word: str = "Unschedulable") -> Callable[[Any], object]:
    return do("wait", conditions=[{"type": "PodScheduled", "status": "False", "reason": word, "message": text}])


def find_labels(world: Docker) -> AppFacts:
    del world
    labels = {Label.ROLE: "trainer", Label.REPLICA: "0", Label.INCARNATION: "0", Label.STATE_DIR: "/state"}
    return orphaned_apps.build_facts(
        "app", [build_container_facts(status="running", exit_code=None, labels=labels)], "/state"
    )


NO_QUEUE = "not possible: its programs start at once"
KILL = do("end", 1, 137)
BY_CANCEL = all_of(do("annotate", "torchx cancel"), do("conclude", "Failed", "DeadlineExceeded"))
NOT_PULLED = {"waiting": {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "img": not found'}}
NOT_BEGUN = {"begun": False}
TAINTED = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
DELETED = (Reason(code=Code.POD_DELETED, text="Stopping container main"),)

situation(
    "it waits for room",
    *(NO_QUEUE, NOT_BEGUN),
    slurm=do("queue", "Resources"),
    kubernetes=unschedulable("0/3 nodes are available: 3 Insufficient nvidia.com/gpu."),
)
situation(
    "a quota is used up",
    *(NO_QUEUE, NOT_BEGUN),
    slurm=do("queue", "AssocGrpGRES"),
    kubernetes=do("warn", "exceeded quota: x"),
)
situation(
    "it waits for another job, or for its gang",
    *(NO_QUEUE, NOT_BEGUN),
    slurm=do("queue", "Dependency"),
    kubernetes=unschedulable("", "SchedulingGated"),
)
situation(
    "its image cannot be pulled",
    "not possible: it has no image",
    local_docker="not possible: the submission is refused before there is an app",
    kubernetes=do("wait", containerStatuses=[{"name": "main", "image": "img", "state": NOT_PULLED}]),
)
situation(
    "the command does not exist",
    do("refuse_start", "'python3': No such file or directory"),
    ssh="not possible: the host's Python is looked for before there is an app",
    slurm="not possible: the job's script looks for the Python",
    local_docker=do("refuse_start", NO_PYTHON),
    kubernetes=fail_pod("FailedIndexes", 128, word="StartError", message=NO_PYTHON),
)
situation(
    "the disk is full",
    do("refuse_start", "/logs/trainer/0: No space left on device"),
    slurm="not possible: srun says it, and there is no node",
    local_docker=do("refuse_start", "no space left on device"),
    kubernetes=all_of(
        do("put", 1, "Failed", reason="Evicted", message="low on ephemeral-storage"),
        do("conclude", "Failed", "FailedIndexes"),
    ),
)
situation(
    "the agent refuses its command line",
    do("end", 0, 2, stderr=REFUSED),
    slurm=end_slurm("FAILED", do("end", 0, 2, stderr=REFUSED)),
    kubernetes=fail_pod("PodFailurePolicy", 2, message=f"muster: {REFUSED}"),
)
situation(
    "a worker fails, and the job with it",
    do("end", 1, 1, report=REPORT),
    slurm=end_slurm("FAILED", do("end", 1, 1, report=REPORT)),
    kubernetes=fail_pod("PodFailurePolicy", 1, message=REPORT),
)
situation(
    "it fails without a report",
    do("end", 1, 1),
    slurm=end_slurm("FAILED", do("end", 1, 1)),
    kubernetes=fail_pod("PodFailurePolicy", 1),
)
situation(
    "an agent is killed, and no retry is allowed",
    *(KILL, {"retries": 0}),
    slurm=end_slurm("FAILED", KILL),
    kubernetes=fail_pod("FailedIndexes", 137),
)
situation(
    "an agent is killed, and all retries are used",
    all_of(KILL, KILL),
    slurm=end_slurm("FAILED", KILL, KILL),
    kubernetes=fail_pod("BackoffLimitExceeded", 137),
)
situation(
    "an agent is killed, and starts again", KILL, kubernetes=all_of(do("put", 0), do("fail", 137), do("put", 1, at=1))
)
situation(
    "a worker has failed, and the nodes form a new round",
    tell_events(
        {"what": "round_broken", "detail": {"kind": "worker", "reason": "rank 1 exited with code 3", "cause": "crash"}}
    ),
)
situation(
    "memory is used up",
    *(do("end", 1, 1, report=OOM_REPORT), {"retries": 0}),
    local_docker=do("end", 1, 137, oom_killed=True, memory_bytes=2 << 30),
    slurm=end_slurm("OUT_OF_MEMORY", KILL),
    kubernetes=fail_pod("FailedIndexes", 137, word="OOMKilled"),
)
situation("it hangs", tell_events({"what": "hang_named", "detail": {"text": "rank 1 did not enter all_reduce #7"}}))
situation("it is paused", tell_events(state="paused", step=80, total=100, paused_since_s=MAY_30))
situation(
    "it is suspended",
    "not possible: Ctrl-Z suspends the command, too",
    slurm=do("set", state="SUSPENDED"),
    kubernetes=do("suspend"),
)
situation(
    "a node is preempted",
    do("end", 1, 143),
    slurm=all_of(do("leave", "_note_signal", signal.SIGTERM, None), do("queue", "Priority")),
    kubernetes=disrupt("PreemptionByScheduler", "by a pod"),
)
situation(
    "a node is drained",
    "as a preempted node: its agent exits with 143",
    kubernetes=disrupt("EvictionByEvictionAPI", "by drain"),
)
situation(
    "a machine is lost",
    "not possible: all its nodes are on one machine",
    ssh=do("lose", 1, host="h1", limit_s=60.0, text="no route to host"),
    slurm=do("set", state="RUNNING", nodes=("n0",)),
    kubernetes=all_of(do("put", 0), do("put", 1, deleted=True, conditions=[TAINTED])),
)
situation(
    "what runs its nodes does not answer, or is lost",
    do("lose_supervisor"),
    local_docker=do("lose_engine"),
    slurm=do("forget"),
    kubernetes="not possible: the command says that the API server cannot be reached",
)
situation(
    "a person deletes a node",
    "as a killed agent",
    local_docker=do("remove", 1),
    slurm="not possible: scancel ends whole jobs",
    kubernetes=all_of(
        do("conclude", "Failed", "FailedIndexes"),
        do("observe", lost_pod=Reason(code=Code.POD_LOST, pods=("app-x1-trainer-1-0",), causes=DELETED)),
    ),
)
situation(
    "only its labels are left",
    "not possible: without its folder the app is not known",
    local_docker=find_labels,
    kubernetes="not possible: without its Jobs the app is not known",
)
situation(
    "the time limit is reached",
    "not possible: it has none",
    slurm=end_slurm("TIMEOUT", do("leave", "_leave_at_limit")),
    kubernetes=do("conclude", "Failed", "DeadlineExceeded", "Job was active longer than specified deadline"),
)
situation("it is cancelled while it waits", do("ask", "cancel"), NOT_BEGUN, kubernetes=BY_CANCEL)
situation("it is cancelled while it runs", do("ask", "cancel"), kubernetes=all_of(do("put", 0), BY_CANCEL))
situation(
    "muster stop ends it",
    do("ask", "stop"),
    kubernetes=all_of(do("annotate", "muster stop"), do("conclude", "Failed", "DeadlineExceeded")),
)
situation(
    "it succeeds",
    all_of(do("end", 0, 0), do("end", 1, 0)),
    slurm=end_slurm("COMPLETED", do("end", 0, 0), do("end", 1, 0)),
    kubernetes=all_of(do("put", 0, "Succeeded"), do("put", 1, "Succeeded"), do("conclude", "Complete", "")),
)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, AppFacts | str]]:
    """The facts of each situation on each adapter, or why it is not possible there."""
    folder = tmp_path_factory.mktemp("apps")
    made: dict[str, dict[str, AppFacts | str]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node, "_run", lambda *_: "")
        for row, (name, choose) in enumerate(SITUATIONS.items()):
            for adapter, world_type in ADAPTERS.items():
                cell = choose(adapter)
                found: Any = cell
                if not isinstance(cell, str):
                    world = world_type(folder / f"{row}-{adapter}" / "app", **OPTIONS[name])
                    found = cell(world)
                    found = found if isinstance(found, AppFacts) else world.build()
                made.setdefault(name, {})[adapter] = found
    return made


def list_reasons(facts: AppFacts) -> list[Reason]:
    return [*facts.reasons, *(each for job in facts.jobs.values() for each in job.trouble)]


def test_every_situation_reads_as_written(
    table: dict[str, dict[str, AppFacts | str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muster.schedulers.wording.job_line.format_clock", lambda _at_s: "12:00")
    monkeypatch.setattr("muster.schedulers.wording.words.time.localtime", time.gmtime)

    def show(facts: AppFacts | str) -> str:
        lines = [facts] if isinstance(facts, str) else [format_line(facts), *(f"  {e!r}" for e in list_reasons(facts))]
        return "".join(f"  {line}\n" for line in lines)

    text = ""
    for name, cells in table.items():
        shown: dict[str, list[str]] = {}
        for adapter, facts in cells.items():
            shown.setdefault(show(facts), []).append(adapter)
        text += f"== {name}\n" + "".join(f"{', '.join(who)}:\n{what}" for what, who in shown.items())
    if os.environ.get("MUSTER_WRITE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text(), f"to accept the change: MUSTER_WRITE_GOLDEN=1 writes {GOLDEN}"


def test_a_code_has_the_same_facts_on_all_adapters(table: dict[str, dict[str, AppFacts | str]]) -> None:
    """The template of its words is one, but what is in brackets is left out without its facts."""
    for name, cells in table.items():
        given: dict[Code, set[frozenset[str]]] = {}
        for facts in cells.values():
            for each in () if isinstance(facts, str) else walk(list_reasons(facts)):
                given.setdefault(each.code, set()).add(frozenset(list_facts(each)) - {"causes"})
        assert {code: names for code, names in given.items() if len(names) > 1} == {}, name
