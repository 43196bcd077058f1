"""Connections between nodes, on the agent's loop. Nothing here blocks.

`links` says what members and the leader need of a network, `tcp_network` and `tcp_link` provide it over TCP,
`addresses` resolves names and reserves ports, `probe` finds out whether the process behind an address has ended.
"""
