"""App ids: `NAMESPACE:NAME`, and where they live when that was not the current context.

TorchX hands back nothing but the id, so whatever a later command needs to find the app must be in it. Context and
kubeconfig are there only when they were given, percent-encoded: ids must not contain a slash.
"""

from dataclasses import dataclass, field
from urllib.parse import quote, unquote

from muster.schedulers.errors import SchedulerError
from muster.schedulers.kubernetes.api.connection import Access


@dataclass(frozen=True, kw_only=True)
class AppRef:
    """Where an app is."""

    namespace: str
    name: str
    access: Access = field(default_factory=Access)

    def __str__(self) -> str:
        parts = [self.namespace, self.name]
        if self.access.context or self.access.kubeconfig:
            parts.append(quote(self.access.context or "", safe=""))
        if self.access.kubeconfig:
            parts.append(quote(self.access.kubeconfig, safe=""))
        return ":".join(parts)


def parse_app_id(app_id: str) -> AppRef:
    """Reads an app id, `NAMESPACE:NAME[:CONTEXT[:KUBECONFIG]]`.

    Raises:
        SchedulerError: not of that form.
    """
    parts = app_id.split(":")
    if not 2 <= len(parts) <= 4 or not all(parts[:2]):
        raise SchedulerError(f"app id {app_id!r} is not NAMESPACE:NAME")
    context, kubeconfig = (unquote(part) for part in (*parts[2:], "", "")[:2])
    return AppRef(
        namespace=parts[0], name=parts[1], access=Access(context=context or None, kubeconfig=kubeconfig or None)
    )
