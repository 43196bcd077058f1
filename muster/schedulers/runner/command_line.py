"""What a user of TorchX's command line reads when a command fails or is interrupted: one line, or none; no traceback.

Facts about `torchx`, 0.7.0 and the nightly of 2026-10-26: only `torchx run` turns some exceptions into a line; all
other commands end by the interpreter's traceback, and `torchx log` reads in threads, each of which prints one too. None
catches KeyboardInterrupt. `sys.excepthook` and `threading.excepthook` are Python's own hooks for that. They are set
only where `callers` finds TorchX's command line, and pass on all that is not ours: where it does not, nothing is
changed.
"""

import logging
import sys
import threading
from types import TracebackType

from muster.schedulers.errors import EngineError, SchedulerError
from muster.schedulers.runner import callers

logger = logging.getLogger(__name__)


def print_errors_as_lines() -> None:
    """Make `torchx ...` end with one line when one of our errors ends it, and with none after Ctrl-C.

    After Ctrl-C the process still ends by SIGINT, as shells expect. Idempotent; affects no other program.
    """
    if not callers.runs_command_line() or getattr(sys.excepthook, "prints_lines", False):
        return
    hook, thread_hook = sys.excepthook, threading.excepthook

    def show(kind: type[BaseException], value: BaseException, tb: TracebackType | None) -> None:
        if isinstance(value, (EngineError, SchedulerError)):
            logger.error("%s", value)
        elif not isinstance(value, KeyboardInterrupt):
            hook(kind, value, tb)

    def show_in_thread(args: threading.ExceptHookArgs) -> None:
        # `torchx log` raises the first error of its threads again in the main thread and logs the others.
        if not isinstance(args.exc_value, (EngineError, SchedulerError)):
            thread_hook(args)

    show.prints_lines = True  # type: ignore[attr-defined]
    sys.excepthook, threading.excepthook = show, show_in_thread
