"""Puts the parts of an agent together. Imported after the warm template was started, which needs none of this."""

from typing import TYPE_CHECKING

from muster._guard import GuardLease
from muster.agent.config import AgentConfig
from muster.agent.logs import LogRouter
from muster.agent.node.supervisor import Supervisor
from muster.agent.runtime.event_log import EventLog, open_sinks
from muster.agent.runtime.loop import Loop
from muster.agent.runtime.signals import ChildWatch
from muster.agent.workers.cold import CommandStarter
from muster.agent.workers.spec import WorkerStarter
from muster.agent.workers.warm.starter import TemplateStarter
from muster.agent.workers.warm.template_handle import TemplateHandle, TemplateOptions

if TYPE_CHECKING:
    from muster.agent.placement.affinity import WorkerPlacement


def build_supervisor(
    config: AgentConfig,
    *,
    loop: Loop,
    lease: GuardLease,
    placements: "tuple[WorkerPlacement, ...]",
    warm: TemplateOptions | None,
    template: TemplateHandle | None,
) -> Supervisor:
    """Build an agent, ready to run.

    Args:
        config: the agent's.
        loop: its one loop.
        lease: the guard's fencing lease.
        placements: length nproc, indexed by local rank; empty: workers run where the agent may.
        warm: how its templates are started; None: workers start cold.
        template: the first template, if it was started already.

    Raises:
        MusterError: the log folder, the event sink or the rendezvous is not available.
    """
    logs = LogRouter(
        config=config.logs, loop=loop, run_id=config.rendezvous.run_id, role=config.role, nproc=config.nproc
    )
    event_log = EventLog(loop.clock, open_sinks(config.event_log_handler))
    children = ChildWatch(loop)
    starter: WorkerStarter
    if warm is None:
        starter = CommandStarter(on_record=event_log.write)
    else:
        starter = TemplateStarter(
            loop,
            children,
            CommandStarter(),
            warm,
            on_notice=logs.print_line,
            on_record=event_log.write,
            early=template,
        )
    return Supervisor(
        config,
        loop=loop,
        lease=lease,
        logs=logs,
        event_log=event_log,
        children=children,
        starter=starter,
        placements=placements,
    )
