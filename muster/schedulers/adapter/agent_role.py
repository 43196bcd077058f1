"""From a role of an AppDef to what its replicas run: arguments, the agent's command and the agent's environment."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torchx.specs import AppDef, Role

from muster._shared.contract import Env
from muster.schedulers.agent_command import assign_run_ids, build_agent_args, is_agent_role
from muster.schedulers.grace import build_drain_env
from muster.schedulers.runner.roles import check_roles
from muster.schedulers.secret_variables import list_named_secrets


@dataclass(frozen=True, kw_only=True)
class ReplicaPlan:
    """What one replica runs."""

    command: tuple[str, ...]
    """The program (an absolute path, or a name of PATH for one that a guard starts) and its arguments."""
    env: Mapping[str, str] = field(repr=False)
    """Added to those of its place, such as the app's `base_env`."""
    runs_agent: bool
    cwd: str = ""
    """Absolute path of the folder in which it starts. "": its place decides that."""
    secret_env: tuple[str, ...] = ()
    """Variables of `env` that are never printed, whatever they look like."""


@dataclass(frozen=True, kw_only=True)
class AgentPlace:
    """What an adapter tells the agents of a role about the place where they run. `Env` explains each field."""

    adapter: str
    """The scheduler's name, for reports."""
    app_id: str
    log_dir: str
    """Absolute path on the node of a folder that outlives the agent."""
    termination_log: str = ""
    """Absolute path of a file that gets the report. "": none."""
    token: str = field(default="", repr=False)
    """The job's token, see `naming.derive_token`. "": it reaches the agents in another way."""
    port: int | None = None
    """The port of rendezvous on node 0. None: the agent's own default, or known only when it starts."""
    grace_s: float | None = None
    """The option `grace_s`."""
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables that reach the role's replicas besides its own."""
    stops_together: bool = False
    """Whether all replicas are stopped and continued at once (Ctrl-Z)."""
    draws_bars: bool = False
    """Whether the reader of the output draws progress bars."""
    logs_here: bool = False
    """Whether all nodes are processes of this machine, and `log_dir` is the same for those of one role."""
    sigterm_senders: str = "`torchx cancel`, the end of `torchx run`, or `kill`"
    """What usually sends SIGTERM to a node. "": the adapter prints who has."""


def translate_replica(
    role: Role,
    place: AgentPlace,
    *,
    rank0_host: str,
    bundle_dir: str | None,
    python: str = "",
    env: Mapping[str, str] | None = None,
) -> ReplicaPlan:
    """Translate one replica of a role to its command and variables, whether it runs the agent or not.

    Args:
        role: of `assign_arguments`, with the macros of this replica applied (`runner.roles.apply_macros`).
        place: where it runs.
        rank0_host: address of the replica 0 that this one gets, see `Env.RANK0_HOST`.
        bundle_dir: absolute path of the folder with the agent's bundle on the node. None: muster is installed there.
        python: the interpreter of an agent whose role names it without a path. "": as the role names it.
        env: variables of the caller. The role's own come after them.
    """
    variables = {**(env or {}), **role.env, Env.RANK0_HOST: rank0_host}
    secret_env = list_named_secrets(role.metadata)
    if not is_agent_role(role):
        return ReplicaPlan(
            command=(role.entrypoint, *role.args), env=variables, runs_agent=False, secret_env=secret_env
        )
    program = python if python and "/" not in role.entrypoint else role.entrypoint
    return ReplicaPlan(
        command=(program, *build_agent_args(role.args, bundle_dir)),
        env=variables | build_agent_env(role, place),
        runs_agent=True,
        secret_env=secret_env,
    )


def assign_arguments(app: AppDef, labels: Mapping[str, str], app_id: str) -> list[Role]:
    """Check the roles of an app and give each agent role a run id of its own.

    Args:
        app: not changed.
        labels: of each role, by name. All are different.
        app_id: the app's id, or the macro of it.

    Returns:
        Copies of the roles. Macros are not yet substituted, see `runner.roles.apply_macros`.

    Raises:
        SchedulerError: no adapter can run a role. It is one line.
    """
    check_roles(app)
    args = assign_run_ids(app.roles, labels, app_id=app_id)
    return [replace(role, args=args[role.name]) for role in app.roles]


def build_agent_env(role: Role, place: AgentPlace) -> dict[str, str]:
    """Return the variables by which an adapter informs an agent about its job.

    The address of rank 0, `Env.RANK0_HOST`, goes to the replicas of all roles and is not among them.

    Args:
        role: runs the agent.
        place: where it runs.
    """
    env = {Env.REQUIRE_TOKEN: "1", Env.ADAPTER: place.adapter, Env.APP_ID: place.app_id, Env.LOG_DIR: place.log_dir}
    env[Env.SIGTERM_SENDERS] = place.sigterm_senders
    optional = {
        Env.TERMINATION_LOG: place.termination_log,
        Env.TOKEN: place.token,
        Env.RDZV_PORT: "" if place.port is None else str(place.port),
        Env.STOPS_TOGETHER: "1" if place.stops_together else "",
        Env.LIVE_BARS: "1" if place.draws_bars else "",
        Env.LOGS_HERE: "1" if place.logs_here else "",
    }
    env |= {name: value for name, value in optional.items() if value}
    return env | build_drain_env(role, place.grace_s, place.env)
