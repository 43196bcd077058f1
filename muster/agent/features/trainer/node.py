"""The part: opens the port on the node of global rank 0, and records in the page what the Trainer there reports."""

import contextlib
import os
import socket
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from muster._shared.contract import KubeflowEnv
from muster.agent.node.round_parts import PartContext, RoundPart, Start
from muster.agent.runtime.loop import Loop

if TYPE_CHECKING:
    from muster.agent.features.trainer.endpoint import TrainerEndpoint
    from muster.agent.round import Round
    from muster.agent.workers.status_page import ReportedStatus

_NO_PROXY = ("no_proxy", "NO_PROXY")


class TrainerPort:
    """The loopback port where a Hugging Face Trainer reports its progress, open before the workers start.

    The owner closes it.
    """

    def __init__(self, loop: Loop, open_endpoint: "Callable[[str], TrainerEndpoint]") -> None:
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
        self._endpoint: TrainerEndpoint | None = None
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
                excluded = environ.get(name, environ.get(other, ""))
                env[name] = excluded if excluded.strip() == "*" else ",".join(filter(None, (excluded, "127.0.0.1")))
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


class TrainerPart(RoundPart):
    """The port, from the first round on in which this node has global rank 0."""

    def __init__(self, context: PartContext) -> None:
        self._context = context
        self._port: TrainerPort | None = None
        self._path = ""
        """The path of the round's requests; "" while another node has global rank 0."""

    def begin_round(self, formed: "Round", start: Start | None) -> None:
        """See `RoundPart`."""
        del start
        self._path = ""
        if formed.rank_offset == 0 and self._context.get_page() is not None:
            with contextlib.suppress(OSError):  # without the Trainer's progress
                self._port = self._port or TrainerPort(self._context.loop, self._open_endpoint)
                self._path = f"/{formed.number}"

    def _open_endpoint(self, token: str) -> "TrainerEndpoint":
        from muster.agent.features.trainer.endpoint import TrainerEndpoint

        return TrainerEndpoint(self._context.loop, token, self._record)

    def _record(self, path: str, status: "ReportedStatus") -> None:
        """Record a report, but not one of an earlier round."""
        page = self._context.get_page()
        if page is not None and path == self._path:
            page.record_reported(0, status)

    def build_env(self, formed: "Round", local_rank: int) -> Mapping[str, str]:
        """See `RoundPart`."""
        if self._port is None or not self._path or formed.rank_offset + local_rank:
            return {}
        return self._port.build_env(self._context.config.base_env, self._path)

    def close(self) -> None:
        """See `RoundPart`."""
        if self._port is not None:
            self._port.close()


def create_part(context: PartContext) -> TrainerPart:
    """Create the part of one agent."""
    return TrainerPart(context)
