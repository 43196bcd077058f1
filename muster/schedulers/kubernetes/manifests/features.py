"""What features of the agent want of their pods and of the cluster. No other builder of documents knows a feature.

`export`: with `--metrics-port` Prometheus reads the metrics (a named port, annotations, a PodMonitor), and a probe asks
whether workers run. The annotations are those that the configuration in Prometheus' own examples reads.
Source: https://prometheus-operator.dev/docs/api-reference/api (PodMonitor).

`job_object`: with the option `events` the agent writes Events and annotations of its Job or JobSet.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from muster._shared.contract import Env, parse_listen_address
from muster.schedulers.agent_command import find_agent_flag
from muster.schedulers.errors import OptionError, SchedulerError
from muster.schedulers.kubernetes import kube
from muster.schedulers.kubernetes.manifests.inputs import NAMESPACE_PLACEHOLDER, AppInputs, RoleInputs

_PORT_NAME: Final = "metrics"
_ALL: Final = "::"
"""All addresses of the pod, of both versions of IP: Prometheus reads from outside of it."""

_POD_MONITOR: Final = kube.Kind(api_version="monitoring.coreos.com/v1", kind="PodMonitor")

ABSENCES: Final = {
    _POD_MONITOR.kind: "pod_monitor=true: the Prometheus operator is not installed in this cluster, or this account "
    f"may not see {_POD_MONITOR.api_version}; without it the pods have the annotations prometheus.io/scrape, port and "
    "path"
}
"""What a submission says if the cluster does not have a kind that a feature wants."""


@dataclass(frozen=True, kw_only=True)
class PodNeeds:
    """What a feature needs of the pods of a role that runs our agent."""

    env: Mapping[str, str]
    """A role's own variables replace them."""
    template: Mapping[str, Any]
    """What is merged into the pod template, before the user's `pod_template`."""


def list_needs(inputs: AppInputs, role: RoleInputs) -> list[PodNeeds]:
    """Return what features want of the pods of a role.

    Raises:
        SchedulerError: two things want the same port.
    """
    needs = (_find_metrics_needs(inputs, role), _find_job_object_needs(inputs, role)) if role.runs_agent else ()
    return [each for each in needs if each is not None]


def build_feature_objects(inputs: AppInputs, labels: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the further objects that features want.

    Raises:
        OptionError: an option needs a port which no role has.
    """
    options = inputs.options
    given = [name for name in ("pod_monitor", "readiness") if getattr(options, name)]
    if given and not any(_find_metrics_port(role) for role in inputs.roles):
        raise OptionError(
            f"{given[0]}=true needs a port of the pods: give the component --metrics_port PORT, as in 9464", given[0]
        )
    spec = {
        "selector": {"matchLabels": {kube.LABEL_INSTANCE: inputs.name}},
        "podMetricsEndpoints": [{"port": _PORT_NAME, "path": "/metrics"}],
    }
    monitor = kube.build_document(_POD_MONITOR, {"name": inputs.name, "labels": labels}, spec=spec)
    return [monitor] if options.pod_monitor else []


# -- metrics ----------------------------------------------------------------------------------------------------------


def _find_metrics_needs(inputs: AppInputs, role: RoleInputs) -> PodNeeds | None:
    port = _find_metrics_port(role)
    if port is None:
        return None
    container: dict[str, Any] = {"name": kube.CONTAINER, "ports": [{"containerPort": port, "name": _PORT_NAME}]}
    if inputs.options.readiness:  # host names do not wait for it
        get = {"path": "/readyz", "port": _PORT_NAME}
        container["readinessProbe"] = {"httpGet": get, "periodSeconds": 5, "timeoutSeconds": 2}
    annotations = {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(port),
        "prometheus.io/path": "/metrics",
    }
    template = {"metadata": {"annotations": annotations}, "spec": {"containers": [container]}}
    return PodNeeds(env={Env.METRICS_HOST: _ALL}, template=template)


def _find_metrics_port(role: RoleInputs) -> int | None:
    """Find the port at which the pods of a role can be read from outside. None: there is none, or it is not known.

    Raises:
        SchedulerError: the role serves something else there.
    """
    text = find_agent_flag(role.role.args, "metrics-port") if role.runs_agent else None
    found = None if text is None else parse_listen_address(text)
    if found is None or not found[1] or found[0].startswith("127.") or found[0] == "::1":
        return None
    if found[1] in role.role.port_map.values():
        raise SchedulerError(f"role {role.role.name!r}: --metrics-port {text} is also a port of its port_map")
    return found[1]


# -- the job's object -------------------------------------------------------------------------------------------------


def _find_job_object_needs(inputs: AppInputs, role: RoleInputs) -> PodNeeds | None:
    """Say which object the agent reports as its own. A JobSet has all roles, so their names are said."""
    if not inputs.options.events:
        return None
    if inputs.options.flavor == "job":
        told = kube.JOB.build_path(NAMESPACE_PLACEHOLDER, kube.build_job_name(inputs.name, role.label, "job"))
    else:
        told = kube.JOBSET.build_path(NAMESPACE_PLACEHOLDER, inputs.name)
        told += f" {role.label}" if sum(each.runs_agent for each in inputs.roles) > 1 else ""
    env = {Env.JOB_OBJECT: told, Env.ACCOUNT_DIR: kube.ACCOUNT_DIR}
    env |= {Env.SECRET_NAMES: " ".join(role.secret_env)} if role.secret_env else {}
    return PodNeeds(env=env, template={"spec": {"automountServiceAccountToken": True}})
