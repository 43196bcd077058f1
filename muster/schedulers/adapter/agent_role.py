"""From a role of an AppDef to what its replicas run: arguments, the agent's command and the agent's environment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torchx.specs import AppDef, Role

from muster._shared.contract import Env
from muster.schedulers.agent_command import assign_run_ids, rewrite_agent_args, rewrite_image_args
from muster.schedulers.grace import build_drain_env
from muster.schedulers.runner.roles import check_roles


@dataclass(frozen=True, kw_only=True)
class AgentPlace:
    """What an adapter tells the agents of a role of the place where they run; see `Env` for each."""

    adapter: str
    """The scheduler's name, for reports."""
    app_id: str
    log_dir: str
    """Absolute path on the node of a folder that outlives the agent."""
    termination_log: str = ""
    """Absolute path of a file that gets the report; "": none."""
    token: str = field(default="", repr=False)
    """See `naming.derive_token`; "": it reaches the agents in another way."""
    port: int | None = None
    """For rendezvous, on node 0; None: the agent's own default, or known only when it starts."""
    grace_s: float | None = None
    """The option `grace_s`."""
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables that reach the role's replicas besides its own."""
    stops_together: bool = False
    """All replicas are stopped and continued at once (Ctrl-Z)."""
    draws_bars: bool = False
    """Who reads the output draws progress bars."""


def assign_arguments(app: AppDef, labels: Mapping[str, str], app_id: str) -> list[Role]:
    """Check the roles of an app and give each agent role a run id of its own.

    Args:
        app: not changed.
        labels: of each role, by name; all different.
        app_id: the app's id, or the macro of it.

    Returns:
        Copies of the roles; macros are not yet substituted, see `runner.roles.apply_macros`.

    Raises:
        SchedulerError: no adapter can run a role; one line.
    """
    check_roles(app)
    args = assign_run_ids(app.roles, labels, app_id=app_id)
    return [replace(role, args=args[role.name]) for role in app.roles]


def build_agent_args(args: Sequence[str], bundle_dir: str | None) -> list[str]:
    """Return what follows the interpreter for an agent role.

    Args:
        args: the role's.
        bundle_dir: absolute path of the folder with the bundle on the node; None: muster is installed there.
    """
    return rewrite_image_args(args) if bundle_dir is None else rewrite_agent_args(args, bundle_dir)


def build_agent_env(role: Role, place: AgentPlace) -> dict[str, str]:
    """Return the variables by which an adapter tells an agent of its job.

    The address of rank 0, `Env.RANK0_HOST`, goes to the replicas of all roles and is not among them.

    Args:
        role: runs the agent.
        place: where it runs.
    """
    env = {Env.REQUIRE_TOKEN: "1", Env.ADAPTER: place.adapter, Env.APP_ID: place.app_id, Env.LOG_DIR: place.log_dir}
    optional = {
        Env.TERMINATION_LOG: place.termination_log,
        Env.TOKEN: place.token,
        Env.RDZV_PORT: "" if place.port is None else str(place.port),
        Env.STOPS_TOGETHER: "1" if place.stops_together else "",
        Env.LIVE_BARS: "1" if place.draws_bars else "",
    }
    env |= {name: value for name, value in optional.items() if value}
    return env | build_drain_env(role, place.grace_s, place.env)
