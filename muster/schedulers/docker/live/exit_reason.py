"""Describes why a container ended: pure, from the engine's state and the agent's report."""

from typing import Final

from muster._shared.contract import ExitCode
from muster.schedulers.docker.engine.container_state import ContainerFacts
from muster.schedulers.docker.engine.errors import one_line
from muster.schedulers.failure_report import explain_message
from muster.schedulers.wording.reasons import Code, Reason, Reasons

MESSAGE_LIMIT_BYTES: Final = 1 << 20
"""Largest part that is read of an agent's last message or error file. The agent writes far less."""

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
