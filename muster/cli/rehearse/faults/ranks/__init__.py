"""Faults of one rank.

`killed`, `raises`, `crashes`, `stopped` outside a collective and `stopped_in_collective`, `loader_killed`, `slow`.
"""
