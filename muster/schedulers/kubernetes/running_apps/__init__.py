"""An app in a cluster: submit it, read its status, follow its logs, end it.

`app` is one app: it finds its objects, says what they tell, deletes and resizes. `submit` creates all objects or none.
`cancelling` ends an app whatever its queue does, and its other roles if one has failed. `observation` reads what
`status` needs, remembers what Kubernetes forgets, and words why a queue or gang makes an app wait. `status` builds what
`torchx status` shows. `pod_status` reads one pod, and explains why it waits or ended. `logs` reads one node's log, and
keeps those of a cancelled app. `agent_requests` asks the agents in the pods, and reads what they report of a hang.
"""
