"""Which nodes the next run of a job leaves out, by commands that stand in for Slurm's."""

import json
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from muster._shared.contract import HOLD_FLAG
from muster.schedulers.slurm import node
from muster.schedulers.slurm.node import Allocation
from muster.schedulers.supervision import decisions
from muster.schedulers.supervision.app_folder import AppFolder, AppRecord, AppSpec
from muster.schedulers.supervision.driver import EventQueue
from muster.schedulers.supervision.machine import Machine
from muster.schedulers.supervision.state import (
    AppPhase,
    Outcome,
    ReplicaId,
    ReplicaState,
    ReplicaStatus,
    SupervisedApp,
    SupervisedRole,
)
from muster.schedulers.wording.reasons import Code, Reason, has_code
from muster.schedulers.wording.words import word

SENT = Reason(code=Code.SLURM_SIGNALLED, signal="SIGTERM")
KILLED = Reason(code=Code.REPLICA_ENDED, replica="w/1", exit_code=137, causes=(Reason(code=Code.ON_HOST, host="n2"),))

ALLOCATION = Allocation(job_id="7", restarts="0", task=0, hosts=("n1", "n2", "n3"), end_s=None)


class Slurm:
    """Answers the commands of a node, and notes them."""

    def __init__(self, excluded: str = "(null)", *, could_run: bool = True) -> None:
        self.excluded, self.could_run = excluded, could_run
        self.calls: list[str] = []
        """Of `scontrol` its orders, which it reads one by one."""
        self.failures = 0
        """So many changes and submissions are refused."""

    def call(self, *words: str, text: str = "") -> str | None:
        done = [self._do(each) for each in ([" ".join(words)] if words != ("scontrol",) else text.splitlines())]
        return None if None in done else "".join(each or "" for each in done)

    def _do(self, call: str) -> str | None:
        self.calls.append(call)
        if call.startswith("scontrol -o show"):
            return f"JobId=7 JobName=x JobState=RUNNING Requeue=1 ExcNodeList={self.excluded} Partition=gpu"
        if "--test-only" in call:
            return "" if self.could_run else None
        if call.startswith(("update", "sbatch")):
            if self.failures:
                self.failures -= 1
                return None
            self.excluded = call.rpartition("ExcNodeList=")[2]
            return "8"
        return ""

    def find(self, *begin: str) -> list[str]:
        return [call for call in self.calls if call.startswith(begin)]


def build_spec(
    folder: Path, count: int = 3, *, least: int | None = None, agent: bool = True, **details: Any
) -> AppSpec:
    role = SupervisedRole(name="w", replicas=count, runs_agent=agent, min_replicas=least)
    details = {"continues": "requeue", "may_lose": False, "shared": True, **details}
    return AppSpec(
        app_id="app", scheduler="slurm", folder=str(folder), driver="", roles=(role,), grace_s=5.0, details=details
    )


def build_running(replica: ReplicaId, **more: Any) -> SupervisedApp:
    return SupervisedApp(replicas={replica: ReplicaState(status=ReplicaStatus.RUNNING, starts=1)}, **more)


def write_node(folder: Path, replica: ReplicaId, app: SupervisedApp | None) -> node.NodeFolder:
    """Make the folder of a node; None: it has recorded nothing yet."""
    made = node.NodeFolder(folder, ALLOCATION.run, replica)
    made.state_dir.mkdir(parents=True, exist_ok=True)
    if app is not None:
        made.write_record(AppRecord(app=app, machine=Machine.here(), submitted_s=1.0))
    return made


class Supervised:
    """A supervisor of a node whose agent runs, with a driver that starts and ends nothing."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, spec: AppSpec, replica: ReplicaId, allocation: Allocation = ALLOCATION
    ) -> None:
        self.folder = write_node(Path(spec.folder), replica, build_running(replica, phase=AppPhase.RUNNING))
        self.replica, self.driver, queue = replica, Driver(), EventQueue()
        self.posted: list[Callable[[], None]] = []
        monkeypatch.setattr(queue, "post", self.posted.append)
        self.supervisor = node.NodeSupervisor(self.folder, spec, queue, self.driver, allocation)  # type: ignore[arg-type]

    def signal(self, *signums: int) -> None:
        for signum in signums:
            self.supervisor._note_signal(signum, None)
        for each in self.posted:
            self.supervisor.handle_event(each)

    def end(self, exit_code: int | None) -> SupervisedApp:
        self.supervisor.handle_event(decisions.ReplicaEnded(replica=self.replica, exit_code=exit_code))
        self.supervisor.close()
        return self.supervisor.record.app


@pytest.fixture(autouse=True)
def _no_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node.time, "sleep", lambda _s: None)


def go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, slurm: Slurm, how: str, *suspected: str) -> Slurm:
    """End a run of a job whose leader suspects these nodes."""
    spec = build_spec(tmp_path, continues=how)
    folder = AppFolder(tmp_path)
    status = folder.role_dir("w") / "run" / "status.json"
    status.parent.mkdir(parents=True)
    nodes = [
        {"host": host, "suspicion": "it failed first" if host in suspected else ""} for host in (*"xyz", "n1", "n2")
    ]
    status.write_text(json.dumps({"nodes": [*nodes, {"host": "n3"}]} if suspected != ("torn",) else {"nodes": 3}))
    (folder.state_dir / "runs" / ALLOCATION.run).mkdir(parents=True)
    monkeypatch.setattr(node, "_call", slurm.call)
    node._continue_job(folder, spec, ALLOCATION)
    return slurm


def test_a_requeued_job_leaves_out_what_is_suspected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slurm = go_on(monkeypatch, tmp_path, Slurm(), "requeue", "n2", "x")  # x is no node of this job
    assert slurm.find("requeue", "update") == ["requeue 7", "update JobId=7 ExcNodeList=n2"]
    [test] = slurm.find("sbatch")
    assert test.startswith("sbatch --test-only --exclude=n2 ")


def test_an_update_that_is_refused_is_done_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slurm = Slurm()
    slurm.failures = 2
    go_on(monkeypatch, tmp_path, slurm, "requeue", "n2")
    assert len(slurm.find("update")) == 3
    assert len(slurm.find("requeue")) == 1, "once more might hit the next run"
    assert slurm.excluded == "n2"


@pytest.mark.parametrize("before", ["n2", "n[1-2]"])
def test_what_another_node_has_left_out_stays_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, before: str) -> None:
    slurm = go_on(monkeypatch, tmp_path, Slurm(excluded=before), "requeue", "n2")
    assert slurm.find("requeue", "update", "sbatch") == ["requeue 7"]
    assert slurm.excluded == before


def test_a_follow_up_leaves_out_what_was_left_out_before_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slurm = go_on(monkeypatch, tmp_path, Slurm(excluded="bad[1-2]"), "follow-up", "n1", "n2")
    submit = slurm.find("sbatch")[-1]
    assert submit.startswith("sbatch --parsable --exclude=bad1,bad2,n1,n2 --dependency=afterany:7 ")


def test_a_follow_up_that_is_refused_is_submitted_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slurm = Slurm()
    slurm.failures = 2
    go_on(monkeypatch, tmp_path, slurm, "follow-up")
    assert len(slurm.find("sbatch --parsable")) == 3
    told = (AppFolder(tmp_path).state_dir / node.JOBS_NAME).read_text()
    assert told == "8\n", "`muster status` and `muster stop` know it by its id while it waits, too"


@pytest.mark.parametrize("is_shared", [True, False])
def test_an_incarnation_knows_its_number_and_how_the_one_before_ended(tmp_path: Path, is_shared: bool) -> None:
    """A follow-up is another job, which Slurm counts anew. Without a shared folder earlier runs may be elsewhere."""
    spec = build_spec(tmp_path, 1, shared=is_shared, replicas={"w": [{}]})
    replica = ReplicaId("w", 0)
    first, again = replace(ALLOCATION, job_id="9"), replace(ALLOCATION, job_id="9", restarts="1")
    followed = replace(ALLOCATION, job_id="10")
    for name in (".snapshot", "7", "7.x"):
        (AppFolder(tmp_path).state_dir / node.RUNS_DIR / name).mkdir(parents=True)

    def describe(allocation: Allocation) -> str:
        text = node.describe_incarnation(AppFolder(tmp_path), spec, allocation, replica)
        folder = node.NodeFolder(tmp_path, allocation.run, replica)
        folder.state_dir.mkdir(parents=True)
        assert node.describe_incarnation(AppFolder(tmp_path), spec, allocation, replica) == text, "another was first"
        if allocation is first:
            app = SupervisedApp(replicas={replica: ReplicaState()}, reasons=(SENT,))
            folder.write_record(AppRecord(app=app, machine=Machine.here(), submitted_s=0.0))
        return text

    assert describe(first) == ""
    assert describe(again) == "2 Slurm sent SIGTERM"
    assert describe(followed) == ("3" if is_shared else ""), "the node of the second was lost"


@pytest.mark.parametrize("suspected", [(), ("n9",), ("torn",)])
@pytest.mark.parametrize("how", ["requeue", "follow-up"])
def test_without_a_suspicion_nothing_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, suspected: tuple[str, ...], how: str
) -> None:
    slurm = go_on(monkeypatch, tmp_path, Slurm(), how, *suspected)
    assert not any("exclude" in call or "ExcNodeList" in call for call in slurm.calls)


def test_a_job_that_needs_all_nodes_gets_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slurm = go_on(monkeypatch, tmp_path, Slurm(could_run=False), "requeue", "n2")
    assert slurm.find("requeue", "update") == ["requeue 7"]


@pytest.mark.parametrize(
    ("runs_agent", "exit_code", "is_over"),
    [(True, 0, True), (True, 1, True), (True, 143, False), (True, None, False), (True, 69, False), (False, 0, False)],
)
def test_a_job_that_has_ended_when_it_is_told_to_stop_is_not_run_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, runs_agent: bool, exit_code: int | None, is_over: bool
) -> None:
    """The time limit comes while the agents end: all steps are done, and the next run would begin with the first."""
    spec, replica = build_spec(tmp_path, 1, agent=runs_agent), ReplicaId("w", 0)
    running = build_running(replica, phase=AppPhase.RUNNING)
    told, _ = decisions.decide(spec.roles, running, decisions.CancelRequested(reasons=(Reason(code=Code.TIME_LIMIT),)))
    ended, _ = decisions.decide(spec.roles, told, decisions.ReplicaEnded(replica=replica, exit_code=exit_code))
    slurm = Slurm()
    monkeypatch.setattr(node, "_call", slurm.call)
    code = node._end_run(AppFolder(tmp_path), spec, ALLOCATION, ended, has_to_continue=True)
    assert slurm.find("requeue") == ([] if is_over else ["requeue 7"])
    assert code == (exit_code if is_over else 143)


@pytest.mark.parametrize(
    ("continues", "is_cancelled", "code"), [("requeue", False, 250), ("no", False, 143), ("requeue", True, 143)]
)
def test_a_node_in_an_image_without_slurm_asks_the_script_to_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, continues: str, *, is_cancelled: bool, code: int
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    spec, replica = build_spec(tmp_path, 2, in_image=True, continues=continues), ReplicaId("w", 1)
    folder = write_node(tmp_path, replica, None)
    if is_cancelled:
        AppFolder(tmp_path).write_request("cancel")
    ended = build_running(replica, phase=AppPhase.ENDED, outcome=Outcome.CANCELLED)
    allocation = replace(ALLOCATION, task=1)
    assert node._end_run(AppFolder(tmp_path), spec, allocation, ended, has_to_continue=True) == code
    own = SupervisedApp(replicas={replica: ReplicaState(exit_code=250)}, outcome=Outcome.CANCELLED)
    assert node._end_run(AppFolder(tmp_path), spec, allocation, own, has_to_continue=False) == 1, "a program's own code"
    node._end_others(AppFolder(tmp_path), allocation, (KILLED,))
    supervised = Supervised(monkeypatch, spec, replica, allocation)
    looks: list[Any] = []
    monkeypatch.setattr(supervised.supervisor._event_queue, "set_timer", lambda *words: looks.append(words[-1]))
    supervised.supervisor.watch_end()
    looks[0]()
    assert supervised.end(143).reasons == (Reason(code=Code.JOB_ENDS, causes=(KILLED,)),)
    assert folder.run_dir.exists()


LEFT, FAILED = (AppPhase.RUNNING, None), (AppPhase.ENDED, Outcome.FAILED)


@pytest.mark.parametrize(
    ("least", "others", "details", "goes_on"),
    [
        (3, [LEFT, LEFT], {"may_lose": False}, False),
        (3, [LEFT, LEFT], {"may_lose": False, "shared": False}, False),
        (2, [LEFT, LEFT], {}, True),
        (2, [LEFT, None], {}, True),  # it is just starting
        (2, [LEFT, FAILED], {}, False),
        (2, [LEFT, (AppPhase.ENDED, Outcome.SUCCEEDED)], {}, True),
        (3, [LEFT, LEFT, LEFT], {}, True),  # a spare
        (2, [LEFT, FAILED], {"shared": False}, True),  # what the others have recorded is not known
        (3, [LEFT, LEFT], {"may_lose": False, "word": HOLD_FLAG}, True),
    ],
)
def test_a_job_goes_on_without_a_replica_if_enough_are_left(
    tmp_path: Path, least: int, others: list[Any], details: dict[str, Any], *, goes_on: bool
) -> None:
    details = {"may_lose": True, "word": "main.py", **details}
    details["replicas"] = {"w": [{"command": ["python3", details.pop("word")]}] * (1 + len(others))}
    spec = build_spec(tmp_path, least=least, **details)
    for index, known in enumerate(others, start=1):
        replica = ReplicaId("w", index)
        state = {replica: ReplicaState()}
        write_node(tmp_path, replica, known and SupervisedApp(replicas=state, phase=known[0], outcome=known[1]))
    assert node._can_go_on(AppFolder(tmp_path), spec, ALLOCATION, ReplicaId("w", 0)) is goes_on


@pytest.mark.parametrize("index", [0, 7])
@pytest.mark.parametrize(
    ("roles", "exit_code", "ends_others"),
    [(("w", "x"), 1, True), (("w", "x"), 2, True), (("w", "x"), 0, False), (("w",), 1, False)],
)
def test_a_role_that_fails_ends_the_others_of_its_app(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    roles: tuple[str, ...],
    exit_code: int,
    index: int,
    *,
    ends_others: bool,
) -> None:
    made = tuple(SupervisedRole(name=name, replicas=9, runs_agent=True) for name in roles)
    spec = replace(build_spec(tmp_path), roles=made)
    slurm = Slurm()
    monkeypatch.setattr(node, "_call", slurm.call)
    status = ReplicaStatus.FAILED if exit_code else ReplicaStatus.SUCCEEDED
    known = {ReplicaId("w", index): ReplicaState(status=status, exit_code=exit_code)}
    outcome = Outcome.FAILED if exit_code else Outcome.SUCCEEDED
    app = SupervisedApp(replicas=known, phase=AppPhase.ENDED, outcome=outcome)
    assert node._end_run(AppFolder(tmp_path), spec, ALLOCATION, app, has_to_continue=False) == exit_code
    ends = ["update JobId=7 Requeue=0", "scancel --signal=USR1 7"]
    assert [each.removeprefix("scontrol ") for each in slurm.calls] == (ends if ends_others else [])


PREEMPTED = "2026-11-26T10:59:00"


@pytest.mark.parametrize(
    ("job", "saves", "continues", "goes_on"),
    [
        ("JobState=TIMEOUT", False, "requeue", False),
        ("JobState=TIMEOUT", False, "follow-up", False),
        ("JobState=TIMEOUT", True, "requeue", True),
        ("JobState=TIMEOUT", False, "no", True),  # it ends as it always has
        ("JobState=RUNNING EndTime=NEAR PreemptTime=None", False, "requeue", False),
        ("JobState=RUNNING EndTime=NEAR PreemptTime=None", True, "requeue", True),
        ("JobState=RUNNING EndTime=FAR PreemptTime=None", False, "requeue", True),
        (f"JobState=RUNNING EndTime=NEAR PreemptTime={PREEMPTED}", False, "requeue", True),
        ("JobState=PENDING", False, "requeue", True),  # scontrol requeue
        ("", False, "requeue", True),  # the controller does not answer
    ],
)
def test_a_run_that_its_limit_ends_goes_on_only_with_a_new_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, job: str, *, saves: bool, continues: str, goes_on: bool
) -> None:
    spec, replica = build_spec(tmp_path, 1, continues=continues, signal_s=120), ReplicaId("w", 0)
    kept = write_node(tmp_path, replica, None).role_dir("w") / "app" / "checkpoint.json"
    kept.parent.mkdir(parents=True)
    kept.write_text("of an earlier run")
    text = job.replace("NEAR", write_time(time.time() + 150)).replace("FAR", write_time(time.time() + 3600))
    monkeypatch.setattr(node, "_run", lambda *_words, **_more: text)
    made = Supervised(monkeypatch, spec, replica)
    made.supervisor.leave(SENT, continues=True)
    if saves:
        kept.write_text("of this run")
    app = made.end(None)
    assert made.supervisor.has_to_continue == goes_on
    assert app.outcome is (Outcome.CANCELLED if goes_on else Outcome.FAILED)
    assert has_code(app.reasons, Code.NOTHING_SAVED) != goes_on


@pytest.mark.parametrize(
    ("signum", "reason", "continues"),
    [(signal.SIGHUP, Reason(code=Code.ROLE_RESIZED), False), (signal.SIGTERM, SENT, True)],
)
def test_a_node_that_a_resize_takes_away_is_not_run_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, signum: int, reason: Reason, *, continues: bool
) -> None:
    monkeypatch.setattr(node, "_run", lambda *_words, **_more: "")
    monkeypatch.setattr(node.NodeSupervisor, "_would_repeat", lambda _self: False)
    made = Supervised(monkeypatch, build_spec(tmp_path, 1), ReplicaId("w", 0))
    made.signal(signum)
    assert (made.end(143).reasons, made.supervisor.has_to_continue) == ((reason,), continues)


@pytest.mark.parametrize(("left_s", "wait_s"), [(8.0, 3.0), (2.0, 0.0), (9999.0, node._LOOK_S)])
def test_a_run_ends_its_grace_period_before_the_time_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, left_s: float, wait_s: float
) -> None:
    """The limit may have moved when it comes, so Slurm is asked again."""
    made = Supervised(monkeypatch, build_spec(tmp_path, 1), ReplicaId("w", 0), replace(ALLOCATION, end_s=1000 + left_s))
    timers: list[tuple[float, Any]] = []
    monkeypatch.setattr(node.time, "time", lambda: 1000.0)
    monkeypatch.setattr(made.supervisor._event_queue, "set_timer", lambda _name, *timer: timers.append(timer))
    made.supervisor.watch_deadline()
    [(found_s, check)] = timers
    assert found_s == wait_s
    left, moved = [], 1000 + left_s + 60
    monkeypatch.setattr(made.supervisor, "_leave_at_limit", lambda: left.append(made.supervisor.end_s))
    for end_s in (moved, None, 1005.5):
        monkeypatch.setattr(made.supervisor, "ask_slurm", lambda _ask, then, end_s=end_s: then(end_s))
        check()
    assert (len(timers), left) == (3, [1005.5])


LOST = Reason(code=Code.NODES_LOST, hosts=("n2",))


@pytest.mark.parametrize(
    ("job", "states", "line", "details", "why"),
    [
        ("n1,n3", "n2 DOWN*", "", {}, LOST),
        ("", "n1 IDLE n2 DOWN+DRAIN n3 IDLE", "", {}, LOST),  # it is queued again already
        ("n1,n3", "n2 IDLE", "", {}, SENT),  # its part had ended first
        ("n1,n3", "n2 IDLE", "srun: error: Node failure on n2\n", {}, LOST),
        ("n1,n2,n3", "", "", {}, SENT),
        ("", "", "", {}, SENT),  # the controller does not answer
        ("n1,n3", "n2 DOWN*", "", {"may_lose": True}, SENT),  # it was lost long before
        ("n1,n3", "n2 DOWN*", "srun: error: Node failure on n2\n", {"may_lose": True}, SENT),
    ],
)
def test_a_run_that_ends_because_slurm_has_lost_a_node_names_it(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    job: str,
    states: str,
    line: str,
    details: dict[str, Any],
    why: Reason,
) -> None:
    spec = build_spec(tmp_path, **{"replicas": {"w": [{}] * 3}, **details})
    words = states.split()
    shown = "".join(f"NodeName={name} State={state}\n" for name, state in zip(words[::2], words[1::2], strict=True))
    monkeypatch.setattr(node, "_run", lambda *words, **_more: f"NodeList={job}" if "job" in words else shown)
    monkeypatch.setattr(node.NodeSupervisor, "_would_repeat", lambda _self: False)
    log = write_node(tmp_path, ReplicaId("w", 0), None).app_state_dir / node.LOG_NAME
    log.write_text("srun: error: Node failure on n9\n")
    made = Supervised(monkeypatch, spec, ReplicaId("w", 0))
    made.signal(signal.SIGTERM)
    with log.open("a") as file:
        file.write(line)
    assert made.end(143).reasons == (why,)
    second = replace(ALLOCATION, restarts="1")
    for index in (0, 7):  # the node of the second knows nothing of it
        told_next = node.describe_incarnation(AppFolder(tmp_path), spec, second, ReplicaId("w", index))
        assert told_next == f"2 {word(why)}" or (index and why != LOST)


@pytest.mark.parametrize("task", [0, 1])
def test_the_log_of_the_first_node_says_why_the_job_stops(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, task: int
) -> None:
    """The agent knows only that it was sent SIGTERM."""
    spec, replica = build_spec(tmp_path, 2, replicas={"w": [{}] * 2}), ReplicaId("w", task)
    monkeypatch.setattr(node, "_run", lambda *_words, **_more: "")

    def stop(by: str) -> list[str]:
        made = Supervised(monkeypatch, spec, replica, replace(ALLOCATION, task=task, end_s=1e9))
        if by == "limit":
            made.supervisor._leave_at_limit()
        else:
            made.signal(signal.SIGUSR1, signal.SIGTERM)
        return made.driver.lines

    limit = "w/0 [muster] Slurm job 7 reaches its time limit at 2001-09-09 01:46:40 UTC: it stops before"
    assert stop("limit") == ([limit] if task == 0 else [])
    sent = "Slurm sent SIGUSR1 (usually for `scancel`, a preemption, a lost node or the time limit)"
    assert stop("signal") == ([f"w/0 [muster] {sent}"] if task == 0 else [])
    for request, why in (("stop", "stopped (muster stop)"), ("cancel", "cancelled")):
        AppFolder(tmp_path).request_file.write_text(request)
        assert stop("signal") == ([f"w/0 [muster] {why}"] if task == 0 else [])
    node._end_others(AppFolder(tmp_path), ALLOCATION, (KILLED,))
    assert stop("signal") == (["w/0 [muster] the job ends: w/1 was ended by SIGKILL (on n2)"] if task == 0 else [])


def test_a_job_with_spares_that_loses_its_script_names_its_first_node(monkeypatch, tmp_path):
    """Slurm ends it if an administrator sets that node to DOWN."""
    spec = build_spec(tmp_path, may_lose=True, replicas={"w": [{}] * 3})
    shown = "JobId=7 JobState=COMPLETING Reason=JobLaunchFailure NodeList=n[2-3] BatchHost=n1\n"
    monkeypatch.setattr(node, "_run", lambda *_words, **_more: shown)
    monkeypatch.setattr(node.NodeSupervisor, "_would_repeat", lambda _self: False)
    made = Supervised(monkeypatch, spec, ReplicaId("w", 1), replace(ALLOCATION, task=1))
    made.signal(signal.SIGTERM)
    assert made.end(143).reasons == (Reason(code=Code.NODES_LOST, hosts=("n1",)),)


@pytest.mark.parametrize(
    ("left", "failed", "lost", "ended"),
    [
        ("n1,n3", [0], ("n2",), ("w/0 on n1",)),  # a spare had replaced it
        ("n1,n3", [1], (), ()),  # one node, twice
        ("n1,n3", [], (), ()),
        ("n3", [], ("n1", "n2"), ()),
        ("n1,n2,n3", [0], (), ()),
    ],
)
def test_a_node_that_has_failed_counts_as_one_that_slurm_has_lost(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    left: str,
    failed: list[int],
    lost: tuple[str, ...],
    ended: tuple[str, ...],
) -> None:
    """Two nodes and a spare. The last one would wait for nodes that cannot come."""
    spec = build_spec(tmp_path, 2, may_lose=True, replicas={"w": [{"command": ["python3", "main.py"]}] * 3})
    replicas = [ReplicaId("w", index) for index in range(3)]
    supervisor = Supervised(monkeypatch, spec, replicas[2], replace(ALLOCATION, task=2)).supervisor
    for each in replicas:
        phase, outcome = FAILED if each.index in failed else LEFT
        write_node(tmp_path, each, build_running(each, phase=phase, outcome=outcome))
    monkeypatch.setattr(node, "_run", lambda *_words, **_more: f"JobState=RUNNING NodeList={left}\n")
    monkeypatch.setattr(supervisor, "ask_slurm", lambda ask, then: then(ask()))
    supervisor._check_losses(replicas)
    why = Reason(code=Code.NODES_LOST, hosts=lost, replicas=ended, is_final=True)
    assert supervisor.record.app.reasons == ((why,) if lost else ())
    assert supervisor.has_to_continue == bool(lost)


def write_time(wall_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(wall_s))


class Driver:
    """Starts and ends nothing."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def print_line(self, replica: ReplicaId, text: str) -> None:
        self.lines.append(f"{replica} {text}")

    def stop(self, replica: ReplicaId, *, is_interrupt: bool) -> None:
        pass

    def close(self, *, succeeded: bool) -> None:
        pass
