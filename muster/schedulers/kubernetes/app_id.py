"""App ids: `NAMESPACE:NAME`, with context and kubeconfig if the user gave them.

A later command has nothing but the id, so the id must hold everything needed to find the app. Context and kubeconfig
are percent-encoded, because ids must not contain a slash.
"""

from dataclasses import dataclass, field
from urllib.parse import quote, unquote

from muster.schedulers.errors import SchedulerError
from muster.schedulers.kubernetes.api.connection import Access


@dataclass(frozen=True, kw_only=True)
class AppRef:
    """An app and the cluster it is in."""

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
    """Parse an app id, `NAMESPACE:NAME[:CONTEXT[:KUBECONFIG]]`.

    Raises:
        SchedulerError: the text does not have this form.
    """
    parts = app_id.split(":")
    if not 2 <= len(parts) <= 4 or not all(parts[:2]):
        raise SchedulerError(f"app id {app_id!r} is not of the form NAMESPACE:NAME")
    context, kubeconfig = (unquote(part) for part in (*parts[2:], "", "")[:2])
    return AppRef(
        namespace=parts[0], name=parts[1], access=Access(context=context or None, kubeconfig=kubeconfig or None)
    )
