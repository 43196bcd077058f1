"""What the rooms share: environment names, exit codes, file names and schemas. Standard library only.

The components, the scheduler adapters and the agent never import one another. This module defines everything that two
of them must agree on.
"""

import signal
from collections.abc import Mapping
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from typing import TextIO

AGENT_MODULE: Final = "muster.agent"
"""`python3 -m muster.agent`: the entrypoint that components write and adapters recognise."""

AGENT_SWITCHES: Final = (
    "standalone",
    "module",
    "no-python",
    "run-path",
    "virtual-local-rank",
    "tracker-run",
    "trainer-callback",
)
"""The agent's flags without a value. With them adapters find the end of its flags, where the program begins."""

AGENT_SHORT_SWITCHES: Final = "m"
"""The switches with a short form. Every other short flag takes a value."""

COLLAPSED_FROM_RANKS: Final = 8
"""A terminal with this many ranks or more shows their lines merged, unless the user has said otherwise."""

AGENT_ENTRY_NAME: Final = "agent/entry.py"
"""The same as a file of the package `muster`. Its docstring says why adapters prefer it."""

ADOPTED_FLAG: Final = "--muster-adopted"
"""First argument of a guard and an agent that such a program has forked from itself, see `agent.driven`."""

DRIVEN_FLAG: Final = "--muster-driven"
"""First argument of an agent that a Python program starts and drives, see `agent.driven`."""

HOLD_FLAG: Final = "--muster-hold"
"""First argument of a replica of a hold: the node's index and the idle limit, `INDEX:SECONDS`, and the agent's flags
without a program follow."""

WAITING_FLAG: Final = "--muster-waiting"
"""First argument of guard and agent that wait on a hold, see `agent.hold.waiting`; a `WaitingRole` follows."""


class WaitingRole:
    """What a process of a held node is."""

    ORIGINAL: Final = "original"
    GUARD: Final = "guard"
    AGENT: Final = "agent"


HOLD_STATE_NAME: Final = "hold.json"
"""In the folder of a held node: `HoldKey`."""

HOLD_METADATA: Final = "muster.hold"
"""In an AppDef's metadata: it is a hold."""


class HoldKey:
    """What a holder reports of itself."""

    STATE: Final = "state"
    """starting, ready, busy, cold (no agent can wait) or ended."""
    RUN: Final = "run"
    """The name of the run that is on the node. "": there is none."""
    IDLE_SINCE_S: Final = "idle_since_s"
    """Wall-clock seconds. None: it runs something."""
    IDLE_LIMIT_S: Final = "idle_limit_s"
    """Seconds without a run after which the hold ends."""
    PID: Final = "pid"
    """The holder's process id."""
    NPROC: Final = "nproc"
    """Most processes of a run on this node."""
    MODULES: Final = "modules"
    """What is imported."""
    IMPORT_S: Final = "import_s"


def find_hold_dir(log_dir: str, index: int) -> str:
    """Return the folder of a held node: its socket, which only this user can reach, and its state."""
    return f"{log_dir}/hold-{index}"


AGENT_BUNDLE_NAME: Final = "muster-agent.zip"
"""The agent as one runnable file. `schedulers/bundle.py` builds it, and it is copied into containers and pods."""

WORKSPACE_BUNDLE_NAME: Final = "muster-workspace.tar.gz"
"""The user's working folder. An adapter packs it, and the agent unpacks it before it does anything else."""

RDZV_CONF_SECONDS: Final = ("join_timeout", "timeout", "last_call_timeout", "keep_alive_interval")
RDZV_CONF_KEYS: Final = (*RDZV_CONF_SECONDS, "keep_alive_max_attempt", "is_host")
"""Keys of `--rdzv-conf` for muster's backends."""

RDZV_CONF_WITHOUT_EFFECT: Final = (
    "close_timeout",
    "heartbeat_timeout",
    "read_timeout",
    "cas_backoff_max_seconds",
    "store_type",
)
"""Keys of torch's stores, accepted and ignored."""

RDZV_BACKENDS: Final = ("c10d", "muster", "static")
"""Values of `--rdzv-backend` that are muster's own. Any other is torch's, with keys of its own."""

DEFAULT_RUN_ID: Final = "none"
"""The run id without `--rdzv-id`, as with torchrun."""

DEFAULT_RDZV_PORT: Final = 29400
"""Port of the rendezvous leader when neither the command line nor an adapter names one (as torchrun's c10d)."""


SIZE_LIMIT: Final = 16384
"""The most nodes of a job, and the most workers of a node: more is a slip, which would fill the memory."""

DEFAULT_SNAPSHOT_SHARE: Final = 400
"""Thousandths of the free memory that a node's snapshots may take."""


class Env:
    """Names of environment variables that cross from one part of muster to another."""

    RANK0_HOST: Final = "TORCHX_RANK0_HOST"
    """The address of node 0. Every adapter sets it on every node, and `--rank0-env` gets the name of this variable.

    Every role that runs the agent is a job of its own, with a node 0 of its own. In other roles this is the address of
    replica 0 of the app's first role, as in TorchX.
    """

    RDZV_PORT: Final = "MUSTER_RDZV_PORT"
    """Set by an adapter that chose the leader's port itself. With muster's backend it overrides `--rdzv-port`."""

    RDZV_FD: Final = "MUSTER_RDZV_FD"
    """Number of an inherited listening socket for the leader (local_cwd, node 0 only). Removed before workers start."""

    TOKEN: Final = "MUSTER_TOKEN"  # the variable's name, not a secret
    """The job's secret, for mutual authentication in rendezvous. Removed before workers start."""

    REQUIRE_TOKEN: Final = "MUSTER_REQUIRE_TOKEN"
    """"1" if an adapter supplies a token. An agent that has no token then refuses to run (usage error)."""

    WORKSPACE: Final = "MUSTER_WORKSPACE"
    """Path of a packed workspace. Before it does anything else, the agent unpacks it into the working directory."""

    WORKSPACE_DIR: Final = "MUSTER_WORKSPACE_DIR"
    """The folder into which the agent unpacks the workspace. Unset: the working directory."""

    AFTER: Final = "MUSTER_AFTER"
    """`ROLE PORT`: the replica waits until replica 0 of that role of its app accepts connections at the port."""

    ROLES_FILE: Final = "MUSTER_ROLES_FILE"
    """Path of a file with the hosts of the app's roles by role, as JSON. It is there once one has moved to another host
    (ssh), and then counts instead of the variables."""

    READY_PORT: Final = "MUSTER_READY_PORT"
    """The port at which node 0 of a role shows that its workers run. Set if another role waits for it."""

    LOG_DIR: Final = "MUSTER_LOG_DIR"
    """The log folder, if the command line has no `--log-dir`. Set by an adapter."""

    NODE_NAME: Final = "MUSTER_NODE_NAME"
    """Name of this node's machine in reports (pod or container name). The host name counts if it is unset."""

    SEGMENT: Final = "MUSTER_SEGMENT"
    """The NVLink domain of this node, for `--rank-order segment`, in place of what driver or scheduler report."""

    MACHINE_NAME: Final = "MUSTER_MACHINE_NAME"
    """The name of this node's machine, as administrators know it. Set if the host name is another one (Kubernetes: the
    Node's name)."""

    LAST_CALL_S: Final = "MUSTER_LAST_CALL_S"
    """The default of `--last-call-timeout`, in seconds, set by an adapter (Kubernetes: 30)."""

    TERMINATION_LOG: Final = "MUSTER_TERMINATION_LOG"
    """The file that gets the report (at most 4 KiB). Unset in an agent that no adapter has started:
    `/dev/termination-log`, if it exists."""

    ADAPTER: Final = "MUSTER_ADAPTER"
    """The adapter that started this node, by the name of its scheduler: local_cwd, kubernetes. For reports only."""

    SIGTERM_SENDERS: Final = "MUSTER_SIGTERM_SENDERS"
    """Set beside `ADAPTER`: what usually sends SIGTERM to this node, in words. "": the adapter says so itself."""

    LOGS_HERE: Final = "MUSTER_LOGS_HERE"
    """"1" if all nodes of the job are processes of the machine from which it was submitted, with one log folder."""

    POD_NAMESPACE: Final = "MUSTER_POD_NAMESPACE"
    """The namespace of the pod (Kubernetes)."""

    JOB_OBJECT: Final = "MUSTER_JOB_OBJECT"
    """`PATH[ ROLE]`. PATH is the path in Kubernetes' API of the object for which the agent writes Events and
    annotations (`agent.features.job_object`). ROLE is put before their texts if several roles share the object. Unset:
    none is written."""

    ACCOUNT_DIR: Final = "MUSTER_ACCOUNT_DIR"
    """Set beside `JOB_OBJECT`: the folder with the token and the CA of the pod's service account."""

    SECRET_NAMES: Final = "MUSTER_SECRET_NAMES"
    """Set beside `JOB_OBJECT`: names of variables, separated by spaces, whose values no Event may show."""

    APP_ID: Final = "MUSTER_APP_ID"
    """The adapter's name of the app. It is for reports only. The run id is `--rdzv-id`."""

    STOPS_TOGETHER: Final = "MUSTER_STOPS_TOGETHER"
    """"1" if the adapter starts, shows and stops all nodes of the job together, on one machine.

    Then the leases of the nodes do not run out while the job is suspended (SIGTSTP), and a line about the whole job is
    printed by one node only.
    """

    LIVE_BARS: Final = "MUSTER_LIVE_BARS"
    """"1" if a reader of this node's output draws progress bars.

    The agent then writes the state of each bar once a second, as a line that begins with a carriage return. When the
    bar has ended, it writes such a line without text.
    """

    METRICS_HOST: Final = "MUSTER_METRICS_HOST"
    """The address at which the agent listens if `--metrics-port` names no address. Set by an adapter. Unset:
    127.0.0.1."""

    INCARNATION: Final = "MUSTER_INCARNATION"
    """How often this replica was started before. Set by an adapter that counts the starts. If it is above 0 and this
    agent leads, the agent knows that it has lost its memory of the job, and that other nodes, which it may not reach,
    may still run the job."""

    JOB_INCARNATION: Final = "MUSTER_JOB_INCARNATION"
    """`NUMBER[ WHY]`, for lines in the log only. NUMBER is how often the whole job was started, this time included. WHY
    is how its previous incarnation ended on this node. Set by an adapter after it has queued the job again or started
    its only node again. Unset: this is the first incarnation."""

    DRAINED_PODS: Final = "MUSTER_DRAINED_PODS"
    """How many earlier pods of this node were drained, as Kubernetes counts. "" or unset: none, or not known."""

    DRAIN_LIMIT_S: Final = "MUSTER_DRAIN_LIMIT_S"
    """Seconds from a preemption until the agent sends the stop signal to workers that have not stopped by then. An
    adapter sets it to its grace period less `--shutdown-timeout` and a margin, because a pod cannot see its own grace
    period."""

    IMPORT_HOOK: Final = "MUSTER_IMPORT_HOOK"
    """Set by the agent in its workers: `MODULE=OURS`. `OURS.inject` gets MODULE once the program has imported it."""

    SPARE: Final = "MUSTER_SPARE"
    """Set to "1" by the agent in a spare, which waits before its script's main until it gets a rank."""

    STATUS_PAGE: Final = "MUSTER_STATUS_PAGE"
    """Set by the agent in its workers: `FILE:ROUND:SLOT`, where the worker finds its slot (see `StatusPageLayout`)."""

    FEATURES: Final = "MUSTER_FEATURES"
    """Set by the agent in its workers: the features that it has, with commas between them. A worker does not wait for
    an answer of a feature that is not there."""

    SNAPSHOTS: Final = "MUSTER_SNAPSHOTS"
    """Set by the agent in its workers if its job has used snapshots: `FILE:ROUND:LOCAL_RANK`, where they are kept
    (`_shared.snapshot_file`)."""

    SNAPSHOT_STEP: Final = "MUSTER_SNAPSHOT_STEP"
    """Set by the agent in its workers if all ranks continue from a snapshot: the step of the snapshot."""

    WATCHED: Final = "MUSTER_WATCHED"
    """Set by the agent in its workers, which then report their process groups (`agent.workers.hooks`). "1": the agent
    watches for hangs and reads torch's flight recorder. "0": it does neither."""

    STACK_FILE: Final = "MUSTER_STACK_FILE"
    """Set by the agent beside `WATCHED` in workers that are not Python programs. When the agent sends a signal, the
    Python programs that such a worker has started append their stacks to this file (`agent.workers.torch_backend`)."""

    RESUME_PATH: Final = "MUSTER_RESUME_PATH"
    """Set by the agent in its workers: the path of the last checkpoint that all ranks have saved at one step."""

    RESUME_STEP: Final = "MUSTER_RESUME_STEP"
    """Set beside `RESUME_PATH`: the step of that checkpoint."""

    CHECKPOINT: Final = "MUSTER_CHECKPOINT"
    """The content of `checkpoint.json` of the replica that this one replaces. Set if the folder of that replica was
    lost."""

    CONTROL_FD: Final = "MUSTER_CONTROL_FD"
    """Number of an inherited socket to the Python program that started this agent. The agent sends its records and
    errors there, and reads no PET_ variable. Set by `agent.driven` only."""

    IMAGE: Final = "MUSTER_IMAGE"
    """`PID:FD`: the process id of the agent's child that forks workers from the program's own image, and the socket to
    this child. Set beside `CONTROL_FD`, by `agent.driven` only."""

    REPORT_FILE: Final = "MUSTER_REPORT_FILE"
    """Set beside `CONTROL_FD`: a failed job's report is also written to this file."""

    NOTIFY_EVENT: Final = "MUSTER_NOTIFY_EVENT"
    """Set by the agent for the command of `--notify`: what has happened, in one word."""

    NOTIFY_REASON: Final = "MUSTER_NOTIFY_REASON"
    """Set by the agent for the command of `--notify`: why it has happened, in one line."""

    JOB_ID: Final = "MUSTER_JOB_ID"
    """Set by the agent in its workers if the job has an id of its own. It is the same in all attempts of the job."""

    ATTEMPT_ID: Final = "MUSTER_ATTEMPT_ID"
    """Set beside `JOB_ID`. It is the same in all ranks of one attempt."""

    PREFLIGHT: Final = "MUSTER_PREFLIGHT"
    """Set by the agent for a site's own checks: the value of `--preflight`, quick or full."""

    NVML: Final = "MUSTER_NVML"
    """The path of NVML's library for the preflight. It is needed if the dynamic linker does not find the library."""

    PREFLIGHT_DIR: Final = "MUSTER_PREFLIGHT_DIR"
    """The folder with a site's own checks, in place of /etc/muster/preflight.d. See `--preflight`."""

    RUN_FIRST: Final = "MUSTER_RUN_FIRST"
    """Set by the agent for a worker: a file of the agent whose `run` is called before the program starts, and which
    imports nothing of ours. The program does not see the variable."""

    ROUND: Final = "MUSTER_ROUND"
    """The number of the round. Set in the workers of an agent that has a `CONTROL_FD`, which keeps results by round."""

    PRIVATE: Final = (
        *(RDZV_FD, RDZV_PORT, TOKEN, REQUIRE_TOKEN, WORKSPACE, WORKSPACE_DIR, LAST_CALL_S, TERMINATION_LOG),
        *(STOPS_TOGETHER, LIVE_BARS, INCARNATION, DRAINED_PODS, DRAIN_LIMIT_S, CHECKPOINT, CONTROL_FD, REPORT_FILE),
        *(AFTER, READY_PORT, JOB_INCARNATION, IMAGE, JOB_OBJECT, ACCOUNT_DIR, SECRET_NAMES, METRICS_HOST, MACHINE_NAME),
    )
    """What the agent removes from its workers' environment."""


TOKEN_PLACEHOLDER: Final = "<{key}>"
"""What a dry run prints instead of a token. The agent refuses one of this form: it was never filled in."""


class ExitCode(IntEnum):
    """Exit codes of the agent, the only ones besides 128+n for "ended by signal n".

    An adapter also runs a replica again that ended without an exit code of its own.

    `agent.node.decisions` sets them. Why 69, decide `consensus.formation` (the job cannot be formed), `member.seeking`
    (no leader is found), `member.decisions` (this node is refused), `torch_handlers.thread` (torch's handlers), and
    `consensus.failures` with `verdicts` ("elsewhere").
    """

    SUCCEEDED = 0
    """Every worker of the job succeeded. With every rendezvous backend, the agent exits with 0 only then."""
    WORKERS_FAILED = 1
    """Workers failed, and no restart is left or a verdict has stopped the job. The node is not started again."""
    USAGE = 2
    """A flag or variable is wrong or differs from the other agents of the job, or the program does not exist. The node
    is not started again.

    In a job of several nodes, a program that does not exist fails in the workers: the code is then 1.
    """
    RENDEZVOUS = 69
    """Rendezvous failed: the nodes did not find each other in time, or lost each other. Or this node had to leave the
    job: its kernel cannot end a worker, or the verdict is "elsewhere". The node is started again."""
    TERMINATED = 143
    """SIGTERM (128 + 15) ended the agent: the node was preempted or stopped. The node is started again, and this
    uses no retry."""

    @staticmethod
    def of_signal(signum: int) -> int:
        """Return 128 and the signal's number, as shells report it."""
        return 128 + signum


class AskKind(Enum):
    """What a person asks of a running job, through the agent of any of its nodes (`muster-agent ask job`)."""

    STOP = "stop"
    CHECKPOINT = "checkpoint"
    PAUSE = "pause"
    RESUME = "resume"
    STACKS = "stacks"
    REACH = "reach"
    """Nothing. The agent that gets it answers itself, which shows that the job can be asked."""


class AskOutcome(Enum):
    """How a person's request has ended."""

    DONE = "done"
    REFUSED = "refused"
    """The job does not do it, or cannot: its ranks call no function for it, or no workers run."""
    LATE = "late"
    """Some ranks have not done it within the limit."""
    LOST = "lost"
    """Nodes that were to do it, or to answer, are gone, or do not run workers yet."""
    UNREACHED = "unreached"
    """The request or its answer was lost on the way to a node that runs: what the job would have done is not known."""


_HIGHEST_SIGNAL_CODE: Final = 128 + 64


def has_feature(name: str, environ: "Mapping[str, str]") -> bool:
    """Return whether the agent of a worker with this environment has a feature."""
    return name in environ.get(Env.FEATURES, name).split(",")


def name_signal(signum: int) -> str:
    """Return a text such as `SIGKILL` for 9. One without a name, as most real-time signals, gives `signal 40`."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def is_resize(detail: Mapping[str, object]) -> bool:
    """Return whether a `round_broken` with this detail only changes the size of the job, which uses no restart."""
    return detail.get("joined") is True or detail.get("left") is True


def describe_end(code: int | None, signal_name: str | None = None, *, plural: bool = False) -> str:
    """Say how a process ended: "exited with code 1", "was ended by SIGKILL". No other place words it.

    `diagnosis.root_cause` adds to it that the kernel's OOM killer was the cause.

    Args:
        code: as from os.waitstatus_to_exitcode. None: `signal_name` says it.
        signal_name: as from `name_signal`.
        plural: the subject is several processes.
    """
    if code is not None and code < 0:
        signal_name = name_signal(-code)
    return f"{'were' if plural else 'was'} ended by {signal_name}" if signal_name else f"exited with code {code}"


def describe_exit_code(code: int, *, plural: bool = False) -> str:
    """Return the same of an agent's, a container's or a shell's exit code, which is 128+n when signal n ended it."""
    return describe_end(128 - code if 128 < code <= _HIGHEST_SIGNAL_CODE else code, plural=plural)


LISTEN_ADDRESS: Final = "[ADDRESS:]PORT with an IP address and a port from 0 to 65535, as in 9464 or 0.0.0.0:9464"


SNAPSHOT_MEMORY: Final = "a share of the free memory from 1% to 100%, bytes with K, M, G or T (1024 each), or 0"
"""What `parse_snapshot_memory` takes, for messages."""


def parse_digits(text: str, most: int = 10**17) -> int | None:
    """Parse a whole number in plain digits. Return None for other text, or for more than `most`."""
    text = text.strip()
    is_number = text.isascii() and text.isdecimal() and len(text) <= 20 and int(text) <= most  # an `int` may be long
    return int(text) if is_number else None


SECONDS_LIMIT: Final = 1e9


def parse_seconds(text: str) -> float | None:
    """Parse a number of seconds in plain digits. Return None for other text, less than 0 or more than the limit."""
    try:
        seconds = float(text) if text.isascii() and "_" not in text else -1.0
    except ValueError:
        return None
    return seconds if 0.0 <= seconds <= SECONDS_LIMIT else None  # NaN is not


def parse_snapshot_memory(text: str) -> tuple[int, int | None] | None:
    """Parse the most memory that snapshots may take on a node.

    Returns:
        The share in thousandths of what is free, and the limit in bytes (None: only the share). None: it is neither.
    """
    number, unit = (text[:-1], text[-1:]) if text[-1:] in "%KMGT" else (text, "")
    count = parse_digits(number)
    if count is not None:
        if unit == "%" and 0 < count <= 100:
            return 10 * count, None
        if unit != "%":
            size = count << {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}[unit]
            if size < 1 << 62:
                return 0, size
    return None


def parse_listen_address(text: str) -> tuple[str, int] | None:
    """Return the address, "" where none is given, and the port. Return None for anything else.

    >>> parse_listen_address("9464"), parse_listen_address("[::]:0"), parse_listen_address("host:1")
    (('', 9464), ('::', 0), None)
    """
    import socket  # workers, too, read this module

    host, colon, port = text.strip().rpartition(":")
    number = parse_digits(port, 65535)
    if number is None:
        return None
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:  # IPv6 without brackets
        return None
    if not colon:
        return "", number
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except (OSError, ValueError):
            continue
        return host, number
    return None


class KubeflowEnv:
    """Variables by which Kubeflow's progress of a TrainJob is reached, of transformers' callback and of its SDK."""

    URL: Final = "KUBEFLOW_TRAINER_SERVER_URL"
    TOKEN: Final = "KUBEFLOW_TRAINER_SERVER_TOKEN"
    """Path of a file."""
    CA: Final = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
    """Path of a file."""
    OFF: Final = "DISABLE_KUBEFLOW_INTEGRATION"
    """TRUE or 1: nothing is reported."""


class OtelEnv:
    """Variables of OpenTelemetry by which the agent knows that there is a collector."""

    ENDPOINT: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"
    ENDPOINTS: Final = (ENDPOINT, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")
    TRACE_PARENT: Final = "TRACEPARENT"
    """The span that the job belongs to. In workers it is that of their attempt."""


class RoleKey:
    """Keys of `torchx.specs.Role.metadata` that pass from components to adapters what a `Resource` cannot hold."""

    MEMORY_REQUEST_MB: Final = "muster.memory_request_mb"
    """Present only if the user gave neither `memMB` nor `h`. Its value is a decimal string such as "4096".

    Then `resource.memMB` is TorchX's default (1024), which the user did not ask for. So an adapter sets no memory
    limit, and requests this many MB (1024 per process) if it has requests. When the key is absent, the user gave
    `resource.memMB` and it applies. Stock TorchX schedulers ignore the key and use `resource.memMB`.
    """

    CPU_REQUEST: Final = "muster.cpu_request"
    """Present only if the user gave neither `cpu` nor `h`, and a node has more workers than TorchX's default has CPUs.

    Its value is the number of workers. An adapter that asks for CPUs, or limits them, uses it: see `count_cpus`.
    """

    SECRET_ENV: Final = "muster.secret_env"
    """Names of variables, separated by commas, whose values adapters never print, whatever they look like.

    Stock TorchX schedulers ignore the key.
    """

    POLICY: Final = "muster.policy"
    """A dictionary: what becomes of the app when the role ends, see `_shared.role_policy.RolePolicy`.

    `muster.components.roles` writes it. Stock TorchX schedulers ignore the key.
    """


DEFAULT_DRAIN_LIMIT_S: Final = 10.0
"""What `Env.DRAIN_LIMIT_S` means when it is unset: what the adapters' default grace period leaves."""

NEVER_RETRY: Final = (int(ExitCode.WORKERS_FAILED), int(ExitCode.USAGE))
"""Exit codes of the agent after which a replica must not be started again."""


class LogNames:
    """Files of a run: `<log_dir>/<run_id>/attempt_<n>/<local_rank>/{stdout.log,stderr.log,error.json}`."""

    ATTEMPT_DIR: Final = "attempt_{attempt}"
    STDOUT: Final = "stdout.log"
    STDERR: Final = "stderr.log"
    ERROR: Final = "error.json"
    EXIT_SUFFIX: Final = ".exit"
    """`error.json.exit`: the exit code of a worker that has called `sys.exit` with one, and has yet to end."""
    FILTERED_STDOUT: Final = "filtered_stdout.log"
    FILTERED_STDERR: Final = "filtered_stderr.log"
    NOTIFIED: Final = "notified"
    """`<log_dir>/<run_id>/notified/`: an empty file for each event that `--notify` has reported."""
    REPORT: Final = "report.json"
    """`<log_dir>/<run_id>/report.json`: the failure report of the whole job, `_shared.reports.Report`."""
    EVENTS: Final = "events.jsonl"
    """`<log_dir>/<run_id>/events.jsonl`: one record per transition of this node's agent."""
    CHECKPOINT: Final = "checkpoint.json"
    """`<log_dir>/<run_id>/checkpoint.json`: the last checkpoint that all ranks have saved, `agent.round.Checkpoint`.
    Until the job has succeeded: its next incarnation resumes from there."""
    STATUS: Final = "status.json"
    """`<log_dir>/<run_id>/status.json`: how the job is doing, `_shared.job_view.JobStatus`, of the node that leads."""
    LATEST: Final = "latest"
    """`<log_dir>/latest`: a link to the newest attempt's folder.

    Beside the folders of jobs it links to the newest job's.
    """


FORMAT: Final = 1
"""The format of all that one process of muster writes and another one reads: files, messages, annotations, shared
memory.

Raise it when a reader would misread what is written, or miss a field. A reader takes one format and refuses all others
with `check_format`, in one line. No reader has a default for what is always written, and none accepts an earlier form.
"""


class FormatError(ValueError):
    """What is read has another format than `FORMAT`. `str()` is a line with its name, its number and ours."""


def check_format(found: object, name: str) -> None:
    """Refuse what has another format.

    Args:
        found: the number that it has, which anything may have written. None: it has none.
        name: the path of a file, or which peer has sent it.

    Raises:
        FormatError: it is not `FORMAT`.
    """
    if type(found) is not int or found != FORMAT:
        has = "no format number" if found is None else f"format {str(found)[:20]}"
        raise FormatError(f"{name} is of another version of muster: it has {has}, and format {FORMAT} is needed")


STATUS_LIMIT_BYTES: Final = 1 << 18
"""The largest `status.json`."""
TERMINATION_LOG_LIMIT_BYTES: Final = 4096
"""Kubernetes keeps this much of a termination message."""


_ORDERING: Final = (*range(0x2028, 0x202F), *range(0x2066, 0x206A))
_CONTROLS: Final = {code: repr(chr(code))[1:-1] for code in (*range(9), *range(11, 32), *range(127, 160), *_ORDERING)}
"""Characters that a terminal obeys or that reorder a line, but newline and tab, and how they are shown."""


def show_controls(text: str) -> str:
    r"""Return the text with escape sequences as what they are (`\x1b[2J`): ours may quote what a worker or a file said.

    Colours of quoted text are left out.
    """
    if "\x1b" in text:
        import re

        text = re.sub(r"\x1b\[[0-9;:]*m", "", text)
    if not text.isascii():
        text = text.encode(errors="backslashreplace").decode()  # names of files that are no UTF-8
    return text.translate(_CONTROLS)


def print_line(text: str, stream: "TextIO | None" = None) -> None:
    """Print one or several lines at once. All that may quote a worker, a file or another machine is printed by this.

    Args:
        text: without its last newline.
        stream: None: stderr.
    """
    import sys

    print(show_controls(text), file=stream or sys.stderr, flush=True)


def has_controls(text: str) -> bool:
    """Return whether a text has control characters or ends of lines."""
    return any(ord(each) in _CONTROLS or each in "\n\t" for each in text)
