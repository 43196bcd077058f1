"""Finds the factories of schedulers as TorchX does, by the entry points `torchx.schedulers`: ours and others'."""

import contextlib
from typing import TYPE_CHECKING, Final

from muster.schedulers.adapter.properties import Properties
from muster_entry import OF_TORCHX, SCHEDULERS

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

DEFAULT: Final = next(iter(SCHEDULERS))
"""The scheduler of a command that names none. TorchX takes the first entry point, too."""
_GROUP: Final = "torchx.schedulers"
_OURS: Final = "muster_entry"
"""The module of the entry points of this package, see there."""


def list_entry_points() -> "dict[str, EntryPoint]":
    """List entry points by name. Of one name the last counts, as for TorchX.

    Ours are there without the package's metadata, too.
    """
    from importlib.metadata import EntryPoint, entry_points

    points = {point.name: point for point in entry_points(group=_GROUP)}
    if any(point.module == _OURS for point in points.values()):
        return points
    ours = {name: EntryPoint(name, f"{_OURS}:{name}", _GROUP) for name in (*SCHEDULERS, *OF_TORCHX)}
    return {**ours, **points}  # a checkout on PYTHONPATH


def list_properties() -> dict[str, Properties]:
    """Return the properties of the schedulers that may be made with `muster.schedulers.adapter`, by their names.

    Those that have the same apps as another one are left out.
    """
    points = list_entry_points()
    made = [name for name, point in points.items() if point.module != _OURS or name not in OF_TORCHX]
    found = {name: _read_properties(points[name]) for name in made}
    return {name: properties for name, properties in found.items() if not properties.same_apps_as}


def find_properties(name: str) -> Properties:
    """Return the properties of a scheduler, of which only the factory is loaded.

    Args:
        name: as in an app handle. If there is no such scheduler, or it declares none, they are the defaults.
    """
    return _read_properties(list_entry_points().get(name))


def _read_properties(point: "EntryPoint | None") -> Properties:
    with contextlib.suppress(Exception):  # another package's; what creates the scheduler reports the error
        properties = getattr(point and point.load(), "properties", None)
        if isinstance(properties, Properties):
            return properties
    return Properties()
