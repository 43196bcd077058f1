"""Where workers run: how many there are, on which CPUs, next to which GPUs.

`device_count` counts workers if that needs torch, and `affinity` assigns CPUs by what the machine has. They are loaded
only if a flag asks for them. `segments` finds the node's NVLink domain. `thread_counts` gives a template on a held node
the numbers of threads that the run's environment names.

From outside, import `affinity.plan_affinity`, `device_count.count_workers`, `segments.find_segment` and
`thread_counts`.
"""
