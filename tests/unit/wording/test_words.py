"""Every reason in words: the one place where tests look at these sentences. Others look for codes and facts."""

import ast
import inspect
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

import muster
from muster.schedulers.wording import reasons
from muster.schedulers.wording.reasons import Code, Reason, has_code, identify, parse_reasons, to_data
from muster.schedulers.wording.words import format_duration, word, word_all

C, R = Code, Reason
HOST = R(code=C.ON_HOST, host="n2")
KILLED = R(code=C.EXITED, exit_code=137)
FULL = R(code=C.UNSCHEDULABLE, lacks=("Insufficient cpu", "taint"), counts=(2, -1), total=3)
QUOTA = R(code=C.QUOTA_EXCEEDED, word="FailedCreate", text="exceeded quota: pods=1")
MAY_30 = 1_780_142_400.0


def of_pods(code: Code, count: int, cause: Reason, **facts: Any) -> Reason:
    return R(code=code, count=count, total=4, causes=(cause,), **facts)


TABLE: dict[str, tuple[Reason, ...]] = {
    # requests of people, and what a supervisor does
    "cancelled": (R(code=C.CANCELLED),),
    "stopped (muster stop)": (R(code=C.STOPPED),),
    "killed": (R(code=C.KILLED),),
    "cancelled: its supervisor got SIGTERM": (R(code=C.SUPERVISOR_SIGNALLED, signal="SIGTERM"),),
    "cancelled: the command that started it (pid 7) ended": (R(code=C.SUBMITTER_ENDED, pid=7),),
    "is ending: killed; stopped (muster stop)": (R(code=C.ENDING, causes=(R(code=C.KILLED), R(code=C.STOPPED))),),
    "given up 600 s after SIGKILL, and perhaps still there: r/0, r/1": (
        R(code=C.GIVEN_UP, limit_s=600.0, replicas=("r/0", "r/1")),
    ),
    "its agents could not be asked to stop, so it goes on": (R(code=C.GOES_ON_UNASKED),),
    "r was resized from 3 to 1 node": (R(code=C.RESIZED, role="r", total=3, count=1),),
    "its supervisor was lost after {date}, when 1 replica ran; `muster recover app` continues it": (
        R(code=C.SUPERVISOR_LOST, at_s=MAY_30, count=1, job="app"),
    ),
    "its supervisor was lost; continued by `muster recover`": (R(code=C.SUPERVISOR_REPLACED),),
    "its supervisor was lost; continued by `muster recover`; 2 started again": (
        R(code=C.SUPERVISOR_REPLACED, count=2),
    ),
    # the end of a replica, and what follows
    "r/0 vanished": (R(code=C.REPLICA_ENDED, replica="r/0"),),
    "the agent of r/0 was ended by SIGKILL (on n2)": (
        R(code=C.AGENT_ENDED, replica="r/0", exit_code=137, causes=(HOST,)),
    ),
    "no such script (r/0 exited with code 2)": (
        R(code=C.REPLICA_REFUSED, replica="r/0", exit_code=2, causes=(R(code=C.AGENT_SAID, text="no such script"),)),
    ),
    "r/0 exited with code 1: its workers failed for good; see its log for the report": (
        R(code=C.REPLICA_FINAL, replica="r/0", exit_code=1),
    ),
    "r/0 exited with code 2: its command line is wrong; see its log": (
        R(code=C.REPLICA_FINAL, replica="r/0", exit_code=2),
    ),
    "r/0 exited with code 3 (on n2): this exit code is not retried": (
        R(code=C.REPLICA_FINAL, replica="r/0", exit_code=3, causes=(HOST,)),
    ),
    "r/0 could not be started: no such file": (
        R(code=C.NEVER_STARTED, replica="r/0", causes=(R(code=C.COULD_NOT_START, text="no such file"),)),
    ),
    "started again: 1 of 2 retries used": (R(code=C.STARTED_AGAIN, count=1, total=2),),
    "r/0 was preempted; started again (this uses no retry)": (R(code=C.PREEMPTED_AGAIN, replica="r/0"),),
    "its one retry is used": (R(code=C.RETRIES_USED, count=1),),
    "all 3 retries are used": (R(code=C.RETRIES_USED, count=3),),
    "no retries by the scheduler (--max_retries 0)": (R(code=C.NO_RETRIES),),
    "no retries by the scheduler (--max_retries 0; --max_retries 1 starts it again)": (
        R(code=C.NO_RETRIES, is_agent=True),
    ),
    "r/0 exited with code 0; started again by its role's policy (restart 3)": (
        R(code=C.REPLICA_ENDED, replica="r/0", exit_code=0),
        R(code=C.RESTARTED, count=3),
    ),
    "role l has ended, which it served": (R(code=C.SERVED_ENDED, role="l"),),
    "stopped because role a has failed": (R(code=C.STOPPED_WITH_ROLE, role="a"),),
    "restarted once": (R(code=C.RESTARTS, count=1),),
    "restarted 2 times": (R(code=C.RESTARTS, count=2),),
    "started again by its role's policy (restart 3 of 5)": (R(code=C.RESTARTED, count=3, total=5),),
    "role a has failed, which is not critical: a/0 exited with code 1; all 5 retries are used": (
        R(
            code=C.FAILED_ALONE,
            role="a",
            causes=(R(code=C.REPLICA_ENDED, replica="a/0", exit_code=1), R(code=C.RETRIES_USED, count=5)),
        ),
    ),
    "it needs 2 replicas and has 1": (R(code=C.TOO_FEW, count=1, total=2),),
    "going on with 1 replica (at least 1 needed)": (R(code=C.GOES_ON, count=1, total=1),),
    # why a replica has ended
    "its supervisor had died": (R(code=C.SUPERVISOR_DIED),),
    "h: not reached for 60 s: no route; its place is c now": (
        R(code=C.LINK_LOST, host="h", limit_s=60.0, text="no route"),
        R(code=C.MOVED, host="c"),
    ),
    "OOMKilled: out of memory, limit 2Gi; request more with --memMB": (R(code=C.OUT_OF_MEMORY, limit="2Gi"),),
    "OOMKilled: out of memory, no memory limit, so its node ran out of memory; request more with --memMB": (
        R(code=C.OUT_OF_MEMORY),
    ),
    "its container was removed": (R(code=C.CONTAINER_REMOVED),),
    "stopped before it was started": (R(code=C.STOPPED_BEFORE_START),),
    "could not be started: image 'img' has no 'sh'": (R(code=C.IMAGE_LACKS_COMMAND, image="img", program="sh"),),
    "could not be started: image 'img' has no 'python3'; muster's agent needs Python 3.10 or newer in the image": (
        R(code=C.IMAGE_LACKS_COMMAND, image="img", program="python3", is_agent=True),
    ),
    "the engine's error": (R(code=C.ENGINE_SAID, text="the engine's error"),),
    # what agents report
    "rank 3 failed: boom; cause: out of main memory; suspected: node 1; node 2": (
        R(code=C.JOB_FAILED, text="rank 3 failed", exception="boom", cause="host-oom", suspected=("node 1", "node 2")),
    ),
    "it hangs (reported at 2026-05-30 12:00:00 UTC); `muster stacks` prints all stacks, `muster stop` ends the job": (
        R(code=C.HANGS, text="it hangs", at_s=MAY_30),
    ),
    "the nodes form a new round: node 1 was lost": (R(code=C.NEW_ROUND, text="node 1 was lost"),),
    "the nodes form a new round: x (cause: out of main memory)": (R(code=C.NEW_ROUND, text="x", cause="host-oom"),),
    "rank 3 exited with code 1 (boom)": (R(code=C.WORKER_FAILED, rank=3, text="exited with code 1", exception="boom"),),
    # what is not known
    "no Docker engine answers at unix:///s: this is what was last known": (R(code=C.NO_ENGINE, host="unix:///s"),),
    "its state folder is gone; only the labels of its containers are known here": (R(code=C.STATE_GONE),),
    "it was submitted with another home folder: its state is in /h; only the labels of its containers are known here": (
        R(code=C.OTHER_HOME, text="/h"),
    ),
    "its format is newer": (R(code=C.OTHER_FORMAT, text="its format is newer"),),
    "it cannot be read: no right": (R(code=C.UNREADABLE, text="no right"),),
    "in its own words": (R(code=C.FOREIGN_TEXT, text="in its own words"),),
    "its annotation is damaged": (R(code=C.DAMAGED, text="its annotation is damaged"),),
    # Kubernetes: why pods wait
    "no claim": (R(code=C.NOT_SCHEDULED, text="no claim"),),
    "waiting for its gang or queue to be admitted": (R(code=C.GATED),),
    "cannot pull image 'img' (--image chooses another)": (R(code=C.IMAGE_NOT_PULLED, image="img"),),
    "InvalidImageName: cannot pull image 'img' (--image chooses another): bad format": (
        R(code=C.IMAGE_NOT_PULLED, image="img", word="InvalidImageName", text="bad format"),
    ),
    "FailedMount: no claim": (R(code=C.SCHEDULER_SAID, word="FailedMount", text="no claim"),),
    "FailedCreate: violates; try -cfg security=restricted": (
        R(code=C.SECURITY_REFUSED, word="FailedCreate", text="violates"),
    ),
    "Terminating": (R(code=C.TERMINATING),),
    "Terminating on node n, which does not respond; if the node will not come back, run: kubectl taint nodes n "
    "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute": (R(code=C.NODE_SILENT, host="n"),),
    "waiting in queue q": (R(code=C.QUEUE, queue="q"),),
    "waiting in queue q: insufficient quota": (R(code=C.QUEUE, queue="q", text="insufficient quota"),),
    "waiting in queue q; this account may not list workloads, which say why": (
        R(code=C.QUEUE_HIDDEN, queue="q", what="workloads"),
    ),
    "waiting for its gang: no room": (R(code=C.GANG, text="no room"),),
    "suspended: waiting for its queue q": (R(code=C.SUSPENDED_IN_QUEUE, queue="q"),),
    "suspended: to resume it, run: kubectl patch '{}'": (R(code=C.SUSPENDED, by="kubectl patch '{}'"),),
    "no pod of the job runs now, but it ran before: its pods ended or were deleted, and the cluster creates new ones": (
        R(code=C.RAN_BEFORE),
    ),
    "3 of 4 pods wait: Insufficient cpu (2 of 3 nodes), taint": (of_pods(C.PODS_WAIT, 3, FULL),),
    "1 of 4 pods runs: Terminating": (of_pods(C.PODS_RUN, 1, R(code=C.TERMINATING)),),
    "1 of 4 pods failed: node 1 (pod p) was ended by SIGKILL (last line)": (
        of_pods(C.PODS_FAILED, 1, KILLED, nodes=(1,), pods=("p",), text="last line"),
    ),
    "2 of 4 pods failed: nodes 0, 1 were ended by SIGKILL": (
        of_pods(C.PODS_FAILED, 2, KILLED, nodes=(0, 1), pods=("p", "q")),
    ),
    "2 of 4 pods failed: pods p, q: evicted by its node: low on memory": (
        of_pods(C.PODS_FAILED, 2, R(code=C.NODE_EVICTED, text="low on memory"), pods=("p", "q")),
    ),
    "2 of 4 pods are Unknown: Terminating": (of_pods(C.PODS_OTHER, 2, R(code=C.TERMINATING), word="Unknown"),),
    "1 of 2 pods waits, and Kubernetes gives no reason: kubectl x": (
        R(code=C.PODS_UNEXPLAINED, count=1, total=2, by="kubectl x"),
    ),
    "it has no pods yet, and Kubernetes gives no reason: kubectl x": (R(code=C.JOB_UNEXPLAINED, by="kubectl x"),),
    "no pods: FailedCreate: exceeded quota: pods=1; request less, or delete unused objects": (
        R(code=C.NO_PODS, causes=(QUOTA,)),
    ),
    "1 pod not created: Terminating": (R(code=C.PODS_MISSING, count=1, causes=(R(code=C.TERMINATING),)),),
    "1 pod not created yet: the Job controller replaces a pod after 10 s; if it takes longer, run: kubectl x": (
        R(code=C.PODS_REPLACED_SOON, count=1, by="kubectl x"),
    ),
    "node 1 of 2 in a pod that starts": (R(code=C.PODS_START, nodes=(1,), total=2),),
    "this account may not list events, which say why pods wait": (R(code=C.EVENTS_HIDDEN),),
    # Kubernetes: why pods and Jobs have ended
    "ended without an exit code": (R(code=C.ENDED_WITHOUT_CODE, text="ended without an exit code"),),
    "exited with code 3: SystemExit: 3": (
        R(code=C.POD_ENDED, text="SystemExit: 3", causes=(R(code=C.EXITED, exit_code=3),)),
    ),
    "preempted by a pod of higher priority: x": (R(code=C.PREEMPTED, text="x"),),
    "its node was lost or tainted": (R(code=C.NODE_TAINTED),),
    "evicted (its node is being drained): by drain": (R(code=C.NODE_DRAINED, text="by drain"),),
    "its node no longer exists": (R(code=C.NODE_GONE),),
    "terminated by its node (resource pressure or shutdown)": (R(code=C.NODE_PRESSED),),
    "its node was shut down": (R(code=C.NODE_SHUT_DOWN),),
    "cannot unpack the workspace with the image's tar (exit 127): tar?": (
        R(code=C.WORKSPACE_NOT_UNPACKED, exit_code=127, text="tar?"),
    ),
    "the pod of node 0 was replaced: was ended by SIGKILL": (R(code=C.POD_REPLACED, nodes=(0,), causes=(KILLED,)),),
    "pod p is gone: deleted: by a person": (
        R(code=C.POD_LOST, pods=("p",), causes=(R(code=C.POD_DELETED, text="by a person"),)),
    ),
    "a pod is gone: it was deleted, and no event that this account may list says why": (R(code=C.POD_LOST_UNKNOWN),),
    "more replicas failed than max_retries allows": (R(code=C.TOO_MANY_FAILED),),
    "a replica failed, and no retry of it was left (--max_retries)": (R(code=C.NO_RETRY_LEFT),),
    "stopped because another role failed": (R(code=C.OTHER_ROLE_FAILED),),
    "role r has failed, and its Job is deleted": (R(code=C.ROLE_FAILED, role="r"),),
    "the Job of role r is deleted": (R(code=C.ROLE_DELETED, role="r"),),
    "the Job of role r is deleted, and how it ended is not known": (R(code=C.ROLE_UNKNOWN, role="r"),),
    "still running: role a, b; `torchx cancel` stops it": (R(code=C.ROLES_RUN, roles=("a", "b")),),
    "Kubernetes has not kept its report: `muster log` prints the pods' logs, which have it": (
        R(code=C.REPORT_NOT_KEPT),
    ),
    # Slurm
    "job 7 waits: jobs with a higher priority are before it (Priority); starts about {date}": (
        R(code=C.SLURM_WAITS, job="7", word="Priority", at_s=MAY_30),
    ),
    "job 7 waits: a user holds it: scontrol release 7 lets it go on (JobHeldUser)": (
        R(code=C.SLURM_WAITS, job="7", word="JobHeldUser"),
    ),
    "job 7 waits: a limit of its quality of service is reached (QOSNew)": (
        R(code=C.SLURM_WAITS, job="7", word="QOSNew"),
    ),
    "job 7 waits: New": (R(code=C.SLURM_WAITS, job="7", word="New"),),
    "job 7 waits: Slurm has not looked at it yet": (R(code=C.SLURM_WAITS, job="7"),),
    "Slurm ended job 7: its time limit is over (TIMEOUT)": (R(code=C.SLURM_ENDED, job="7", word="TIMEOUT"),),
    "Slurm job 7": (R(code=C.SLURM_JOB, job="7"),),
    "Slurm job 7 is completing": (R(code=C.SLURM_JOB, job="7", word="completing"),),
    "Slurm does not know its job (any more)": (R(code=C.SLURM_FORGOT),),
    "it was not submitted": (R(code=C.NOT_SUBMITTED),),
    "incarnation 2; the previous incarnation ended: Slurm sent SIGTERM": (
        R(code=C.INCARNATION, count=2),
        R(code=C.BEFORE, causes=(R(code=C.SLURM_SIGNALLED, signal="SIGTERM"),)),
    ),
    "Slurm has lost node n1, n2": (R(code=C.NODES_LOST, hosts=("n1", "n2")),),
    "Slurm has lost node n1, and r/1 on n2 ended before: too few are left": (
        R(code=C.NODES_LOST, hosts=("n1",), replicas=("r/1 on n2",), is_final=True),
    ),
    "it stopped before the time limit of its Slurm job": (R(code=C.TIME_LIMIT),),
    "time limit; the script has called muster.worker.saved for no new checkpoint, so the job does not go on": (
        R(code=C.NOTHING_SAVED),
    ),
    "its role was resized": (R(code=C.ROLE_RESIZED),),
    "preempted: another node was": (R(code=C.OTHER_PREEMPTED),),
    "the job ends": (R(code=C.JOB_ENDS),),
    "r/0 exited with code 1; started again: 1 of 2 retries used": (
        R(
            code=C.NODE_REPORTS,
            causes=(R(code=C.REPLICA_ENDED, replica="r/0", exit_code=1), R(code=C.STARTED_AGAIN, count=1, total=2)),
        ),
    ),
    "the job ends: its role was resized": (R(code=C.JOB_ENDS, causes=(R(code=C.ROLE_RESIZED),)),),
    "srun: no right": (R(code=C.SCRIPT_SAID, text="srun: no right"),),
    "Slurm job 7 could not use its folder: /t on a node is another user's, or others can write to it: remove it, or "
    "name another folder with -cfg node_dir=PATH": (R(code=C.FOLDER_FOREIGN, job="7", text="/t", host="a node"),),
    "Slurm job 7 could not write its files to /t on its nodes: create this folder on every node, writable for you, or "
    "name another one with -cfg node_dir=PATH": (R(code=C.FOLDER_UNWRITABLE, job="7", text="/t"),),
    # the log folder of a job that was started by hand
    "rank 1 failed": (R(code=C.RECORDED_END, text="rank 1 failed"),),
    "node 1 has written nothing for 2 min, and no record says that its agent has ended; the others have ended (exit "
    "code 0, exit code 1)": (R(code=C.AGENTS_SILENT, nodes=(1,), count=1, age_s=120.0, exit_codes=(0, 1)),),
    "nodes 0, 1 have written nothing for 20 s, and no record says that their agents have ended": (
        R(code=C.AGENTS_SILENT, nodes=(0, 1), count=2, age_s=20.0),
    ),
    # replicas
    "the job was cancelled": (R(code=C.JOB_CANCELLED),),
    "stopped when the job failed": (R(code=C.STOPPED_WITH_JOB),),
    "stopped": (R(code=C.REPLICA_STOPPED),),
    "ended because of r[1]": (R(code=C.ENDED_WITH, replica="r[1]"),),
    "ended by a resize": (R(code=C.RESIZED_AWAY),),
    "it has no pod, because the job has ended": (R(code=C.HAS_NO_POD),),
    "its pod is being deleted, because the job has ended": (R(code=C.POD_ENDS),),
    # holds
    "held: it runs main-1": (R(code=C.HOLD_RUNS, job="main-1"),),
    "held: it starts": (R(code=C.HOLD_STARTS),),
    "held: its agents import; idle for 5 s, ends after 1 min without a run": (
        R(code=C.HOLD_IMPORTS, age_s=5.0, limit_s=60.0),
    ),
    "held: idle for 5 s, ends after 1 min without a run": (R(code=C.HOLD_IDLE, age_s=5.0, limit_s=60.0),),
}


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.schedulers.wording.words.time.localtime", __import__("time").gmtime)


@pytest.mark.parametrize("line", TABLE, ids=range(len(TABLE)))
def test_a_reason_in_words(line: str) -> None:
    assert word_all(TABLE[line]) == line.replace("{date}", "2026-05-30 12:00:00")


def test_every_code_is_in_the_table() -> None:
    found = [each for told in TABLE.values() for each in reasons.walk(told)]
    assert {each.code for each in found} == set(Code)


def test_every_code_says_what_it_means_and_who_reports_it() -> None:
    [tree] = [each for each in ast.parse(inspect.getsource(reasons)).body if getattr(each, "name", "") == "Code"]
    assert isinstance(tree, ast.ClassDef)
    bare = {
        ast.unparse(before.targets[0])
        for before, each in itertools.pairwise([*tree.body, None])
        if isinstance(before, ast.Assign) and not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
    }
    grouped = {"PODS_WAIT", "PODS_RUN", "PODS_FAILED"}  # the docstring below counts for them
    grouped |= {"PREEMPTED", "NODE_TAINTED", "NODE_DRAINED", "NODE_GONE", "NODE_PRESSED", "NODE_EVICTED"}
    assert bare == grouped | {"NODE_SHUT_DOWN"}


@pytest.mark.parametrize("line", TABLE, ids=range(len(TABLE)))
def test_a_reason_survives_the_disk(line: str) -> None:
    assert parse_reasons(json.loads(json.dumps([to_data(each) for each in TABLE[line]]))) == TABLE[line]


def test_what_changes_by_itself_does_not_make_another_wait() -> None:
    more = R(
        code=C.PODS_WAIT, count=1, total=4, causes=(R(code=C.UNSCHEDULABLE, lacks=("a", "b"), what="a, b", total=2),)
    )
    same = R(
        code=C.PODS_WAIT, count=3, total=4, causes=(R(code=C.UNSCHEDULABLE, lacks=("b", "a"), what="a, b", total=9),)
    )
    other = R(code=C.PODS_WAIT, count=3, total=4, causes=(R(code=C.UNSCHEDULABLE, lacks=("b",), what="b", total=9),))
    assert identify(more) == identify(same) != identify(other)


def test_a_code_is_found_among_causes() -> None:
    ended = R(code=C.AGENT_ENDED, causes=(R(code=C.COULD_NOT_START),))
    assert has_code((ended,), C.COULD_NOT_START)
    assert not has_code((ended,), C.OUT_OF_MEMORY)


def test_a_reason_is_said_once_and_not_beside_its_state() -> None:
    told = R(code=C.KILLED)
    assert word_all((told, told)) == "killed"
    assert word_all((R(code=C.CANCELLED), R(code=C.KILLED)), state="cancelled") == "killed"
    assert word(R(code=C.SUPERVISOR_SIGNALLED, signal="SIGHUP"), state="cancelled") == "its supervisor got SIGHUP"


@pytest.mark.parametrize(
    ("duration_s", "words"),
    [
        (0.2, "0 s"),
        (24, "24 s"),
        (60, "1 min"),
        (125, "2 min 5 s"),
        (7380, "2 h 3 min"),
        (90000, "1 d 1 h"),
        (86405, "1 d"),
    ],
)
def test_durations_have_two_units_at_most(duration_s, words):
    assert format_duration(duration_s, 0) == words


PRODUCT = Path(muster.__file__).parent
OTHERS_SAY = {
    "Fatal Python error": "CPython, of a fatal signal",
    "<no Python frame>": "CPython's faulthandler, of a thread",
    "torch finds no ": "the program that counts devices in another interpreter, where torch may print errors, too",
    "invalid mount type": "TorchX",
    "already in progress": "the Docker engine",
    "logging driver does not support reading": "the Docker engine",
    "failed to allocate network": "the Docker engine",
    "executable file not found": "a container runtime",
    "no such file or directory": "a container runtime",
    "already completing or completed": "scancel",
    "error: ": "Slurm's commands",
    "exceeded quota": "the API server",
    "address pool": "the Docker engine",
    "container:": "the Docker engine's name of a network",
    "ssh: ": "ssh",
    ": error: ": "argparse",
    "Error: ": "Python, of an exception",
    "Extension modules:": "CPython's faulthandler",
    "missing keys": "transformers",
    "::ffff:": "an address of IPv4 in one of IPv6",
    "MemAvailable:": "the kernel",
}
"""Texts that product code looks for in what other programs print, and who prints them."""
METHODS = (
    "startswith",
    "endswith",
    "removeprefix",
    "removesuffix",
    "partition",
    "rpartition",
    "split",
    "find",
    "count",
)


CLAUSE = re.compile(r"[a-z]{2}[:;,] ?$|^[:;,] [a-z]{2}|^\(?[a-z]{2,} [a-z]{2,}\)?$")
"""What begins or ends a clause of a sentence ("hung: ", "; retried"), and two words."""


def find_sentences(tree: ast.AST) -> list[tuple[int, str]]:
    """Texts of at least three words, and starts and ends of clauses, that code decides on or cuts, with their lines."""

    def is_sentence(node: ast.AST) -> bool:
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        return len(text.split()) >= 3 or bool(CLAUSE.search(text))

    found: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            found += filter(is_sentence, [node.left, *node.comparators])
            found += [each for part in node.comparators for each in getattr(part, "elts", ()) if is_sentence(each)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
            found += filter(is_sentence, [node.func.value, *node.args])
            found += [each for part in node.args for each in getattr(part, "elts", ()) if is_sentence(each)]
    return [(each.lineno, str(each.value)) for each in found if isinstance(each, ast.Constant)]


def test_the_search_for_decisions_on_sentences_finds_them() -> None:
    code = 'x = a in ("it was lost",) or "no room is left" == b or c.removeprefix("why: ") or d("a b c")'
    assert [text for _, text in find_sentences(ast.parse(code))] == ["it was lost", "no room is left", "why: "]


def test_nothing_decides_on_a_sentence() -> None:
    """Codes and facts say what happened. A sentence of ours may be worded anew at any time."""
    paths = [each for each in PRODUCT.rglob("*.py") if "testing" not in each.parts]
    found = {text: f"{path}:{line}" for path in paths for line, text in find_sentences(ast.parse(path.read_text()))}
    assert {text: where for text, where in found.items() if text not in OTHERS_SAY} == {}
    assert set(found) == set(OTHERS_SAY), "each exception is used"
