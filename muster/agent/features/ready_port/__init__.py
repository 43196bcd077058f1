"""Listens on a port while the workers of this node run, so that the roles that wait for this one can start.

`sink` opens and closes it. An adapter names the port by `Env.READY_PORT`, for a role of agents that has no port of its
own in its `port_map`.
"""
