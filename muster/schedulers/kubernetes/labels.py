"""Labels and annotations by which an app's objects are found again."""

import getpass
import re
from collections.abc import Mapping
from typing import Any, Final

LABEL_NAME: Final = "app.kubernetes.io/name"
LABEL_INSTANCE: Final = "app.kubernetes.io/instance"
LABEL_COMPONENT: Final = "app.kubernetes.io/component"
LABEL_MANAGED_BY: Final = "app.kubernetes.io/managed-by"
MANAGED_BY: Final = "muster"

LABEL_SUBMITTER: Final = "muster.torchx/submitter"
"""The user name of the account that submitted, for people and for accounting."""

JOB_INDEX_LABEL: Final = "batch.kubernetes.io/job-completion-index"

INDEX_DRAINS: Final = "batch.kubernetes.io/job-index-ignored-failure-count"
INDEX_FAILURES: Final = ("batch.kubernetes.io/job-index-failure-count", INDEX_DRAINS)
"""Annotations of a pod: how many earlier pods of its index have failed, and how many were disrupted."""

APPDEF_ANNOTATION: Final = "muster.torchx/appdef"
WORKSPACE_KEY: Final = "muster.kubernetes_workspace"
"""In `Role.metadata`: the key of the role's packed workspace in its Secret."""

CANCEL_ANNOTATION: Final = "muster.torchx/cancelled"
"""Its value is the command that ended the app."""
BY_CANCEL: Final = "torchx cancel"
BY_STOP: Final = "muster stop"
FAILED_ANNOTATION: Final = re.compile(r"muster\.torchx/(?:.+\.)?failed")
"""The annotation in which agents say why their job has failed (`-cfg events=true`). It may contain the role's name."""
SUBMITTED_ANNOTATION: Final = "muster.torchx/submitted"
"""On the record of an app that was cancelled in its queue: when the app was created."""
SUBMISSION_ANNOTATION: Final = "muster.torchx/submission"
"""A random value on every object of one submission, by which a repeated request recognises its own objects."""

KUEUE_QUEUE: Final = "kueue.x-k8s.io/queue-name"
KUEUE_PRIORITY: Final = "kueue.x-k8s.io/priority-class"
KUEUE_MINIMUM: Final = "kueue.x-k8s.io/job-min-parallelism"
KUEUE_EQUAL: Final = "kueue.x-k8s.io/job-completions-equal-parallelism"
KUEUE_ELASTIC: Final = "kueue.x-k8s.io/elastic-job"
"""Kueue lets the Job change its parallelism while it runs. With `KUEUE_MINIMUM` it refuses that."""

_OWN_LABELS: Final = (LABEL_NAME, LABEL_INSTANCE, LABEL_COMPONENT, LABEL_MANAGED_BY, KUEUE_QUEUE, KUEUE_PRIORITY)
_CONTROLLER_LABELS: Final = ("controller-uid", "job-name")
_CONTROLLER_DOMAINS: Final = ("batch.kubernetes.io", "jobset.sigs.k8s.io", "volcano.sh")


def is_reserved(key: str) -> bool:
    """Return whether a label is set by muster, or by the controller of a Job or JobSet, or by Volcano."""
    return key in _OWN_LABELS + _CONTROLLER_LABELS or key.partition("/")[0] in _CONTROLLER_DOMAINS


def read_role(item: Mapping[str, Any]) -> str:
    """Return the label of the role that an object belongs to, or "" for one that all roles share."""
    return str((item["metadata"].get("labels") or {}).get(LABEL_COMPONENT, ""))


def find_submitter() -> str:
    """Return the user name of this process as a label value, or "" if its user has no name."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # no entry in the container's passwd
        return ""
    return re.sub(r"[^-.\w]", "-", name, flags=re.ASCII)[:63].strip("-._")
