"""Creates schedulers by their names: ours and those of other packages."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from muster._shared.contract import show_controls
from muster._shared.control import CommandExit, ControlError
from muster.schedulers.adapter.properties import list_entry_points
from muster.schedulers.adapter.scheduler import PluginScheduler
from muster.schedulers.errors import EngineError, SchedulerError

if TYPE_CHECKING:
    from torchx.runner import Runner

_SESSION: Final = "torchx"
"""TorchX's name of the session, which is in the default path of logs and in the handles that are printed."""
logger = logging.getLogger(__name__)


def create_scheduler(name: str) -> PluginScheduler:
    """Create the scheduler of this name. Only its adapter is imported. The caller closes it.

    Args:
        name: as in an app handle.

    Raises:
        ControlError: there is none of that name, it fails, or it is not made with `muster.schedulers.adapter`.
        EngineError, SchedulerError: what its factory says of this machine or the caller.
    """
    points = list_entry_points()
    if name not in points:
        raise ControlError(f"there is no scheduler {name!r}; there are: {', '.join(points)}", CommandExit.USAGE)
    try:
        scheduler = points[name].load()(_SESSION)
    except (ControlError, EngineError, SchedulerError):
        raise
    except ImportError as error:
        line = f"scheduler {name!r} cannot be used here: {describe_error(error)}"
        raise ControlError(line, CommandExit.USAGE) from error
    except Exception as error:  # another package's
        line = f"scheduler {name!r} cannot be created: {describe_error(error)}"
        raise ControlError(line, CommandExit.LOST) from error
    if not isinstance(scheduler, PluginScheduler):
        close_quietly(name, scheduler)
        line = (
            f"muster cannot ask scheduler {name!r}, which is not made with muster.schedulers.adapter; use torchx for it"
        )
        raise ControlError(line, CommandExit.USAGE)
    return scheduler


@contextmanager
def open_runner(name: str, scheduler_args: str | None) -> "Iterator[tuple[PluginScheduler, Runner, dict[str, Any]]]":
    """Create what submits apps to a scheduler. Yield the scheduler, TorchX's runner with it alone, and the options.

    Args:
        name: of the scheduler.
        scheduler_args: as of `-cfg`. `.torchxconfig` has more.

    Raises:
        ControlError: the scheduler cannot be used, or refuses in the block what is submitted.
    """
    from torchx.runner import Runner
    from torchx.specs import InvalidRunConfigException

    from muster.schedulers.runner import config_file

    try:
        scheduler = create_scheduler(name)
        with Runner(_SESSION, {name: lambda *_args, **_more: scheduler}) as runner:
            cfg = scheduler.run_opts().cfg_from_str(scheduler_args)
            config_file.apply_section(scheduler.run_opts(), name, cfg)
            yield scheduler, runner, cfg
    except (EngineError, SchedulerError) as error:
        raise ControlError(str(error), CommandExit.REFUSED) from error
    except InvalidRunConfigException as error:
        line = f"-cfg {error.cfg_key}: {error}; `torchx runopts {name}` lists the options"
        raise ControlError(" ".join(line.split()), CommandExit.REFUSED) from error


def close_quietly(name: str, scheduler: object) -> None:
    """Close what a factory has made, whatever it is. An error becomes a line."""
    close = getattr(scheduler, "close", None)
    try:
        if callable(close):
            close()
    except Exception as error:  # noqa: BLE001  # another package's
        logger.warning("%s: %s", name, describe_error(error))


def describe_error(error: Exception) -> str:
    """Return one line. Python's own errors, such as `KeyError`, say little without their name."""
    text = show_controls(" ".join(str(error).split()))
    is_for_people = type(error).__module__ != "builtins" or isinstance(error, (ImportError, OSError))
    return text if is_for_people and text else f"{type(error).__name__}: {text}"
