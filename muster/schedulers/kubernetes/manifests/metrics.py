"""What lets Prometheus read the metrics of a job's agents (a named port, annotations, a PodMonitor), and a probe.

Source: https://prometheus-operator.dev/docs/api-reference/api (PodMonitor). The annotations are those that the
configuration in Prometheus' own examples reads.
"""

from typing import Any, Final

from muster._shared.contract import Env, parse_listen_address
from muster.schedulers.agent_command import find_agent_flag
from muster.schedulers.errors import OptionError, SchedulerError
from muster.schedulers.kubernetes.kinds import POD_MONITOR, build_document
from muster.schedulers.kubernetes.labels import LABEL_INSTANCE
from muster.schedulers.kubernetes.manifests.inputs import AppInputs, RoleInputs

METRICS_PORT: Final = "metrics"
"""Its name in the pod."""
_ALL: Final = "::"
"""All addresses of the pod, of both versions of IP: Prometheus reads from outside of it."""


def find_metrics_port(role: RoleInputs) -> int | None:
    """Find the port at which the pods of a role can be read from outside. None: there is none, or it is not known.

    Raises:
        SchedulerError: the role serves something else there.
    """
    text = find_agent_flag(role.role.args, "metrics-port") if role.runs_agent else None
    found = None if text is None else parse_listen_address(text)
    if found is None or not found[1] or _is_loopback(found[0]):
        return None
    if found[1] in role.role.port_map.values():
        raise SchedulerError(f"role {role.role.name!r}: --metrics-port {text} is also a port of its port_map")
    return found[1]


def _is_loopback(host: str) -> bool:
    return host.startswith("127.") or host == "::1"


def build_metrics_env(role: RoleInputs) -> dict[str, str]:
    """Return where the agent listens unless its flag says it."""
    return {Env.METRICS_HOST: _ALL} if find_metrics_port(role) else {}


def build_metrics_annotations(role: RoleInputs) -> dict[str, str]:
    """Return what a Prometheus without its operator looks for."""
    port = find_metrics_port(role)
    if port is None:
        return {}
    return {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(port),
        "prometheus.io/path": "/metrics",
    }


def build_readiness(inputs: AppInputs, role: RoleInputs) -> dict[str, Any]:
    """Build the probe of `readiness`: a pod is ready while its workers run. Host names do not wait for it."""
    if not inputs.options.readiness or find_metrics_port(role) is None:
        return {}
    probe = {"httpGet": {"path": "/readyz", "port": METRICS_PORT}, "periodSeconds": 5, "timeoutSeconds": 2}
    return {"readinessProbe": probe}


def build_pod_monitor(inputs: AppInputs, labels: dict[str, str]) -> dict[str, Any]:
    """Return the PodMonitor of an app."""
    spec = {
        "selector": {"matchLabels": {LABEL_INSTANCE: inputs.name}},
        "podMetricsEndpoints": [{"port": METRICS_PORT, "path": "/metrics"}],
    }
    return build_document(POD_MONITOR, {"name": inputs.name, "labels": labels}, spec=spec)


def check_metrics(inputs: AppInputs) -> None:
    """Refuse options that need a port which no role has.

    Raises:
        OptionError: one line.
    """
    given = [name for name in ("pod_monitor", "readiness") if getattr(inputs.options, name)]
    if given and not any(find_metrics_port(role) for role in inputs.roles):
        raise OptionError(
            f"{given[0]}=true needs a port of the pods: give the component --metrics_port PORT, as in 9464", given[0]
        )
