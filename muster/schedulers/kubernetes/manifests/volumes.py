"""Volumes of a pod: ours, and TorchX's mounts.

TorchX has binds (host paths), volumes (claims) and devices. The source of a `type=volume` mount may also be
`configmap/NAME`, `secret/NAME`, `emptydir/` or `emptydir/10Gi`, or `pvc/NAME` (the same as NAME). The name of a claim
cannot contain a slash.
"""

import posixpath
from typing import Any, Final

from muster._shared.contract import RoleKey
from muster.schedulers.errors import SchedulerError
from muster.schedulers.kubernetes import syntax
from muster.schedulers.kubernetes.manifests.inputs import AppInputs, RoleInputs
from muster.schedulers.kubernetes.names import build_config_map_name, build_workspace_name

BUNDLE_DIR: Final = "/opt/muster"
WORK_DIR: Final = "/muster/work"
SCRATCH_DIR: Final = "/muster/scratch"
CACHE_DIR: Final = "/muster/cache"
"""Compile caches, on what `-cfg compile_cache` names."""
SHM_DIR: Final = "/dev/shm"  # noqa: S108 - the kernel's name for it

_UNLIMITED_SHM: Final = "8Gi"
"""Limit of /dev/shm for a job without a memory limit. It is not reserved."""


def build_volumes(inputs: AppInputs, role: RoleInputs) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Build a role's volumes and its container's mounts.

    Raises:
        SchedulerError: a mount of an unknown type, without an absolute target, or forbidden by security=restricted.
    """
    volumes: list[dict[str, Any]] = []
    mounts: list[dict[str, Any]] = []
    for index, mount in enumerate(role.role.mounts):
        name = f"mount-{index}"
        source, read_only = _build_source(inputs, role, mount)
        target = _check_target(role, mount.dst_path, [other["mountPath"] for other in mounts])
        volumes.append({"name": name, **source})
        mounts.append({"name": name, "mountPath": target, **_build_read_only(read_only)})
    used = {mount["mountPath"] for mount in mounts}
    for name, path, source in _build_own_volumes(inputs, role):
        if path not in used:  # a user's /dev/shm replaces ours
            volumes.append({"name": name, **source})
            mounts.append({"name": name, "mountPath": path, **_build_read_only(path == BUNDLE_DIR)})
    return volumes, mounts


def _build_read_only(read_only: bool) -> dict[str, bool]:
    return {"readOnly": True} if read_only else {}


def _build_own_volumes(inputs: AppInputs, role: RoleInputs) -> list[tuple[str, str, dict[str, Any]]]:
    shm = {"medium": "Memory", "sizeLimit": _decide_shm_size(inputs, role)}
    ours: list[tuple[str, str, dict[str, Any]]] = [
        ("muster-shm", SHM_DIR, {"emptyDir": shm}),
        ("muster-scratch", SCRATCH_DIR, {"emptyDir": {}}),
    ]
    sources = _build_bundle_sources(inputs, role)
    if sources:
        ours.append(("muster-bundle", BUNDLE_DIR, {"projected": {"sources": sources, "defaultMode": 0o444}}))
    if role.workspace:
        ours.append(("muster-work", WORK_DIR, {"emptyDir": {}}))
    cache = inputs.options.compile_cache
    if cache is not None and cache.startswith("/"):
        _check_host_path(inputs, role, cache)
        ours.append(("muster-cache", CACHE_DIR, {"hostPath": {"path": cache, "type": "DirectoryOrCreate"}}))
    elif cache is not None:
        ours.append(("muster-cache", CACHE_DIR, {"persistentVolumeClaim": {"claimName": cache}}))
    return ours


def needs_agent(inputs: AppInputs, role: RoleInputs) -> bool:
    """Return whether a role needs the agent's ConfigMap."""
    return role.runs_agent and inputs.options.agent == "bundled"


def _build_bundle_sources(inputs: AppInputs, role: RoleInputs) -> list[dict[str, Any]]:
    """Return the agent and the role's own workspace as files of one folder."""
    sources: list[dict[str, Any]] = []
    if needs_agent(inputs, role):
        sources.append({"configMap": {"name": build_config_map_name(inputs.name)}})
    if role.workspace:
        item = {"key": role.workspace, "path": role.workspace}
        sources.append({"secret": {"name": build_workspace_name(inputs.name), "items": [item]}})
    return sources


def _decide_shm_size(inputs: AppInputs, role: RoleInputs) -> str:
    if inputs.options.shm_size:
        return inputs.options.shm_size
    memory_mb = int(role.role.resource.memMB)
    if RoleKey.MEMORY_REQUEST_MB in role.role.metadata or memory_mb <= 0:
        return _UNLIMITED_SHM
    # It counts towards the memory limit.
    return f"{max(64, memory_mb // 2)}Mi"


def _check_target(role: RoleInputs, path: str, used: list[str]) -> str:
    """Check the path, and return it without a slash at its end."""
    clean = posixpath.normpath(path)
    if not path.startswith("/") or ":" in path or ".." in path.split("/") or clean == "/":
        raise SchedulerError(
            f"role {role.role.name!r}: mount target {path!r} is not an absolute path below / without ':' and '..'"
        )
    if clean in (BUNDLE_DIR, WORK_DIR, SCRATCH_DIR, CACHE_DIR):
        raise SchedulerError(f"role {role.role.name!r}: mount target {path!r} is reserved for muster")
    if clean in used:
        raise SchedulerError(f"role {role.role.name!r}: two mounts have the target {clean!r}")
    return clean


def _build_source(inputs: AppInputs, role: RoleInputs, mount: Any) -> tuple[dict[str, Any], bool]:
    if hasattr(mount, "permissions"):  # a DeviceMount
        _check_host_path(inputs, role, mount.src_path)
        read_only = "w" not in mount.permissions and "m" not in mount.permissions
        return {"hostPath": {"path": mount.src_path}}, read_only
    if hasattr(mount, "src_path"):  # a BindMount
        _check_host_path(inputs, role, mount.src_path)
        return {"hostPath": {"path": mount.src_path}}, mount.read_only
    if hasattr(mount, "src"):  # a VolumeMount
        return _build_volume_source(role, mount.src, mount.read_only), mount.read_only
    raise SchedulerError(f"role {role.role.name!r}: mount {mount!r} has an unknown type")


def _check_host_path(inputs: AppInputs, role: RoleInputs, path: str) -> None:
    if inputs.options.security == "restricted":
        raise SchedulerError(f"role {role.role.name!r}: host path {path!r} is forbidden by security=restricted")
    if not path.startswith("/") or ".." in path.split("/"):
        raise SchedulerError(
            f"role {role.role.name!r}: mount source {path!r} is not an absolute path of the host without '..'"
        )


def is_claim(source: str) -> bool:
    """Return whether the source of a volume mount names a claim."""
    return "/" not in source or source.startswith("pvc/")


def _build_volume_source(role: RoleInputs, source: str, read_only: bool) -> dict[str, Any]:
    kind, slash, name = source.partition("/")
    if not slash:
        kind, name = "pvc", source
    if kind == "emptydir":
        if name and syntax.QUANTITY.fullmatch(name) is None:
            raise SchedulerError(
                f"role {role.role.name!r}: volume {source!r} needs a size such as 10Gi after the slash, or nothing"
            )
        return {"emptyDir": {"sizeLimit": name} if name else {}}
    if kind in ("configmap", "secret", "pvc") and syntax.NAME.fullmatch(name) is None:
        raise SchedulerError(f"role {role.role.name!r}: volume {source!r}: {name!r} is not a Kubernetes object name")
    if kind == "configmap":
        return {"configMap": {"name": name}}
    if kind == "secret":
        return {"secret": {"secretName": name}}
    if kind == "pvc":
        return {"persistentVolumeClaim": {"claimName": name, **_build_read_only(read_only)}}
    raise SchedulerError(
        f"role {role.role.name!r}: volume {source!r} is not CLAIM, pvc/NAME, configmap/NAME, secret/NAME or emptydir/"
    )
