"""Makes TorchX's `Runner.wait` return at an app's end: on both lines it reads the state, sleeps and reads it again.

The interval is 1 s on the command line and 10 s by default in Python, and half of it is lost at the end of every app.
So `describe`, when `wait` calls it, first waits for the end itself. All other callers get an answer at once.

Fact about TorchX 0.7.0 and the nightly of 2026-10-26, which have no hook for it: `wait` of `torchx.runner.api` calls
`Runner.status` in the same thread. Where that does not hold, `wait` polls as it does by itself: nothing else changes.
"""

import sys
from typing import Final

from muster.schedulers.supervision import client
from muster.schedulers.supervision.app_folder import AppFolder, AppRecord, AppSpec

WAIT_LIMIT_S: Final = 60.0
"""The longest delay of an answer, so that no error here can block a caller for good."""

_FRAMES: Final = 8
"""How many stack frames are searched for `wait`: it calls `Runner.status`, which calls `describe`, in one thread."""


def read_app_for_wait(folder: AppFolder) -> tuple[AppSpec, AppRecord | None] | None:
    """`client.read_app`, after the app's end if TorchX's `wait` is the caller; None if it has been deleted meanwhile.

    Raises:
        SupervisorError: see `client.read_app`.
    """
    try:
        spec, record = client.read_app(folder)
        if record is None or client.has_ended(record) or not client.runs_here(record):
            return spec, record
        if not _is_called_by_wait():
            return spec, record
        client.wait_ended(folder, limit_s=WAIT_LIMIT_S)
        return client.read_app(folder)
    except FileNotFoundError:
        return None


def _is_called_by_wait() -> bool:
    frame = sys._getframe(2)  # noqa: SLF001  # `inspect` would do the same
    for _ in range(_FRAMES):
        if frame.f_code.co_name == "wait" and frame.f_globals.get("__name__") == "torchx.runner.api":
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
