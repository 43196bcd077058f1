"""What a user of TorchX's command line reads when one of its commands fails: one line, no traceback.

Facts about `torchx`, 0.7 and the nightly of 2026: only `torchx run` turns some exceptions into a line; all other
commands end by the interpreter's traceback, and `torchx log` reads in threads, each of which prints one too. 0.7's
`torchx log` asks for an unknown app for ever; `cancel` and `delete` say nothing of one. Where none of this holds, the
functions here change nothing.
"""

import logging
import sys
import threading
from collections.abc import Collection
from types import FrameType, TracebackType
from typing import Final

from muster.schedulers.errors import EngineError, SchedulerError

_MAIN: Final = "torchx.cli.main"
_NEED_APP: Final = ("torchx.cli.cmd_log", "torchx.cli.cmd_cancel", "torchx.cli.cmd_delete")

logger = logging.getLogger(__name__)


def is_running() -> bool:
    """Whether this process is `torchx ...`: its main thread is in TorchX's command line."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001  # documented in spite of its name
    return _is_below((_MAIN,), frame)


def needs_app() -> bool:
    """Whether the caller is a command of `torchx` that does not say by itself that an app does not exist."""
    return _is_below(_NEED_APP, sys._getframe(1))  # noqa: SLF001  # `inspect` would do the same


def _is_below(modules: Collection[str], frame: FrameType | None) -> bool:
    while frame is not None:
        if _find_module_name(frame) in modules:
            return True
        frame = frame.f_back
    return False


def _find_module_name(frame: FrameType) -> str:
    """The module's real name, also of `python -m torchx.cli.main`."""
    name, spec = frame.f_globals.get("__name__"), frame.f_globals.get("__spec__")
    return str(spec.name if name == "__main__" and spec is not None else name)


def print_errors_as_lines() -> None:
    """Make `torchx ...` end with one line when one of our errors ends it. Idempotent; affects no other program."""
    if not is_running() or getattr(sys.excepthook, "prints_lines", False):
        return
    hook, thread_hook = sys.excepthook, threading.excepthook

    def show(kind: type[BaseException], value: BaseException, tb: TracebackType | None) -> None:
        if isinstance(value, (EngineError, SchedulerError)):
            logger.error("%s", value)
        else:
            hook(kind, value, tb)

    def show_in_thread(args: threading.ExceptHookArgs) -> None:
        # `torchx log` raises the first error of its threads again in the main thread and logs the others.
        if not isinstance(args.exc_value, (EngineError, SchedulerError)):
            thread_hook(args)

    show.prints_lines = True  # type: ignore[attr-defined]
    sys.excepthook, threading.excepthook = show, show_in_thread
