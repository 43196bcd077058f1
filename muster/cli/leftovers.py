"""Finds what ended jobs have left on this machine and on its Docker engine, and what Slurm's have left.

Each scheduler, also one of another package, finds what its apps have left (`PluginScheduler.find_leftovers`). Some
things have no app any more: packed workspaces, containers, volumes, unpacked agents, logs of agents started by hand.
They are found here.

TorchX 0.7 has no command that removes them, and the nightly's removes one job at a time. Jobs that run, and jobs of
other users and other homes, are never listed here.
"""

import fcntl
import logging
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from muster._shared.folders import remove_folder
from muster._shared.foreign_files import walk_files
from muster._shared.ownership import check_folder
from muster.cli.adapters import close_quietly, create_keepers, describe_error
from muster.schedulers import bundle_start
from muster.schedulers.adapter.scheduler import Leftover, measure_folder
from muster.schedulers.supervision.registry import AppRegistry, find_state_dir

_DOCKER: Final = "docker"
"""The registry of both Docker schedulers."""

_AGENT_LOGS: Final = re.compile(r"muster_[a-z0-9_]{8}")
"""As `tempfile.mkdtemp` names the folder of an agent without `--log-dir`."""

logger = logging.getLogger(__name__)


def find_leftovers(env: Mapping[str, str], *, ended_before_s: float, opened: ExitStack) -> list[Leftover]:
    """Find what can be removed, oldest first.

    Args:
        env: the environment, for the state folder and the engine's address.
        ended_before_s: wall-clock seconds. Jobs that ended later are left alone.
        opened: closes the schedulers and the engine with which what was found is removed.
    """
    state_dir = find_state_dir(env)
    found = [*_find_of_schedulers(opened), *_find_packed(state_dir)]
    found += _find_killed_submissions(state_dir)
    found += _find_unpacked_agents()
    found += _find_logs_of_agents(Path(env.get("TMPDIR") or tempfile.gettempdir()))
    found += _find_lost_containers(env, state_dir, opened)
    old = [each for each in found if each.ended_s is None or each.ended_s <= ended_before_s]
    return sorted(old, key=lambda each: (each.ended_s or 0.0, each.name))


def _find_of_schedulers(opened: ExitStack) -> Iterator[Leftover]:
    for name, scheduler in create_keepers("prune"):
        opened.callback(close_quietly, name, scheduler)
        try:
            yield from scheduler.find_leftovers()
        except Exception as error:  # noqa: BLE001  # others are removed all the same
            logger.warning("%s: %s", name, describe_error(error))


def _find_packed(state_dir: Path) -> Iterator[Leftover]:
    from muster.schedulers.docker.live.payload import find_left_folders

    for folder in find_left_folders(state_dir):
        try:
            changed_s = folder.stat().st_mtime
        except OSError:
            continue
        yield Leftover(
            name=folder.name,
            what="a workspace that a killed command had packed",
            size_bytes=measure_folder(folder),
            ended_s=changed_s,
            remove=lambda folder=folder: remove_folder(folder),  # type: ignore[misc]
        )


def _find_killed_submissions(state_dir: Path) -> Iterator[Leftover]:
    """Return what a command on the way to an engine has left: no supervisor knows of it."""
    from muster.schedulers.docker.live import submissions

    for mark in submissions.find_killed(state_dir):
        yield Leftover(
            name=f"{_DOCKER}://{mark.app_id}",
            what="its submission was killed: containers, network, reservations",
            size_bytes=measure_folder(state_dir / submissions.APPS / mark.app_id),
            ended_s=mark.made_s,
            remove=lambda mark=mark: submissions.remove_killed(state_dir, mark),  # type: ignore[misc]
        )


def _find_unpacked_agents() -> Iterator[Leftover]:
    """Return the agents that jobs of this machine have unpacked, and that no process runs from."""
    for base in bundle_start.find_bases():
        for used_s, folder in bundle_start.list_unpacked(base):
            try:
                if bundle_start.is_used(folder):
                    continue
            except OSError:
                continue
            yield Leftover(
                name=folder,
                what="an unpacked agent that no job uses",
                size_bytes=measure_folder(Path(folder)),
                ended_s=used_s,
                remove=lambda folder=folder: bundle_start.remove_unused(folder),  # type: ignore[misc]
            )


def _find_logs_of_agents(folder: Path) -> Iterator[Leftover]:
    """Log folders of agents that were started by hand, without `--log-dir`, and have ended with something to read."""
    for path in folder.glob("muster_*"):
        try:
            is_ours = _AGENT_LOGS.fullmatch(path.name) and path.lstat().st_uid == os.geteuid() and not path.is_symlink()
            if not is_ours or not any(path.glob("*/attempt_*")):
                continue
            check_folder(path, "")
            with _lock_ended(path):
                has_failed = any(path.glob("*/report.json"))
                times = (each.stat(follow_symlinks=False).st_mtime for each in walk_files(path))
                ended_s = max(times, default=path.stat().st_mtime)
        except OSError:  # it runs, is being removed, or another user could have put it there
            continue
        yield Leftover(
            name=str(path),
            what=f"{'failed: ' if has_failed else ''}logs of a job started by hand",
            size_bytes=measure_folder(path),
            ended_s=ended_s,
            remove=lambda path=path: _remove_ended(path),  # type: ignore[misc]
        )


@contextmanager
def _lock_ended(path: Path) -> Iterator[None]:
    """Hold the locks that an agent has while it lives: of the folder, and of its node's folder in it.

    Raises:
        OSError: an agent has one, or the file system has no locks.
    """
    with ExitStack() as stack:
        for each in (path, *path.glob("**/.lock")):
            fd = os.open(each, os.O_RDONLY | os.O_NOFOLLOW)
            stack.callback(os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def _remove_ended(path: Path) -> None:
    with _lock_ended(path):
        remove_folder(path)


def _find_lost_containers(env: Mapping[str, str], state_dir: Path, opened: ExitStack) -> Iterator[Leftover]:
    """Return the containers of this home's apps whose state folder is gone, and reservations without an app."""
    from muster.schedulers.docker.engine.client import Engine
    from muster.schedulers.docker.engine.errors import DockerError
    from muster.schedulers.docker.live import creation, submissions, unregistered
    from muster.schedulers.docker.spec import Label
    from muster.schedulers.docker.users import build_user_id

    engine = Engine(env)
    opened.callback(engine.close)
    try:
        apps, remains = unregistered.list_apps(engine), unregistered.list_remains(engine)
        caches = unregistered.list_caches(engine)
    except DockerError as error:
        logger.info("%s", error)
        return
    # Submissions register first, then unmark.
    known = submissions.list_submitting(state_dir) | set(AppRegistry(state_dir, _DOCKER))
    mine = {Label.USER: build_user_id(), Label.STATE_DIR: str(state_dir)}
    for app_id, containers in apps.items():
        if app_id in known or any(facts.running for facts in containers):
            continue
        if unregistered.find_other_state_dir(containers, str(state_dir)) is not None:
            continue
        yield Leftover(
            name=f"{_DOCKER}://{app_id}",
            what=f"its state folder is gone: {len(containers)} containers",
            size_bytes=0,
            ended_s=unregistered.find_end_s(containers),
            remove=lambda labels={**mine, Label.APP: app_id}: creation.remove_app(engine, labels),  # type: ignore[misc]
        )
    for app_id, labels in remains.items():
        if app_id in known or labels[0][Label.STATE_DIR] != str(state_dir):
            continue
        yield Leftover(
            name=f"{_DOCKER}://{app_id}",
            what="reservations, networks or volumes of a job that is gone",
            size_bytes=0,
            ended_s=None,
            remove=lambda labels={**mine, Label.APP: app_id}: creation.remove_app(engine, labels),  # type: ignore[misc]
        )
    for volume, created_s in caches.items():
        yield Leftover(
            name=f"{_DOCKER} volume {volume}",
            what="compile caches that no container has",
            size_bytes=0,
            ended_s=created_s,
            remove=lambda volume=volume: engine.remove_volume(volume),  # type: ignore[misc]
        )
