"""An app as records: what was asked for and will be carried out. No torchx here: the supervisor reads these too.

An `AppRequest` holds one `ContainerRequest` per replica. The supervisor keeps it on disk and creates lost containers
again from it, so all of it is plain data.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

from muster._contract import Env

AGENT_DIR: Final = "/opt/muster"
"""Where the agent's bundle lies in a container."""

STATE_DIR: Final = "/var/opt/muster"
"""Writable by any user of the image: logs and the last report."""

REPORT_FILE: Final = f"{STATE_DIR}/report.json"
ERROR_FILE: Final = f"{STATE_DIR}/error.json"
"""The root cause in torch's format."""

LOG_DIR: Final = f"{STATE_DIR}/logs"
DEFAULT_SHM_BYTES: Final = 16 << 30
"""A tmpfs takes no memory until it is filled; the engine's 64 MiB stops DataLoader workers."""

SHARED_NETWORK: Final = "muster-shared"
"""Joined by apps when the engine has no address pool left for a network of their own."""

HOST_NETWORK: Final = "host"
"""The engine's name for no network of their own: containers share the host's."""


HOST_PORTS: Final = range(20_000, 32_000)
"""Where gangs meet on the host's network: below the ephemeral ports, which the kernel gives to anybody."""


class Label:
    """Labels of everything this adapter makes; all later commands find it by them."""

    APP: Final = "io.muster.app"
    ROLE: Final = "io.muster.role"
    REPLICA: Final = "io.muster.replica"
    INCARNATION: Final = "io.muster.incarnation"
    """0 for a replica's first container, counting up with every replacement."""
    USER: Final = "io.muster.user"
    CLAIM: Final = "io.muster.claim"
    """On the volume that stands for something an app has to itself; see claims.py."""
    SHARED: Final = "io.muster.shared"
    """On the network of apps that have none of their own."""


@dataclass(frozen=True, kw_only=True)
class ContainerRequest:
    """One replica's container, before the engine was asked anything."""

    role: str
    replica: int
    image: str
    """What the container is made of; built from `base_image` and the workspace when that is not None."""
    name: str
    """Of its first container."""
    command: tuple[str, ...]
    env: Mapping[str, str]
    hostname: str
    aliases: tuple[str, ...]
    runs_agent: bool
    bundled: bool
    """The agent's bundle is copied in."""
    base_image: str | None = None
    host_port: int | None = None
    """Where its gang of agents would like to meet on the host's network, which other apps use too; None elsewhere."""
    workspace: str | None = None
    """Key of the packed folder that goes into the working directory."""
    mounts: tuple[Mapping[str, Any], ...] = ()
    """In the engine's own words: Type, Source, Target, ReadOnly."""
    devices: tuple[Mapping[str, str], ...] = ()
    memory_bytes: int | None = None
    cpus: float | None = None
    gpus: int = 0
    gpu_ids: tuple[str, ...] = ()
    """Given out when the app is submitted, not in a dry run."""
    shm_size_bytes: int | None = None
    ipc: str | None = None
    ulimits: tuple[Mapping[str, Any], ...] = ()
    privileged: bool = False
    read_only: bool = False

    @property
    def key(self) -> tuple[str, int]:
        """What this replica is found by."""
        return self.role, self.replica


@dataclass(frozen=True, kw_only=True)
class AppRequest:
    """All that one app needs of an engine."""

    app_id: str
    network: str
    owns_network: bool
    """False: the network was there before and stays."""
    pull: str
    grace_s: float
    keep: str
    user: str
    containers: tuple[ContainerRequest, ...]
    init: bool = True
    """A tiny init reaps orphans in front of each command."""
    given_ulimits: tuple[Mapping[str, Any], ...] = ()
    """Those of the user: what remains on an engine that may not raise limits."""

    @property
    def labels(self) -> dict[str, str]:
        """On the app's containers, network and volumes."""
        return {Label.APP: self.app_id, Label.USER: self.user}

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON types, secrets of the environments included: for the supervisor's private file only."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "AppRequest":
        """The inverse of `to_json`."""
        containers = tuple(_container_from_json(item) for item in data["containers"])
        return cls(**{**data, "containers": containers, "given_ulimits": tuple(data["given_ulimits"])})

    def show(self, mask: Callable[[Mapping[str, str]], Mapping[str, str]]) -> str:
        """Readable YAML: what `--dryrun` prints.

        Args:
            mask: replaces what is secret in an environment.
        """
        import yaml

        data = self.to_json()
        data["containers"] = [_show_container(container, mask) for container in self.containers]
        return str(yaml.safe_dump(_plain(data), sort_keys=False, width=120))


def set_rendezvous_port(request: AppRequest, role: str, port: int) -> AppRequest:
    """The same app with the agents of a role meeting at this port of the host."""
    containers = tuple(
        replace(container, host_port=port, env={**container.env, Env.RDZV_PORT: str(port)})
        if container.role == role
        else container
        for container in request.containers
    )
    return replace(request, containers=containers)


def share_network(request: AppRequest, network: str = SHARED_NETWORK) -> AppRequest:
    """The same app on a network that other apps use too: every alias gets the app's name in front."""
    prefix = f"{request.app_id}-"
    known = {alias for container in request.containers for alias in container.aliases}
    containers = tuple(
        replace(
            container,
            aliases=tuple(prefix + alias for alias in container.aliases),
            env=_with_rank0(container.env, prefix, known),
        )
        for container in request.containers
    )
    return replace(request, network=network, owns_network=False, containers=containers)


def _with_rank0(env: Mapping[str, str], prefix: str, known: set[str]) -> dict[str, str]:
    host = env[Env.RANK0_HOST]
    return {**env, Env.RANK0_HOST: prefix + host if host in known else host}


def _container_from_json(data: Mapping[str, Any]) -> ContainerRequest:
    names = {f.name for f in fields(ContainerRequest)}
    values: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in data.items() if n in names}
    return ContainerRequest(**values)


def _show_container(
    container: ContainerRequest, mask: Callable[[Mapping[str, str]], Mapping[str, str]]
) -> dict[str, Any]:
    """Without what is empty, and with secrets hidden."""
    shown = {name: value for name, value in asdict(container).items() if value not in (None, (), False, 0, "")}
    shown["replica"] = container.replica
    shown["env"] = mask(container.env)
    return shown


def _plain(value: Any) -> Any:
    """Tuples as lists, so that YAML needs no tags."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
