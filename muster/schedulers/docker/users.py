"""Names the submitting user on an engine, which may serve several users and machines."""

import os
import socket

from muster.schedulers.supervision.machine import read_machine_id


def build_user_id() -> str:
    """Name the user on this installation: a host name may change, and a user id means something on one machine only."""
    return f"{os.geteuid()}@{read_machine_id()}"


def list_user_ids() -> tuple[str, ...]:
    """Return the ids under which this user's objects may be labelled: earlier versions used the host name."""
    return tuple(dict.fromkeys((build_user_id(), f"{os.geteuid()}@{socket.gethostname()}")))
