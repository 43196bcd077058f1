"""The loopback port where a Hugging Face Trainer reports its progress."""

import contextlib
import os
import socket
from collections.abc import Callable, Mapping
from typing import Protocol

from muster._shared.contract import KubeflowEnv
from muster.agent.runtime.loop import Loop

_NO_PROXY = ("no_proxy", "NO_PROXY")


class Endpoint(Protocol):
    """What answers at a Trainer's port."""

    def accept(self, listener: socket.socket) -> None:
        """Accept one connection. Raise OSError when no descriptor is left."""
        ...

    def close(self) -> None:
        """Close all connections."""
        ...


class TrainerPort:
    """The loopback port where a Hugging Face Trainer reports its progress, open before the workers start.

    The owner closes it.
    """

    def __init__(self, loop: Loop, open_endpoint: Callable[[str], Endpoint]) -> None:
        """Listen.

        Args:
            loop: the agent's.
            open_endpoint: makes the endpoint that answers, when something connects. It gets the token that a request
                must bring.

        Raises:
            OSError: no descriptor is left, or the system has no memory files.
        """
        self._loop = loop
        self._open_endpoint = open_endpoint
        self._token = os.urandom(16).hex()
        self._endpoint: Endpoint | None = None
        with contextlib.ExitStack() as undo:
            self._listener = undo.enter_context(socket.create_server(("127.0.0.1", 0), backlog=128))
            self._listener.setblocking(False)
            # The token's file, which only this user's processes can open.
            self._token_fd = os.memfd_create("muster-trainer-token", os.MFD_CLOEXEC)
            undo.callback(os.close, self._token_fd)
            os.write(self._token_fd, self._token.encode())
            self._undo = undo.pop_all()
        loop.watch_readable(self._listener.fileno(), self._accept)

    def build_env(self, environ: Mapping[str, str], path: str) -> dict[str, str]:
        """Build the variables of the worker whose Trainer reports. Only `no_proxy` is changed if it is already set.

        Args:
            environ: the worker's. A job inside a TrainJob of Kubeflow has an address already.
            path: the path of the requests.
        """
        if not {KubeflowEnv.URL, KubeflowEnv.TOKEN, KubeflowEnv.CA}.isdisjoint(environ):
            return {}
        port = self._listener.getsockname()[1]
        env = {
            KubeflowEnv.URL: f"http://127.0.0.1:{port}{path}",
            KubeflowEnv.TOKEN: f"/proc/{os.getpid()}/fd/{self._token_fd}",
        }
        if not {"http_proxy", "all_proxy"}.isdisjoint(map(str.lower, environ)):  # used for loopback too
            for name, other in (_NO_PROXY, _NO_PROXY[::-1]):
                given = environ.get(name, environ.get(other, ""))
                env[name] = given if given.strip() == "*" else ",".join(filter(None, (given, "127.0.0.1")))
        return env

    def _accept(self) -> None:
        try:
            if self._endpoint is None:
                self._endpoint = self._open_endpoint(self._token)
            self._endpoint.accept(self._listener)
        except (OSError, ImportError):  # no descriptors left: no spinning
            self.close()

    def close(self) -> None:
        """Close the port. May be called again."""
        if self._listener.fileno() >= 0:
            self._loop.unwatch(self._listener.fileno())
            if self._endpoint is not None:
                self._endpoint.close()
            self._undo.close()
