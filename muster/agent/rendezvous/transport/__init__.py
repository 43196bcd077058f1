"""Connections between nodes, on the agent's loop. Nothing here blocks.

`links` defines what members and the leader need of a network, `tcp_network` and `tcp_link` provide it over TCP,
`addresses` resolves names and checks which are local, `probe` checks whether the process at an address has ended.
"""
