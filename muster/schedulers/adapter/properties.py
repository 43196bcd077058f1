"""What is peculiar to a scheduler. Its factory declares it, so that it is known before a scheduler is created.

Factories are found as TorchX finds them, by the entry points `torchx.schedulers`: ours and others'.
"""

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from muster._shared import processes
from muster_entry import OF_TORCHX, SCHEDULERS

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


@dataclass(frozen=True, kw_only=True)
class Properties:
    """What the command `muster` must know of a scheduler that its methods do not say.

    The defaults suit a scheduler whose apps outlive their command, and whose agents keep their files for good.
    """

    node_word: str = "node"
    """What people call one of its nodes: pod, container."""
    waits: bool = False
    """`muster run` waits for its apps, which end with their command. So does `torchx run` for each scheduler whose name
    begins with `local`."""
    run_options: Mapping[str, str] = field(default_factory=dict)
    """Options of `-cfg` that `muster run` gives unless its caller does. If `detach=false` is among them, it waits."""
    same_apps_as: str = ""
    """Another scheduler that has the same apps, under whose name they are registered and listed. "": none."""
    own_names: str = ""
    """A regular expression of words that are no names, and by which a person may mean an app of this scheduler only:
    `PluginScheduler.find_named` is asked before all others. "": there are none."""
    has_apps_elsewhere: bool = False
    """Its apps have no folder in the user's state folder. `PluginScheduler.find_named` finds them if no app that has
    one is called so."""
    deleted: str = "somebody deleted it"
    """What has become of an app that existed and does not any more, for people."""
    loses_files: bool = False
    """Output and files of a node are gone when the node is."""
    refuses_hold: str = ""
    """Why `muster hold` cannot hold its nodes, and what to do. "": it can."""
    hold_options: Mapping[str, str] = field(default_factory=dict)
    """Options of `-cfg` that `muster hold` gives unless its caller does."""
    has_holders_here: bool = False
    """The nodes of a hold are processes of this machine with files in the app's folder, and runs reach them there."""


@dataclass(frozen=True, kw_only=True)
class Factory:
    """Creates a scheduler for TorchX, as an entry point names it. Only then is the scheduler's class loaded."""

    name: str
    """The scheduler's, as in app handles."""
    creates: str
    """`package.module:Class` of a `PluginScheduler`, which gets the scheduler's name and TorchX's of the session."""
    properties: Properties = Properties()
    needs_linux: bool = False
    """Another system is refused in one line. A supervisor of muster's needs pidfd, /proc and subreapers. Elsewhere it
    could not find out which process owns an app or whether it is alive, and would be started again and again."""
    elsewhere: str = ""
    """`package.module:function`: what TorchX calls in its place on other systems. "": itself."""

    def __call__(self, session_name: str, **kwargs: Any) -> Any:
        """Create it. Only `elsewhere` gets the other arguments, which TorchX passes to all factories.

        Raises:
            PlatformError: this system is not Linux.
        """
        if self.elsewhere and not processes.LINUX:
            return _load(self.elsewhere)(session_name, **kwargs)
        if self.needs_linux and not processes.LINUX:
            raise self._refuse_system()
        scheduler = _load(self.creates)(self.name, session_name)
        scheduler.properties = self.properties
        return scheduler

    def _refuse_system(self) -> Exception:
        from muster.schedulers.errors import PlatformError
        from muster.schedulers.runner.command_line import print_errors_as_lines

        print_errors_as_lines()
        return PlatformError(
            f"the scheduler {self.name} needs Linux, this is {sys.platform}: run torchx in a Linux virtual machine or "
            "container with the engine's socket, or use kubernetes; local_cwd runs as TorchX's own"
        )


def _load(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)


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
