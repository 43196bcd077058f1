"""Ctrl-C of TorchX's command line: it catches none, so that what a user sees last would be a page of traceback."""

import sys
import traceback
from types import TracebackType
from typing import Final

_COMMAND_LINE: Final = "torchx.cli.main"


def hide_traceback() -> None:
    """Let the KeyboardInterrupt that is on its way out of `torchx ...` show no traceback.

    For a scheduler's `close`, which TorchX calls meanwhile, and which another Ctrl-C may cut short. The process still
    ends by SIGINT, as shells want it. Any other exception, and a program of the caller's own, is left as it is.
    """
    if not isinstance(sys.exc_info()[1], KeyboardInterrupt) or not _runs_command_line():
        return
    hook = sys.excepthook

    def show(kind: type[BaseException], value: BaseException, tb: TracebackType | None) -> None:
        if not isinstance(value, KeyboardInterrupt):
            hook(kind, value, tb)

    sys.excepthook = show


def _runs_command_line() -> bool:
    return any(frame.f_globals.get("__name__") == _COMMAND_LINE for frame, _ in traceback.walk_stack(None))
