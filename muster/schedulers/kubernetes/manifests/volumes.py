"""Volumes of a pod: ours, and TorchX's mounts.

TorchX knows binds (host paths), volumes (claims) and devices. The source of a `type=volume` mount may say more:
`configmap/NAME`, `secret/NAME`, `emptydir/` or `emptydir/10Gi`, `pvc/NAME` (the same as NAME); no claim's name can
hold a slash.
"""

import posixpath
from typing import Any, Final

from muster._contract import RoleKey
from muster.schedulers.errors import SchedulerError
from muster.schedulers.kubernetes import syntax
from muster.schedulers.kubernetes.manifests.inputs import AppInputs, RoleInputs
from muster.schedulers.kubernetes.names import config_map_name

BUNDLE_DIR: Final = "/opt/muster"
WORK_DIR: Final = "/muster/work"
SCRATCH_DIR: Final = "/muster/scratch"
SHM_DIR: Final = "/dev/shm"  # noqa: S108 - the kernel's name for it

_UNLIMITED_SHM: Final = "8Gi"
"""Size of /dev/shm for a job without a memory limit: not reserved, only a bound."""


def build_volumes(plan: AppInputs, role: RoleInputs) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A role's volumes and its container's mounts.

    Raises:
        SchedulerError: a mount of an unknown kind, without an absolute target, or forbidden by security=restricted.
    """
    volumes: list[dict[str, Any]] = []
    mounts: list[dict[str, Any]] = []
    for index, mount in enumerate(role.role.mounts):
        name = f"mount-{index}"
        source, read_only = _build_source(plan, role, mount)
        target = _check_target(role, mount.dst_path, [other["mountPath"] for other in mounts])
        volumes.append({"name": name, **source})
        mounts.append({"name": name, "mountPath": target, **_read_only(read_only)})
    taken = {mount["mountPath"] for mount in mounts}
    for name, path, source in _build_ours(plan, role):
        if path not in taken:  # a user's own /dev/shm wins
            volumes.append({"name": name, **source})
            mounts.append({"name": name, "mountPath": path, **_read_only(path == BUNDLE_DIR)})
    return volumes, mounts


def _read_only(read_only: bool) -> dict[str, bool]:
    return {"readOnly": True} if read_only else {}


def _build_ours(plan: AppInputs, role: RoleInputs) -> list[tuple[str, str, dict[str, Any]]]:
    shm = {"medium": "Memory", "sizeLimit": _shm_size(plan, role)}
    ours: list[tuple[str, str, dict[str, Any]]] = [
        ("muster-shm", SHM_DIR, {"emptyDir": shm}),
        ("muster-scratch", SCRATCH_DIR, {"emptyDir": {}}),
    ]
    if needs_bundle(plan, role):
        source = {"name": config_map_name(plan.name), "defaultMode": 0o444}
        ours.append(("muster-bundle", BUNDLE_DIR, {"configMap": source}))
    if role.workspace:
        ours.append(("muster-work", WORK_DIR, {"emptyDir": {}}))
    return ours


def needs_bundle(plan: AppInputs, role: RoleInputs) -> bool:
    """Whether a role reads anything from the ConfigMap."""
    return bool(role.workspace) or (role.is_agent and plan.options.agent == "bundled")


def _shm_size(plan: AppInputs, role: RoleInputs) -> str:
    if plan.options.shm_size:
        return plan.options.shm_size
    memory_mb = int(role.role.resource.memMB)
    if RoleKey.MEMORY_REQUEST_MB in role.role.metadata or memory_mb <= 0:
        return _UNLIMITED_SHM
    # it counts against the memory limit: full shared memory must leave room for the processes
    return f"{max(64, memory_mb // 2)}Mi"


def _check_target(role: RoleInputs, path: str, taken: list[str]) -> str:
    """The path without a slash at its end."""
    clean = posixpath.normpath(path)
    if not path.startswith("/") or ":" in path or ".." in path.split("/") or clean == "/":
        raise SchedulerError(
            f"role {role.role.name!r}: mount target {path!r} is not an absolute path below / without ':' and '..'"
        )
    if clean in (BUNDLE_DIR, WORK_DIR, SCRATCH_DIR):
        raise SchedulerError(f"role {role.role.name!r}: mount target {path!r} belongs to muster")
    if clean in taken:
        raise SchedulerError(f"role {role.role.name!r}: two mounts have the target {clean!r}")
    return clean


def _build_source(plan: AppInputs, role: RoleInputs, mount: Any) -> tuple[dict[str, Any], bool]:
    if hasattr(mount, "permissions"):  # a DeviceMount
        _refuse_host_path(plan, role, mount.src_path)
        read_only = "w" not in mount.permissions and "m" not in mount.permissions
        return {"hostPath": {"path": mount.src_path}}, read_only
    if hasattr(mount, "src_path"):  # a BindMount
        _refuse_host_path(plan, role, mount.src_path)
        return {"hostPath": {"path": mount.src_path}}, mount.read_only
    if hasattr(mount, "src"):  # a VolumeMount
        return _build_volume_source(role, mount.src, mount.read_only), mount.read_only
    raise SchedulerError(f"role {role.role.name!r}: mount {mount!r} is of no kind this adapter knows")


def _refuse_host_path(plan: AppInputs, role: RoleInputs, path: str) -> None:
    if plan.options.security == "restricted":
        raise SchedulerError(f"role {role.role.name!r}: host path {path!r} is forbidden by security=restricted")
    if not path.startswith("/") or ".." in path.split("/"):
        raise SchedulerError(
            f"role {role.role.name!r}: mount source {path!r} is not an absolute path of the host without '..'"
        )


def _build_volume_source(role: RoleInputs, source: str, read_only: bool) -> dict[str, Any]:
    kind, slash, name = source.partition("/")
    if not slash:
        kind, name = "pvc", source
    if kind == "emptydir":
        if name and syntax.QUANTITY.fullmatch(name) is None:
            raise SchedulerError(f"role {role.role.name!r}: volume {source!r} has no size after the slash, as in 10Gi")
        return {"emptyDir": {"sizeLimit": name} if name else {}}
    if kind in ("configmap", "secret", "pvc") and syntax.NAME.fullmatch(name) is None:
        raise SchedulerError(
            f"role {role.role.name!r}: volume {source!r} holds no name of a Kubernetes object: {name!r}"
        )
    if kind == "configmap":
        return {"configMap": {"name": name}}
    if kind == "secret":
        return {"secret": {"secretName": name}}
    if kind == "pvc":
        return {"persistentVolumeClaim": {"claimName": name, **_read_only(read_only)}}
    raise SchedulerError(
        f"role {role.role.name!r}: volume {source!r} is not CLAIM or one of pvc/, configmap/, secret/, emptydir/"
    )
