"""Names the submitting user on an engine, which may serve several users and machines."""

import os

from muster.schedulers.supervision.machine import read_machine_id


def build_user_id() -> str:
    """Name the user on this installation: a host name may change, and a user id means something on one machine only."""
    return f"{os.geteuid()}@{read_machine_id()}"
