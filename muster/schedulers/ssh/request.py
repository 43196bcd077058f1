"""Builds what will run on the hosts from the AppDef and options, without side effects. The dry run prints it."""

import json
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from torchx.specs import AppDef, Role

from muster._shared.contract import Env
from muster.schedulers import adapter
from muster.schedulers.agent_command import find_agent_flag
from muster.schedulers.ssh.driver import RUN
from muster.schedulers.ssh.hosts import Host
from muster.schedulers.ssh.options import SshOptions

DRIVER: Final = "muster.schedulers.ssh.driver:SshDriver"
WORKSPACE: Final = "ssh.workspace"
"""In `Role.metadata`: absolute path of the folder that travels to the hosts of the role."""


@dataclass(frozen=True, kw_only=True)
class SshRequest:
    """A whole app. Replace parts of it with `dataclasses.replace`."""

    spec: adapter.AppSpec = field(repr=False)
    options: SshOptions
    hosts: tuple[Host, ...]
    """All that are named, in order."""

    def __str__(self) -> str:
        """Return the text of the dry run, without secrets."""
        details = self.spec.details
        shown = {
            "app_id": self.spec.app_id,
            "hosts": [asdict(host) for host in self.hosts],
            "spares": self.options.spares,
            "run_folder": details["ssh"]["parent"],
            "grace_s": self.spec.grace_s,
            "detach": self.options.detach,
            "workspaces": details["workspaces"],
            "replicas": adapter.mask_plans(details["replicas"]),
        }
        return json.dumps(shown, indent=2)


def build_request(
    app: AppDef, options: SshOptions, hosts: Sequence[Host], *, app_id: str, folder: str, token: str
) -> SshRequest:
    """Build the request for an app. It is pure, and the AppDef is not changed.

    Args:
        app: what to run. Images, mounts and resources are ignored.
        options: of `-cfg`.
        hosts: that the options name.
        app_id: the app's id.
        folder: absolute path of the app's future folder here.
        token: the app's secret.

    Raises:
        SchedulerError: a part of the app cannot be run. It is one line.
    """
    roles = adapter.assign_arguments(app, adapter.build_role_labels([role.name for role in app.roles]), app_id)
    follows = bool(options.discover) and len(roles) == 1 and adapter.build_role_plan(app.roles[0]).is_elastic
    needed = adapter.build_role_plan(app.roles[0]).needed if follows else sum(role.num_replicas for role in roles)
    if len(hosts) < needed + options.spares:
        more = f" and {options.spares} spare{'' if options.spares == 1 else 's'}" if options.spares else ""
        nodes = f"{needed} node{'' if needed == 1 else 's'}{more}"
        need, are = "needs" if nodes == "1 node" else "need", "is" if len(hosts) == 1 else "are"
        raise adapter.SchedulerError(f"{nodes} {need} as many hosts, and {len(hosts)} {are} named")
    _check_slots(roles, hosts[: sum(role.num_replicas for role in roles) + options.spares])
    place = adapter.AgentPlace(
        adapter="ssh", app_id=app_id, log_dir=f"{RUN}/log", grace_s=options.grace_s, env=options.env
    )
    replicas = {
        role.name: [
            adapter.plan_replica(
                role,
                index,
                place,
                cwd=f"{RUN}/work",
                bundle_dir=RUN,
                error_file=f"{RUN}/error.json",
                python=options.python,
            )
            for index in range(role.num_replicas)
        ]
        for role in roles
    }
    spec = adapter.build_process_spec(
        app,
        replicas,
        place,
        folder=folder,
        driver=DRIVER,
        token=token,
        workspace_key=WORKSPACE,
        details={
            "discover": find_discovery(roles[0], options) if follows else None,
            "ssh": {
                "ssh": list(options.ssh),
                "python": options.python,
                "parent": posixpath.join(options.folder, f"muster-{app_id}"),
                "lost_s": options.lost_s,
                "stays": options.stays,
            },
        },
    )
    return SshRequest(spec=spec, options=options, hosts=tuple(hosts))


def find_discovery(role: Role, options: SshOptions) -> dict[str, Any]:
    """Return what the supervisor needs to follow a discovery script."""
    wanted = find_agent_flag(role.args, "nproc-per-node") or "1"
    script = posixpath.abspath(posixpath.expanduser(options.discover or ""))
    return {"script": script, "processes": int(wanted) if wanted.isdecimal() else 1, "spares": options.spares}


def _check_slots(roles: Sequence[Role], hosts: Sequence[Host]) -> None:
    """Check that each host, which runs one node, has slots for the node's processes."""
    for role in roles:
        if not adapter.is_agent_role(role):
            continue
        wanted = find_agent_flag(role.args, "nproc-per-node") or "1"
        for host in hosts:
            if wanted.isdecimal() and host.slots is not None and int(wanted) > host.slots:
                raise adapter.SchedulerError(
                    f"role {role.name!r} runs {wanted} processes on each node, and {host.name} has {host.slots} slots"
                )


def place_request(
    request: SshRequest,
    *,
    hosts: Sequence[str],
    addresses: Mapping[str, str],
    ports: Mapping[str, int],
    others: Mapping[str, str],
) -> adapter.AppSpec:
    """Add to a request what is known only when the hosts have been asked.

    Args:
        request: of the app.
        hosts: one per replica, in order of role and index. The rest are spares.
        addresses: of the first host of each role whose agents meet, by role. Those of the first role are there in any
            case.
        ports: for the agents to meet, by role.
        others: an address of each host, for a first host that has moved.
    """
    spec = request.spec
    plans: dict[str, list[dict[str, Any]]] = {}
    for role in spec.roles:
        env = {Env.RANK0_HOST: addresses.get(role.name, addresses[spec.roles[0].name])}
        if role.name in ports:
            env[Env.RDZV_PORT] = str(ports[role.name])
        plans[role.name] = [{**plan, "env": {**plan["env"], **env}} for plan in spec.details["replicas"][role.name]]
    return replace(spec, details={**spec.details, "replicas": plans, "hosts": list(hosts), "addresses": dict(others)})


def count_replicas(spec: adapter.AppSpec) -> int:
    """Return how many hosts an app uses at once."""
    return sum(role.replicas for role in spec.roles)
