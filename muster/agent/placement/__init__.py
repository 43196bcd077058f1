"""Where workers run: how many there are, on which CPUs, next to which GPUs.

`device_count` counts workers if that needs torch, and `affinity` assigns CPUs by what the machine has. They are loaded
only if a flag asks for them. `segments` finds the node's NVLink domain.

From outside, import `affinity.plan_affinity`, `device_count.count_workers` and `segments.find_segment`.
"""
