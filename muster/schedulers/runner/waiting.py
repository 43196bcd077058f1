"""A process that waits for its job: `Runner.wait` returns at the app's end, and Ctrl-Z stops the job with the command.

On both lines `wait` reads the state, sleeps and reads it again. The interval is 1 s on the command line and 10 s by
default in Python, and half of it is lost at the end of every app. So `describe`, when `wait` calls it, first waits for
the end itself. All other callers get an answer at once.

The list of `callers` says which parts of TorchX this relies on. If they differ, `wait` polls as it does by itself.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Final

from muster.schedulers.runner import callers
from muster.schedulers.supervision import client
from muster.schedulers.supervision.app_folder import AppFolder, AppRecord, AppSpec

WAIT_LIMIT_S: Final = 60.0
"""The longest delay of an answer, so that no error here can block a caller for good."""


def read_app_for_wait(folder: AppFolder, *, keeps: bool) -> tuple[AppSpec, AppRecord | None] | None:
    """Do as `client.read_app`, after the app's end if TorchX's `wait` calls. Return None if it has been deleted.

    What waits for an app keeps its supervisor running.

    Args:
        folder: the app's.
        keeps: this process submitted the app, and keeps its supervisor running, too.

    Raises:
        EngineError: see `client.revive_app`.
    """
    with contextlib.suppress(FileNotFoundError):
        waits = callers.is_wait()
        spec, record = (client.revive_app if waits or keeps else client.read_app)(folder)
        if waits and record is not None and not client.has_ended(record) and client.runs_here(record):
            client.wait_ended(folder, limit_s=WAIT_LIMIT_S)
            return client.read_app(folder)
        return spec, record
    return None


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
