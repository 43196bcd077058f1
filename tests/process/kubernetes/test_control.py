"""A server that opens no websocket. What a stop, a pause or a checkpoint does behind it is in the contract's tests."""

import socket
import threading

from muster.schedulers.kubernetes.api.connection import Connection
from muster.schedulers.kubernetes.api.errors import Unreachable
from muster.schedulers.kubernetes.api.execution import run_in_pod


def test_a_server_that_does_not_shake_hands_is_given_up():
    from kubernetes import client

    errors = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        configuration = client.Configuration()
        host = configuration.host = f"http://127.0.0.1:{silent.getsockname()[1]}"
        connection = Connection(host=host, pool=None, configuration=configuration, namespace="n", origin="o")

        def run():
            try:
                run_in_pod(connection, "n", "p", ["true"], limit_s=0.2)
            except Unreachable as error:
                errors.append(str(error))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(60)
    assert ["pod/p: TimeoutError" in error for error in errors] == [True]
