"""TorchX's `Runner.wait`: it asks for the app's state, sleeps an interval, asks again, on both lines.

The interval is 1 s on the command line and 10 s by default in Python, and half of it is lost at the end of every app.
So `describe`, when it is `wait` that asks, first waits for the end itself. Everybody else gets an answer at once.
"""

import sys
from typing import Final

from muster.schedulers.supervision import client
from muster.schedulers.supervision.app_folder import AppFolder, AppRecord, AppSpec, Machine

HOLD_S: Final = 60.0
"""An answer is not held back longer, so that nothing that goes wrong here can hang a caller."""

_FRAMES: Final = 8
"""How far up `wait` is looked for: it calls `Runner.status`, which calls `describe`, in one thread."""


def look_for_wait(folder: AppFolder) -> tuple[AppSpec, AppRecord | None] | None:
    """`client.look`, after the app's end if TorchX's `wait` is what asks; None when it has been deleted meanwhile.

    Raises:
        SupervisorError: see `client.look`.
    """
    try:
        spec, record = client.look(folder)
        if record is None or client.is_over(record) or record.machine.host != Machine.here().host:
            return spec, record
        if not _is_asked_by_wait():
            return spec, record
        client.wait_ended(folder, limit_s=HOLD_S)
        return client.look(folder)
    except FileNotFoundError:
        return None


def _is_asked_by_wait() -> bool:
    frame = sys._getframe(2)  # noqa: SLF001  # `inspect` would do the same
    for _ in range(_FRAMES):
        if frame.f_code.co_name == "wait" and frame.f_globals.get("__name__") == "torchx.runner.api":
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
