"""Which app a person means: a handle with or without its scheme or session, a name, its beginning, or `last`.

Names are looked up in the state folder, which has the apps of this machine, its Docker engine and adapters of other
packages whose apps have a supervisor here. A name that is not there is looked up by the schedulers whose apps are
elsewhere, as in the cluster of the current context.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple

from muster._shared.control import CommandExit, ControlError
from muster.schedulers.adapter.properties import find_properties, list_properties
from muster.schedulers.errors import EngineError, SchedulerError, UnsafeFolderError
from muster.schedulers.supervision.registry import AppRegistry, find_last_remote, find_state_dir

LAST: Final = "last"
_HANDLE = re.compile(r"(?:(?P<scheduler>[\w-]+)://)?(?:[^/]*/)?(?P<app_id>[^/]+)", re.ASCII)
_NAME = re.compile(r"[a-z][a-z0-9_-]*", re.ASCII | re.IGNORECASE)
"""Any app may be called so. Other words may be what only one scheduler's apps are called (`Properties.own_names`)."""
_TORCHX: Final = "torchx"
"""The session in the handles that `torchx run` and `muster run` print. Others name the same apps."""


class AppName(NamedTuple):
    """An app, and the scheduler that runs it. As a text it is the handle that `muster list` prints."""

    scheduler: str
    app_id: str

    def __str__(self) -> str:
        return f"{self.scheduler}://{_TORCHX}/{self.app_id}"


def find_app(word: str, env: Mapping[str, str]) -> AppName:
    """Return the one app that a person means.

    Args:
        word: `local_cwd://torchx/train-x7k2`, `local_cwd://train-x7k2`, `train-x7k2`, `train`, the number of a job of
            Slurm's, or `last`: the newest of the apps that this user has submitted on this machine.
        env: the environment, for the state folder.

    Raises:
        ControlError: no app or several have such a name, or the text is no handle.
    """
    match = _HANDLE.fullmatch(word)
    if os.sep in word and os.path.isdir(word):
        stacks = "`kill -USR2 PID`, with the process id of an agent, prints the stacks of its node"
        raise ControlError(f"{word!r} is a folder, and this command needs an app; {stacks}", CommandExit.USAGE)
    if match is None:
        example = "local_cwd://torchx/train-x7k2"
        raise ControlError(f"{word!r} is not an app handle; an example is {example}", CommandExit.USAGE)
    scheduler, app_id = match["scheduler"], match["app_id"]
    if scheduler is None and app_id == LAST:
        newest = list_newest(env)
        if not newest:
            raise ControlError("there is no last job: none was submitted on this machine", CommandExit.UNKNOWN)
        return newest[0]
    missing = []
    for name in [] if _NAME.fullmatch(app_id) else _list_asked(app_id, scheduler):
        own_ids, why = _find_named(name, app_id)
        if own_ids:
            return AppName(name, own_ids[0])
        missing.append(why)
    found = [each for each in _list_apps(scheduler, find_state_dir(env)) if each.app_id.startswith(app_id)]
    if scheduler is None and not found:
        found, why = _find_elsewhere(app_id)
        missing.append(why)
    exact = [each for each in found if each.app_id.rpartition(":")[2] == app_id] or found
    if len(exact) > 1:
        names = ", ".join(map(str, exact))
        raise ControlError(f"{word!r} may be any of {len(exact)} jobs: {names}", CommandExit.USAGE)
    if exact:
        return AppName(scheduler or exact[0].scheduler, exact[0].app_id)
    if scheduler is None:
        raise ControlError(", and ".join(missing), CommandExit.UNKNOWN)
    return AppName(scheduler, app_id)  # its adapter reports what it knows


def _list_asked(app_id: str, scheduler: str | None) -> list[str]:
    """Name the schedulers whose apps alone may be called so, all or the one that is given."""
    known = list_properties() if scheduler is None else {scheduler: find_properties(scheduler)}
    return [name for name, each in known.items() if each.own_names and re.fullmatch(each.own_names, app_id)]


def _find_elsewhere(word: str) -> tuple[list[AppName], str]:
    """Ask the schedulers whose apps have no folder here. Return the apps, and a line if there are none."""
    found, lines = [], []
    for name, properties in list_properties().items():
        if properties.has_apps_elsewhere:
            ids, line = _find_named(name, word)
            found += [AppName(name, app_id) for app_id in ids]
            lines.append(line)
    return found, next(filter(None, lines), f"no job is named {word!r}; `muster list` lists them")


def _find_named(scheduler: str, word: str) -> tuple[Sequence[str], str]:
    """See `PluginScheduler.find_named`.

    Raises:
        ControlError: the scheduler cannot be asked.
    """
    from muster.cli.adapters import create_scheduler

    try:
        with closing(create_scheduler(scheduler)) as made:
            return made.find_named(word)
    except (EngineError, SchedulerError) as error:
        raise ControlError(f"no job of this machine is named {word!r}; {error}", CommandExit.UNKNOWN) from error


def list_names(env: Mapping[str, str]) -> list[str]:
    """Return the names of the apps in the state folder, for the shell's completion."""
    try:
        state_dir = find_state_dir(env)
    except UnsafeFolderError:  # the command reports it
        return [LAST]
    return [LAST, *(each.app_id for each in _list_apps(None, state_dir))]


def _list_apps(scheduler: str | None, state_dir: Path) -> Iterator[AppName]:
    names = _list_schedulers(state_dir) if scheduler is None else [find_properties(scheduler).same_apps_as or scheduler]
    for name in names:
        for app_id in AppRegistry(state_dir, name):
            yield AppName(name, app_id)


def _list_schedulers(state_dir: Path) -> list[str]:
    """Return the names of the schedulers that may have apps here: a folder that is none's has no links to apps."""
    return sorted(each.name for each in state_dir.iterdir() if each.is_dir())


def list_newest(env: Mapping[str, str]) -> list[AppName]:
    """Return the newest app of each scheduler, of those that were submitted here. The first is `last`."""
    state_dir = find_state_dir(env)
    names = _list_schedulers(state_dir)
    newest = {name: AppRegistry(state_dir, name).find_newest() or find_last_remote(state_dir, name) for name in names}
    known = sorted(((found, name) for name, found in newest.items() if found is not None), reverse=True)
    return [AppName(name, app_id) for (_, app_id), name in known]
