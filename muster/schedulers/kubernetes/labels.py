"""Labels and annotations by which an app's objects are found again. Later versions read them, so they stay."""

from typing import Final

LABEL_NAME: Final = "app.kubernetes.io/name"
LABEL_INSTANCE: Final = "app.kubernetes.io/instance"
LABEL_COMPONENT: Final = "app.kubernetes.io/component"
LABEL_MANAGED_BY: Final = "app.kubernetes.io/managed-by"
MANAGED_BY: Final = "muster"

JOB_INDEX_LABEL: Final = "batch.kubernetes.io/job-completion-index"
TASK_INDEX_LABEL: Final = "volcano.sh/task-index"
TASK_LABEL: Final = "volcano.sh/task-spec"

INDEX_FAILURES: Final = (
    "batch.kubernetes.io/job-index-failure-count",
    "batch.kubernetes.io/job-index-ignored-failure-count",
)
"""Annotations of a pod: how many earlier pods of its index have failed, and how many were disrupted."""

APPDEF_ANNOTATION: Final = "muster.torchx/appdef"
WORKSPACE_KEY: Final = "muster.kubernetes_workspace"
"""In `Role.metadata`: the key of the role's packed workspace in its Secret. Older versions kept it in the AppDef."""

CANCEL_ANNOTATION: Final = "muster.torchx/cancelled"
SUBMISSION_ANNOTATION: Final = "muster.torchx/submission"
"""A random value on every object of one submission, by which a repeated request recognises its own objects."""

KUEUE_QUEUE: Final = "kueue.x-k8s.io/queue-name"
KUEUE_PRIORITY: Final = "kueue.x-k8s.io/priority-class"
KUEUE_MINIMUM: Final = "kueue.x-k8s.io/job-min-parallelism"
KUEUE_EQUAL: Final = "kueue.x-k8s.io/job-completions-equal-parallelism"
