"""Errors of the adapters that the TorchX command line prints as one line.

TorchX turns only `ComponentValidationException` and two related exceptions into a message. All others become a
traceback.
"""

import errno
from collections.abc import Mapping

from torchx.specs.api import InvalidRunConfigException
from torchx.specs.finder import ComponentValidationException

from muster._shared.contract import show_controls


class _LineError(Exception):
    def __str__(self) -> str:
        return show_controls(super().__str__())


class SchedulerError(_LineError, ComponentValidationException, ValueError):  # type: ignore[misc]
    """The caller's fault: one line that names the value and what is allowed."""


class UnknownAppError(SchedulerError):
    """There is no such app."""


class EndedAppError(SchedulerError):
    """The app has ended already."""


class EngineError(_LineError, ComponentValidationException, RuntimeError):  # type: ignore[misc]
    """The machine's or the engine's fault: one line that says what is missing and what to do."""


class NotConfiguredError(EngineError):
    """Nothing says where the engine is. `muster list` names it only if asked, or if a job was submitted to it here."""


class RightError(EngineError):
    """The account lacks a right: nothing was changed."""


class UnsafeFolderError(EngineError, PermissionError):
    """Another user could change or replace a folder from which programs are started."""


class PlatformError(EngineError, ModuleNotFoundError):
    """This system lacks what a scheduler needs. `torchx runopts` prints a ModuleNotFoundError as a line and goes on."""


class OptionError(SchedulerError, InvalidRunConfigException):  # type: ignore[misc]
    """A scheduler option (`-cfg`) that does not exist or has an impossible value. `cfg_key` names it."""

    def __init__(self, message: str, cfg_key: str, cfg: Mapping[str, object] | None = None) -> None:
        Exception.__init__(self, message.replace("\n", r"\n"))  # a value may have several lines
        self.cfg_key = cfg_key
        self.cfg = dict(cfg or {})


def describe_os_error(error: OSError, folder: str) -> str:
    """Return what the system refuses, with the file. If the error of a full disk names no file, name `folder`."""
    where = error.filename or (folder if error.errno in (errno.ENOSPC, errno.EDQUOT) else None)
    reason = error.strerror or str(error)
    return f"{where}: {reason}" if where else reason
