"""What the agents write in their containers: how often they have restarted workers, a hang, the last checkpoint."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from muster._shared.contract import Env, LogNames
from muster.schedulers import agent_command
from muster.schedulers.adapter.records import RecordReader, describe_roles
from muster.schedulers.docker.engine.client import Engine
from muster.schedulers.docker.engine.container_state import ContainerFacts
from muster.schedulers.docker.engine.errors import DockerError
from muster.schedulers.docker.spec import LOG_DIR, AppRequest, ContainerRequest, Label
from muster.schedulers.failure_report import parse_attempt

RECORDS_LIMIT_BYTES: Final = 8 << 20
"""Some 20,000 records. A job with more of them shows no restarts while it runs."""

CHECKPOINT_LIMIT_BYTES: Final = 64 << 10
"""A path in JSON is at most six times as long as in the file system."""

_FILE_PREFIX: Final = "restarts-"
"""In the app's folder: the last known number for a role, when its container may have been removed."""


def find_run_file(container: ContainerRequest, name: str) -> str | None:
    """The absolute path of a file of the agent's run in a container; None if its command does not tell.

    Args:
        container: that runs the agent.
        name: one of `LogNames`.
    """
    return agent_command.find_run_file(container.command, container.env.get(Env.LOG_DIR, LOG_DIR), name)


def read_checkpoint(engine: Engine, request: ContainerRequest, container: str) -> str:
    """Read the last checkpoint that all ranks have saved; "" if there is none, or the container is gone.

    Args:
        engine: with the container.
        request: the container's.
        container: its id.
    """
    path = find_run_file(request, LogNames.CHECKPOINT) if request.runs_agent else None
    if path is None:
        return ""
    try:
        content = engine.copy_out(container, path, CHECKPOINT_LIMIT_BYTES)
    except DockerError:
        return ""
    return "" if content is None else content.decode(errors="replace")


def record_restarts(engine: Engine, folder: Path, request: ContainerRequest, container: str) -> None:
    """Keep the number beside the app's state: a container that has ended may be removed. Node 0 knows it.

    Args:
        engine: with the container.
        folder: of the app's state.
        request: the container's.
        container: its id.
    """
    if not request.runs_agent or request.replica != 0:
        return
    records = _read_file(engine, request, container, LogNames.EVENTS)
    if records is not None:
        with suppress(OSError):  # a full disk: the container's end must be reported in any case
            (folder / _build_name(request.role)).write_text(str(parse_attempt(records)))


def read_events(engine: Engine, folder: Path, details: Mapping[str, Any]) -> tuple[int, str]:
    """How often workers of an app were restarted in place, and what is known of an app that runs (`describe_running`).

    While no engine answers, the second says so.

    Args:
        engine: with the app's containers.
        folder: of the app's state.
        details: of the app's spec; empty after its end.
    """
    counts = {path.name: _read_number(path) for path in folder.glob(f"{_FILE_PREFIX}*")}
    if details and not engine.is_available():
        return sum(counts.values()), f"no Docker engine answers at {engine.host}: this is what was known before"
    app = AppRequest.from_json(details["request"]) if details else None
    readers = {
        request.role: RecordReader(partial(_read_live, engine, app, request))
        for request in (() if app is None else app.containers)
        if app is not None and request.runs_agent and request.replica == 0
    }
    for role, reader in readers.items():
        counts[_build_name(role)] = max(counts.get(_build_name(role), 0), reader.restarts)
    return sum(counts.values()), describe_roles(readers)


def _build_name(role: str) -> str:
    return f"{_FILE_PREFIX}{quote(role, safe='')}"


def _read_live(engine: Engine, app: AppRequest, request: ContainerRequest, names: Sequence[str]) -> list[bytes]:
    """Files in the newest container of node 0; none also while no engine answers."""
    labels = {**app.labels, Label.ROLE: request.role, Label.REPLICA: str(request.replica)}
    found: list[ContainerFacts] = []
    with suppress(DockerError):
        found = engine.list_containers(labels)
    newest = max(found, key=lambda facts: int(facts.labels[Label.INCARNATION]), default=None)
    return [b"" if newest is None else _read_file(engine, request, newest.id, name) or b"" for name in names]


def _read_file(engine: Engine, request: ContainerRequest, container: str, name: str) -> bytes | None:
    path = find_run_file(request, name)
    if path is None:
        return None
    try:
        return engine.copy_out(container, path, RECORDS_LIMIT_BYTES)
    except DockerError:
        return None


def _read_number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0
