"""Hides the traceback that TorchX's command line would print after Ctrl-C: it does not catch KeyboardInterrupt.

Fact about TorchX 0.7.0 and the nightly of 2026-10-26: neither has a hook for the end of its command line. Where the
module `torchx.cli.main` does not run, nothing is changed, and the interpreter prints its traceback.
"""

import sys
import traceback
from types import TracebackType
from typing import Final

_COMMAND_LINE: Final = "torchx.cli.main"


def hide_traceback() -> None:
    """Show no traceback for the KeyboardInterrupt that is ending `torchx ...`.

    A scheduler's `close` calls this: TorchX calls `close` during the interrupt, and another Ctrl-C may interrupt
    `close` too. The process still ends by SIGINT, as shells expect. Other exceptions, and programs that are not
    TorchX's command line, are not affected.
    """
    if not isinstance(sys.exc_info()[1], KeyboardInterrupt) or not runs_command_line():
        return
    hook = sys.excepthook

    def show(kind: type[BaseException], value: BaseException, tb: TracebackType | None) -> None:
        if not isinstance(value, KeyboardInterrupt):
            hook(kind, value, tb)

    sys.excepthook = show


def runs_command_line() -> bool:
    """Whether this process is running TorchX's command line."""
    return any(frame.f_globals.get("__name__") == _COMMAND_LINE for frame, _ in traceback.walk_stack(None))
