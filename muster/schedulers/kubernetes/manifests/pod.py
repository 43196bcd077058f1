"""The pod template of a role: the same for every flavour and every node.

Nothing in it depends on the number of nodes or on the node: Kubernetes fills in the index from a label, the address
of node 0 is a name.
"""

import posixpath
from typing import Any, Final

from muster._contract import NEVER_RETRY, NODE_INDEX_MARK, Env, RoleKey
from muster.schedulers.agent_command import rewrite_agent_args, rewrite_image_args
from muster.schedulers.errors import SchedulerError
from muster.schedulers.kubernetes import syntax
from muster.schedulers.kubernetes.labels import (
    LABEL_COMPONENT,
    LABEL_INSTANCE,
    LABEL_MANAGED_BY,
    LABEL_NAME,
    MANAGED_BY,
)
from muster.schedulers.kubernetes.manifests.inputs import INDEX_MARK, AppInputs, RoleInputs, escape
from muster.schedulers.kubernetes.manifests.patch import merge_pod_template
from muster.schedulers.kubernetes.manifests.volumes import BUNDLE_DIR, SCRATCH_DIR, WORK_DIR, build_volumes
from muster.schedulers.kubernetes.names import CONTAINER, secret_name, token_key
from muster.schedulers.naming import build_label

INDEX_VARIABLE: Final = "NODE_INDEX"
LAST_CALL_S: Final = 30
"""Elastic jobs wait so long for more pods after the last joined: they come up seconds apart."""

_INSTANCE_TYPE: Final = "node.kubernetes.io/instance-type"
_EFA: Final = "vpc.amazonaws.com/efa"
_LOST_NODE_S: Final = 60
"""Seconds a pod stays bound to a node that does not answer; Kubernetes' default is 300."""

_USER_ID: Final = 1000
"""security=restricted: any user but root."""

DISRUPTION_RULE: Final = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
"""Preemption, drain and eviction are not charged. First, because the first rule that matches decides."""

EXIT_RULE: Final = {
    "action": "FailJob",
    "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": list(NEVER_RETRY)},
}


def build_pod_template(plan: AppInputs, role: RoleInputs, *, index_label: str, first_index: int = 0) -> dict[str, Any]:
    """One role's pod template.

    Args:
        plan: the app's.
        role: one of the plan's roles.
        index_label: pod label in which the controller writes the node's index.
        first_index: of the node that the label counts as 0; above 0 only for a role that runs our agent.

    Raises:
        SchedulerError: a mount, resource or patch that cannot be.
    """
    volumes, mounts = build_volumes(plan, role)
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "subdomain": plan.name,
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": role.grace_s,
        "tolerations": _build_tolerations(plan),
        "securityContext": _build_pod_security(plan),
        "containers": [_build_container(plan, role, mounts, index_label, first_index)],
        "volumes": volumes,
    }
    if role.workspace and not role.is_agent:
        spec["initContainers"] = [_build_unpacker(plan, role, mounts)]
    spec.update(_build_placement(plan, role))
    template = {"metadata": {"labels": build_labels(plan, role), "annotations": _ANNOTATIONS}, "spec": spec}
    return merge_pod_template(template, plan.options.pod_template or {}, plan.options.schema_version)


def build_labels(plan: AppInputs, role: RoleInputs | None = None) -> dict[str, str]:
    """Labels of every object of the app; `role`: of those of one role."""
    labels = {LABEL_NAME: _label_value(plan), LABEL_INSTANCE: plan.name, LABEL_MANAGED_BY: MANAGED_BY}
    return {**labels, LABEL_COMPONENT: role.label} if role is not None else labels


def _label_value(plan: AppInputs) -> str:
    return build_label(plan.app.name)


_ANNOTATIONS: Final = {
    # a sidecar that outlives the job keeps its pods from ending
    "sidecar.istio.io/inject": "false",
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
    "kubectl.kubernetes.io/default-container": CONTAINER,
}


def _build_placement(plan: AppInputs, role: RoleInputs) -> dict[str, Any]:
    options = plan.options
    placement: dict[str, Any] = {}
    selector = dict(options.node_selector)
    if _INSTANCE_TYPE in role.role.resource.capabilities:
        selector[_INSTANCE_TYPE] = _check_instance_type(role, str(role.role.resource.capabilities[_INSTANCE_TYPE]))
    if selector:
        placement["nodeSelector"] = selector
    if options.service_account:
        placement["serviceAccountName"] = options.service_account
    if options.image_pull_secrets:
        placement["imagePullSecrets"] = [{"name": name} for name in options.image_pull_secrets]
    if options.priority_class and options.resolved_gang != "kueue":
        placement["priorityClassName"] = options.priority_class
    return placement


def _check_instance_type(role: RoleInputs, text: str) -> str:
    if syntax.LABEL_VALUE.fullmatch(text) is None:
        raise SchedulerError(f"role {role.role.name!r}: {_INSTANCE_TYPE} {text!r} is no value of a node's label")
    return text


def _build_tolerations(plan: AppInputs) -> list[dict[str, Any]]:
    ours: list[dict[str, Any]] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"):
        toleration = {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": _LOST_NODE_S}
        ours.append(toleration)
    return ours + [dict(toleration) for toleration in plan.options.tolerations]


def _build_pod_security(plan: AppInputs) -> dict[str, Any]:
    security: dict[str, Any] = {"seccompProfile": {"type": "RuntimeDefault"}}
    if plan.options.security == "restricted":
        security.update(runAsNonRoot=True, runAsUser=_USER_ID, runAsGroup=_USER_ID, fsGroup=_USER_ID)
    return security


def _build_security(plan: AppInputs, role: RoleInputs) -> dict[str, Any]:
    if any(hasattr(mount, "permissions") for mount in role.role.mounts):
        # a device of the host: Kubernetes gives it to privileged containers only, as TorchX's adapter does
        return {"privileged": True}
    capabilities: dict[str, Any] = {"drop": ["ALL"]}
    if plan.options.rdma:
        capabilities["add"] = ["IPC_LOCK"]
    return {"allowPrivilegeEscalation": False, "capabilities": capabilities}


def _build_container(
    plan: AppInputs, role: RoleInputs, mounts: list[dict[str, Any]], index_label: str, first_index: int
) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": role.role.image,
        "command": [escape(role.role.entrypoint)],
        "args": _build_args(plan, role, first_index),
        "env": _build_env(plan, role, index_label, first_index),
        "resources": build_resources(plan, role),
        "volumeMounts": mounts,
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": _build_security(plan, role),
    }
    if plan.options.image_pull_policy:
        container["imagePullPolicy"] = plan.options.image_pull_policy
    if role.role.port_map:
        container["ports"] = _build_ports(role)
    if role.workspace:
        container["workingDir"] = WORK_DIR
    return container


def _build_args(plan: AppInputs, role: RoleInputs, first_index: int) -> list[str]:
    args = list(role.args)
    if role.is_agent:
        bundled = plan.options.agent == "bundled"
        args = rewrite_agent_args(args, BUNDLE_DIR) if bundled else rewrite_image_args(args)
    return [_put_index(arg, first_index) for arg in args]


def _put_index(text: str, first_index: int) -> str:
    """Kubernetes puts the index; where it is not the label's, the agent."""
    return text.replace(INDEX_MARK, NODE_INDEX_MARK if first_index else f"$({INDEX_VARIABLE})")


def _build_ports(role: RoleInputs) -> list[dict[str, Any]]:
    ports: list[dict[str, Any]] = []
    for name, port in role.role.port_map.items():
        if not isinstance(port, int) or not 0 < port < 65536:
            raise SchedulerError(f"role {role.role.name!r}: port {name}={port!r} is not between 1 and 65535")
        if port not in [other["containerPort"] for other in ports]:
            ports.append({"containerPort": port})  # names have their own grammar and nobody needs them
    return ports


def _build_env(plan: AppInputs, role: RoleInputs, index_label: str, first_index: int) -> list[dict[str, Any]]:
    # The index comes first: others refer to it, and a variable can only refer to those before it.
    env: list[dict[str, Any]] = [_from_field(INDEX_VARIABLE, f"metadata.labels['{index_label}']")]
    ours: dict[str, str] = {Env.RANK0_HOST: plan.rank0_host(role), "TMPDIR": SCRATCH_DIR}
    if plan.options.security == "restricted":
        ours.update(HOME=SCRATCH_DIR, USER="muster")  # uid 1000 need not be in the image's passwd
    if role.is_agent:
        env.append(_from_field(Env.NODE_NAME, "metadata.name"))
        env.append(_from_secret(plan, Env.TOKEN, token_key(role.label)))
        ours.update(_build_agent_env(plan, role))
    if first_index:
        env.append({"name": Env.NODE_INDEX, "value": f"{first_index}+$({INDEX_VARIABLE})"})
    reserved = {entry["name"] for entry in env} | {Env.RANK0_HOST, Env.REQUIRE_TOKEN}
    theirs: dict[str, str] = {key: text for key, text in role.env.items() if key not in reserved}
    for key, text in {**ours, **theirs}.items():
        env.append({"name": key, "value": _put_index(text, first_index)})
    for name, secret in role.secret_env.items():
        if name not in reserved:
            env.append(_from_secret(plan, name, secret.key))
    return env


def _build_agent_env(plan: AppInputs, role: RoleInputs) -> dict[str, str]:
    env = {
        Env.REQUIRE_TOKEN: "1",
        Env.ADAPTER: "kubernetes",
        Env.APP_ID: plan.name,
        Env.LOG_DIR: posixpath.join(SCRATCH_DIR, "logs"),
        Env.TERMINATION_LOG: "/dev/termination-log",
    }
    if role.elastic:
        env[Env.LAST_CALL_S] = str(LAST_CALL_S)
    if role.workspace:
        env[Env.WORKSPACE] = posixpath.join(BUNDLE_DIR, role.workspace)
        env[Env.WORKSPACE_DIR] = WORK_DIR
    return env


def _from_secret(plan: AppInputs, name: str, key: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret_name(plan.name), "key": key}}}


def _from_field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def build_resources(plan: AppInputs, role: RoleInputs) -> dict[str, Any]:
    """Requests and limits of a role's container. No CPU limit: the slowest rank slows all the others."""
    options, resource = plan.options, role.role.resource
    requests: dict[str, str] = {}
    limits: dict[str, str] = {}
    if resource.cpu > 0:
        requests["cpu"] = _format_cpu(max(0, round(resource.cpu * 1000) - options.reserved_millicpu))
    asked_mb = role.role.metadata.get(RoleKey.MEMORY_REQUEST_MB)
    if asked_mb is not None:
        requests["memory"] = f"{asked_mb}Mi"
    elif resource.memMB > 0:
        limits["memory"] = f"{int(resource.memMB)}Mi"
        requests["memory"] = f"{max(1, int(resource.memMB) - options.reserved_memmb)}Mi"
    for name, count in _count_devices(plan, role).items():
        requests[name] = limits[name] = str(count)
    return {key: value for key, value in (("requests", requests), ("limits", limits)) if value}


def _format_cpu(millicpu: int) -> str:
    return str(millicpu // 1000) if millicpu % 1000 == 0 else f"{millicpu}m"


def _count_devices(plan: AppInputs, role: RoleInputs) -> dict[str, int]:
    resource, options = role.role.resource, plan.options
    devices = {name: int(count) for name, count in resource.devices.items()}
    if resource.gpu > 0:
        devices["nvidia.com/gpu"] = int(resource.gpu)
    if options.efa_device_count is not None:
        devices[_EFA] = options.efa_device_count
    if options.rdma and options.rdma != "true":
        device, _, number = options.rdma.partition(":")
        devices[device] = int(number or 1)
    for name, count in devices.items():
        if syntax.RESOURCE.fullmatch(name) is None:
            raise SchedulerError(
                f"role {role.role.name!r}: device {name!r} is not DOMAIN/RESOURCE, as in nvidia.com/gpu"
            )
        if count < 0:
            raise SchedulerError(f"role {role.role.name!r}: {count} of device {name!r} is negative")
    return {name: count for name, count in devices.items() if count}


def _build_unpacker(plan: AppInputs, role: RoleInputs, mounts: list[dict[str, Any]]) -> dict[str, Any]:
    """Unpacks the workspace for a role that does not run our agent, with the image's own tar."""
    ours = [mount for mount in mounts if mount["mountPath"] in (BUNDLE_DIR, WORK_DIR)]
    unpacker: dict[str, Any] = {
        "name": "workspace",
        "image": role.role.image,
        "command": ["tar", "-xzof", posixpath.join(BUNDLE_DIR, str(role.workspace)), "-C", WORK_DIR],
        "resources": build_resources(plan, role),
        "volumeMounts": ours,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    if plan.options.image_pull_policy:
        unpacker["imagePullPolicy"] = plan.options.image_pull_policy
    return unpacker
