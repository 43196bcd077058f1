"""Ctrl-Z of TorchX's command line: the job stops with the command, and `fg` continues both."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from muster.schedulers.runner.interrupt import runs_command_line


def follow_suspension(tell: Callable[[str], None]) -> None:
    """Stop and continue a job together with this process, if it is TorchX's command line on a terminal.

    Args:
        tell: gets "suspend" before this process stops, and "continue" once it runs again.
    """
    is_ours = threading.current_thread() is threading.main_thread() and runs_command_line()
    if not is_ours or signal.getsignal(signal.SIGTSTP) is not signal.SIG_DFL:
        return

    def stop(_signum: int, _frame: FrameType | None) -> None:
        tell("suspend")
        os.kill(os.getpid(), signal.SIGSTOP)
        tell("continue")

    signal.signal(signal.SIGTSTP, stop)
