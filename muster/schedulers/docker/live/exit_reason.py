"""Why a container ended, in parts for people: pure, from what the engine and the agent left behind."""

import json
from typing import Any, Final

from muster._contract import ExitCode
from muster.schedulers.docker.engine.container_state import ContainerFacts
from muster.schedulers.docker.engine.errors import one_line

MESSAGE_LIMIT_BYTES: Final = 1 << 20
"""What is read of an agent's last message or error file; it writes far less."""

COULD_NOT_START: Final = "could not be started"
"""How a reason begins when a container never ran; the submission is then taken back."""

_MIB: Final = 1 << 20


def ended_by_engine(facts: ContainerFacts, *, runs_agent: bool) -> bool:
    """Whether a container found ended after the engine was away was ended by that, not by its own doing.

    An engine that stops takes its containers with it, by SIGTERM and SIGKILL. A program that ended by itself meanwhile
    has an exit code of its own; an agent exits 69 when its peers were taken away first.
    """
    code = facts.exit_code
    if code is None or facts.oom_killed:
        return False
    return code > 128 or (runs_agent and code == ExitCode.RENDEZVOUS)


def describe_state(facts: ContainerFacts, message: bytes | None) -> str:
    """One clause that completes "exited with 1 (...)": out of memory, the engine's parts, the agent's.

    Args:
        facts: of a container that has ended.
        message: what its agent left as its last message; None when it left none.
    """
    said = []
    if facts.oom_killed:
        limit = f", limit {facts.memory_bytes // _MIB} MiB" if facts.memory_bytes else ""
        said.append(f"OOMKilled: out of memory{limit}")
    if facts.error:
        said.append(one_line(facts.error))
    if message:
        said.append(describe_message(message))
    return "; ".join(part for part in said if part)


def describe_message(message: bytes) -> str:
    """An agent's last message in one line: a report as JSON, or one sentence when there was no round at all."""
    try:
        data = json.loads(message)
    except ValueError:
        return one_line(message.decode(errors="replace"))
    return describe_report(data) if isinstance(data, dict) else one_line(data)


def describe_report(report: dict[str, Any]) -> str:
    """The agent's report in one line: why the job ended, and what the root cause raised."""
    failures = report.get("failures") or ()
    first = next((f for f in failures if isinstance(f, dict) and not f.get("collateral")), None)
    parts = [str(report.get("reason") or "")]
    raised = first.get("exception") if first else None
    if raised and str(raised) not in parts[0]:
        parts.append(str(raised))
    return one_line(": ".join(word for word in parts if word))


def describe_start_failure(error: object, image: str, command: str, *, runs_agent: bool) -> str:
    """Why a container could not be started; the commonest reason gets its own parts."""
    said = one_line(error)
    missing = "executable file not found" in said or "no such file or directory" in said.lower()
    if missing and command in said:
        needs = "; muster's agent needs Python 3.10 or newer in the image" if runs_agent else ""
        return f"could not be started: image {image!r} has no {command!r}{needs}"
    return f"{COULD_NOT_START}: {said}"
