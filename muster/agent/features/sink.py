"""What a sink gets, which follows what happens to a job and never touches a round: see `muster.agent.features`."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from muster._shared.records import record

if TYPE_CHECKING:
    from muster.agent.config import AgentConfig
    from muster.agent.logs import LogRouter
    from muster.agent.node.actions import Finish
    from muster.agent.node.events import Event
    from muster.agent.round import Round
    from muster.agent.runtime.event_log import EventLog, RunTimes
    from muster.agent.runtime.loop import Loop
    from muster.agent.runtime.signals import ChildWatch


class Witness(Protocol):
    """Reads the events of a node, and how it ends. The agent's end waits for it."""

    def read(self, event: "Event", current: "Round | None") -> None:
        """Read an event before it is decided; `current` is None before the first round."""
        ...

    def read_end(self, finish: "Finish", last: "Round | None", times: "RunTimes") -> None:
        """Read the job's end, after its report is printed; `last` is None if there was no round."""
        ...

    @property
    def is_busy(self) -> bool:
        """Whether the agent's end must wait for it, which it does within a limit of its own."""
        ...

    def shorten(self, limit_s: float) -> None:
        """Be busy for at most this time from now on; 0 means no more."""
        ...


@record
class SinkContext:
    """All that a sink may use."""

    config: "AgentConfig"
    environ: Mapping[str, str]
    """The agent's."""
    loop: "Loop"
    logs: "LogRouter"
    """Prints lines, in any thread, also after the loop's last turn."""
    children: "ChildWatch"
    event_log: "EventLog"
    """Gets the sink, which it closes."""
    add_witness: Callable[[Witness], None]
