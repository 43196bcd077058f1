"""How a command of TorchX ends when it fails or is interrupted: it rolls back, and prints one line, or none.

The list of `callers` says which parts of TorchX this relies on. The hooks are set only where `callers` finds TorchX's
command line, and pass on all that is not ours. `torchx log` reads in threads, and each prints a traceback, too.

Ctrl-C unwinds the stack. What a submission has made is removed, and apps of the command are stopped. SIGTERM and SIGHUP
would end the process at once, so they get a handler that unwinds it, too. Ctrl-Z stops the jobs of the command with it.
"""

import atexit
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

from muster.schedulers.errors import EngineError, SchedulerError
from muster.schedulers.runner import callers

logger = logging.getLogger(__name__)

_SIGNALLED = 128
"""A shell's exit codes above it: a signal."""


def print_errors_as_lines() -> None:
    """Make `torchx ...` end with one line when one of our errors ends it, and with none after Ctrl-C.

    After Ctrl-C the process still ends by SIGINT, as shells expect. It is idempotent, and affects no other program.
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
        # `torchx log` raises its threads' first error.
        if not isinstance(args.exc_value, (EngineError, SchedulerError)):
            thread_hook(args)

    show.prints_lines = True  # type: ignore[attr-defined]
    sys.excepthook, threading.excepthook = show, show_in_thread


def is_interrupted(error: BaseException | None) -> bool:
    """Return whether an exception comes from Ctrl-C, or from a signal that `unwind_on_signals` handles."""
    by_signal = isinstance(error, SystemExit) and isinstance(error.code, int) and error.code > _SIGNALLED
    return by_signal or isinstance(error, KeyboardInterrupt)


def unwind_on_signals() -> None:
    """Make SIGTERM and SIGHUP end `torchx ...` as Ctrl-C does: by that signal, after it has cleaned up. Idempotent.

    Signals that the caller ignores (`nohup`) or handles stay as they are. A second one, which `timeout` and shells that
    end send, interrupts nothing. Ctrl-C still does.
    """
    if threading.current_thread() is not threading.main_thread() or not callers.runs_command_line():
        return
    got = 0

    def end(signum: int, _frame: FrameType | None) -> None:
        nonlocal got
        if not got:
            got = signum
            raise SystemExit(_SIGNALLED + signum)

    def end_by_signal() -> None:
        if got:
            sys.stderr.flush()
            signal.signal(got, signal.SIG_DFL)
            signal.raise_signal(got)

    ours = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is signal.SIG_DFL]
    for each in ours:
        signal.signal(each, end)
    if ours:
        atexit.register(end_by_signal)


def follow_suspension(tell: Callable[[str], None]) -> None:
    """Stop and continue a job together with this process, if it is TorchX's command line on a terminal.

    Args:
        tell: gets "suspend" before this process stops, and "continue" once it runs again.
    """
    is_ours = threading.current_thread() is threading.main_thread() and callers.runs_command_line()
    if not is_ours or signal.getsignal(signal.SIGTSTP) is not signal.SIG_DFL:
        return

    def stop(_signum: int, _frame: FrameType | None) -> None:
        tell("suspend")
        os.kill(os.getpid(), signal.SIGSTOP)
        tell("continue")

    signal.signal(signal.SIGTSTP, stop)
