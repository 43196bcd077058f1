"""Faults of a node, or of all of them.

`agent_killed`, `first_lost` (node 0) and `lost` (another one), `preempted`, `app_restarted`.
"""
