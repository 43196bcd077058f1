"""The reasons for which an app, or one replica of it, is in its state: codes and facts. Standard library only."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from muster._shared.records import build, record

if TYPE_CHECKING:
    from muster._shared.job_view import JobStatus


class Code(Enum):
    """What a reason says: the template of its words, what it means, and which adapters report it.

    `{name}` is a fact of `Reason`, or a rule of `words`, which also says what follows a colon: `{count:pod}` is "1 pod"
    or "2 pods", `{count:runs|run}` one of both words. What is in brackets is left out if a fact in it is not known.
    """

    template: str

    def __new__(cls, template: str) -> "Code":  # noqa: PYI034  # `Self` came with Python 3.11
        """Give each member a value of its own, also if two have the same template."""
        member = object.__new__(cls)
        member._value_ = len(cls.__members__)
        member.template = template
        return member

    # -- requests of people, and what a supervisor does ---------------------------------------------------------------
    CANCELLED = ""
    """A person or a program has cancelled it. All adapters."""
    STOPPED = "stopped (muster stop)"
    """`muster stop` has stopped it. All adapters."""
    KILLED = "killed"
    """A second Ctrl-C has killed it. local_cwd, ssh, Docker, held."""
    SUPERVISOR_SIGNALLED = "its supervisor got {signal}"
    """Its supervisor got a signal, and cancelled it. local_cwd, ssh, Docker, held."""
    SUBMITTER_ENDED = "the command that started it (pid {pid}) ended"
    """The command to which it belongs has ended. local_cwd, ssh, Docker, held."""
    ENDING = "is ending: {causes}"
    """It is being ended, for other reasons. local_cwd, ssh, Docker, held."""
    GIVEN_UP = "given up {limit_s} s after SIGKILL, and perhaps still there: {replicas}"
    """Replicas have not ended after SIGKILL. local_cwd, ssh, Docker, held."""
    GOES_ON_UNASKED = "its agents could not be asked to stop, so it goes on"
    """A stop was withdrawn because no agent could be asked. local_cwd, ssh, Docker, held."""
    RESIZED = "{role} was resized from {total} to {count:node}"
    """A role has another number of nodes by request. local_cwd, ssh, Docker, held, Slurm."""
    SUPERVISOR_LOST = (
        "its supervisor was lost after {at_s:date}, when {count:replica} ran; `muster recover {job}` continues it"
    )
    """Its supervisor has died. local_cwd, ssh, Docker, held."""
    SUPERVISOR_REPLACED = "its supervisor was lost; continued by `muster recover`[; {count} started again]"
    """`muster recover` has continued it. local_cwd, ssh, Docker, held."""

    # -- the end of a replica, and what follows -----------------------------------------------------------------------
    REPLICA_ENDED = "{replica} {exit_code:end}[ ({causes})]"
    """A replica has ended without success. Supervised adapters, Slurm."""
    AGENT_ENDED = "the agent of {replica} {exit_code:end}[ ({causes})]"
    """The agent of a replica is lost. Supervised adapters, Slurm."""
    REPLICA_REFUSED = "{causes} ({replica} {exit_code:end})"
    """An agent has refused its command line. Supervised adapters, Slurm."""
    REPLICA_FINAL = "{replica} {exit_code:end}[ ({causes})]: {exit_code:meaning}"
    """An agent has ended with a code that is not retried, and has left no report. Supervised adapters, Slurm."""
    NEVER_STARTED = "{replica} {causes}"
    """A replica was never started. Supervised adapters, Slurm."""
    STARTED_AGAIN = "started again: {count} of {total} retries used"
    """A replica is started again, and uses a retry. Supervised adapters, Slurm."""
    PREEMPTED_AGAIN = "{replica} was preempted; started again (this uses no retry)"
    """A preempted replica is started again, and uses no retry. Supervised adapters, Slurm."""
    RETRIES_USED = "{count:its one retry is|all {count} retries are} used"
    """All retries of a role are used. Supervised adapters, Slurm."""
    NO_RETRIES = "no retries by the scheduler (--max_retries 0{is_agent:; --max_retries 1 starts it again})"
    """A role has no retries. `is_agent`: a hint how it gets one. Supervised adapters, Slurm."""
    RESTARTED = "started again by its role's policy (restart {count}[ of {total}])"
    """A replica that has ended is started again, because its role's policy says so. Supervised adapters, Slurm."""
    SERVED_ENDED = "role {role} has ended, which it served"
    """A replica was stopped because the role that it serves has ended. Slurm."""
    STOPPED_WITH_ROLE = "stopped because role {role} has failed"
    """A replica was stopped because others of its role have failed for good. Slurm."""
    RESTARTS = "restarted {count:once|{count} times}"
    """How often a replica was started again, because its role's policy says so. All adapters; Kubernetes while its pod
    runs."""
    FAILED_ALONE = "role {role} has failed, which is not critical: {causes}"
    """A role that is not critical has failed for good, and the app goes on without it. All adapters."""
    TOO_FEW = "it needs {total:replica} and has {count}"
    """Fewer replicas are left than the app needs. Supervised adapters."""
    GOES_ON = "going on with {count:replica} (at least {total} needed)"
    """The app goes on with fewer replicas. Supervised adapters."""

    # -- why a replica has ended --------------------------------------------------------------------------------------
    SUPERVISOR_DIED = "its supervisor had died"
    """The supervisor that knew its exit code has died. local_cwd, ssh, held."""
    LINK_LOST = "[{nodes:node} of {job}: ][{host}: ][not reached for {limit_s} s: ]{text}"
    """The link to another machine is lost; `text` is what it says itself. ssh, held."""
    MOVED = "its place is {host} now"
    """A replica that was lost has another host now. ssh."""
    ON_HOST = "on {host}"
    """Where it has ended. Slurm."""
    OUT_OF_MEMORY = (
        "OOMKilled: out of memory, {limit:limit {limit}|no memory limit, so its node ran out of memory}; request "
        "more with --memMB"
    )
    """The kernel has killed it at its memory limit. Docker, Kubernetes."""
    CONTAINER_REMOVED = "its container was removed"
    """Its container was removed. Docker."""
    STOPPED_BEFORE_START = "stopped before it was started"
    """It was stopped before it was started. Docker."""
    COULD_NOT_START = "could not be started: {text}"
    """It could not be started; `text` is the system's or the engine's. Supervised adapters, Kubernetes."""
    IMAGE_LACKS_COMMAND = (
        "could not be started: image {image!r} has no {program!r}{is_agent:; muster's agent needs Python 3.10 or "
        "newer in the image}"
    )
    """Its image has no such program. Docker, Kubernetes."""
    ENGINE_SAID = "{text}"
    """What the engine has recorded of its end; `text` is quoted. Docker."""

    # -- what agents report -------------------------------------------------------------------------------------------
    JOB_FAILED = "{text}[: {exception}][; cause: {cause:class}][; suspected: {suspected:;}]"
    """The agents' report of a job that has failed. All adapters."""
    AGENT_SAID = "{text}"
    """The last sentence of an agent that has no round; `text` is quoted. All adapters."""
    HANGS = "{text} (reported at {at_s:utc} UTC); `muster stacks` prints all stacks, `muster stop` ends the job"
    """The agents report a hang with which the job goes on. All adapters."""
    NEW_ROUND = "the nodes form a new round: {text}[ (cause: {cause:class})]"
    """The nodes form a new round. All adapters."""
    WORKER_FAILED = "rank {rank} {text}[ ({exception})]"
    """A worker of this replica has failed. All adapters."""

    # -- what is not known --------------------------------------------------------------------------------------------
    NO_ENGINE = "no Docker engine answers at {host}: this is what was last known"
    """No Docker engine answers. Docker."""
    STATE_GONE = "its state folder is gone; only the labels of its containers are known here"
    """The app's state folder is gone. Docker."""
    OTHER_HOME = (
        "it was submitted with another home folder: its state is in {text}; only the labels of its containers are "
        "known here"
    )
    """It was submitted with another home folder, `text`. Docker."""
    OTHER_FORMAT = "{text}"
    """Agents of another release of muster have written its files; `text` says which. All adapters."""
    UNREADABLE = "it cannot be read: {text}"
    """Its state cannot be read; `text` is the error. All adapters."""
    FOREIGN_TEXT = "{text}"
    """Another package's scheduler says it in its own words; `text` is quoted."""

    DAMAGED = "{text}"
    """What the submission has left in the cluster is damaged; `text` says what. Kubernetes."""

    # -- Kubernetes: why pods wait ------------------------------------------------------------------------------------
    UNSCHEDULABLE = "{lacks}"
    """No node fits: what `lacks` names, on `counts` of `total` nodes. Kubernetes."""
    NOT_SCHEDULED = "{text}"
    """The cluster's scheduler says something else. Kubernetes."""
    GATED = "waiting for its gang or queue to be admitted"
    """A gate keeps its pods from being scheduled. Kubernetes."""
    IMAGE_NOT_PULLED = "[{word}: ]cannot pull image {image!r} (--image chooses another)[: {text}]"
    """Its image cannot be pulled. Kubernetes."""
    SCHEDULER_SAID = "{word}[: {text}]"
    """What a container's state, an event or a condition says: `word` and `text` are quoted. Kubernetes."""
    QUOTA_EXCEEDED = "{word}: {text}; request less, or delete unused objects"
    """An event says that a quota forbids pods. Kubernetes."""
    SECURITY_REFUSED = "{word}: {text}; try -cfg security=restricted"
    """An event says that the namespace's security forbids pods. Kubernetes."""
    TERMINATING = "Terminating"
    """The pod is deleted, and has not ended yet. Kubernetes."""
    NODE_SILENT = (
        "Terminating on node {host}, which does not respond; if the node will not come back, run: kubectl taint "
        "nodes {host} node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
    )
    """The same, on a node that does not respond. Kubernetes."""
    QUEUE = "waiting in queue {queue}[: {text}]"
    """It waits in a queue of Kueue's. Kubernetes."""
    QUEUE_HIDDEN = "waiting in queue {queue}; this account may not list {what}, which say why"
    """The same, and the account may not list `what`, which says why. Kubernetes."""
    GANG = "waiting for its gang: {text}"
    """It waits for its PodGroup. Kubernetes."""
    SUSPENDED_IN_QUEUE = "suspended: waiting for its queue {queue}"
    """It is suspended until its queue resumes it. Kubernetes."""
    SUSPENDED = "suspended: to resume it, run: {by}"
    """It is suspended, and no queue resumes it: `by` does. Kubernetes."""
    RAN_BEFORE = (
        "no pod of the job runs now, but it ran before: its pods ended or were deleted, and the cluster creates new "
        "ones"
    )
    """No pod of it runs, and some did before. Kubernetes."""
    PODS_WAIT = "{count} of {total:pod} {count:waits|wait}: {causes}[ ({text})]"
    PODS_RUN = "{count} of {total:pod} {count:runs|run}: {causes}[ ({text})]"
    PODS_FAILED = "{count} of {total:pod} failed: {how_pods_failed}[ ({text})]"
    PODS_OTHER = "{count} of {total:pod} {count:is|are} {word}: {causes}[ ({text})]"
    """`count` of `total` pods wait, run, have failed, or are in the phase `word`, for one reason. Kubernetes."""
    PODS_UNEXPLAINED = "{count} of {total:pod} {count:waits|wait}, and Kubernetes gives no reason: {by}"
    """`count` of `total` pods wait, and Kubernetes does not say why. `by` shows more. Kubernetes."""
    JOB_UNEXPLAINED = "it has no pods yet, and Kubernetes gives no reason: {by}"
    """There are no pods, and Kubernetes does not say why. Kubernetes."""
    NO_PODS = "no pods: {causes}"
    """There are no pods. Kubernetes."""
    PODS_MISSING = "{count:pod} not created: {causes}"
    """Some pods do not exist. Kubernetes."""
    PODS_REPLACED_SOON = (
        "{count:pod} not created yet: the Job controller replaces a pod after 10 s; if it takes longer, run: {by}"
    )
    """The same, and nothing says why. Kubernetes."""
    PODS_START = "{nodes:node} of {total} in a pod that starts"
    """Some nodes are in pods that start. Kubernetes."""
    EVENTS_HIDDEN = "this account may not list events, which say why pods wait"
    """The account may not list events. Kubernetes."""

    # -- Kubernetes: why pods and Jobs have ended ---------------------------------------------------------------------
    EXITED = "{exit_code:end}"
    """A container has ended with an exit code. Kubernetes."""
    ENDED_WITHOUT_CODE = "{text}"
    """A pod has ended without one. Kubernetes."""
    POD_ENDED = "{causes}[: {text}]"
    """How a pod has ended, and the last line that it has left. Kubernetes."""
    PREEMPTED = "preempted by a pod of higher priority[: {text}]"
    NODE_TAINTED = "its node was lost or tainted[: {text}]"
    NODE_DRAINED = "evicted (its node is being drained)[: {text}]"
    NODE_GONE = "its node no longer exists[: {text}]"
    NODE_PRESSED = "terminated by its node (resource pressure or shutdown)[: {text}]"
    NODE_EVICTED = "evicted by its node[: {text}]"
    NODE_SHUT_DOWN = "its node was shut down[: {text}]"
    POD_DELETED = "deleted[: {text}]"
    """What has ended a pod, if not its program. Kubernetes."""
    WORKSPACE_NOT_UNPACKED = "cannot unpack the workspace with the image's tar (exit {exit_code}): {text}"
    """The image's tar has failed. Kubernetes."""
    POD_REPLACED = "the pod of {nodes:node} was replaced: {causes}"
    """A pod that has failed was replaced by one that runs. Kubernetes."""
    POD_LOST = "{pods:pod} is gone: {causes}"
    """The pod that failed the app is gone, and its events say why. Kubernetes."""
    POD_LOST_UNKNOWN = "{pods:pod} is gone: it was deleted, and no event that this account may list says why"
    """The same, and no event says why, or the account may not list events. Kubernetes."""
    TOO_MANY_FAILED = "more replicas failed than max_retries allows"
    """More replicas have failed than max_retries allows. Kubernetes."""
    NO_RETRY_LEFT = "a replica failed, and no retry of it was left (--max_retries)"
    """A replica has failed, and no retry of it was left. Kubernetes."""
    OTHER_ROLE_FAILED = "stopped because another role failed"
    """A role was stopped because another one has failed. Kubernetes."""
    ROLE_FAILED = "role {role} has failed, and its Job is deleted"
    """A role has failed, and its Job is deleted. Kubernetes."""
    ROLE_DELETED = "the Job of role {role} is deleted"
    """The Job of a role is deleted, and the others go on. Kubernetes."""
    ROLE_UNKNOWN = "the Job of role {role} is deleted, and how it ended is not known"
    """The Job of a role is deleted, and it is not known how it ended. Kubernetes."""
    ROLES_RUN = "still running: role {roles}; `torchx cancel` stops it"
    """Roles of an app that has failed still run. Kubernetes."""
    REPORT_NOT_KEPT = "Kubernetes has not kept its report: `muster log` prints the pods' logs, which have it"
    """The pods have not kept the agents' report. Kubernetes."""

    # -- Slurm --------------------------------------------------------------------------------------------------------
    SLURM_WAITS = "job {job} waits: {slurm_reason}[; starts about {at_s:date}]"
    """The job waits: `word` is Slurm's reason. `at_s`: when Slurm expects it to start. Slurm."""
    SLURM_ENDED = "Slurm ended job {job}: {slurm_end} ({word})"
    """Slurm has ended the job: `word` is its state. Slurm."""
    SLURM_JOB = "Slurm job {job}[ is {word}]"
    """The job that runs the app, and its state if that is not RUNNING. Slurm."""
    SLURM_FORGOT = "Slurm does not know its job (any more)"
    """Slurm does not know the job (any more). Slurm."""
    NOT_SUBMITTED = "it was not submitted"
    """Its submission was killed. Slurm."""
    INCARNATION = "incarnation {count}"
    """Its scheduler has started it `count` times. Slurm."""
    BEFORE = "the previous incarnation ended: {causes}"
    """Why the incarnation before has ended. Slurm."""
    NODES_LOST = "Slurm has lost node {hosts}[, and {replicas} ended before]{is_final:: too few are left}"
    """Slurm has lost nodes. `is_final`: with those of `replicas`, which ended before, too few are left. Slurm."""
    SLURM_SIGNALLED = "Slurm sent {signal}"
    """Slurm has sent a signal. Slurm."""
    TIME_LIMIT = "it stopped before the time limit of its Slurm job"
    """It has stopped before the time limit. Slurm."""
    NOTHING_SAVED = (
        "time limit; the script has called muster.worker.saved for no new checkpoint, so the job does not go on"
    )
    """At the time limit there was no new checkpoint. Slurm."""
    ROLE_RESIZED = "its role was resized"
    """A resize has ended this node. Slurm."""
    OTHER_PREEMPTED = "preempted: another node was"
    """Another node was preempted. Slurm."""
    JOB_ENDS = "the job ends[: {causes}]"
    """Another node has ended the job, for `causes` if they are known. Slurm."""
    NODE_REPORTS = "{causes}"
    """What the supervisor of one node says, which does not count for other nodes. Slurm."""
    SCRIPT_SAID = "{text}"
    """The last line of the job's script or of srun. Slurm."""
    FOLDER_FOREIGN = (
        "[Slurm job {job} could not use its folder: ]{text} on {host} is another user's, or others can write to it: "
        "remove it, or name another folder with -cfg node_dir=PATH"
    )
    """The app's folder, `text`, on a node is another user's. Slurm."""
    FOLDER_UNWRITABLE = (
        "Slurm job {job} could not write its files to {text} on its nodes: create this folder on every node, "
        "writable for you, or name another one with -cfg node_dir=PATH"
    )
    """The app's files could not be written to `text` on its nodes. Slurm."""

    # -- the log folder of a job that was started by hand -------------------------------------------------------------
    RECORDED_END = "{text}"
    """What the agents have recorded last. A log folder."""
    AGENTS_SILENT = (
        "{nodes:node} {count:has|have} written nothing for {age_s:duration}, and no record says that {count:its "
        "agent has|their agents have} ended[; the others have ended ({exit_codes:exit code})]"
    )
    """Agents write nothing any more, and no record says that they ended. A log folder."""

    # -- replicas -----------------------------------------------------------------------------------------------------
    JOB_CANCELLED = "the job was cancelled"
    """It was stopped because the job was cancelled. All adapters."""
    STOPPED_WITH_JOB = "stopped when the job failed"
    """It was stopped because the job has failed. All adapters."""
    REPLICA_STOPPED = "stopped"
    """It was stopped, and the job goes on. All adapters."""
    ENDED_WITH = "ended because of {replica}"
    """It has ended because of the root cause on `replica`. All adapters."""

    RESIZED_AWAY = "ended by a resize"
    """A resize has ended it. Kubernetes."""
    HAS_NO_POD = "it has no pod, because the job has ended"
    """It has no pod, because the job has ended. Kubernetes."""
    POD_ENDS = "its pod is being deleted, because the job has ended"
    """Its pod is being deleted, because the job has ended. Kubernetes."""

    # -- holds --------------------------------------------------------------------------------------------------------
    HOLD_RUNS = "held: it runs {job}"
    """The nodes of a hold run `job`. All adapters."""
    HOLD_STARTS = "held: it starts"
    """Agents do not wait on all its nodes yet. All adapters."""
    HOLD_IMPORTS = "held: its agents import; idle for {age_s:duration}, ends after {limit_s:duration} without a run"
    """Its agents import what runs need, and nothing runs. All adapters."""
    HOLD_IDLE = "held: idle for {age_s:duration}, ends after {limit_s:duration} without a run"
    """Nothing runs on it. All adapters."""


@record
class Reason:
    """Why an app or a replica is in its state. `code` says which of the facts there are."""

    code: Code
    role: str = ""
    replica: str = ""
    """"trainer/0"."""
    replicas: tuple[str, ...] = ()
    nodes: tuple[int, ...] = ()
    """Indexes."""
    pods: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    """What nodes lack, as a scheduler names it."""
    counts: tuple[int, ...] = ()
    """Of how many nodes that is said; -1: it is not known."""
    hosts: tuple[str, ...] = ()
    host: str = ""
    """A machine: of another adapter than Kubernetes it is also the node's name."""
    job: str = ""
    """The id by which a scheduler or a person knows it."""
    queue: str = ""
    image: str = ""
    program: str = ""
    by: str = ""
    """The command, as people type it."""
    rank: int | None = None
    """Global."""
    exit_code: int | None = None
    """128+n if signal n ended it. None: it has none, or it is not known."""
    signal: str = ""
    """"SIGTERM"."""
    pid: int | None = None
    cause: str = ""
    """The class of a failure, see `verdicts.causes`."""
    exception: str = ""
    suspected: tuple[str, ...] = ()
    """Nodes, one clause each, as the leader words them."""
    is_agent: bool = False
    is_final: bool = False
    exit_codes: tuple[int, ...] = ()
    """Of others."""
    limit: str = ""
    """Of memory."""
    count: int | None = None
    """How many of them there are, were used, or are left."""
    total: int | None = None
    """Of how many."""
    at_s: float | None = None
    """Wall-clock seconds."""
    age_s: float | None = None
    """How long ago."""
    limit_s: float | None = None
    word: str = ""
    """A scheduler's own name of a reason, a state or a phase."""
    text: str = ""
    """What another program has said, in one line. It may have ids and times in it."""
    what: str = ""
    """What of `word`, `text` and `lacks` stays the same while somebody waits for the same thing."""
    causes: "tuple[Reason, ...]" = ()
    """Why that is, the most important first."""

    def __repr__(self) -> str:
        """Show only the facts that there are."""
        facts = (f"{name}={each!r}" for name, each in list_facts(self).items())
        return f"Reason({', '.join((self.code.name, *facts))})"


Reasons: TypeAlias = tuple[Reason, ...]
"""Why an app or a replica is in its state, the most important reason first."""

_CHANGES: Final = frozenset(
    {
        *("count", "total", "counts", "nodes", "pods", "at_s", "age_s", "limit_s"),
        *("lacks", "word", "text", "causes"),
    }
)
"""Facts that change while somebody waits for the same thing."""


def identify(reason: Reason) -> tuple[object, ...]:
    """Return what tells one wait from another: the code, and the facts that do not change by themselves."""
    facts = {name: each for name, each in list_facts(reason).items() if name not in _CHANGES}
    kept = ((name, tuple(sorted(each)) if isinstance(each, tuple) else each) for name, each in facts.items())
    return reason.code, *kept, *map(identify, reason.causes)


def walk(reasons: Iterable[Reason]) -> Iterator[Reason]:
    """Yield reasons and their causes."""
    for each in reasons:
        yield each
        yield from walk(each.causes)


def has_code(reasons: Iterable[Reason], *codes: Code) -> bool:
    """Return whether a reason, or a cause of one, has one of these codes."""
    return any(each.code in codes for each in walk(reasons))


def list_facts(reason: Reason) -> dict[str, Any]:
    """Return the facts that a reason has, by name."""
    return {
        name: each
        for name, each in vars(reason).items()
        if name != "code" and (each or each == 0) and each is not False
    }


def to_data(reason: Reason) -> dict[str, Any]:
    """Return a reason as JSON's types."""
    facts = list_facts(reason)
    if reason.causes:
        facts["causes"] = [to_data(each) for each in reason.causes]
    return {"code": reason.code.name.lower(), "facts": facts}


def parse_reasons(data: Any) -> Reasons:
    """Return the reasons of which `to_data` has made each.

    Raises:
        KeyError, TypeError, ValueError: it has another form.
    """
    return tuple(map(_parse_reason, data))


def _parse_reason(data: Any) -> Reason:
    facts = {name: tuple(value) if isinstance(value, list) else value for name, value in data["facts"].items()}
    return build(
        Reason, {**facts, "code": Code[data["code"].upper()], "causes": parse_reasons(facts.get("causes", ()))}
    )


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """What the agents of one role say of their job while it runs. See `failure_report`."""

    trouble: Reasons = ()
    """A hang with which it goes on, and why it forms a new round."""
    attempt: int = 0
    """How often workers were restarted in place because one failed."""
    status: "JobStatus | None" = None
    """How far it is. None: it has not reported it."""
