"""Where workers run: how many there are, on which CPUs, next to which GPUs.

`device_count` counts, `affinity` assigns CPUs, `cpu_topology` and `gpus` read what the machine has. All but
`device_count` are loaded only for `--numa-binding`.

From outside, import `affinity.plan_affinity` and `device_count.count_workers`.
"""
