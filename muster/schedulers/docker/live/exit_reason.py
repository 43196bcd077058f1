"""Describes why a container ended: pure, from the engine's state and the agent's report."""

from typing import Final

from muster._shared.contract import ExitCode
from muster.schedulers.docker.engine.container_state import ContainerFacts
from muster.schedulers.docker.engine.errors import one_line
from muster.schedulers.failure_report import describe_report, parse_report

MESSAGE_LIMIT_BYTES: Final = 1 << 20
"""Largest part that is read of an agent's last message or error file. The agent writes far less."""

COULD_NOT_START: Final = "could not be started"
"""The beginning of a reason when a container never ran. Then the submission is rolled back."""

COMMAND_NOT_FOUND: Final = 127
"""The exit code, as in a shell, of a container whose command does not exist or could not be started."""

_MIB: Final = 1 << 20


def ended_by_engine(facts: ContainerFacts, *, runs_agent: bool) -> bool:
    """Return whether a container that has ended while the engine was unavailable was ended by the engine.

    An engine that stops ends its containers by SIGTERM and SIGKILL. A program that ended by itself has an exit code of
    its own. An agent exits with 69 if the other members were ended first.
    """
    code = facts.exit_code
    if code is None or facts.oom_killed:
        return False
    return code > 128 or (runs_agent and code == ExitCode.RENDEZVOUS)


def describe_state(facts: ContainerFacts, message: bytes | None) -> str:
    """Return one clause that completes "exited with 1 (...)": out of memory, the engine's message, the agent's.

    Args:
        facts: of a container that has ended.
        message: its agent's last message. None: there is none.
    """
    parts = []
    if facts.oom_killed:
        limit = f", limit {facts.memory_bytes // _MIB} MiB" if facts.memory_bytes else ""
        parts.append(f"OOMKilled: out of memory{limit}")
    if facts.error:
        parts.append(one_line(facts.error))
    if message:
        parts.append(describe_message(message))
    return "; ".join(part for part in parts if part)


def describe_message(message: bytes) -> str:
    """Return an agent's last message in one line: a report as JSON, or one sentence if there was no round at all."""
    report = parse_report(message)
    return one_line(message.decode(errors="replace")) if report is None else describe_report(report)


def describe_start_failure(error: object, image: str, command: str, *, runs_agent: bool) -> str:
    """Return why a container could not be started. The most common reason has its own text."""
    message = one_line(error)
    missing = "executable file not found" in message or "no such file or directory" in message.lower()
    if missing and command in message:
        needs = "; muster's agent needs Python 3.10 or newer in the image" if runs_agent else ""
        return f"{COULD_NOT_START}: image {image!r} has no {command!r}{needs}"
    return f"{COULD_NOT_START}: {message}"
