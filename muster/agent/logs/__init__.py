"""Workers' output: captured, kept in files, shown on the console, remembered for the report.

`router` is what the supervisor uses. `routing` decides from the flags where each stream goes (`torch_logs_specs`: a
plug-in of torch's decides), `files` names and owns the files of a run, `line_filter` keeps filtered copies. `pump`
empties the pipe of one stream and `pump_thread` runs all pumps. `console` is what people see: `lines` cuts bytes into
prefixed lines and recognises progress bars, `console_queue` is what waits to be shown, `console_writer` the thread
that writes it, `progress_bars` the live rows at the foot of a terminal.

From outside, import `Console`, `LogRouter` and `WorkerStreams`.
"""

from muster.agent.logs.console import Console
from muster.agent.logs.router import LogRouter
from muster.agent.logs.routing import WorkerStreams

__all__ = ["Console", "LogRouter", "WorkerStreams"]
