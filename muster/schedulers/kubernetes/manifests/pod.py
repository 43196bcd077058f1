"""The pod template of a role: the same for every flavour and every node.

It depends neither on the number of nodes nor on the node: Kubernetes fills in the index from a label, and the address
of node 0 is a host name.

TorchX's mounts are binds (host paths), volumes (claims) and devices. The source of a `type=volume` mount may also be
`configmap/NAME`, `secret/NAME`, `emptydir/` or `emptydir/10Gi`, or `pvc/NAME` (the same as NAME). The name of a claim
cannot contain a slash.
"""

import posixpath
from typing import Any, Final

from muster._shared.contract import NEVER_RETRY, Env, ExitCode, RoleKey
from muster._shared.role_policy import dump_policy
from muster.schedulers.adapter.agent_role import AgentPlace, build_agent_env
from muster.schedulers.agent_command import build_agent_args, wrap_command
from muster.schedulers.errors import SchedulerError
from muster.schedulers.gpus import build_cache_env
from muster.schedulers.kubernetes import kube
from muster.schedulers.kubernetes.manifests.features import list_needs
from muster.schedulers.kubernetes.manifests.inputs import (
    INDEX_PLACEHOLDER,
    NAMESPACE_PLACEHOLDER,
    AppInputs,
    RoleInputs,
    escape,
)
from muster.schedulers.kubernetes.schema import merge_pod_template
from muster.schedulers.naming import build_label
from muster.schedulers.runner.roles import count_cpus

BUNDLE_DIR: Final = "/opt/muster"
WORK_DIR: Final = "/muster/work"
SCRATCH_DIR: Final = "/muster/scratch"
CACHE_DIR: Final = "/muster/cache"
"""Compile caches, on what `-cfg compile_cache` names."""
SHM_DIR: Final = "/dev/shm"  # noqa: S108 - the kernel's name for it

_UNLIMITED_SHM: Final = "8Gi"
"""Limit of /dev/shm for a job without a memory limit. It is not reserved."""

LAST_CALL_S: Final = 30
"""How long an elastic job waits for more pods after the last one joined: they start seconds apart."""

_INSTANCE_TYPE: Final = "node.kubernetes.io/instance-type"
_EFA: Final = "vpc.amazonaws.com/efa"
_LOST_NODE_S: Final = 60
"""How long a pod stays bound to a node that does not respond. Kubernetes' default is 300 s."""

DISRUPTION_RULE: Final = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
"""Preemption, drain and eviction do not count as retries. It comes first: the first rule that matches decides."""

PREEMPTED_RULE: Final = {
    "action": "Ignore",
    "onExitCodes": {"containerName": kube.CONTAINER, "operator": "In", "values": [int(ExitCode.TERMINATED)]},
}
"""When one pod is preempted, the agents of all pods end with this code: none of them uses a retry."""

FINAL_RULE: Final = {
    "action": "FailJob",
    "onExitCodes": {"containerName": kube.CONTAINER, "operator": "NotIn", "values": [0, 128 + 9, 128 + 15]},
}
"""Of a command that `_shared.role_command` has given up. A pod that was killed, or told to end, is replaced."""

EXIT_RULE: Final = {
    "action": "FailJob",
    "onExitCodes": {"containerName": kube.CONTAINER, "operator": "In", "values": list(NEVER_RETRY)},
}


def build_pod_template(inputs: AppInputs, role: RoleInputs) -> dict[str, Any]:
    """Build one role's pod template.

    Raises:
        SchedulerError: an invalid mount, resource or patch.
    """
    volumes, mounts = _build_volumes(inputs, role)
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "subdomain": inputs.name,
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": role.grace_s,
        "tolerations": _build_tolerations(inputs),
        "securityContext": _build_pod_security(inputs),
        "containers": [_build_container(inputs, role, mounts)],
        "volumes": volumes,
    }
    if role.workspace and not role.runs_agent:
        spec["initContainers"] = [_build_unpacker(inputs, role, mounts)]
    spec.update(_build_placement(inputs, role))
    template = {"metadata": {"labels": build_labels(inputs, role), "annotations": dict(_ANNOTATIONS)}, "spec": spec}
    patches = [each.template for each in list_needs(inputs, role)]
    for patch in (*patches, inputs.options.pod_template or {}):
        template = merge_pod_template(template, patch, inputs.options.schema_version)
    return template


def build_labels(inputs: AppInputs, role: RoleInputs | None = None) -> dict[str, str]:
    """Return the labels of an app's objects. With `role`, return those of that role's objects."""
    labels = {
        kube.LABEL_NAME: build_label(inputs.app.name),
        kube.LABEL_INSTANCE: inputs.name,
        kube.LABEL_MANAGED_BY: kube.MANAGED_BY,
    }
    if inputs.submitter:
        labels[kube.LABEL_SUBMITTER] = inputs.submitter
    labels |= inputs.options.labels
    return {**labels, kube.LABEL_COMPONENT: role.label} if role is not None else labels


_ANNOTATIONS: Final = {
    # A sidecar would keep the pod from ending.
    "sidecar.istio.io/inject": "false",
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
    "kubectl.kubernetes.io/default-container": kube.CONTAINER,
}


def _build_placement(inputs: AppInputs, role: RoleInputs) -> dict[str, Any]:
    options = inputs.options
    selector = dict(options.node_selector)
    if _INSTANCE_TYPE in role.role.resource.capabilities:
        selector[_INSTANCE_TYPE] = str(role.role.resource.capabilities[_INSTANCE_TYPE])
    return _select_given(
        nodeSelector=selector,
        serviceAccountName=options.service_account,
        imagePullSecrets=[{"name": name} for name in options.image_pull_secrets],
        priorityClassName=None if options.resolved_gang == "kueue" else options.priority_class,
    )


def _select_given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value}


def _build_tolerations(inputs: AppInputs) -> list[dict[str, Any]]:
    ours: list[dict[str, Any]] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"):
        toleration = {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": _LOST_NODE_S}
        ours.append(toleration)
    return ours + [dict(toleration) for toleration in inputs.options.tolerations]


def _build_pod_security(inputs: AppInputs) -> dict[str, Any]:
    security: dict[str, Any] = {"seccompProfile": {"type": "RuntimeDefault"}}
    user = inputs.options.user
    if user is not None:
        # Claims are root's: writing needs the group.
        security.update(runAsNonRoot=True, fsGroup=user.gid)
        security.update({} if user.uid is None else {"runAsUser": user.uid, "runAsGroup": user.gid})
    return security


def _build_security(inputs: AppInputs, role: RoleInputs) -> dict[str, Any]:
    if any(hasattr(mount, "permissions") for mount in role.role.mounts):
        # Host devices need it; TorchX does the same.
        return {"privileged": True}
    capabilities: dict[str, Any] = {"drop": ["ALL"]}
    if inputs.options.rdma:
        capabilities["add"] = ["IPC_LOCK"]
    return {"allowPrivilegeEscalation": False, "capabilities": capabilities}


def _build_container(inputs: AppInputs, role: RoleInputs, mounts: list[dict[str, Any]]) -> dict[str, Any]:
    command = [escape(role.role.entrypoint), *_build_args(inputs, role)]
    if role.is_wrapped:
        count_path = posixpath.join(SCRATCH_DIR, "restarts") if role.is_restarted else None
        command = wrap_command(command, dump_policy(role.policy), _find_bundle_dir(inputs), count_path)
    return {
        "name": kube.CONTAINER,
        "image": role.role.image,
        "command": command[:1],
        "args": command[1:],
        "env": _build_env(inputs, role),
        "resources": build_resources(inputs, role),
        "volumeMounts": mounts,
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": _build_security(inputs, role),
        **_select_given(
            imagePullPolicy=inputs.options.image_pull_policy,
            # A name would need a stricter syntax.
            ports=[{"containerPort": port} for port in dict.fromkeys(role.role.port_map.values())],
            workingDir=WORK_DIR if role.workspace else "",
        ),
    }


def _build_args(inputs: AppInputs, role: RoleInputs) -> list[str]:
    args = list(role.args)
    if role.runs_agent:
        args = build_agent_args(args, _find_bundle_dir(inputs))
    return [_insert_index(arg) for arg in args]


def _find_bundle_dir(inputs: AppInputs) -> str | None:
    """Return the folder with the agent's bundle. None: muster is in the image."""
    return BUNDLE_DIR if inputs.options.agent == "bundled" else None


def _insert_index(text: str) -> str:
    """Insert references that Kubernetes replaces by the node's index and the namespace."""
    text = text.replace(INDEX_PLACEHOLDER, f"$({kube.INDEX_VARIABLE})")
    return text.replace(NAMESPACE_PLACEHOLDER, f"$({kube.NAMESPACE_VARIABLE})")


def _build_env(inputs: AppInputs, role: RoleInputs) -> list[dict[str, Any]]:
    # Variables can refer only to earlier ones.
    env: list[dict[str, Any]] = [
        _build_field_variable(kube.INDEX_VARIABLE, f"metadata.labels['{kube.JOB_INDEX_LABEL}']")
    ]
    env.append(_build_field_variable(kube.NAMESPACE_VARIABLE, "metadata.namespace"))
    ours: dict[str, str] = {Env.RANK0_HOST: inputs.build_rank0_host(role), "TMPDIR": SCRATCH_DIR, **role.others}
    if inputs.options.compile_cache is not None:
        ours.update(build_cache_env(CACHE_DIR))
    if inputs.options.user is not None and inputs.options.user.uid is not None:
        ours.update(HOME=SCRATCH_DIR, USER="muster")  # the image's passwd may lack the uid
    if role.runs_agent:
        env.append(_build_field_variable(Env.NODE_NAME, "metadata.name"))
        env.append(_build_field_variable(Env.MACHINE_NAME, "spec.nodeName"))
        if not role.elastic:  # of the pods of an elastic job nothing is counted, see `build_job_spec`
            env.append(_build_field_variable(Env.DRAINED_PODS, f"metadata.annotations['{kube.INDEX_DRAINS}']"))
        env.append(_build_secret_variable(inputs, Env.TOKEN, kube.build_token_key(role.label)))
        ours.update(_build_agent_env(inputs, role))
    for key, text in {**ours, **role.env}.items():
        if key not in role.secret_env:
            env.append({"name": key, "value": _insert_index(text)})
    env += [_build_secret_variable(inputs, name, kube.build_variable_key(role.label, name)) for name in role.secret_env]
    return env


def _build_agent_env(inputs: AppInputs, role: RoleInputs) -> dict[str, str]:
    place = AgentPlace(
        adapter="kubernetes",
        app_id=inputs.name,
        log_dir=posixpath.join(SCRATCH_DIR, "logs"),
        termination_log="/dev/termination-log",
        grace_s=inputs.options.grace_s,
        sigterm_senders="Kubernetes, which deletes or evicts the pod, or `torchx cancel`",
    )
    env = build_agent_env(role.role, place)
    for needs in list_needs(inputs, role):
        env |= needs.env
    if role.elastic:
        env[Env.LAST_CALL_S] = str(LAST_CALL_S)
    if role.workspace:
        env[Env.WORKSPACE] = posixpath.join(BUNDLE_DIR, role.workspace)
        env[Env.WORKSPACE_DIR] = WORK_DIR
    return env


def _build_secret_variable(inputs: AppInputs, name: str, key: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": kube.build_secret_name(inputs.name), "key": key}}}


def _build_field_variable(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def build_resources(inputs: AppInputs, role: RoleInputs) -> dict[str, Any]:
    """Request and limits of a role's container. No CPU limit: the slowest rank slows down all others."""
    options, resource = inputs.options, role.role.resource
    requests: dict[str, str] = {}
    limits: dict[str, str] = {}
    cpus = count_cpus(role.role)
    if cpus > 0:
        millicpu = max(0, round(cpus * 1000) - options.reserved_millicpu)
        requests["cpu"] = str(millicpu // 1000) if millicpu % 1000 == 0 else f"{millicpu}m"
    requested_mb = role.role.metadata.get(RoleKey.MEMORY_REQUEST_MB)
    if requested_mb is not None:
        requests["memory"] = f"{requested_mb}Mi"
    elif resource.memMB > 0:
        limits["memory"] = f"{int(resource.memMB)}Mi"
        requests["memory"] = f"{max(1, int(resource.memMB) - options.reserved_memmb)}Mi"
    for name, count in _count_devices(inputs, role).items():
        requests[name] = limits[name] = str(count)
    return {key: value for key, value in (("requests", requests), ("limits", limits)) if value}


def _count_devices(inputs: AppInputs, role: RoleInputs) -> dict[str, int]:
    resource, options = role.role.resource, inputs.options
    devices = {name: int(count) for name, count in resource.devices.items()}
    if resource.gpu > 0:
        devices["nvidia.com/gpu"] = int(resource.gpu)
    if options.efa_device_count is not None:
        devices[_EFA] = options.efa_device_count
    if options.rdma and options.rdma != "true":
        device, _, number = options.rdma.partition(":")
        devices[device] = int(number or 1)
    return {name: count for name, count in devices.items() if count}


def _build_unpacker(inputs: AppInputs, role: RoleInputs, mounts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the init container that unpacks the workspace with the image's tar, for a role without our agent."""
    ours = [mount for mount in mounts if mount["mountPath"] in (BUNDLE_DIR, WORK_DIR)]
    return {
        "name": "workspace",
        "image": role.role.image,
        "command": ["tar", "-xzof", posixpath.join(BUNDLE_DIR, str(role.workspace)), "-C", WORK_DIR],
        "resources": build_resources(inputs, role),
        "volumeMounts": ours,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        **_select_given(imagePullPolicy=inputs.options.image_pull_policy),
    }


# -- volumes -----------------------------------------------------------------------------------------------------------


def _build_volumes(inputs: AppInputs, role: RoleInputs) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Build a role's volumes and its container's mounts.

    Raises:
        SchedulerError: a mount of an unknown type, without an absolute target, or forbidden by security=restricted.
    """
    volumes: list[dict[str, Any]] = []
    mounts: list[dict[str, Any]] = []
    for index, mount in enumerate(role.role.mounts):
        name = f"mount-{index}"
        source, read_only = _build_source(inputs, role, mount)
        target = _check_target(role, mount.dst_path)
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
    return (role.runs_agent or role.is_wrapped) and inputs.options.agent == "bundled"


def _build_bundle_sources(inputs: AppInputs, role: RoleInputs) -> list[dict[str, Any]]:
    """Return the agent and the role's own workspace as files of one folder."""
    sources: list[dict[str, Any]] = []
    if needs_agent(inputs, role):
        sources.append({"configMap": {"name": kube.build_config_map_name(inputs.name)}})
    if role.workspace:
        item = {"key": role.workspace, "path": role.workspace}
        sources.append({"secret": {"name": kube.build_workspace_name(inputs.name), "items": [item]}})
    return sources


def _decide_shm_size(inputs: AppInputs, role: RoleInputs) -> str:
    if inputs.options.shm_size:
        return inputs.options.shm_size
    memory_mb = int(role.role.resource.memMB)
    if RoleKey.MEMORY_REQUEST_MB in role.role.metadata or memory_mb <= 0:
        return _UNLIMITED_SHM
    # It counts towards the memory limit.
    return f"{max(64, memory_mb // 2)}Mi"


def _check_target(role: RoleInputs, path: str) -> str:
    """Check the path, and return it without a slash at its end."""
    clean = posixpath.normpath(path)
    if not path.startswith("/") or ":" in path or ".." in path.split("/") or clean == "/":
        raise SchedulerError(
            f"role {role.role.name!r}: mount target {path!r} is not an absolute path below / without ':' and '..'"
        )
    if clean in (BUNDLE_DIR, WORK_DIR, SCRATCH_DIR, CACHE_DIR):
        raise SchedulerError(f"role {role.role.name!r}: mount target {path!r} is reserved for muster")
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
        if name and kube.QUANTITY.fullmatch(name) is None:
            raise SchedulerError(
                f"role {role.role.name!r}: volume {source!r} needs a size such as 10Gi after the slash, or nothing"
            )
        return {"emptyDir": {"sizeLimit": name} if name else {}}
    if kind in ("configmap", "secret", "pvc") and kube.OBJECT_NAME.fullmatch(name) is None:
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
