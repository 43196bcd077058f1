"""Requests of people to a running job, through the agent of any node. Loaded when a round has run for a second.

`server` listens in the agent and posts each request as an event of the node; the answer comes from the leader. `client`
is `muster-agent ask job`, which the adapters run on a node. `address` is what the two agree on. `question` asks at the
agent's terminal after Ctrl-C.

No file is used. The socket's name is in Linux's abstract name space and disappears with the agent, however the agent
ends. Two checks replace a file's permissions: the user id of the connecting process, and a signature with the job's
token, which workers do not have. Containers that share their host's network need the second.

From outside, import `ControlServer`, `client` and `question`.
"""

from muster.agent.control.server import ControlServer

__all__ = ["ControlServer"]
