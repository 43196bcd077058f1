"""Where workers run: how many there are, on which CPUs, next to which GPUs.

`device_count` counts workers where that takes torch, `affinity` assigns CPUs, `machine` reads what the machine has. All
are loaded only when a flag asks for them.

From outside, import `affinity.plan_affinity` and `device_count.count_workers`.
"""
