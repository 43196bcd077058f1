"""The agent's configuration: one frozen object, built by `cli.arguments` from flags and environment."""

from collections.abc import Mapping
from enum import IntFlag
from typing import TYPE_CHECKING, Any, Final

from muster._shared.contract import DEFAULT_DRAIN_LIMIT_S, Env
from muster._shared.records import NO_ITEMS, record
from muster.agent.errors import UsageError
from muster.agent.runtime.limits import KEEP_ALIVE_ATTEMPTS, KEEP_ALIVE_INTERVAL_S, LAST_CALL_S
from muster.agent.workers.spec import Program

if TYPE_CHECKING:
    from muster.agent.round import Checkpoint


HANG_TIMEOUT_AUTO: Final = -1.0
"""Replaces a number of seconds: the timeout is learned from the job."""


class Std(IntFlag):
    """One of a worker's two output streams, with torch's numbers."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


@record
class StdChoice:
    """Value of `--redirects` and `--tee`: `3` for all ranks, or `0:3,1:1` for some."""

    default: Std = Std.NONE
    by_rank: Mapping[int, Std] = NO_ITEMS

    def of(self, local_rank: int) -> Std:
        """Return the streams chosen for one local rank."""
        return self.by_rank.get(local_rank, self.default)


@record
class RendezvousConfig:
    """Where and how the nodes form a round. With `static`, host and port are MASTER_ADDR and MASTER_PORT."""

    backend: str
    """"muster" (also what `c10d` means on our command line), "static", or a name in torch's registry."""
    run_id: str
    host: str | None
    """The leader's host; None with `standalone`."""
    port: int
    node_index: int | None
    """--node-rank, if given: node 0 leads. If None, the node that can bind the endpoint's local address leads."""
    min_nodes: int
    max_nodes: int
    standalone: bool = False
    """Whether this node is alone and needs no socket."""
    listen_fd: int | None = None
    """An inherited listening socket for the leader."""
    has_stock_host: bool = False
    """Whether this is node 0, and its host comes from --rank0-env of one of TorchX's own schedulers.

    Those give node 0 loopback, and the other nodes its address.
    """
    is_by_hand: bool = False
    """Whether no scheduler has started this agent."""
    local_addr: str | None = None
    """--local-addr: also MASTER_ADDR when this node hosts global rank 0."""
    token: str | None = None
    has_shared_token: bool = False
    """Whether the token is the one that all agents of this user on this machine find."""
    max_restarts: int = 0
    max_restarts_flag: str = "--max-restarts"
    """The name of this limit that the user knows."""
    hang_action: str = "restart"
    """What follows when the job hangs: report (only a page on the console), restart or stop."""
    policy: str = ""
    """--on: rules of `_shared.policy`, separated by semicolons."""
    segment: str | None = None
    """For --rank-order segment, this node's NVLink domain, or "" if nothing tells it. None means ranks by node index.
    """
    machine: str = ""
    """The machine's boot id; "" if unknown."""
    machine_name: str = ""
    """See `contract.Env.MACHINE_NAME`."""
    join_timeout_s: float = 600.0
    last_call_timeout_s: float = LAST_CALL_S
    keep_alive_interval_s: float = KEEP_ALIVE_INTERVAL_S
    keep_alive_max_attempt: int = KEEP_ALIVE_ATTEMPTS
    checkpoint: "Checkpoint | None" = None
    """The last checkpoint of the job's earlier incarnations."""
    incarnation: int = 0
    """How often this node's agent was started before, which lost its memory of the job; 0 if unknown."""
    stop_limit_s: float = 60.0
    """The most time that this node takes to stop its workers: `--shutdown-timeout`, and the limit after SIGKILL."""
    is_host: bool | None = None
    """`--rdzv-conf is_host=`: whether this node leads, whatever its index. None: see `node_index`."""
    endpoint: str = ""
    """--rdzv-endpoint as given, for torch's handlers."""
    conf: Mapping[str, str] = NO_ITEMS
    """--rdzv-conf as given, for torch's handlers."""
    control_fd: int | None = None
    """For `caller`, the socket to the program whose handler is used."""
    master_addr: str = "127.0.0.1"
    """--master-addr, for `static`."""
    master_port: int = 29500
    """--master-port, for `static`."""

    def __repr__(self) -> str:
        """Return the fields without the token."""
        shown = (f"{name}={value!r}" for name, value in self.__dict__.items() if name != "token")
        return f"RendezvousConfig({', '.join(shown)})"

    @property
    def silence_s(self) -> float:
        """The silence limit: a node that is silent for this long counts as lost."""
        return self.keep_alive_interval_s * self.keep_alive_max_attempt

    @property
    def lends_endpoint(self) -> bool:
        """Whether the workers' store listens at the endpoint while they run, and the leader between rounds."""
        return self.backend == "static"


@record
class LogConfig:
    """Where the workers' output goes."""

    base_dir: str | None
    """`--log-dir`. None means a temporary folder if a file is needed; "/dev/null" means no files."""
    links_latest: bool = False
    """Whether `latest` in `base_dir` names the newest attempt, because a person has named the folder."""
    redirects: StdChoice = StdChoice()
    tee: StdChoice = StdChoice()
    local_ranks_filter: frozenset[int] | None = None
    """Ranks whose lines reach the console; None means all."""
    duplicate_stdout_filters: tuple[str, ...] = ()
    duplicate_stderr_filters: tuple[str, ...] = ()
    logs_specs: str | None = None
    """Name of a `torchrun.logs_specs` entry point."""
    prefix_template: str | None = None
    """--log-line-prefix-template, or TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE."""
    shows_prefixed: bool = False
    """Whether streams that neither go to files nor are teed also pass through the agent, with prefixes and live
    progress bars.

    It is for a terminal to which several workers would otherwise write at once.
    """
    marks_bars: bool = False
    """See `_shared.contract.Env.LIVE_BARS`."""
    shows_status: bool = False
    """Whether the last row of the terminal shows the job's progress. Only the agent then writes to that terminal."""
    merges_lines: bool = False
    """Whether equal output of several workers within a short time is shown once on the console."""
    has_colour: bool = False
    """Whether terminals may get colours: neither NO_COLOR nor TERM=dumb forbids it."""


@record
class AgentConfig:
    """One agent's whole configuration."""

    program: Program
    nproc: int
    """Workers on this node. `gpu`, `cpu` and `auto` have been counted."""
    rendezvous: RendezvousConfig
    logs: LogConfig
    role: str = "default"
    max_restarts: int = 0
    restart_backoff_s: float = 0.0
    """Base of the exponential back-off (with jitter) before the second and later restarts of one cause; 0 means none.
    """
    start: str = "auto"
    """"cold", "warm" or "auto"."""
    preload: str = "auto"
    """--preload: "auto" and/or module names, separated by commas."""
    start_method: str = "spawn"
    """For function workers and --run-path."""
    shutdown_timeout_s: float = 30.0
    kill_limit_s: float = 30.0
    """How long killed workers may take to end before this node leaves the job without them."""
    signals_to_handle: tuple[str, ...] = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    asks_at_interrupt: bool = False
    """Whether --interrupt-action is ask."""
    preempt_signal: str | None = None
    """--preempt-signal: a signal that announces a preemption, as SIGTERM always does."""
    sigterm_senders: str = ""
    """What usually sends SIGTERM here, for the line about one."""
    slurm_job: str | None = None
    """The id of the Slurm job that this agent is part of."""
    drain_limit_s: float = DEFAULT_DRAIN_LIMIT_S
    """How long a preemption may take before the workers get the stop signal; see `contract.Env.DRAIN_LIMIT_S`."""
    features: Mapping[str, Any] = NO_ITEMS
    """What the flags of features say, by the features' names; nothing of those without a flag."""
    trace_parent: str = ""
    """The span of the job, as TRACEPARENT names it; "" if no traces are exported."""
    virtual_local_rank: bool = False
    numa_binding: str | None = None
    omp_num_threads: int | None = None
    """OMP_NUM_THREADS of workers whose `base_env` has none; None leaves it unset."""
    hang_timeout_s: float | None = None
    """How long no worker of any node may show a sign of life. `HANG_TIMEOUT_AUTO` means learned, and None no limit."""
    event_log_handler: str = "null"
    base_env: Mapping[str, str] = NO_ITEMS
    """The environment that workers inherit: the agent's without `_shared.contract.Env.PRIVATE`."""
    agent_error_file: str | None = None
    """The agent's own TORCHELASTIC_ERROR_FILE, to which the root cause is copied in torch's format."""
    node_name: str = ""
    """This machine's name in reports."""
    termination_log: str | None = None
    """The file that gets the report. None: none does."""
    is_pod: bool = False
    """Whether Kubernetes reads the termination log."""
    report_columns: int = 70
    """How wide the report is. An adapter's reader puts the role and the node before each line."""
    counts_since: str = ""
    """Which start of this node or job is the first that this agent knows: "incarnation 2 of this node". "": the first.
    """
    loss: str = ""
    """One line about what this job has lost with its earlier pods, if it has no checkpoint either. "": nothing."""
    log_command: str | None = None
    """The command that shows the logs from outside this node's container; None if they are in a folder of this machine.
    """
    stops_together: bool = False
    """Whether the adapter starts, shows and stops all nodes of the job together, on this machine."""
    control_fd: int | None = None
    """A socket to the program that drives this agent, see `control_socket`; None if there is none."""
    report_file: str | None = None
    """Where the driving program reads the report of a failed job."""


def read_token(environ: Mapping[str, str]) -> str | None:
    """Return MUSTER_TOKEN; None without one.

    Raises:
        UsageError: the token is missing although it is required, or it can be guessed.
    """
    token = environ.get(Env.TOKEN) or None
    if token is None and environ.get(Env.REQUIRE_TOKEN, "0") not in ("", "0"):
        raise UsageError(f"{Env.REQUIRE_TOKEN} requires a token, but {Env.TOKEN} is not set or empty")
    if token is not None and token.startswith("<") and token.endswith(">"):
        raise UsageError(f"{Env.TOKEN} is {token}, the placeholder of a dry run: put a token in its place")
    if token is not None:
        _check_token(token)
    return token


def _check_token(token: str) -> None:
    """Refuse a token that can be guessed, by its length: a digit has 3.3 bits, a hexadecimal one 4, others 6.

    Raises:
        UsageError: it has less than 128 bits.
    """
    if token.isdecimal():
        least, kind = 39, "decimal digits"
    elif not set(token.lower()) - set("0123456789abcdef"):
        least, kind = 32, "hexadecimal digits"
    else:
        least, kind = 22, "characters"
    if len(token) < least:
        raise UsageError(
            f"{Env.TOKEN} can be guessed: it must have 128 random bits, which is {least} {kind} or more, not "
            f"{len(token)}; make one with `openssl rand -hex 32`"
        )
