"""Builds the request to the engine from an AppDef: pure, offline, deterministic. This is the dry run."""

import fnmatch
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

from torchx.specs import AppDef, BindMount, DeviceMount, Role, VolumeMount

from muster._shared.contract import Env, RoleKey
from muster.schedulers import naming
from muster.schedulers.adapter.agent_role import AgentPlace, ReplicaPlan, assign_arguments, translate_replica
from muster.schedulers.agent_command import is_agent_role, wrap_command
from muster.schedulers.docker import spec
from muster.schedulers.docker.options import DockerOptions, PublishedPort
from muster.schedulers.errors import OptionError, SchedulerError
from muster.schedulers.gpus import build_cache_env
from muster.schedulers.grace import decide_app_grace_s
from muster.schedulers.role_variables import build_role_env
from muster.schedulers.runner.roles import apply_macros, build_role_plan, count_cpus, read_policy

_HOST_RANK0: Final = "127.0.0.1"
"""Rank 0 on the host's network. Not `localhost`: that may resolve to ::1 first, or not at all."""

WORKSPACE_KEY: Final = "muster.docker_workspace"
"""In `Role.metadata`: the key of the role's packed workspace."""


def _check_ports(app: AppDef, options: DockerOptions) -> None:
    """Raise OptionError: nothing would be published. The engine refuses a port of the host that is not free."""
    if options.publish and options.network == spec.HOST_NETWORK:
        text = "publish: with network=host every port of a container is one of the host already; leave publish out"
        raise OptionError(text, "publish")
    for port in options.publish:
        if not _count_replicas(app.roles, port):
            names = ", ".join(sorted({name for role in app.roles for name in role.port_map})) or "none"
            text = f"publish: no role has a port {port.port!r} in its port_map; there are: {names}"
            raise OptionError(text, "publish")


@dataclass(frozen=True, kw_only=True)
class RequestBuilder:
    """Builds the request to the engine."""

    app: AppDef
    """What to run. It is not changed."""
    options: DockerOptions
    name: str
    """The app's id, unique on this engine."""
    token: str
    """The app's secret. The agents of each role get a token derived from it."""
    user: str
    """The submitting user, see `spec.build_user_id`. Later commands see only apps of their own user."""
    adapter: str = "local_docker"
    """The scheduler's name, for reports."""
    state_dir: str = ""
    """The user's folder for muster's state. It becomes a label."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """The environment from which `copy_env` copies."""
    draws_bars: bool = False
    """The caller draws progress bars, see `Env.LIVE_BARS`."""

    def build(self) -> spec.AppRequest:
        """Return the request.

        Raises:
            SchedulerError: one line that names the role, the value and what is allowed.
        """
        options = self.options
        roles = assign_arguments(self.app, self._labels, self.name)
        _check_ports(self.app, options)
        return spec.AppRequest(
            app_id=self.name,
            network=options.network or self.name,
            owns_network=options.network is None,
            pull=options.pull,
            grace_s=decide_app_grace_s(self.app.roles, options.grace_s, self._env),
            keep=options.keep,
            user=self.user,
            state_dir=self.state_dir,
            containers=tuple(
                self._build_container(role, replica) for role in roles for replica in range(role.num_replicas)
            ),
        )

    @cached_property
    def _labels(self) -> Mapping[str, str]:
        """Role name -> its label in names."""
        return naming.build_role_labels([role.name for role in self.app.roles])

    @cached_property
    def _env(self) -> Mapping[str, str]:
        """The variables of all containers."""
        return _select_env(self.options.copy_env, self.environ) | dict(self.options.env)

    def _build_container(self, role: Role, replica: int) -> spec.ContainerRequest:
        """Return the container of one replica of a role."""
        if not role.image:
            raise SchedulerError(f"role {role.name!r} has no image; give one, for example --image pytorch/pytorch")
        applied = apply_macros(role, app_id=self.name, replica_id=replica)
        runs_agent = is_agent_role(role)
        waits = bool(read_policy(role).after) and not runs_agent
        bundled = (runs_agent or waits) and self.options.agent == "bundled"
        hostname = f"{self._labels[role.name]}-{replica}"
        on_host = runs_agent and self.options.network == spec.HOST_NETWORK
        host_port = _pick_host_port(self.name, role.name) if on_host else None
        made = self._translate(applied, hostname, host_port)
        if waits:  # the supervisor starts it again
            command = wrap_command(made.command, {}, spec.AGENT_DIR if bundled else None)
            made = replace(made, command=tuple(command))
        workspace = role.metadata.get(WORKSPACE_KEY)
        builds = workspace is not None and self.options.image_repo is not None
        return spec.ContainerRequest(
            role=role.name,
            replica=replica,
            image=f"{self.options.image_repo}:{self.name}-{self._labels[role.name]}" if builds else role.image,
            base_image=role.image if builds else None,
            name=naming.build_replica_name(self.name, self._labels[role.name], replica),
            command=made.command,
            env=made.env,
            secret_env=made.secret_env,
            hostname=hostname,
            aliases=self._build_aliases(role, replica, hostname),
            runs_agent=runs_agent,
            bundled=bundled,
            host_port=host_port,
            workspace=workspace,
            mounts=(
                *(_build_mount(role, mount) for mount in role.mounts if not isinstance(mount, DeviceMount)),
                *self._build_cache_mounts(),
            ),
            cpus=count_cpus(role) if count_cpus(role) > 0 else None,
            gpus=max(0, int(role.resource.gpu)),
            read_only=self.options.read_only,
            user=self.options.user,
            labels=self.options.labels,
            host_config=self._build_host_config(role, replica),
        )

    def _build_host_config(self, role: Role, replica: int) -> dict[str, Any]:
        options, memory_bytes = self.options, _find_memory_limit(role)
        log_config = {"Type": options.log_driver, "Config": dict(options.log_opts)}  # "": the engine's default
        config = {
            "Memory": memory_bytes,
            "MemorySwap": memory_bytes,  # equal limits: no swap, as on a cluster
            "ShmSize": self._choose_shm_bytes(memory_bytes),
            "IpcMode": options.ipc,
            "Ulimits": [{"Name": name, "Soft": soft, "Hard": hard} for name, (soft, hard) in options.ulimits.items()],
            "Privileged": options.privileged,
            "Devices": _build_devices(role),
            "Tmpfs": dict(options.tmpfs),
            "PortBindings": self._build_port_bindings(role, replica),
            "LogConfig": log_config if options.log_driver or options.log_opts else {},
            # A colon is the older form.
            "SecurityOpt": [re.sub("[:=]", "=", text, count=1) for text in options.security_opt],
            "CapAdd": list(options.cap_add),
            "Dns": list(options.dns),
            "ExtraHosts": list(options.extra_hosts),
        }
        return {name: value for name, value in config.items() if value}

    def _build_port_bindings(self, role: Role, replica: int) -> dict[str, list[dict[str, str]]]:
        """Return the ports of one replica. If several publish the same port, each has its own on the host."""
        bindings: dict[str, list[dict[str, str]]] = {}
        for port in self.options.publish:
            number = port.find_number(role.port_map)
            if number is None:
                continue
            earlier = self.app.roles[: list(self._labels).index(role.name)]
            name, binding = port.to_engine(number, _count_replicas(earlier, port) + replica)
            bindings.setdefault(name, []).extend(binding)
        return bindings

    def _translate(self, role: Role, hostname: str, host_port: int | None) -> ReplicaPlan:
        """Translate a role whose macros are those of one replica."""
        place = AgentPlace(
            adapter=self.adapter,
            app_id=self.name,
            log_dir={**self._env, **role.env}.get(Env.LOG_DIR, spec.LOG_DIR),
            termination_log=spec.REPORT_FILE,
            token=naming.derive_token(self.token, role.name),
            port=host_port,
            grace_s=self.options.grace_s,
            env=self._env,
            stops_together=True,
            draws_bars=self.draws_bars,
        )
        made = translate_replica(
            role,
            place,
            rank0_host=self._find_rank0_host(role, is_agent_role(role)),
            bundle_dir=spec.AGENT_DIR if self.options.agent == "bundled" else None,
            env=self._env,
        )
        env = {
            **self._build_role_env(role.name),
            **made.env,
            Env.NODE_NAME: hostname,
            Env.ADAPTER: self.adapter,
            Env.APP_ID: self.name,
        }
        if made.runs_agent:
            env.setdefault("TORCHELASTIC_ERROR_FILE", spec.ERROR_FILE)
        if self.options.compile_cache:
            env = {**build_cache_env(spec.CACHE_DIR), **env}
        return replace(made, env=env)

    def _build_role_env(self, own: str) -> dict[str, str]:
        on_host = self.options.network == spec.HOST_NETWORK
        hosts = {
            role.name: [
                _HOST_RANK0 if on_host else self._name_alias(f"{self._labels[role.name]}-{index}")
                for index in range(role.num_replicas)
            ]
            for role in self.app.roles
        }
        return build_role_env([build_role_plan(role) for role in self.app.roles], self.name, own, hosts)

    def _build_cache_mounts(self) -> tuple[dict[str, Any], ...]:
        """Return a volume that the engine makes with the first container that has it."""
        name = self.options.compile_cache
        if not name:
            return ()
        labels = {spec.Label.CACHE: name, spec.Label.USER: self.user}
        mount = _build_mount_entry("volume", build_cache_name(self.user, name), spec.CACHE_DIR, read_only=False)
        return ({**mount, "VolumeOptions": {"Labels": labels}},)

    def _find_rank0_host(self, role: Role, runs_agent: bool) -> str:
        """Return the host of rank 0. Each agent role has its own. All other roles have that of the first role."""
        if self.options.network == spec.HOST_NETWORK:
            return _HOST_RANK0
        is_own = runs_agent and role.name != self.app.roles[0].name
        return self._name_alias(f"{self._labels[role.name]}-0" if is_own else "rank0")

    def _build_aliases(self, role: Role, replica: int, hostname: str) -> tuple[str, ...]:
        if self.options.network == spec.HOST_NETWORK:
            return ()
        is_first = replica == 0 and role.name == self.app.roles[0].name
        return tuple(map(self._name_alias, (hostname, "rank0") if is_first else (hostname,)))

    def _name_alias(self, host: str) -> str:
        """Return a host's name on the app's network. Other apps may use that, too, if the user has named it."""
        return host if self.options.network is None else f"{self.name}-{host}"

    def _choose_shm_bytes(self, memory_bytes: int | None) -> int | None:
        if self.options.ipc in ("host", "none"):
            return None
        return self.options.shm_size_bytes or memory_bytes or spec.DEFAULT_SHM_BYTES


def _count_replicas(roles: Iterable[Role], port: PublishedPort) -> int:
    """Return how many containers publish a port."""
    return sum(role.num_replicas for role in roles if port.find_number(role.port_map) is not None)


def _select_env(patterns: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    return {name: environ[name] for name in sorted(environ) if any(fnmatch.fnmatch(name, p) for p in patterns)}


def _pick_host_port(*words: str) -> int:
    """Prefer a rendezvous port on the host's network. The submission reserves the next port that is free."""
    digest = hashlib.sha256("/".join(words).encode()).digest()
    return spec.HOST_PORTS[int.from_bytes(digest[:4], "big") % len(spec.HOST_PORTS)]


def _find_memory_limit(role: Role) -> int | None:
    """Return the memory limit in bytes. Return None if none was requested (`RoleKey.MEMORY_REQUEST_MB`)."""
    if RoleKey.MEMORY_REQUEST_MB in role.metadata or role.resource.memMB <= 0:
        return None
    return int(role.resource.memMB) << 20


def _build_mount(role: Role, mount: Any) -> dict[str, Any]:
    if isinstance(mount, BindMount):
        if not mount.src_path.startswith("/"):
            raise SchedulerError(f"role {role.name!r}: bind mount of {mount.src_path!r} needs an absolute path")
        return _build_mount_entry("bind", mount.src_path, mount.dst_path, mount.read_only)
    if isinstance(mount, VolumeMount):
        return _build_mount_entry("volume", mount.src, mount.dst_path, mount.read_only)
    raise SchedulerError(f"role {role.name!r}: {mount!r} is not a bind mount, a volume mount or a device mount")


def build_cache_name(user: str, name: str) -> str:
    """Return the volume of `-cfg compile_cache=NAME`, which is this user's own: code is loaded from it."""
    digest = hashlib.sha256(user.encode()).hexdigest()[:12]
    return f"muster-cache-{digest}-{name}"


def _build_mount_entry(kind: str, source: str, target: str, read_only: bool) -> dict[str, Any]:
    return {"Type": kind, "Source": source, "Target": target, "ReadOnly": read_only}


def _build_devices(role: Role) -> list[dict[str, str]]:
    from torchx.schedulers.devices import DEVICES, get_device_mounts

    unknown = sorted(set(role.resource.devices) - set(DEVICES))
    if unknown:
        raise SchedulerError(
            f"role {role.name!r}: unknown device {unknown[0]!r}; allowed are {', '.join(sorted(DEVICES))}"
        )
    mounts = [mount for mount in role.mounts if isinstance(mount, DeviceMount)]
    mounts += get_device_mounts(role.resource.devices)
    return [
        {"PathOnHost": m.src_path, "PathInContainer": m.dst_path, "CgroupPermissions": m.permissions} for m in mounts
    ]
