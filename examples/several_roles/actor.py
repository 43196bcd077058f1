"""Makes samples and sends them to the learner, for as long as there is one. It needs Python and nothing else.

`rollouts.py` submits it. The learner's host and port come from muster, by the names of the role and its port.
"""

import contextlib
import json
import os
import random
import socket
import time


def main() -> None:
    """Send samples; connect again when the learner has restarted."""
    host = os.environ["MUSTER_ROLE_LEARNER_HOSTS"].partition(",")[0]
    port = int(os.environ["MUSTER_ROLE_LEARNER_PORT_SAMPLES"])
    while True:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=5.0) as connection:
            connection.settimeout(None)
            print(f"process {os.getpid()} is connected to {host}:{port}", flush=True)
            send(connection)
        time.sleep(0.1)


def send(connection: socket.socket) -> None:
    """Send samples of the line y = 3x + 1, with noise, until the learner is gone."""
    while True:
        x = random.uniform(-1.0, 1.0)  # noqa: S311
        y = 3.0 * x + 1.0 + random.gauss(0.0, 0.05)
        connection.sendall(json.dumps([x, y]).encode() + b"\n")
        time.sleep(0.001)


if __name__ == "__main__":
    main()
