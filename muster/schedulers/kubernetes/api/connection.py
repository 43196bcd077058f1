"""Finds the cluster and the account: kubeconfig, context, or the pod's own account. Only this module reads them."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from muster.schedulers.errors import EngineError, NotConfiguredError
from muster.schedulers.kubernetes import kube

_POOL_SIZE: Final = 80
"""Connections kept: more than all log readers open. The pool closes further ones after one use, with a warning each on
the user's terminal. The library's default is five per CPU of this machine."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """Kubeconfig and context. Every `open_connection` reads the credentials again: they expire."""

    kubeconfig: str | None = None
    context: str | None = None


@dataclass(frozen=True, kw_only=True)
class Connection:
    """A connection pool and the credentials for one cluster."""

    host: str
    """https://..., without a trailing slash."""
    pool: Any
    """A `urllib3.PoolManager` with the cluster's certificates."""
    configuration: Any
    """The client library's configuration, which authenticates and refreshes tokens."""
    namespace: str
    """The context's, or the pod's own."""
    origin: str
    """For messages: "context 'kind-a' of /home/me/.kube/config"."""

    def build_auth_headers(self) -> dict[str, str]:
        """Return the authentication headers with the current credentials."""
        settings = self.configuration.auth_settings().values()
        return {item["key"]: item["value"] for item in settings if item["in"] == "header" and item["value"]}


def open_connection(access: Access) -> Connection:
    """Read the configuration and build a connection pool, and send nothing.

    Raises:
        EngineError: no client library, no configuration, no such context.
    """
    try:
        from kubernetes import client, config
    except ImportError as error:
        raise EngineError(f"the kubernetes scheduler needs the Kubernetes client: {_find_install()}") from error
    configuration = client.Configuration()
    path = _find_kubeconfig(access)
    if path is None:
        return _open_in_cluster(client, config, configuration)
    try:
        config.load_kube_config(config_file=path, context=access.context, client_configuration=configuration)
        contexts, active = config.list_kube_config_contexts(config_file=path)
    except config.ConfigException as error:
        raise EngineError(f"kubeconfig {path}: {' '.join(str(error).split())}") from error
    chosen = next((item for item in contexts if item["name"] == access.context), active)
    return _connect(
        client,
        configuration,
        namespace=chosen.get("context", {}).get("namespace") or "default",
        origin=f"context {chosen['name']!r} of {path}",
    )


def _find_kubeconfig(access: Access) -> str | None:
    """Return the kubeconfig files, or None for the pod's own account.

    Raises:
        EngineError: neither exists.
    """
    named = access.kubeconfig or os.environ.get("KUBECONFIG")
    if named:
        found = [part for part in named.split(os.pathsep) if part and Path(part).expanduser().exists()]
        if not found:
            raise EngineError(f"kubeconfig {named!r} does not exist; set -cfg kubeconfig=FILE or KUBECONFIG")
        return os.pathsep.join(str(Path(part).expanduser()) for part in found)
    default = Path("~/.kube/config").expanduser()
    if default.exists():
        return str(default)
    if os.environ.get("KUBERNETES_SERVICE_HOST") and not access.context:
        return None
    raise NotConfiguredError(
        "no cluster is configured: KUBECONFIG is not set, ~/.kube/config does not exist, and this is not a pod; "
        "set KUBECONFIG, or -cfg kubeconfig=FILE of torchx run (with --dryrun it needs no cluster)"
    )


def _open_in_cluster(client: Any, config: Any, configuration: Any) -> Connection:
    try:
        config.load_incluster_config(client_configuration=configuration)
        namespace = Path(kube.ACCOUNT_DIR, "namespace").read_text().strip()
    except (config.ConfigException, OSError) as error:
        message = f"this pod has no service account ({error}); set automountServiceAccountToken: true, or KUBECONFIG"
        raise EngineError(message) from error
    return _connect(client, configuration, namespace=namespace, origin="the pod's service account")


def _connect(client: Any, configuration: Any, *, namespace: str, origin: str) -> Connection:
    configuration.connection_pool_maxsize = _POOL_SIZE
    api_client = client.ApiClient(configuration)
    return Connection(
        host=configuration.host.rstrip("/"),
        pool=api_client.rest_client.pool_manager,
        configuration=configuration,
        namespace=namespace,
        origin=origin,
    )


def _find_install() -> str:
    """Return the command that installs the client. TorchX 0.7 and the client must agree on urllib3: pip sees both."""
    from importlib import metadata

    try:
        metadata.version("torchx")
    except metadata.PackageNotFoundError:  # its nightly line, which the extra would replace
        return "pip install 'torchx-muster[kubernetes]'"
    return "pip install 'torchx-muster[torchx,kubernetes]'"
