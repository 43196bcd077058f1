"""Which nodes of a job a command is for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from torchx.specs import AppState, is_terminal

from muster._shared.control import CommandExit, ControlError, count_nodes
from muster.cli.answers import print_error
from muster.schedulers.adapter.scheduler import PluginScheduler
from muster.schedulers.agent_command import is_agent_role
from muster.schedulers.errors import UnknownAppError
from muster.schedulers.wording.facts import AppFacts
from muster.schedulers.wording.words import word_all

FAILED: Final = 255
"""Exit code of `exec` and `shell` where muster has failed, and not the command: as of `ssh`."""


def print_failure(error: ControlError) -> int:
    """Print why nothing was run, and return the exit code."""
    code = print_error(error, as_json=False)
    return code if error.exit_code is CommandExit.USAGE else FAILED


@dataclass(frozen=True)
class Target:
    """One node."""

    role: str
    index: int
    runs: bool
    """Whether it runs, as its scheduler reports it."""

    def __str__(self) -> str:
        return f"{self.role}/{self.index}"


def find_targets(
    scheduler: PluginScheduler, app_id: str, *, role: str | None, node: int | None, takes_all: bool
) -> list[Target]:
    """Find the nodes that are meant.

    Args:
        scheduler: of the app.
        app_id: its id.
        role: the only one of which nodes are meant. None: of all that run agents, or the only one.
        node: its index. None: 0.
        takes_all: all nodes, also those that do not run.

    Raises:
        ControlError: the app does not run, or has no such role or node.
        UnknownAppError: the app is not known.
    """
    facts = scheduler.read_facts(app_id)
    if facts is None:
        raise UnknownAppError(app_id)
    if is_terminal(facts.state):
        raise ControlError(f"{app_id} has ended already ({facts.state.name})", CommandExit.ENDED)
    if facts.state is not AppState.RUNNING:
        why = word_all(facts.reasons)
        raise ControlError(f"{app_id} is {facts.state.name}" + (f": {why}" if why else ""), CommandExit.REFUSED)
    roles = _choose_roles(app_id, facts, role, takes_all=takes_all)
    nodes = [each for name in roles for each in _list_nodes(facts, name)]
    if not nodes:
        raise ControlError(f"no node of {app_id} runs", CommandExit.ENDED)
    if takes_all:
        return nodes
    index = node or 0
    found = [each for each in nodes if each.index == index]
    if not found:
        has = f"it has {count_nodes(len(nodes))}" + (f", 0 to {len(nodes) - 1}" if len(nodes) > 1 else "")
        raise ControlError(f"{app_id} has no node {index}: {has}", CommandExit.REFUSED)
    if not found[0].runs:
        raise ControlError(f"{found[0]} of {app_id} does not run", CommandExit.ENDED)
    return found


def _choose_roles(app_id: str, facts: AppFacts, role: str | None, *, takes_all: bool) -> Sequence[str]:
    names = [each.name for each in facts.app.roles if is_agent_role(each)]
    if not names:
        raise ControlError(f"{app_id} runs no agents of muster: no node of it has workers", CommandExit.REFUSED)
    if role is not None and role not in names:
        raise ControlError(
            f"{app_id} has no role {role!r} that runs agents; there is: {', '.join(names)}", CommandExit.USAGE
        )
    if role is not None:
        return [role]
    if len(names) > 1 and not takes_all:
        raise ControlError(f"{app_id} has several roles: name one with --role: {', '.join(names)}", CommandExit.USAGE)
    return names


def _list_nodes(facts: AppFacts, role: str) -> list[Target]:
    """List the nodes of a role, of an elastic one those that it has now."""
    known = [each for each in facts.replicas or () if each.role == role]
    return [
        Target(role, each.id, each.state is AppState.RUNNING)
        for each in sorted(known, key=lambda each: each.id)
        if each.state is not AppState.CANCELLED
    ]
