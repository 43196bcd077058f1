"""Kubernetes: an AppDef becomes a Job (or a JobSet, or a Volcano Job) and what its pods need.

`scheduler` is what TorchX calls, `__main__` adds `resize`. `options` reads `-cfg`, `names` makes and checks every name,
`labels` are the keys by which objects are found again, `app_id` reads handles, `syntax` is how Kubernetes spells
things, `schema` checks documents against the published fields. `manifests` builds the documents (pure), `api` talks to
the API server, `live` submits, watches and ends an app.
"""

from muster.schedulers.kubernetes.scheduler import KubernetesScheduler, create_scheduler

__all__ = ["KubernetesScheduler", "create_scheduler"]
