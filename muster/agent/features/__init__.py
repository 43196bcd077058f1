"""What is optional, one folder for each feature. Without a folder and its row here, everything else works.

    preflight       checks this machine before the workers start, and what nodes must have in common
    snapshots       keeps the ranks' states in the nodes' memory, from which the next round continues
    device_memory   waits until the memory of the GPUs is free before workers are restarted
    in_place        keeps workers whose script can take part in several rounds, and spares
    debugger        lends the terminal to one worker's debugger
    trainer         receives the progress of a Hugging Face Trainer
    trackers        names a job's one run to Weights & Biases, Comet and MLflow
    hangs           watches whether workers hang, and reads in what
    job_object      tells users of kubectl of the job
    train_job       reports progress to Kubeflow's TrainJob
    ready_port      shows the other roles of the app that the workers run
    export          metrics and traces for outside observers
    notify          runs a command of the user when something happens to the job

A *part* hangs on the rounds of a node. The module `node` of its folder has `create_part`, which gets a
`PartContext` and returns a `RoundPart`. `agent.node.round_parts` has both; it loads the part when its row says so, from
then on calls it in every round, and goes on without it if it raises an exception.

For what nodes must agree on, a feature has a half at the leader as well, the module `leader`: pure functions, which
`agent.rendezvous.consensus.parts` calls. The two halves exchange JSON of the feature's own records, in a `PartReport`
(node to leader), a `PartOrder` (leader to node), a `PartOffer` (what a node has for the next round), a `PartShare`
(what one node must know of a round) and a `PartMemory` (what the job remembers, also with another leader).
What is meant for a feature that an agent does not have changes nothing there. A leader without the feature forgets what
was remembered with the next round, since it cannot say whether that still holds.

A *sink* follows events and the status, and never touches a round. The module `sink` of its folder has `connect`, which
gets a `sink.SinkContext` and returns the agent's configuration, as it is or with more. `agent.launch` calls it when its
row says so.

The flags of a feature are in the module `flags` of its folder: `FLAGS`, and `read`, which returns what
`AgentConfig.features` has by the feature's name.

Imports go from a feature to the agent, never back and never to another feature. What several of them use stands beside
their folders: `limited_command` runs a command of the user, and `http_peer` has connections of HTTP.

From outside, import `PARTS`, `PartRow`, `SINKS`, `FLAG_OWNERS`, `RowContext`, `load_half`, `load_module` and `sink`.
"""

import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from muster._shared.contract import Env, KubeflowEnv, OtelEnv
from muster._shared.processes import find_nvml
from muster._shared.records import record
from muster.agent.config import HANG_TIMEOUT_AUTO
from muster.agent.workers.spec import ProgramKind

if TYPE_CHECKING:
    from muster.agent.config import AgentConfig
    from muster.agent.round import Round
    from muster.agent.workers.status_page import StatusPage


@record
class RowContext:
    """What a row looks at. Nothing is loaded for the answer."""

    config: "AgentConfig"
    formed: "Round"
    """The round that begins, or has begun."""
    page: "StatusPage | None"
    """The round's; None if there is none."""
    running_s: float = 0.0
    """How long ago the start of its workers began."""


@record
class PartRow:
    """A feature with a part."""

    name: str
    """The folder's."""
    starts: Callable[[RowContext], bool] = lambda _: False
    """Whether the part is needed in a round that begins. It is asked until the part is loaded."""
    wakes: Callable[[RowContext], bool] = lambda _: False
    """Whether a worker wants the part. It is asked four times a second while workers run."""
    flags: tuple[str, ...] = ()
    """The names of its flags, which are in the module `flags` of its folder."""
    adds_variables: "Callable[[AgentConfig], bool]" = lambda _: False
    """Whether `add_variables` of the module `variables` of its folder is called before anything is started, for what
    all workers inherit."""
    begins_early: "Callable[[AgentConfig], bool]" = lambda _: False
    """Whether `begin_early` of the module `node` is called while the agent starts. The part is then loaded before there
    is a round."""
    reads_views: bool = False
    """Whether the part reads what workers wait in, also for a round in which it has not begun. `Judge` of the module
    `judge` says what follows: see `diagnosis.hangs`."""
    is_agreed: bool = False
    """Whether the feature has a half at the leader: the module `leader` of its folder."""


def _may_have_trainer(context: RowContext) -> bool:
    """Return whether the worker of global rank 0 is here, and may import the Trainer."""
    if context.formed.rank_offset != 0 or context.page is None:
        return False
    config = context.config
    is_other = config.base_env.get("PYTHON_EXEC", sys.executable) != sys.executable
    if is_other or config.program.kind is ProgramKind.COMMAND:
        return True
    return any(os.path.isdir(os.path.join(folder, "transformers")) for folder in sys.path)


def _is_debugger_asking(context: RowContext) -> bool:
    page = context.page
    return page is not None and any(map(page.read_debugger, range(context.config.nproc)))


def _has_preflight(config: "AgentConfig") -> bool:
    settings = config.features.get("preflight")
    return settings is None or settings.mode != "off"


def _continues_snapshots(context: RowContext) -> bool:
    return any(memory.feature == "snapshots" for memory in context.formed.memories)


def _is_memory_wanted(context: RowContext) -> bool:
    return context.page is not None and context.page.is_memory_wanted


def _can_worker_stay(context: RowContext) -> bool:
    page = context.page
    return page is not None and any(page.read_stays(rank) is not None for rank in range(context.config.nproc))


PARTS: Final[tuple[PartRow, ...]] = (
    PartRow(name="preflight", flags=("preflight", "devices"), begins_early=_has_preflight, is_agreed=True),
    PartRow(
        name="snapshots",
        starts=_continues_snapshots,
        wakes=_is_memory_wanted,
        flags=("snapshot-memory", "snapshot-copies"),
        is_agreed=True,
    ),
    PartRow(name="device_memory", starts=lambda context: find_nvml(context.config.base_env) is not None),
    PartRow(
        name="in_place",
        starts=lambda context: bool(context.config.features.get("in_place")),
        wakes=_can_worker_stay,
        flags=("spare-workers",),
    ),
    PartRow(name="debugger", wakes=_is_debugger_asking),
    PartRow(
        name="trainer",
        starts=_may_have_trainer,
        flags=("trainer-callback",),
        adds_variables=lambda config: bool(config.features.get("trainer")),
    ),
    PartRow(
        name="trackers", starts=lambda context: bool(context.config.features.get("trackers")), flags=("tracker-run",)
    ),
    PartRow(
        name="hangs",
        starts=lambda context: context.config.hang_timeout_s not in (None, HANG_TIMEOUT_AUTO),
        # its imports would delay the workers' first line
        wakes=lambda context: context.config.hang_timeout_s == HANG_TIMEOUT_AUTO and context.running_s >= 2.0,
        reads_views=True,
        adds_variables=lambda config: find_nvml(config.base_env) is not None,
    ),
)
"""In the order in which their rounds begin."""


def load_module(name: str, module: str) -> Any:
    """Import a module of a feature's folder."""
    return __import__(f"muster.agent.features.{name}.{module}", fromlist=(module,))  # importlib costs 0.5 ms


def load_half(name: str, half: str) -> Any:
    """Import `node` or `leader` of a feature's folder. None: this agent has no such half."""
    has_half = any(row.name == name and (row.is_agreed or half == "node") for row in PARTS)
    return load_module(name, half) if has_half else None


@record
class SinkRow:
    """A feature that follows what happens."""

    name: str
    """The folder's."""
    is_wanted: "Callable[[Mapping[str, str], AgentConfig], bool]"
    """Whether the agent's environment or configuration asks for it."""
    flags: tuple[str, ...] = ()
    """See `PartRow`."""
    is_awaited: bool = False
    """Whether it is a witness for which the end of a failed job may wait for `outcome.WITNESS_END_S`."""


SINKS: Final[tuple[SinkRow, ...]] = (
    SinkRow(name="job_object", is_wanted=lambda environ, _: bool(environ.get(Env.JOB_OBJECT))),
    SinkRow(name="ready_port", is_wanted=lambda environ, _: bool(environ.get(Env.READY_PORT))),
    SinkRow(name="train_job", is_wanted=lambda environ, _: bool(environ.get(KubeflowEnv.URL))),
    SinkRow(
        name="export",
        is_wanted=lambda environ, config: (
            "export" in config.features or any(environ.get(name) for name in OtelEnv.ENDPOINTS)
        ),
        flags=("metrics-port",),
    ),
    SinkRow(name="notify", is_wanted=lambda _, config: "notify" in config.features, flags=("notify",), is_awaited=True),
)
"""In the order in which they are connected."""

FLAG_OWNERS: Final[Mapping[str, str]] = {
    **{flag: row.name for row in PARTS for flag in row.flags},
    **{flag: row.name for row in SINKS for flag in row.flags},
}
"""The feature of each flag that is a feature's."""
