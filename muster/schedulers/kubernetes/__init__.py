"""Kubernetes: an AppDef becomes a Job (or a JobSet) and what its pods need.

`scheduler` is what TorchX and the `muster` command call. `options` declares and checks its `-cfg` options. `names`
builds every name, `labels` are the keys by which objects are found again, and `kinds` the kinds of objects and their
API versions. `syntax` has the patterns of Kubernetes' names and values, and `schema` checks documents against the
published fields. `images` builds and pushes those of `image_repo`. `manifests` builds the documents (pure), and `api`
sends requests to the API server. `running_apps` submits, watches and ends an app, and explains why its pods wait or
ended (`running_apps.pod_status`).
"""

from typing import Final

from muster.schedulers.adapter.properties import Factory, Properties

create_scheduler: Final = Factory(
    name="kubernetes",
    creates="muster.schedulers.kubernetes.scheduler:KubernetesScheduler",
    properties=Properties(
        node_word="pod",
        own_names=".*:.*",  # NAMESPACE:NAME
        has_apps_elsewhere=True,
        deleted="its Job was deleted, or removed after its ttl_s",
        loses_files=True,
        reads_ended_nodes=False,
    ),
)
