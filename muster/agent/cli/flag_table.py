"""Every flag of the agent, as data: parsing, `--help` and the tests against torchrun's parser all read this table.

Flags of a feature are in the module `flags` of its folder, which is loaded when one of them is given, or for a help.

Source: torch/distributed/run.py (`get_args_parser`) of torch 2.13 and 2.15 for the flags that are not `ours`.
"""

from typing import Final

from muster._shared.records import record
from muster.agent.features import FLAG_OWNERS, load_module
from muster.agent.runtime.limits import KEEP_ALIVE_ATTEMPTS


@record
class Flag:
    """One flag. `name` has dashes and no leading ones; the command line may have underscores instead."""

    name: str
    text: str
    """What the flag means, and where torchrun differs. --help has the first sentence, --help-all the whole text."""
    metavar: str = ""
    """The name of the value in --help; "" for a switch, which has none."""
    short: str = ""
    """One letter: `-m`."""
    default: str = ""
    """The default, for --help only; `arguments` sets the value."""
    is_common: bool = False
    """Whether --help has it; --help-all has all flags."""
    ours: bool = False
    """Whether torchrun does not have it."""
    since: str = ""
    """The torch whose torchrun has it first: "2.15". "": 2.13 has it, or it is ours."""
    has_variable: bool = True
    """Whether PET_<NAME> is its default."""
    is_free: bool = False
    """Whether its value is a path, or a text of several lines; all others have no control characters."""
    repeats: bool = False
    """Whether a repeated flag adds to the earlier value, after a semicolon. For all others the last value counts."""

    @property
    def dest(self) -> str:
        """Its key: `nproc_per_node`."""
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        """Its variable: `PET_NPROC_PER_NODE`."""
        return "PET_" + self.dest.upper()

    @property
    def is_switch(self) -> bool:
        """Whether it takes no value."""
        return not self.metavar


NODES: Final = (
    Flag(name="nnodes", metavar="N|MIN:MAX", default="1", is_common=True, text="How many nodes take part."),
    Flag(
        name="nproc-per-node",
        metavar="N|KIND",
        default="1",
        is_common=True,
        text="How many workers run on this node: a number, gpu, cpu or auto. A kind means one for each device: cpu, "
        "gpu, xpu, auto (torch's accelerator, otherwise cpu), or the name of a device torch knows. A short-lived "
        "process counts the devices, because the agent never imports torch.",
    ),
    Flag(
        name="node-rank",
        metavar="I",
        default="0 for static, else none",
        is_common=True,
        text="This node's index. It decides the order of ranks, and node 0 leads. Unlike torchrun, muster-agent "
        "uses it with c10d, too.",
    ),
    Flag(name="role", metavar="NAME", default="default", text="Name of the workers' role, in prefixes and ROLE_NAME."),
    Flag(
        name="local-addr",
        metavar="ADDR",
        default="detected",
        text="The address at which the other nodes reach this node. It becomes MASTER_ADDR if this node hosts rank 0.",
    ),
)

RENDEZVOUS: Final = (
    Flag(
        name="standalone",
        is_common=True,
        text="Run on this node alone. No address and no port are needed, and the id is --rdzv-id or a fresh one. "
        "static with one node and neither --rdzv-endpoint nor --master-port means the same.",
    ),
    Flag(
        name="rdzv-backend",
        metavar="NAME",
        default="static",
        is_common=True,
        text="static, c10d (which means muster here), muster, or a handler of torch's. static: a fixed number of nodes "
        "with --master-addr and --master-port. The agents connect to this port, too, before the workers' store listens "
        "and between rounds, and keep these connections. muster: the agents agree among themselves and need no store. "
        "c10d-torch, etcd, etcd-v2 and any torchrun.handlers entry point: torch's own handlers.",
    ),
    Flag(
        name="rdzv-endpoint",
        metavar="HOST[:PORT]",
        default="localhost:29400",
        is_common=True,
        text="Where the leader listens, or the endpoint of torch's handlers.",
    ),
    Flag(
        name="rank0-env",
        metavar="VARIABLE",
        ours=True,
        has_variable=False,
        text="Name of the environment variable that holds node 0's address. Every node but node 0 must have this "
        "variable. Implies --rdzv-backend muster.",
    ),
    Flag(
        name="rdzv-port",
        metavar="PORT",
        default="29400",
        ours=True,
        has_variable=False,
        text="The port when --rdzv-endpoint names none. With muster, MUSTER_RDZV_PORT overrides it. Implies "
        "--rdzv-backend muster.",
    ),
    Flag(
        name="rdzv-id",
        metavar="ID",
        default="none",
        is_common=True,
        text="The job's id, the same on all nodes, and the name of its log folder.",
    ),
    Flag(
        name="rdzv-conf",
        is_free=True,
        metavar="K=V,...",
        is_common=True,
        text="Settings of the rendezvous, such as join_timeout=600. For muster, join_timeout (600), last_call_timeout "
        f"(3) and keep_alive_interval (1) are seconds. keep_alive_max_attempt ({KEEP_ALIVE_ATTEMPTS}) is the number of "
        "silent intervals after which a node is lost. is_host is 1 on the node that leads, else 0 (with static, node 0 "
        "leads). timeout is another name for join_timeout (static: 900). close_timeout, heartbeat_timeout, "
        "read_timeout, cas_backoff_max_seconds and store_type=tcp are accepted and have no effect. torch's handlers "
        "get every key unchanged.",
    ),
    Flag(
        name="last-call-timeout",
        metavar="S",
        default="3",
        ours=True,
        has_variable=False,
        text="Seconds an elastic job that has its minimum of nodes waits for more after the latest one joined. "
        "Overrides last_call_timeout of --rdzv-conf; torchrun waits 30.",
    ),
    Flag(
        name="master-addr",
        metavar="ADDR",
        default="127.0.0.1",
        is_common=True,
        text="static only: node 0's address, which becomes MASTER_ADDR.",
    ),
    Flag(
        name="master-port",
        metavar="PORT",
        default="29500",
        is_common=True,
        text="static only: the port at that address, which becomes MASTER_PORT.",
    ),
)

RESTARTS: Final = (
    Flag(
        name="max-restarts",
        metavar="N",
        default="0",
        is_common=True,
        text="How often workers may be restarted because one failed. This is one budget for the whole job, not one "
        "per node as in torchrun. Lost and new nodes use none of it.",
    ),
    Flag(
        name="on",
        is_free=True,
        metavar="RULES",
        ours=True,
        has_variable=False,
        repeats=True,
        text="Rules, separated by `;`, that decide what follows from a failure: CONDITION,...: VERDICT. The first "
        "rule that matches decides; each further --on adds rules. Conditions: exit N, signal NAME, the name "
        "of an exception, usage, data, oom (host-oom, device-oom), device, disk, network, preemption, "
        "time-limit, hang, crash, unknown, any, repeat (the same cause at the same place twice in a row, "
        "without a step). Verdicts: restart, elsewhere (the node leaves with exit code 69), stop. After "
        "restart and elsewhere, a number limits how often one cause may lead to it without progress, and free "
        "sets no limit; neither uses --max-restarts. Example: exit 77: elsewhere; ImportError: stop; exit "
        "33,34: restart free. If no rule matches: muster.worker.give_up stops the job. A usage error right "
        "after the start stops it the second time in a row. muster.worker.leave_node means elsewhere. hang "
        "follows --hang-action. device means elsewhere if a spare node waits. An error of --preflight means "
        "elsewhere if a spare node waits, else stop. repeat means stop if a scheduler has started the job, "
        "except for host-oom, device, network, preemption and time-limit. Anything else means restart.",
    ),
    Flag(
        name="restart-backoff",
        metavar="S",
        default="1",
        ours=True,
        has_variable=False,
        text="Base of the exponential back-off in seconds, with jitter. It delays each restart but the first for "
        "the same cause without progress, by at most 64 times the base. 0: no delay.",
    ),
    Flag(
        name="shutdown-timeout",
        metavar="S",
        default="30, or TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
        text="Seconds between the stop signal and SIGKILL, for any stop.",
    ),
    Flag(
        name="signals-to-handle",
        metavar="SIG,...",
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        text="Signals that stop this node; the agent passes them on to the workers.",
    ),
    Flag(
        name="interrupt-action",
        metavar="WHAT",
        default="stop",
        ours=True,
        has_variable=False,
        text="What the first Ctrl-C does; the second kills the workers. stop: the workers get SIGINT. ask: all "
        "ranks pause at one step, and the terminal asks whether to save and stop, stop, or continue. "
        "For ask, the script must call muster.worker.wait_while_paused. Without a terminal: stop.",
    ),
    Flag(
        name="preempt-signal",
        metavar="SIG",
        ours=True,
        has_variable=False,
        text="A signal that announces a preemption as SIGTERM does, such as USR1 for Slurm's --signal=USR1@60. If "
        "the script asks muster.worker.should_stop, all ranks save and stop at the same step. The agents exit "
        "with 143.",
    ),
    Flag(
        name="hang-timeout",
        metavar="S",
        default="auto",
        ours=True,
        has_variable=False,
        text="Seconds after which the job counts as hung if no rank has entered or completed a collective or done "
        "a step. For a rank that has done none of these yet, CPU time (at least 1/200 of a core) and output "
        "(to a file, a pipe or the console) count instead. auto: learned from the job itself, at least 60. 0: "
        "never.",
    ),
    Flag(
        name="hang-action",
        metavar="WHAT",
        default="report with auto, restart with seconds",
        ours=True,
        has_variable=False,
        text="What happens when the job hangs. report: print which rank keeps the others waiting, and all stacks; the "
        "job goes on. restart: start the next attempt while restarts are left. stop: end the "
        "job.",
    ),
    Flag(
        name="rank-order",
        metavar="HOW",
        default="node",
        ours=True,
        has_variable=False,
        text="node: ranks follow the node index. segment: nodes of one NVLink domain get adjacent ranks, and a "
        "spare of the lost node's domain replaces it first. ClusterUUID, the node label "
        "nvidia.com/gpu.clique, SLURM_JOB_SEGMENT_SIZE or MUSTER_SEGMENT names the domain. Node 0 keeps rank "
        "0.",
    ),
    Flag(
        name="monitor-interval",
        metavar="S",
        default="0.1",
        text="Has no effect: nothing is polled.",
    ),
)

PROGRAM: Final = (
    Flag(name="module", short="m", is_common=True, text="The script is a module name, as in `python -m`."),
    Flag(name="no-python", is_common=True, text="The script is an executable of any kind, not run by Python."),
    Flag(
        name="run-path",
        text="Run the script with runpy.run_path in an interpreter that is started as --start-method says. "
        "Overrides --no-python and -m.",
    ),
    Flag(
        name="start-method",
        metavar="HOW",
        default="spawn",
        text="spawn, fork or forkserver: how the interpreters of --run-path and of function workers are started.",
    ),
    Flag(
        name="start",
        metavar="HOW",
        default="auto",
        ours=True,
        has_variable=False,
        text="cold: a new interpreter per worker. warm: fork workers from one template that has imported torch. "
        "auto: warm for Python scripts on Linux. spawn, fork and forkserver set --start-method, "
        "which torchrun abbreviates so.",
    ),
    Flag(
        name="preload",
        metavar="MODULE,...",
        default="auto",
        ours=True,
        has_variable=False,
        text="Modules that the warm template imports. auto: torch and those of its parts that the program uses, if "
        "it imports torch.",
    ),
    Flag(
        name="virtual-local-rank",
        text="Every worker has LOCAL_RANK=0 and sees only its own device through CUDA_VISIBLE_DEVICES, and "
        "HIP_VISIBLE_DEVICES if set.",
    ),
    Flag(
        name="numa-binding",
        metavar="HOW",
        default="off",
        has_variable=False,
        text="node, socket, exclusive or core-complex: bind each worker to CPUs near its GPU, with numactl when it is "
        "installed. On a machine without GPUs the workers are spread over the NUMA nodes.",
    ),
)

OUTPUT: Final = (
    Flag(
        name="log-dir",
        is_free=True,
        metavar="DIR",
        default="a temporary folder",
        is_common=True,
        text="Base folder of the log files. The link `latest` in it names the newest attempt. /dev/null: no files "
        "are written.",
    ),
    Flag(
        name="redirects",
        short="r",
        metavar="WHAT",
        default="0",
        is_common=True,
        text="Write workers' streams to files only: 0 none, 1 stdout, 2 stderr, 3 both. By local rank: 0:3,1:1. "
        "Without this flag, several workers on a terminal get prefixes and live progress bars. With `-r 0` they write "
        "to the terminal themselves.",
    ),
    Flag(
        name="tee",
        short="t",
        metavar="WHAT",
        default="0",
        is_common=True,
        text="Write workers' streams to files and to the console; values as for --redirects.",
    ),
    Flag(
        name="log-line-prefix-template",
        metavar="TEXT",
        default="TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
        since="2.15",
        text="The prefix of console lines, such as '${hostname}:${rank}: '. The end of --help-all lists the macros.",
    ),
    Flag(
        name="local-ranks-filter",
        metavar="R,...",
        default="all",
        text="Only these local ranks write to the console; files get everything.",
    ),
    Flag(
        name="collapse-lines",
        metavar="WHEN",
        default="auto",
        ours=True,
        has_variable=False,
        text="If several workers write a line within half a second, print it once, with their ranks. Lines may "
        "differ in digits, hexadecimal numbers and paths. Equal tracebacks are also printed once. on: always. "
        "off: never. auto: on a terminal with 8 workers or more. Files get everything.",
    ),
    Flag(
        name="duplicate-stdout-filters",
        is_free=True,
        metavar="TEXT,...",
        text="Lines with any of these texts also go to filtered_stdout.log; `,,` means a comma.",
    ),
    Flag(
        name="duplicate-stderr-filters",
        is_free=True,
        metavar="TEXT,...",
        text="As --duplicate-stdout-filters, for stderr and filtered_stderr.log.",
    ),
    Flag(
        name="logs-specs",
        metavar="NAME",
        has_variable=False,
        text="A torchrun.logs_specs entry point that places the log files; `default` is the agent's own layout.",
    ),
    Flag(
        name="event-log-handler",
        metavar="NAME",
        default="null",
        text="console prints the agent's event records to stderr, one JSON object per line. events.jsonl in the log "
        "folder always has them.",
    ),
    Flag(
        name="print-completion",
        metavar="SHELL",
        since="2.15",
        has_variable=False,
        text="Print what completes muster-agent's flags in bash, zsh or tcsh, and exit.",
    ),
)

GROUPS: Final = (
    ("Nodes and workers", NODES),
    ("How nodes find each other", RENDEZVOUS),
    ("Restarts and the end", RESTARTS),
    ("The program and how it is started", PROGRAM),
    ("Output", OUTPUT),
)

FLAGS: Final = tuple(flag for _, flags in GROUPS for flag in flags)
"""Those of the agent itself."""


def list_groups() -> tuple[tuple[str, tuple[Flag, ...]], ...]:
    """Return all flags with the titles of their groups. Features with flags are loaded, and have a group each."""
    names = dict.fromkeys(FLAG_OWNERS.values())
    return (*GROUPS, *((f"Feature {name}", load_module(name, "flags").FLAGS) for name in names))


def list_flags() -> tuple[Flag, ...]:
    """Return all flags. Features with flags are loaded."""
    return tuple(flag for _, flags in list_groups() for flag in flags)
