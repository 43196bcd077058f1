"""Asks the agents of an app that runs under a supervisor, for local_cwd and Docker alike.

The adapter gives an `AskNode`: it runs `muster-agent ask job ...` where one replica's agent is, and returns what that
prints. Any live node of a role will do, because its agent passes the question on to the leader. Each role that runs
agents is a job of its own and is asked by itself.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, TypeAlias

from muster._contract import AskKind, AskOutcome
from muster._control import Answer, ControlError, ExitCode, ask_first, build_words, merge_answers
from muster.schedulers.supervision import client
from muster.schedulers.supervision.app_folder import DRAIN_WORD, AppFolder, AppRecord, AppSpec
from muster.schedulers.supervision.state import AppPhase, ReplicaId

ASK_MARGIN_S: Final = 30.0
"""How much longer than the limit the command may take."""

DRAIN_MARGIN_S: Final = 30.0
"""How much longer than the limit the supervisor lets agents end by themselves."""

RECORD_LIMIT_S: Final = 20.0
"""How long a supervisor may take to record a stop."""

AskNode: TypeAlias = Callable[[AppSpec, ReplicaId, Sequence[str], float], tuple[int, str, str]]
"""(spec, replica, words, limit_s) -> exit code, standard output and standard error of the agent's command."""


def ask_app(folder: AppFolder, kind: AskKind, limit_s: float, ask_node: AskNode) -> Answer:
    """Ask the app's agents, and return what became of it.

    Raises:
        ControlError: the app has ended, or runs no agents.
    """
    spec, record = read_running(folder)
    if record.app.phase is AppPhase.ENDING:
        raise ControlError(f"{spec.app_id} is being stopped: {record.app.reason}", ExitCode.REFUSED)
    return ask_roles(spec, record, kind, limit_s, ask_node)


def read_running(folder: AppFolder) -> tuple[AppSpec, AppRecord]:
    """An app that has not ended.

    Raises:
        ControlError: it has, or it runs where this process cannot reach it.
    """
    try:
        spec, record = client.read_app(folder)
    except FileNotFoundError:
        raise ControlError(f"{folder.path.name}: no such app (any more)", ExitCode.UNKNOWN) from None
    except client.SupervisorError as error:
        raise ControlError(str(error), ExitCode.LOST) from error
    if record is None:
        raise ControlError(f"{spec.app_id} is being started: ask again", ExitCode.REFUSED)
    if client.has_ended(record):
        outcome = record.app.outcome.value if record.app.outcome is not None else "ended"
        raise ControlError(f"{spec.app_id} has ended already ({outcome}): nothing was changed", ExitCode.ENDED)
    if not client.runs_here(record):
        raise ControlError(f"{spec.app_id} runs on {record.machine.host}: ask there", ExitCode.LOST)
    return spec, record


def ask_roles(spec: AppSpec, record: AppRecord, kind: AskKind, limit_s: float, ask_node: AskNode) -> Answer:
    """Ask every role that runs agents; the answer for all of them."""
    roles = [role.name for role in spec.roles if role.runs_agent]
    if not roles:
        raise ControlError(f"{spec.app_id} runs no agents of muster that could be asked", ExitCode.REFUSED)
    answers = {role: _ask_role(spec, record, role, build_words(kind, limit_s), limit_s, ask_node) for role in roles}
    return merge_answers(answers)


def _ask_role(
    spec: AppSpec, record: AppRecord, role: str, words: Sequence[str], limit_s: float, ask_node: AskNode
) -> Answer:
    running = {str(replica): replica for replica in record.app.running([role])}
    none = f"no agent of {role} answers: its workers have not run for a second yet, or it is being started again"

    def ask(name: str, words: Sequence[str]) -> tuple[int, str, str]:
        return ask_node(spec, running[name], words, limit_s + ASK_MARGIN_S)

    return ask_first(running, words, ask, none)


def stop_app(folder: AppFolder, limit_s: float, ask_node: AskNode) -> Answer:
    """Stop all ranks at one step, and the app with them.

    That the app ends is recorded first, so that nothing is started again, whatever becomes of the question. Ranks that
    cannot agree on a step get the polite signal, all at once.

    Raises:
        ControlError: the app has ended, or is being stopped already.
    """
    spec, record = read_running(folder)
    if record.app.phase is AppPhase.ENDING:
        raise ControlError(f"{spec.app_id} is being stopped already: {record.app.reason}", ExitCode.REFUSED)
    began_s = time.monotonic()
    folder.write_request("cancel")  # for the next supervisor, if this one dies
    if not folder.send_request(f"{DRAIN_WORD}{limit_s + DRAIN_MARGIN_S:g}"):
        client.read_app(folder)
    _wait_recorded(folder)
    has_agents = any(role.runs_agent for role in spec.roles)
    none = Answer(outcome=AskOutcome.REFUSED, line="it runs no agents of muster")
    asked = ask_roles(spec, record, AskKind.STOP, limit_s, ask_node) if has_agents else none
    if asked.outcome is AskOutcome.DONE and client.wait_ended(folder, limit_s=RECORD_LIMIT_S):
        return replace(asked, line=f"{asked.line}: stopped at a common step")
    folder.send_request("cancel")
    is_over = client.wait_ended(folder, limit_s=spec.grace_s + DRAIN_MARGIN_S)
    took_s = time.monotonic() - began_s
    if not is_over:
        line = f"{asked.line}; it was told to end, and still runs after {took_s:.1f} s"
        return replace(asked, outcome=AskOutcome.LATE, line=line, took_s=took_s)
    if asked.outcome is AskOutcome.DONE:
        return replace(asked, line=f"{asked.line}: stopped at a common step; what else ran got SIGTERM")
    line = f"{asked.line}; so all replicas got SIGTERM at once and have ended, after {took_s:.1f} s: no common step"
    return Answer(outcome=AskOutcome.DONE, line=line, took_s=took_s, late=asked.late)


def _wait_recorded(folder: AppFolder) -> None:
    """Wait until the supervisor has recorded that the app ends.

    Raises:
        ControlError: it does not.
    """
    deadline_s = time.monotonic() + RECORD_LIMIT_S
    while time.monotonic() < deadline_s:
        record = folder.read_record()
        if record is None or record.app.phase in (AppPhase.ENDING, AppPhase.ENDED):
            return
        time.sleep(0.02)
    raise ControlError(f"the supervisor of {folder.path.name} does not answer", ExitCode.LOST)
