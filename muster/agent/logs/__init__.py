"""Workers' output: captured, kept in files, shown on the console, remembered for the report.

`LogRouter` is what the supervisor uses; `Console` also carries the agent's own lines.
"""

from muster.agent.logs.console import Console
from muster.agent.logs.router import LogRouter
from muster.agent.logs.routing import WorkerStreams

__all__ = ["Console", "LogRouter", "WorkerStreams"]
