"""Waits for another role of the app before a replica starts, where the replica runs. Standard library only."""

import contextlib
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from muster._shared.contract import Env
from muster._shared.foreign_files import parse_json, read_whole
from muster._shared.role_policy import name_hosts_variable

_LINE_S: Final = 5.0
"""After which the wait is said."""
_PAUSE_S: Final = 0.1
_CONNECT_S: Final = 2.0


def wait_for_role(
    environ: Mapping[str, str],
    say: Callable[[str], None],
    *,
    now_s: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until the role that `Env.AFTER` names accepts a connection at its port. Return at once if none is named.

    Args:
        environ: the replica's.
        say: prints a line.
        now_s: monotonic seconds.
        pause: sleeps.
    """
    role, _, port = environ.get(Env.AFTER, "").rpartition(" ")
    if not role:
        return
    begun_s, is_said = now_s(), False
    while (problem := _find_problem(host := _find_host(role, environ), int(port))) is not None:
        if now_s() - begun_s >= _LINE_S and not is_said:
            is_said = True
            say(f"waits for role {role}: {host}:{port} does not accept connections yet ({problem})")
        pause(_PAUSE_S)


def _find_host(role: str, environ: Mapping[str, str]) -> str:
    """Return the host of replica 0: of the file, once there is one, or else of the variable."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        hosts: Any = parse_json(read_whole(environ[Env.ROLES_FILE]))
        return str(hosts[role][0])
    return environ[name_hosts_variable(role)].partition(",")[0]


def _find_problem(host: str, port: int) -> str | None:
    """Return why a port does not accept connections. None: it does."""
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except OSError as error:  # a name that is not known yet, too
        return error.strerror or str(error)
    return None
