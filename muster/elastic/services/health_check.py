"""The health check server of a job: one that the program brings, or torch's, if a variable asks for it.

torch's own server opens no port, and only logs that. A company puts its own in the place of
`create_healthcheck_server`. It is called where torch's agent calls it, but once for a job and not for each round.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

_PORT_VARIABLE = "TORCHELASTIC_HEALTH_CHECK_PORT"
_TIMEOUT_S = 60


@contextlib.contextmanager
def serve_health_check(given: Any) -> Iterator[None]:
    """Start a health check server, and stop it at the end.

    Args:
        given: the program's. None: torch's, if the variable names a port.
    """
    server = _create_server() if given is None else given
    if server is None:
        yield
        return
    server.start()
    try:
        yield
    finally:
        server.stop()


def _create_server() -> Any:
    port = os.environ.get(_PORT_VARIABLE)
    if port is None or not port.strip().isdecimal():  # as with torch, which logs it
        return None
    try:
        from torch.distributed.elastic.agent.server import local_elastic_agent
    except ImportError:  # without torch, nothing to restore
        return None
    return local_elastic_agent.create_healthcheck_server(
        alive_callback=lambda: int(time.time()), port=int(port), timeout=_TIMEOUT_S
    )
