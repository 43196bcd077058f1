"""Workers' output: captured, written to files, printed on the console, and kept for the report.

`router` is what the supervisor uses. `routing` decides from the flags where each stream goes (`torch_logs_specs`: a
torch plug-in decides), `files` names and owns the files of a run. `pump` reads the pipe of one stream, and filters its
lines. `opening` opens a round's files in a thread of its own, where a disk that hangs keeps nothing else waiting.
`console` prints on the console: `lines` cuts bytes into prefixed lines, recognises progress bars, and defines what is
queued; `console_writer` is the thread that writes it, which draws live rows at the bottom of a terminal.
`terminal_loan` holds the console back while the debugger of a worker has the terminal.

From outside, import `LogRouter`, `WorkerStreams` and `open_own`, and when a worker asks for it `terminal_loan`.
"""

from muster.agent.logs.files import open_own
from muster.agent.logs.router import LogRouter
from muster.agent.logs.routing import WorkerStreams

__all__ = ["LogRouter", "WorkerStreams", "open_own"]
