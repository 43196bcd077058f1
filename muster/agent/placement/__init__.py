"""Where workers run: how many there are, on which CPUs, next to which GPUs.

`device_count` counts, `affinity` assigns CPUs, `cpu_topology` and `gpus` read what the machine has. Loaded only for
`--numa-binding` and for a counted `--nproc-per-node`.

From outside, import `affinity.plan_affinity` and `device_count.count_workers`.
"""
