"""Which app a person means: a handle with or without its scheme or session, a name, its beginning, or `last`.

Names are looked up in the state folder, which has the apps of this machine, its Docker engine and adapters of other
packages whose apps have a supervisor here. A name that is not there is looked up in the cluster of the current context,
if there is one.
"""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from muster._shared.control import ControlError, ExitCode
from muster.schedulers.errors import EngineError, SchedulerError, UnsafeFolderError
from muster.schedulers.supervision.registry import AppRegistry, find_last_remote, find_state_dir

LAST: Final = "last"
_HANDLE = re.compile(r"(?:(?P<scheduler>[\w-]+)://)?(?:(?P<session>[^/]*)/)?(?P<app_id>[^/]+)", re.ASCII)
SAME_APPS: Final[Mapping[str, str]] = {"local_docker": "docker", "local_held": "held"}
"""A scheduler that has the same apps as another one."""
_KUBERNETES: Final = "kubernetes"
_SLURM: Final = "slurm"
_TORCHX: Final = "torchx"
"""The session in the handles that `torchx run` and `muster run` print."""


@dataclass(frozen=True, kw_only=True)
class AppName:
    """An app, and the scheduler that runs it."""

    scheduler: str
    session: str
    app_id: str

    def __str__(self) -> str:
        return f"{self.scheduler}://{self.session}/{self.app_id}"


def find_app(word: str, env: Mapping[str, str]) -> AppName:
    """Return the one app that a person means.

    Args:
        word: `local_cwd://torchx/train-x7k2`, `local_cwd://train-x7k2`, `train-x7k2`, `train`, the number of a job of
            Slurm's, or `last`: the newest of the apps that this user has submitted on this machine.
        env: the environment, for the state folder and the kubeconfig.

    Raises:
        ControlError: no app or several have such a name, or the text is no handle.
    """
    match = _HANDLE.fullmatch(word)
    if os.sep in word and os.path.isdir(word):
        raise _refuse_folder(word)
    if match is None:
        example = "local_cwd://torchx/train-x7k2"
        raise ControlError(f"{word!r} is not an app handle; an example is {example}", ExitCode.USAGE)
    scheduler, app_id = match["scheduler"], match["app_id"]
    session = match["session"] or "muster"
    if scheduler is None and app_id == LAST:
        return _find_last(env)
    if scheduler is None and ":" in app_id:  # NAMESPACE:NAME
        return AppName(scheduler=_KUBERNETES, session=session, app_id=app_id)
    if app_id.isdecimal() and scheduler in (None, _SLURM):
        of_job = _find_slurm_app(app_id, env)
        if of_job is not None:
            return AppName(scheduler=_SLURM, session=session, app_id=of_job)
    found = list(_find_by_beginning(app_id, scheduler, env))
    exact = [each for each in found if each.app_id.rpartition(":")[2] == app_id] or found
    if len(exact) > 1:
        names = ", ".join(map(name_handle, exact))
        raise ControlError(f"{word!r} may be any of {len(exact)} jobs: {names}", ExitCode.USAGE)
    if exact:
        return AppName(scheduler=scheduler or exact[0].scheduler, session=session, app_id=exact[0].app_id)
    if scheduler is None:
        last_id = _find_last_in_cluster(app_id, env)
        if last_id is not None:  # of a namespace that is not the context's
            return AppName(scheduler=_KUBERNETES, session=session, app_id=last_id)
        line = _describe_unnamed(word, env)
        if app_id.isdecimal():
            line = f"no job that was submitted here has the Slurm job id {app_id}, and {line}"
        raise ControlError(line, ExitCode.UNKNOWN)
    return AppName(scheduler=scheduler, session=session, app_id=app_id)  # its adapter reports what it knows


def _refuse_folder(word: str) -> ControlError:
    known = "`muster status`, `top`, `log`, `events` and `timeline` read a folder with logs"
    stacks = "`kill -USR2 PID`, with the process id of an agent, prints the stacks of its node"
    return ControlError(f"{word!r} is a folder, not an app; only {known}; {stacks}", ExitCode.USAGE)


def _describe_unnamed(word: str, env: Mapping[str, str]) -> str:
    if _has_kubeconfig(env):
        from muster.schedulers import kubernetes

        with contextlib.suppress(EngineError, SchedulerError):
            place = kubernetes.create_scheduler("muster").describe_place(None)
            return f"no job is named {word!r} on this machine or in {place}: {kubernetes.GONE}"
    return f"no job is named {word!r}; `muster list` lists them"


def list_names(env: Mapping[str, str]) -> list[str]:
    """Return the names of the apps in the state folder, for the shell's completion."""
    try:
        state_dir = find_state_dir(env)
    except UnsafeFolderError:  # the command reports it
        return [LAST]
    return [LAST, *(each.app_id for each in _list_apps(None, state_dir))]


def _find_by_beginning(beginning: str, scheduler: str | None, env: Mapping[str, str]) -> Iterator[AppName]:
    local = [each for each in _list_apps(scheduler, find_state_dir(env)) if each.app_id.startswith(beginning)]
    return iter(local) if local or scheduler is not None else _find_in_cluster(beginning, env)


def _list_apps(scheduler: str | None, state_dir: Path) -> Iterator[AppName]:
    names = _list_schedulers(state_dir) if scheduler is None else [SAME_APPS.get(scheduler, scheduler)]
    for name in names:
        for app_id in AppRegistry(state_dir, name):
            yield AppName(scheduler=name, session="muster", app_id=app_id)


def _list_schedulers(state_dir: Path) -> list[str]:
    """Return the names of the schedulers that may have apps here: a folder that is none's has no links to apps."""
    return sorted(each.name for each in state_dir.iterdir() if each.is_dir())


def _find_in_cluster(beginning: str, env: Mapping[str, str]) -> Iterator[AppName]:
    """Look in the current context's namespace. Find nothing if no cluster is set up or it does not answer."""
    if not _has_kubeconfig(env):
        return
    from muster.schedulers import kubernetes

    try:
        scheduler = kubernetes.create_scheduler("muster")
        ids = [str(each.app_id) for each in scheduler.list_apps({})]
    except (EngineError, SchedulerError) as error:
        raise ControlError(f"no job of this machine is named {beginning!r}; {error}", ExitCode.UNKNOWN) from error
    for app_id in ids:
        if app_id.partition(":")[2].startswith(beginning):
            yield AppName(scheduler=_KUBERNETES, session="muster", app_id=app_id)


def _find_slurm_app(job_id: str, env: Mapping[str, str]) -> str | None:
    """Find the app that has this number in `squeue`. None: none that was submitted here."""
    registry = AppRegistry(find_state_dir(env), _SLURM)
    if not any(registry):
        return None
    from muster.schedulers.slurm.live import find_app_of_job

    return find_app_of_job(job_id, registry)


def _has_kubeconfig(env: Mapping[str, str]) -> bool:
    return bool(env.get("KUBECONFIG")) or os.path.exists(os.path.expanduser("~/.kube/config"))


def _find_last_in_cluster(beginning: str, env: Mapping[str, str]) -> str | None:
    """Return the id of the last job that was submitted to Kubernetes from here, if its name begins so.

    None: it does not, or no cluster is set up.

    Raises:
        ControlError: its name begins so, and it no longer exists or cannot be looked up.
    """
    last_id = _read_last_remote(env)
    if last_id is None or not _find_name(last_id).startswith(beginning) or not _has_kubeconfig(env):
        return None
    from muster.schedulers import kubernetes

    try:
        scheduler = kubernetes.create_scheduler("muster")
        exists = scheduler.describe_app(last_id) is not None
    except (EngineError, SchedulerError) as error:
        raise ControlError(f"no job of this machine is named {beginning!r}; {error}", ExitCode.UNKNOWN) from error
    if not exists:
        raise ControlError(scheduler.describe_unknown(last_id), ExitCode.UNKNOWN)
    return last_id


def _read_last_remote(env: Mapping[str, str]) -> str | None:
    found = find_last_remote(find_state_dir(env), _KUBERNETES)
    return None if found is None else found[1]


def _find_name(app_id: str) -> str:
    """Return the name in NAMESPACE:NAME, which the context and the kubeconfig may follow."""
    return app_id.partition(":")[2].partition(":")[0]


def _find_last(env: Mapping[str, str]) -> AppName:
    newest = list_newest(env)
    if not newest:
        raise ControlError("there is no last job: none was submitted on this machine", ExitCode.UNKNOWN)
    return newest[0]


def list_newest(env: Mapping[str, str]) -> list[AppName]:
    """Return the newest app of each scheduler, of those that were submitted here. The first is `last`."""
    state_dir = find_state_dir(env)
    newest = {name: AppRegistry(state_dir, name).find_newest() for name in _list_schedulers(state_dir)}
    newest[_KUBERNETES] = find_last_remote(state_dir, _KUBERNETES)
    known = sorted(((found, name) for name, found in newest.items() if found is not None), reverse=True)
    return [AppName(scheduler=name, session="muster", app_id=app_id) for (_, app_id), name in known]


def name_handle(app: AppName) -> str:
    """Return the handle that `muster list` prints."""
    return f"{app.scheduler}://{_TORCHX}/{app.app_id}"
