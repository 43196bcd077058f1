"""An app in a cluster: submit it, read its status, follow its logs, end it.

`app` is one app: it finds its objects, says what they tell, deletes and resizes. `submit` creates all objects or none.
`cancelling` ends an app whatever its queue does. `observation` reads what `status` needs, remembers what Kubernetes
forgets, and words why a queue or gang makes an app wait. `status` builds what `torchx status` shows. `pod_status` reads
one pod, and explains why it waits or ended. `watch` watches the pods of an app, and `logs` reads one node's log.
`kept_logs` keeps those of a cancelled app. `role_stop` stops the other roles of an app if one has failed. `asking` asks
the agents in the pods, and reads what they report of a hang.
"""
