"""The request for an app as records. They do not need torchx: the supervisor reads them too.

An `AppRequest` holds one `ContainerRequest` per replica. The supervisor keeps it on disk and creates lost containers
again from it, so all of it is plain data.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from muster._shared.contract import Env
from muster.schedulers.agent_command import find_run_file
from muster.schedulers.secret_variables import mask_args, mask_env
from muster.schedulers.supervision.machine import read_machine_id

AGENT_DIR: Final = "/opt/muster"
"""The folder of the agent's bundle in a container."""

STATE_DIR: Final = "/var/opt/muster"
"""Writable by any user of the image: logs and the last report."""

REPORT_FILE: Final = f"{STATE_DIR}/report.json"
ERROR_FILE: Final = f"{STATE_DIR}/error.json"
"""The root cause in torch's format."""

LOG_DIR: Final = f"{STATE_DIR}/logs"
DEFAULT_SHM_BYTES: Final = 16 << 30
"""A tmpfs uses no memory until it is filled. The engine's default of 64 MiB stops DataLoader workers."""

DEFAULT_ULIMITS: Final[Mapping[str, tuple[int, int]]] = {
    "memlock": (-1, -1),
    "stack": (64 << 20, 64 << 20),
    "nofile": (1 << 20, 1 << 20),
}
"""Soft and hard limits, for RDMA, deep stacks and DataLoaders with many files.

The engine's own defaults are too low for all three.
"""

HOST_NETWORK: Final = "host"
"""The engine's name of the host's own network, which containers can share."""

HOST_PORTS: Final = range(20_000, 32_000)
"""Rendezvous ports on the host's network: below the ephemeral ports, which the kernel gives to any process."""


CACHE_DIR: Final = "/var/opt/muster-cache"
"""Compile caches, on a volume of `-cfg compile_cache`."""


def build_user_id() -> str:
    """Name the submitting user on an engine, which may serve several users and machines.

    A host name may change, and a user id means something on one machine only.
    """
    return f"{os.geteuid()}@{read_machine_id()}"


class Label:
    """Labels of all objects that this adapter creates. Later commands find the objects by them."""

    APP: Final = "io.muster.app"
    ROLE: Final = "io.muster.role"
    REPLICA: Final = "io.muster.replica"
    INCARNATION: Final = "io.muster.incarnation"
    """0 for a replica's first container, counting up with every replacement."""
    USER: Final = "io.muster.user"
    CLAIM: Final = "io.muster.claim"
    """On the volume that represents a reservation. See `running_apps.reservations`."""
    STATE_DIR: Final = "io.muster.state_dir"
    """The folder for muster's state that the submission used."""
    CACHE: Final = "io.muster.cache"
    """On a volume with compile caches: its name in `-cfg compile_cache`. It belongs to no app."""
    RUN_DIR: Final = "io.muster.run_dir"
    """On containers that run an agent: the folder of its run's files there, which can be read after the end, too."""


@dataclass(frozen=True, kw_only=True)
class ContainerRequest:
    """One replica's container, before any request to the engine."""

    role: str
    replica: int
    image: str
    """The container's image. It is built from `base_image` and the workspace if that is not None."""
    name: str
    """The name of its first container."""
    command: tuple[str, ...]
    env: Mapping[str, str]
    secret_env: tuple[str, ...] = ()
    """Variables of `env` that are never printed, whatever they look like."""
    hostname: str
    aliases: tuple[str, ...]
    runs_agent: bool
    bundled: bool
    """The agent's bundle is copied into it."""
    base_image: str | None = None
    host_port: int | None = None
    """The rendezvous port of its role on the host's network, which other apps use too.

    None: on other networks.
    """
    workspace: str | None = None
    """Key of the packed folder that is copied into the working directory."""
    mounts: tuple[Mapping[str, Any], ...] = ()
    """In the engine's form: Type, Source, Target, ReadOnly."""
    cpus: float | None = None
    gpus: int = 0
    gpu_ids: tuple[str, ...] = ()
    """Assigned when the app is submitted, not in a dry run."""
    read_only: bool = False
    user: str = ""
    """"" is the image's."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """The user's own."""
    host_config: Mapping[str, Any] = field(default_factory=dict)
    """What is asked of the engine, as it stands in the engine's `HostConfig`."""

    def find_run_file(self, name: str) -> str | None:
        """Return the absolute path of a file of its agent's run, one of `LogNames`. None: its command does not say."""
        log_dir = self.env.get(Env.LOG_DIR, LOG_DIR)
        return find_run_file(self.command, log_dir, name) if self.runs_agent else None


@dataclass(frozen=True, kw_only=True)
class AppRequest:
    """Everything that one app needs from an engine."""

    app_id: str
    network: str
    owns_network: bool
    """False: the network existed before and stays."""
    pull: str
    grace_s: float
    keep: str
    user: str
    """See `build_user_id`."""
    containers: tuple[ContainerRequest, ...]
    init: bool = True
    """A tiny init runs each command and reaps orphans."""
    state_dir: str = ""
    """See `Label.STATE_DIR`."""

    @property
    def labels(self) -> dict[str, str]:
        """On the app's containers, network and volumes."""
        return {Label.APP: self.app_id, Label.USER: self.user, Label.STATE_DIR: self.state_dir}

    def to_json(self) -> dict[str, Any]:
        """Return a dict of JSON types, secrets of the environments included: for the supervisor's private file only."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "AppRequest":
        """Read what `to_json` returns."""
        return cls(**{**data, "containers": tuple(_container_from_json(item) for item in data["containers"])})

    def show(self) -> str:
        """Return the YAML that `--dryrun` prints, without secrets."""
        import yaml

        data = {**self.to_json(), "containers": [_show_container(container) for container in self.containers]}
        # Without tuples, for which YAML needs tags.
        return str(yaml.safe_dump(json.loads(json.dumps(data)), sort_keys=False, width=120))


def set_host_port(request: AppRequest, role: str, port: int) -> AppRequest:
    """Return the same app with this rendezvous port on the host's network for the agents of a role."""
    containers = tuple(
        replace(container, host_port=port, env={**container.env, Env.RDZV_PORT: str(port)})
        if container.role == role
        else container
        for container in request.containers
    )
    return replace(request, containers=containers)


def _container_from_json(data: Mapping[str, Any]) -> ContainerRequest:
    values: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in data.items()}
    return ContainerRequest(**values)


def _show_container(container: ContainerRequest) -> dict[str, Any]:
    """Return the container without empty fields and with secrets masked."""
    shown = {name: value for name, value in asdict(container).items() if value not in (None, (), False, 0, "", {})}
    shown["replica"] = container.replica
    shown["env"] = mask_env(container.env, container.secret_env)
    if container.labels:
        shown["labels"] = mask_env(container.labels)
    if log := container.host_config.get("LogConfig"):
        shown["host_config"] = {**container.host_config, "LogConfig": {**log, "Config": mask_env(log["Config"])}}
    shown["command"] = mask_args(container.command)
    return shown
