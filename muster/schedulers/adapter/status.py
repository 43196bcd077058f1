"""Builds what `torchx status` and `describe` show of an app, from facts: in one form for all adapters."""

import dataclasses
from typing import Any

# TorchX describes in two threads: Ctrl-C during an import in one would leave the other half a module.
import yaml
from torchx.schedulers.api import DescribeAppResponse
from torchx.specs import AppState
from torchx.specs.api import NONE, RoleStatus

from muster.schedulers.errors import SchedulerError
from muster.schedulers.wording.facts import AppFacts
from muster.schedulers.wording.job_line import format_message
from muster.schedulers.wording.replica_lines import build_replica, clean_error, explain_replicas


@dataclasses.dataclass
class DescribedApp(DescribeAppResponse):  # type: ignore[misc]
    """TorchX's response, with the facts from which it was built."""

    facts: AppFacts | None = None


def build_status(facts: AppFacts) -> DescribeAppResponse:
    """Build the response to TorchX's `describe`.

    Args:
        facts: of the app.

    Returns:
        The response, on either line of TorchX.
    """
    # TorchX's command line dumps the status of a failed job as YAML. Without this the state of each replica reads
    # `!!python/object/apply:torchx.specs.api.AppState [5]`.
    yaml.add_representer(AppState, lambda dumper, state: dumper.represent_str(state.name))
    replicas = list(map(build_replica, explain_replicas(facts)))
    extra: dict[str, Any] = {}
    if any(field.name == "metadata" for field in dataclasses.fields(DescribeAppResponse)):
        extra["metadata"] = dict(facts.app.metadata or {})
    return DescribedApp(
        app_id=facts.app_id,
        state=facts.state,
        num_restarts=facts.restarts,
        msg=format_message(facts) or NONE,
        structured_error_msg=clean_error(facts.error or NONE),
        ui_url=facts.ui_url,
        roles=facts.app.roles,
        roles_statuses=[
            RoleStatus(role=role.name, replicas=[each for each in replicas if each.role == role.name])
            for role in (() if facts.replicas is None else facts.app.roles)
        ],
        facts=facts,
        **extra,
    )


def shorten_status(response: DescribeAppResponse, *, has_lines: bool) -> DescribeAppResponse:
    """Return the status of an app that has ended without what `torchx run` prints only as long YAML.

    TorchX prints all of it after the report: six lines or more for each replica. `torchx status` has them. The message
    says why the app has ended.

    Args:
        response: see `build_status`.
        has_lines: the command has printed the job's lines, with the error and its traceback.
    """
    error = NONE if has_lines else response.structured_error_msg
    return dataclasses.replace(response, roles_statuses=[], structured_error_msg=error)


def parse_status(response: DescribeAppResponse) -> AppFacts:
    """Return the facts from which `build_status` has built a response."""
    assert isinstance(response, DescribedApp)  # noqa: S101  # of `PluginScheduler.describe_app`
    assert response.facts is not None  # noqa: S101
    return response.facts


def count_replicas(response: DescribeAppResponse) -> dict[str, int]:
    """Count the replicas that each role of an app may have lines of. Spares are more than were asked for."""
    known = {role.role: [each.id for each in role.replicas] for role in response.roles_statuses}
    return {
        role.name: max(role.num_replicas, *(each + 1 for each in known.get(role.name, [0]))) for role in response.roles
    }


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
