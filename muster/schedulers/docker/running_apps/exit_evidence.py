"""Explains from the engine's state, and from a container's files and output, why it ended."""

from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Final

from muster._shared.contract import ExitCode
from muster.schedulers.docker.engine.client import Engine
from muster.schedulers.docker.engine.container_state import ContainerFacts
from muster.schedulers.docker.engine.errors import DockerError, EngineUnavailable, one_line
from muster.schedulers.docker.spec import ERROR_FILE, REPORT_FILE, ContainerRequest
from muster.schedulers.failure_report import explain_message, explain_start_failure, find_usage_line
from muster.schedulers.wording.reasons import Code, Reason, Reasons

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
