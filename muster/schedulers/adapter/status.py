"""Builds what `torchx status` and `describe` show of an app, from facts: in one form for all adapters."""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

# Imported here although only `describe` needs it: TorchX describes an app in two threads, and a Ctrl-C while one thread
# imports the module would leave the other with a partly initialised one.
import yaml
from torchx.schedulers.api import DescribeAppResponse
from torchx.specs import AppDef, AppState, Role
from torchx.specs.api import NONE, ReplicaStatus, RoleStatus

from muster._shared.contract import show_controls
from muster.schedulers.errors import SchedulerError


@dataclass(frozen=True, kw_only=True)
class AppFacts:
    """What is known of an app, at about one time."""

    app_id: str
    app: AppDef
    """As submitted, without secrets; see `runner.app_codec`."""
    state: AppState
    replicas: Sequence[ReplicaStatus] | None
    """Of all roles, in order of role and index; None: none has been recorded yet."""
    restarts: int = 0
    """Of replicas, and of workers in place, together."""
    messages: Iterable[str] = ()
    """Why the app is in this state and how far it is, the most important first; empty ones are left out."""
    error: str | None = None
    """The root cause in torch's format, as JSON; None: there is none."""
    ui_url: str | None = None
    """A link for the user."""


def build_status(facts: AppFacts) -> DescribeAppResponse:
    """Build the response to TorchX's `describe`.

    Args:
        facts: of the app.

    Returns:
        The response, on either line of TorchX.
    """
    _print_states_by_name()
    extra: dict[str, Any] = {}
    if any(field.name == "metadata" for field in dataclasses.fields(DescribeAppResponse)):
        extra["metadata"] = dict(facts.app.metadata or {})
    return DescribeAppResponse(
        app_id=facts.app_id,
        state=facts.state,
        num_restarts=facts.restarts,
        msg=show_controls("; ".join(filter(None, facts.messages))) or NONE,
        structured_error_msg=facts.error or NONE,
        ui_url=facts.ui_url,
        roles=facts.app.roles,
        roles_statuses=[] if facts.replicas is None else _group_by_role(facts.app.roles, facts.replicas),
        **extra,
    )


def check_replica(app_id: str, replicas: "dict[str, int]", role: str, index: int) -> None:
    """Refuse a role or a replica that an app does not have.

    Args:
        app_id: of the app, for the message.
        replicas: how many each role has.
        role: the role that is wanted.
        index: the replica that is wanted.

    Raises:
        SchedulerError: one line that names the roles or replicas that it has.
    """
    if role not in replicas:
        raise SchedulerError(f"{app_id} has no role {role!r}; it has: {', '.join(replicas)}")
    last = replicas[role] - 1
    if not 0 <= index <= last:
        raise SchedulerError(f"{app_id}/{role} has replicas 0 to {last}, not {index}")


def _group_by_role(roles: Iterable[Role], replicas: Sequence[ReplicaStatus]) -> list[RoleStatus]:
    return [
        RoleStatus(role=role.name, replicas=[each for each in replicas if each.role == role.name]) for role in roles
    ]


def _print_states_by_name() -> None:
    """Make YAML write FAILED for a state.

    When a job fails, TorchX's command line dumps its status as YAML; without this the state of each replica reads
    `!!python/object/apply:torchx.specs.api.AppState [5]`.
    """
    yaml.add_representer(AppState, lambda dumper, state: dumper.represent_str(state.name))
