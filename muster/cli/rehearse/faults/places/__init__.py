"""Faults of what a job needs around it: the network, the disk and the memory.

`cut_short` and `cut_long` (the network of a node), `disk_full` and `disk_slow` (checkpoints and logs), `out_of_memory`.
They need root. If one cannot be caused, the table says why.
"""
