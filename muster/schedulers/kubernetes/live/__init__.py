"""An app in a cluster: submit it, look at it, follow its logs, end it.

`session` is what the scheduler calls. `submit` creates all objects or none, `operations` cancels, deletes and resizes,
`observation` reads what `status` needs and `status` decides what `torchx status` shows; `pod_status` reads one pod and
puts its pending reason into words. `watch` keeps the pods of an app current, `logs` reads one node's log.
"""
