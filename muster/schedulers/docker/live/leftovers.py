"""Finds what has no app any more: containers, reservations, networks, volumes."""

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from muster.schedulers.adapter.scheduler import Leftover, measure_folder
from muster.schedulers.docker.engine.client import Engine
from muster.schedulers.docker.engine.errors import DockerError
from muster.schedulers.docker.live import creation, submissions, unregistered
from muster.schedulers.docker.live.submissions import REGISTRY
from muster.schedulers.docker.spec import Label, build_user_id
from muster.schedulers.supervision.registry import AppRegistry

logger = logging.getLogger(__name__)


def find_without_app(engine: Engine, state_dir: Path) -> Iterator[Leftover]:
    """Find what can be removed.

    Args:
        engine: the environment's.
        state_dir: the user's. What was submitted with another one is left out.
    """
    yield from _find_killed_submissions(state_dir)
    yield from _find_lost_containers(engine, state_dir)


def _find_killed_submissions(state_dir: Path) -> Iterator[Leftover]:
    """Return what a command on the way to an engine has left: no supervisor knows of it."""
    for mark in submissions.find_killed(state_dir):
        yield Leftover(
            name=f"{REGISTRY}://{mark.app_id}",
            what="its submission was killed: containers, network, reservations",
            size_bytes=measure_folder(state_dir / submissions.APPS / mark.app_id),
            ended_s=mark.made_s,
            remove=partial(submissions.remove_killed, state_dir, mark.app_id),
        )


def _find_lost_containers(engine: Engine, state_dir: Path) -> Iterator[Leftover]:
    """Return the containers of this home's apps whose state folder is gone, and reservations without an app."""
    try:
        apps, remains = unregistered.list_apps(engine), unregistered.list_remains(engine)
        caches = unregistered.list_caches(engine)
    except DockerError as error:
        logger.info("%s", error)
        return
    # Submissions register first, then unmark.
    known = submissions.list_submitting(state_dir) | set(AppRegistry(state_dir, REGISTRY))
    mine = {Label.USER: build_user_id(), Label.STATE_DIR: str(state_dir)}

    def build(app_id: str, what: str, ended_s: float | None = None) -> Leftover:
        remove = partial(creation.remove_app, engine, {**mine, Label.APP: app_id})
        return Leftover(name=f"{REGISTRY}://{app_id}", what=what, ended_s=ended_s, remove=remove)

    for app_id, containers in apps.items():
        is_other_homes = unregistered.find_other_state_dir(containers, str(state_dir)) is not None
        if not (is_other_homes or app_id in known or any(facts.running for facts in containers)):
            what = f"its state folder is gone: {len(containers)} containers"
            yield build(app_id, what, unregistered.find_end_s(containers))
    for app_id, labels in remains.items():
        if app_id not in known and labels[0][Label.STATE_DIR] == str(state_dir):
            yield build(app_id, "reservations, networks or volumes of a job that is gone")
    for volume, created_s in caches.items():
        yield Leftover(
            name=f"{REGISTRY} volume {volume}",
            what="compile caches that no container has",
            ended_s=created_s,
            remove=partial(engine.remove_volume, volume),
        )
