"""Reserves the address on which NCCL's own monitor (RAS) of this node's workers answers.

NCCL's default is one port of the machine for all jobs. The kernel would then pass the agent's question to any of them,
and if another user's job had the port, this job would have no monitor. All processes of one node listen on the same
port, which NCCL opens with SO_REUSEPORT.

Source: NCCL 2.27.7, src/ras/client_support.cc (`rasClientInitSocket`); socket(7) for who may share a port.
"""

import socket
from contextlib import ExitStack


def reserve(stack: ExitStack) -> str | None:
    """Reserve a port of the loopback interface for processes of this user until `stack` is closed.

    A socket that is bound but does not listen keeps the port from others, and gets no connection.

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
