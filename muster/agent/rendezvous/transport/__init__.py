"""Connections between nodes, on the agent's loop. Nothing here blocks.

`links` defines what members and the leader need of a network, and `tcp_link` provides it over TCP. `tcp_network`
accepts connections and limits the number and time of unauthenticated peers. `dial` opens connections, and
checks whether the process at an address has ended. `addresses` resolves names and checks which are local. `stream` is a
link that a thread has taken from the loop, and it blocks.

From outside, import `links`, `addresses`, `stream` and `tcp_network`.
"""
