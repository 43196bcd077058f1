"""Finds schedulers as TorchX does, by the entry points `torchx.schedulers`: ours and those of other packages."""

import logging
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from muster._shared.contract import show_controls
from muster._shared.control import ControlError, ExitCode
from muster.schedulers.adapter.scheduler import PluginScheduler
from muster.schedulers.errors import EngineError, SchedulerError
from muster_entry import SCHEDULERS

_GROUP = "torchx.schedulers"
_OURS = "muster_entry"
"""The module of the entry points of this package, see there."""
MADE_HERE: Final = (
    "local_cwd",
    "detached",
    "local_docker",
    "docker",
    "kubernetes",
    "slurm",
    "ssh",
    "held",
    "local_held",
)
"""The schedulers of this package. Its other entry points register TorchX's own again."""

_WITHOUT_LEFTOVERS: Final = ("local_docker", "local_held", "kubernetes")
"""`docker` and `held` have the apps of the first two, the cluster those of the third."""

logger = logging.getLogger(__name__)


def create_scheduler(name: str, session: str) -> PluginScheduler:
    """Create the scheduler of this name. Only its adapter is imported. The caller closes it.

    Args:
        name: as in an app handle.
        session: TorchX's name of the session.

    Raises:
        ControlError: there is none of that name, it fails, or it is not made with `muster.schedulers.adapter`.
        EngineError, SchedulerError: what its factory says of this machine or the caller.
    """
    points = _list_entry_points()
    if name not in points:
        from difflib import get_close_matches

        near = get_close_matches(name, points, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ControlError(f"there is no scheduler {name!r}; {hint}there are: {', '.join(points)}", ExitCode.USAGE)
    try:
        scheduler = points[name].load()(session)
    except (ControlError, EngineError, SchedulerError):
        raise
    except ImportError as error:
        line = f"scheduler {name!r} cannot be used here: {describe_error(error)}"
        raise ControlError(line, ExitCode.USAGE) from error
    except Exception as error:  # another package's
        line = f"scheduler {name!r} cannot be created: {describe_error(error)}"
        raise ControlError(line, ExitCode.LOST) from error
    if not isinstance(scheduler, PluginScheduler):
        close_quietly(name, scheduler)
        line = (
            f"muster cannot ask scheduler {name!r}, which is not made with muster.schedulers.adapter; use torchx for it"
        )
        raise ControlError(line, ExitCode.USAGE)
    return scheduler


def list_names() -> list[str]:
    """Name the schedulers that may be made with `muster.schedulers.adapter`: ours and those of other packages."""
    return [name for name, point in _list_entry_points().items() if point.module != _OURS or name in MADE_HERE]


def create_keepers(session: str) -> Iterator[tuple[str, PluginScheduler]]:
    """Create the schedulers whose apps may leave something: ours, and those of other packages. The caller closes them.

    One that cannot be created is named in a line. One that cannot be asked here is left out.

    Yields:
        Its name, and the scheduler.
    """
    for name in list_names():
        if name in _WITHOUT_LEFTOVERS:
            continue
        try:
            scheduler = create_scheduler(name, session)
        except ControlError as error:
            logger.log(logging.INFO if error.exit_code is ExitCode.USAGE else logging.WARNING, "%s", error)
        except (EngineError, SchedulerError) as error:
            logger.warning("%s: %s", name, describe_error(error))
        else:
            yield name, scheduler


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


def _list_entry_points() -> dict[str, EntryPoint]:
    """List entry points by name. Of one name the last counts, as for TorchX.

    Ours are there without the package's metadata, too.
    """
    points = {point.name: point for point in entry_points(group=_GROUP)}
    if any(point.module == _OURS for point in points.values()):
        return points
    ours = {name: EntryPoint(name, f"{_OURS}:{name}", _GROUP) for name in SCHEDULERS}  # a checkout on PYTHONPATH
    return {**ours, **points}
