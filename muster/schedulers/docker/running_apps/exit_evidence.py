"""Explains from the engine's state, and from a container's files and output, why it ended and what its agent reports.

Agents write in their containers how often they have restarted workers, a hang, and the last checkpoint.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from muster._shared.contract import ExitCode, LogNames
from muster._shared.foreign_files import read_whole
from muster.schedulers.docker.engine import ContainerFacts, Engine
from muster.schedulers.docker.sdk import DockerError, EngineUnavailable, one_line
from muster.schedulers.docker.spec import ERROR_FILE, REPORT_FILE, AppRequest, ContainerRequest, Label, build_user_id
from muster.schedulers.failure_report import (
    RecordReader,
    explain_message,
    explain_start_failure,
    find_usage_line,
    parse_attempt,
)
from muster.schedulers.wording.reasons import Code, JobFacts, Reason, Reasons

COMMAND_NOT_FOUND: Final = 127
"""The exit code, as in a shell, of a container whose command does not exist or could not be started."""

_CANNOT_EXECUTE: Final = 126
_MOST_RECORDS: Final = 1000
_INIT_ERROR_PREFIX: Final = b"[FATAL tini "
_MESSAGE_LIMIT_BYTES: Final = 1 << 20
"""Largest part that is read of an agent's last message or error file. The agent writes far less."""

_MIB: Final = 1 << 20


def explain_end(
    engine: Engine, facts: ContainerFacts, request: ContainerRequest, error_file: Path, *, has_init: bool
) -> tuple[Reasons, bool]:
    """Explain why a container ended.

    Args:
        engine: the one with the container.
        facts: of the container.
        request: of it.
        error_file: `describe` reads it. It gets the error file of the first agent that left one.
        has_init: a tiny init runs the command and reports one that does not exist.

    Returns:
        Why it ended (empty: the exit code says it), and whether another start is useless.
    """
    if has_init and facts.exit_code in (_CANNOT_EXECUTE, COMMAND_NOT_FOUND):
        output = _read_stderr(engine, facts)
        if output.startswith(_INIT_ERROR_PREFIX):
            text = output.decode(errors="replace")
            why = explain_start_failure(text, request.image, request.command[0], runs_agent=request.runs_agent)
            return (why,), True
    message = None
    if request.runs_agent and facts.exit_code != 0:
        error = _copy_out(engine, facts, ERROR_FILE)
        if error and not error_file.exists():  # each has the whole report
            with suppress(OSError):  # a full disk: still report the end
                error_file.write_bytes(error)
        message = _copy_out(engine, facts, REPORT_FILE)
    reasons = explain_state(facts, message)
    if not message and request.runs_agent and facts.exit_code == ExitCode.USAGE:
        reasons += find_usage_line(_read_stderr(engine, facts))
    return reasons, False


def _read_stderr(engine: Engine, facts: ContainerFacts) -> bytes:
    """Return its first lines. They are empty if the log driver gives none: the end must be reported in any case."""
    try:
        return b"".join(record for _, record in islice(engine.logs(facts.id, stdout=False), _MOST_RECORDS))
    except EngineUnavailable:
        raise
    except DockerError:
        return b""


def _copy_out(engine: Engine, facts: ContainerFacts, path: str) -> bytes | None:
    """Return a file of the container. It is None if not available: the end must be reported in any case."""
    try:
        return engine.copy_out(facts.id, path, _MESSAGE_LIMIT_BYTES)
    except EngineUnavailable:
        raise
    except DockerError:
        return None


def ended_by_engine(facts: ContainerFacts, *, runs_agent: bool) -> bool:
    """Return whether a container that has ended while the engine was unavailable was ended by the engine.

    An engine that stops ends its containers by SIGTERM and SIGKILL. A program that ended by itself has an exit code of
    its own. An agent exits with 69 if the other members were ended first.
    """
    code = facts.exit_code
    if code is None or facts.oom_killed:
        return False
    return code > 128 or (runs_agent and code == ExitCode.RENDEZVOUS)


def explain_state(facts: ContainerFacts, message: bytes | None) -> Reasons:
    """Return why a container has ended: out of memory, the engine's message, the agent's. Empty: its exit code says it.

    Args:
        facts: of a container that has ended.
        message: its agent's last message. None: there is none.
    """
    found: list[Reason | None] = []
    if facts.oom_killed:
        limit = f"{facts.memory_bytes // _MIB}Mi" if facts.memory_bytes else ""
        found.append(Reason(code=Code.OUT_OF_MEMORY, limit=limit))
    if facts.error:
        found.append(Reason(code=Code.ENGINE_SAID, text=one_line(facts.error)))
    found.append(explain_message(message) if message else None)
    return tuple(each for each in found if each is not None)


RECORDS_LIMIT_BYTES: Final = 8 << 20
"""Some 20,000 records. A job with more of them shows no restarts while it runs."""

CHECKPOINT_LIMIT_BYTES: Final = 64 << 10
"""A path in JSON is at most six times as long as in the file system."""

_FILE_PREFIX: Final = "restarts-"
"""In the app's folder: the last known number for a role, when its container may have been removed."""


def read_checkpoint(engine: Engine, request: ContainerRequest, container: str) -> str:
    """Read the last checkpoint that all ranks have saved. Return "" if there is none, or the container is gone.

    Args:
        engine: with the container.
        request: the container's.
        container: its id.
    """
    content = _read_file(engine, request, container, LogNames.CHECKPOINT, CHECKPOINT_LIMIT_BYTES)
    return (content or b"").decode(errors="replace")


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
        with suppress(OSError):  # a full disk: still report the end
            (folder / _build_name(request.role)).write_text(str(parse_attempt(records)))


def read_events(engine: Engine, folder: Path, details: Mapping[str, Any]) -> tuple[int, dict[str, JobFacts]]:
    """Return how often an app's workers were restarted in place, and what is known of its running jobs by role.

    Args:
        engine: with the app's containers.
        folder: of the app's state.
        details: of the app's spec. They are empty after its end.
    """
    counts = {path.name: _read_number(path) for path in folder.glob(f"{_FILE_PREFIX}*")}
    if not details:
        return sum(counts.values()), {}
    app = AppRequest.from_json(details["request"])
    readers = {
        request.role: _build_reader(engine, app, request)
        for request in app.containers
        if request.runs_agent and request.replica == 0
    }
    for role, reader in readers.items():
        counts[_build_name(role)] = max(counts.get(_build_name(role), 0), reader.restarts)
    return sum(counts.values()), {role: reader.job for role, reader in readers.items()}


def read_run_file(engine: Engine, app_id: str, key: tuple[str, int], name: str, limit_bytes: int) -> bytes | None:
    """Read a file of the run's folder in the containers of a node, also those that have ended.

    Args:
        engine: with the app's containers.
        app_id: of the app.
        key: role and index of the node.
        name: below the run's folder. The records of all of its containers are joined. Of other files the newest counts.
        limit_bytes: of the file.

    Returns:
        None: it does not exist, or not any more, or is too large.

    Raises:
        DockerError: the engine does not answer.
    """
    labels = {Label.APP: app_id, Label.ROLE: key[0], Label.REPLICA: str(key[1]), Label.USER: build_user_id()}
    found: list[bytes] = []
    for facts in reversed(engine.list_containers(labels)):
        folder = facts.labels.get(Label.RUN_DIR)
        content = None if folder is None else engine.copy_out(facts.id, folder + name, limit_bytes)
        if content is not None:
            found.append(content)
            if name != LogNames.EVENTS:
                break
    return b"\n".join(reversed(found)) if found else None


def _build_name(role: str) -> str:
    return f"{_FILE_PREFIX}{quote(role, safe='')}"


def _build_reader(engine: Engine, app: AppRequest, request: ContainerRequest) -> RecordReader:
    """Return what reads the files in the newest container of node 0.

    While that does not run, it reads those of the first other node that runs. Where a node is lost, the next one takes
    over. None also while no engine answers.
    """
    source, newest = request, _find_newest(engine, app, request)
    if newest is None or not newest.running:
        others = [each for each in app.containers if each.role == request.role and each.replica > 0]
        for other in sorted(others, key=lambda each: each.replica):
            found = _find_newest(engine, app, other)
            if found is not None and found.running:
                source, newest = other, found
                break

    def read(names: Sequence[str]) -> list[bytes]:
        return [b"" if newest is None else _read_file(engine, source, newest.id, name) or b"" for name in names]

    return RecordReader(read, "" if newest is None or not newest.running else newest.started_at)


def _find_newest(engine: Engine, app: AppRequest, request: ContainerRequest) -> ContainerFacts | None:
    labels = {**app.labels, Label.ROLE: request.role, Label.REPLICA: str(request.replica)}
    with suppress(DockerError):
        return next(reversed(engine.list_containers(labels)), None)
    return None


def _read_file(
    engine: Engine, request: ContainerRequest, container: str, name: str, limit_bytes: int = RECORDS_LIMIT_BYTES
) -> bytes | None:
    path = request.find_run_file(name)
    with suppress(DockerError):
        return None if path is None else engine.copy_out(container, path, limit_bytes)
    return None


def _read_number(path: Path) -> int:
    try:
        return int(read_whole(path))
    except (OSError, ValueError):
        return 0
