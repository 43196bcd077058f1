"""Captures workers' output, writes it to files, prints it on the console, and keeps it for the report.

`router` is what the supervisor uses. `routing` decides from the flags where each stream goes; with `torch_logs_specs` a
torch plug-in decides. `files` names and owns the files of a run. `pump` reads the pipe of one stream, and filters its
lines. `opening` opens a round's files in its own thread, where a disk that hangs delays nothing else. `console` prints
on the console. `lines` cuts bytes into prefixed lines, recognises progress bars, and defines what is queued.
`console_writer` is the thread that writes the queue, and draws live rows at the bottom of a terminal.

From outside, import `LogRouter`, `WorkerStreams`, `open_own` and `replace_file`.
"""

from muster.agent.logs.files import open_own, replace_file
from muster.agent.logs.router import LogRouter
from muster.agent.logs.routing import WorkerStreams

__all__ = ["LogRouter", "WorkerStreams", "open_own", "replace_file"]
