"""Tells which part of TorchX called an adapter: the names of TorchX's modules that the adapters rely on are here, once.

Checked with TorchX 0.7.0 and the nightly of 2026-10-26. Neither tells a scheduler which command or method calls it, and
neither has a public hook for the end of a command, for `Runner.wait` or for what a terminal shows:
`torchx.runner.events` records a call when it is over, and the entry points `torchx.cli.cmds` replace a command for all
schedulers, where of two packages that replace the same one only one counts: ours could hide a user's. So the functions
here look for TorchX's modules on the stack. In a version that names or nests them differently every answer is no, and
adapters do what they do for any Python program: errors have tracebacks, lines no colours, and `wait` polls.
"""

import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Final, TextIO

_MAIN: Final = "torchx.cli.main"
_NEED_APP: Final = ("torchx.cli.cmd_log", "torchx.cli.cmd_cancel", "torchx.cli.cmd_delete")
_STATUS: Final = "torchx.cli.cmd_status"
_RUNNER: Final = "torchx.runner.api"
_PRINTER: Final = "print_log_lines"
"""Prints the lines of one replica, in a thread for each: to its caller's `file`, with the prefix `ROLE/REPLICA `."""

_WAIT_DEPTH: Final = 8
"""How many stack frames are searched for `wait`: it calls `Runner.status`, which calls `describe`, in one thread."""


def runs_command_line() -> bool:
    """Whether this process is `torchx ...`: its main thread is in TorchX's command line. For any thread."""
    main = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001  # documented in spite of its name
    return any(_find_module(frame) == _MAIN for frame in _walk(main))


def needs_app() -> bool:
    """Whether the caller is a command of `torchx` that does not say by itself that an app does not exist.

    0.7's `torchx log` asks for an unknown app for ever; `cancel` and `delete` say nothing of one.
    """
    return any(_find_module(frame) in _NEED_APP for frame in _walk(_get_caller()))


def shows_status() -> bool:
    """Whether the caller is `torchx status`, which a person reads."""
    return any(_find_module(frame) == _STATUS for frame in _walk(_get_caller()))


def is_wait() -> bool:
    """Whether the caller is TorchX's `Runner.wait`, which reads the state, sleeps and reads it again."""
    nearest = zip(_walk(_get_caller()), range(_WAIT_DEPTH), strict=False)
    return any(frame.f_code.co_name == "wait" and _find_module(frame) == _RUNNER for frame, _ in nearest)


def find_printer() -> TextIO | None:
    """The stream to which TorchX's command line prints the lines that the caller reads; None: others read them."""
    for frame in _walk(_get_caller()):
        if frame.f_code.co_name == _PRINTER and _find_module(frame).startswith("torchx."):
            file = frame.f_locals.get("file")
            return file if hasattr(file, "isatty") else None
    return None


def _get_caller() -> FrameType:
    return sys._getframe(2)  # noqa: SLF001  # `inspect` would do the same


def _walk(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _find_module(frame: FrameType) -> str:
    """The module's real name, also of `python -m torchx.cli.main`."""
    name, spec = frame.f_globals.get("__name__"), frame.f_globals.get("__spec__")
    return str(spec.name if name == "__main__" and spec is not None else name)
