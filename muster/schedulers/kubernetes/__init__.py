"""The Kubernetes adapter: an AppDef becomes a Job (or a JobSet, or a Volcano Job) and what its pods need."""

from muster.schedulers.kubernetes.scheduler import KubernetesScheduler, create_scheduler

__all__ = ["KubernetesScheduler", "create_scheduler"]
