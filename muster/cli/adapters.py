"""Finds schedulers as TorchX does, by the entry points `torchx.schedulers`: ours and those of other packages."""

import logging
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points

from muster._shared.control import ControlError, ExitCode
from muster.schedulers.adapter.scheduler import PluginScheduler

_GROUP = "torchx.schedulers"
_OURS = "muster_entry"
"""The module of the entry points of this package, see there."""

logger = logging.getLogger(__name__)


def create_scheduler(name: str, session: str) -> PluginScheduler:
    """Create the scheduler of this name; only its adapter is imported. The caller closes it.

    Args:
        name: as in an app handle.
        session: TorchX's name of the session.

    Raises:
        ControlError: there is none of that name, or it is not made with `muster.schedulers.adapter`.
        EngineError: it cannot be used here.
    """
    points = _list_entry_points()
    if name not in points:
        raise ControlError(f"there is no scheduler {name!r}; there are: {', '.join(points)}", ExitCode.USAGE)
    try:
        scheduler = points[name].load()(session)
    except (ImportError, AttributeError) as error:
        raise ControlError(f"scheduler {name!r} cannot be used here: {error}", ExitCode.USAGE) from error
    if not isinstance(scheduler, PluginScheduler):
        raise ControlError(f"{name!r} is not made with muster.schedulers.adapter: it cannot be asked", ExitCode.USAGE)
    return scheduler


def create_others(session: str) -> Iterator[PluginScheduler]:
    """Create the schedulers that other packages have made with `muster.schedulers.adapter`. The caller closes them."""
    for name, point in _list_entry_points().items():
        if point.module != _OURS:
            try:
                yield create_scheduler(name, session)
            except (ControlError, RuntimeError) as error:
                logger.info("%s", error)


def _list_entry_points() -> dict[str, EntryPoint]:
    """By name; of one name the last counts, as for TorchX."""
    return {point.name: point for point in entry_points(group=_GROUP)}
