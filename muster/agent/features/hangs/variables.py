"""The variable that gives NCCL's own monitor of this node's workers an address."""

import socket
from contextlib import ExitStack
from typing import Final

from muster._shared.records import replace
from muster.agent.config import AgentConfig

MONITOR_ADDRESS: Final = "NCCL_RAS_ADDR"


def add_variables(config: AgentConfig, stack: ExitStack) -> AgentConfig:
    """Add an address of this job and node, unless the user has given one, or wants no monitor."""
    env = config.base_env
    address = None if MONITOR_ADDRESS in env or env.get("NCCL_RAS_ENABLE") == "0" else reserve_monitor_address(stack)
    return config if address is None else replace(config, base_env={**env, MONITOR_ADDRESS: address})


def reserve_monitor_address(stack: ExitStack) -> str | None:
    """Reserve the address on which NCCL's own monitor (RAS) of this node's workers answers, until `stack` is closed.

    NCCL's default is one port of the machine for all jobs. The kernel would then pass the agent's question to any of
    them, and if another user's job had the port, this job would have no monitor. All processes of one node listen on
    the same port, which NCCL opens with SO_REUSEPORT. A socket that is bound but does not listen keeps the port from
    other users, and gets no connection.

    Source: NCCL 2.27.7, src/ras/client_support.cc (`rasClientInitSocket`); socket(7) for who may share a port.

    Returns:
        The value of NCCL_RAS_ADDR; None if there is no port, or no IPv4.
    """
    try:
        reserved = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{reserved.getsockname()[1]}"
    except OSError:
        return None
