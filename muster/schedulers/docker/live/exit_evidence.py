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


class ExitEvidence:
    """Explains why containers ended.

    Args:
        engine: the one with the containers.
        error_file: `describe` reads it. It gets the error file of the first agent that left one.
        has_init: a tiny init runs the commands and reports those that do not exist.
    """

    def __init__(self, engine: Engine, error_file: Path, *, has_init: bool) -> None:
        self._engine = engine
        self._error_file = error_file
        self._has_init = has_init

    def explain(self, facts: ContainerFacts, request: ContainerRequest) -> tuple[Reasons, bool]:
        """Return why this container ended (empty: the exit code says it), and whether another start is useless."""
        missing = self._find_missing_command(facts, request)
        if missing is not None:
            return (missing,), True
        message = self._read_last_message(facts) if request.runs_agent and facts.exit_code != 0 else None
        reasons = explain_state(facts, message)
        if not message and request.runs_agent and facts.exit_code == ExitCode.USAGE:
            reasons += find_usage_line(self._read_stderr(facts))
        return reasons, False

    def _find_missing_command(self, facts: ContainerFacts, request: ContainerRequest) -> Reason | None:
        """Return why the container could not be started, if the init reported that the command does not exist."""
        if facts.exit_code not in (_CANNOT_EXECUTE, COMMAND_NOT_FOUND) or not self._has_init:
            return None
        output = self._read_stderr(facts)
        if not output.startswith(_INIT_ERROR_PREFIX):
            return None
        text = output.decode(errors="replace")
        return explain_start_failure(text, request.image, request.command[0], runs_agent=request.runs_agent)

    def _read_last_message(self, facts: ContainerFacts) -> bytes | None:
        error = self._copy_out(facts, ERROR_FILE)
        if error and not self._error_file.exists():  # each has the whole report
            with suppress(OSError):  # a full disk: still report the end
                self._error_file.write_bytes(error)
        return self._copy_out(facts, REPORT_FILE)

    def _read_stderr(self, facts: ContainerFacts) -> bytes:
        """Return its first lines. They are empty if the log driver gives none: the end must be reported in any case."""
        try:
            return b"".join(record for _, record in islice(self._engine.logs(facts.id, stdout=False), _MOST_RECORDS))
        except EngineUnavailable:
            raise
        except DockerError:
            return b""

    def _copy_out(self, facts: ContainerFacts, path: str) -> bytes | None:
        """Return a file of the container. It is None if not available: the end must be reported in any case."""
        try:
            return self._engine.copy_out(facts.id, path, _MESSAGE_LIMIT_BYTES)
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
        limit = f"{facts.memory_bytes // _MIB} MiB" if facts.memory_bytes else ""
        found.append(Reason(code=Code.OUT_OF_MEMORY, limit=limit))
    if facts.error:
        found.append(Reason(code=Code.ENGINE_SAID, text=one_line(facts.error)))
    found.append(explain_message(message) if message else None)
    return tuple(each for each in found if each is not None)
