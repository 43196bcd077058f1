"""Connections between the roles of an app: one process listens, others find it through a file in a shared folder.

Each role of an app is a job of its own, with its own MASTER_ADDR; what crosses from one role to another is the app's
affair. Here it is pickled Python, so both sides prove that they know MEETING_KEY before anything is read.
"""

import contextlib
import json
import os
import socket
import sys
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

KEY_VARIABLE = "MEETING_KEY"
LIMIT_S = 120.0
PAUSE_S = 0.1


def listen(folder: Path) -> Listener:
    """Listen on a free port of this node and write the address into the folder. The caller closes it."""
    listener = Listener((find_address(), 0), backlog=64, authkey=read_key())
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"address.{os.getpid()}"
    unfinished.write_text(json.dumps(listener.address))
    unfinished.replace(folder / "address.json")
    return listener


def find_address() -> str:
    """Find the address at which the other nodes reach this node."""
    with contextlib.suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return "127.0.0.1"  # a machine that does not know its own name is alone


def connect(folder: Path) -> Connection:
    """Connect to the process that listens; it may start later, and an older run may have left its address.

    Raises:
        TimeoutError: it did not listen within two minutes.
    """
    until_s = time.monotonic() + LIMIT_S
    while (connection := try_to_connect(folder)) is None:
        if time.monotonic() > until_s:
            raise TimeoutError(f"nothing listened at the address in {folder} within {LIMIT_S:g} s")
        time.sleep(PAUSE_S)
    return connection


def try_to_connect(folder: Path) -> Connection | None:
    """Try to connect once; return None if nothing listens there yet."""
    try:
        host, port = json.loads((folder / "address.json").read_text())
        return Client((host, port), authkey=read_key())
    except (OSError, AuthenticationError):  # no file yet, an address of an older run, or another program there now
        return None


def read_key() -> bytes:
    """Read the secret that both sides know."""
    return os.environ[KEY_VARIABLE].encode()


def has_role() -> bool:
    """Return whether this process is a worker. A worker's arguments are the role and the folder."""
    return "RANK" in os.environ and len(sys.argv) == 3
