"""Kubernetes: an AppDef becomes a Job (or a JobSet) and what its pods need.

`scheduler` is what TorchX and the `muster` command call. `options` declares and checks its `-cfg` options. `kube` has
the words of Kubernetes: names, labels, kinds and patterns. `schema` merges the user's pod template by the published
fields. `images` builds and pushes those of `image_repo`. `manifests` builds the documents (pure), and `api` sends
requests to the API server. `running_apps` submits, watches and ends an app, and explains why its pods wait or ended
(`running_apps.pod_status`).
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
    ),
)
