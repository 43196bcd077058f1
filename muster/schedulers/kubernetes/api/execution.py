"""Runs a command in our container of a pod: `kubectl exec`, over the websocket of the client library.

Source: the websocket subprotocols v5.channel.k8s.io and v4.channel.k8s.io: the first byte of a message is its channel,
1 standard output, 2 standard error, 3 a Status at the end. The library reads these too. But it waits for the socket
where the rest of a TLS record may be in the connection's own buffer already, and it parses Status as YAML.
"""

import json
import time
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import urlencode

from muster._shared.control import call_limited
from muster.schedulers.errors import RightError
from muster.schedulers.kubernetes import kube
from muster.schedulers.kubernetes.api.connection import Connection
from muster.schedulers.kubernetes.api.errors import NotRunning, Refusal, Unreachable, explain
from muster.schedulers.node_program.pipe import NodePipe, find_last_line, pump_pipe

_STDIN: Final = 0
_STDOUT: Final = 1
_STDERR: Final = 2
_STATUS: Final = 3
_ERRORS_BYTES: Final = 4000

HANDSHAKE_LIMIT_S: Final = 30.0

_DIALS: Final = "dialing backend"
"""What the API server says of a kubelet that does not answer."""


def run_in_pod(
    connection: Connection, namespace: str, pod: str, command: Sequence[str], *, limit_s: float
) -> tuple[int, str, str]:
    """Run a command in a running container, and wait for its end.

    Args:
        connection: to the cluster.
        namespace: of the pod.
        pod: its name.
        command: program and arguments. No shell runs it.
        limit_s: after this long it is given up.

    Returns:
        Its exit code, standard output and the end of its standard error.

    Raises:
        EngineError: the server does not accept the account. RightError: it lacks the right, which the line names.
        NotRunning: the container does not run.
        Unreachable: there was no response within the limit.
    """
    from websocket import WebSocketException

    stream = _open(connection, namespace, pod, command, limit_s=limit_s)
    output = b""
    deadline_s = time.monotonic() + limit_s
    try:
        while True:
            stream.socket.settimeout(max(0.01, deadline_s - time.monotonic()))
            data = stream.receive()
            if data is None:
                break
            output += data
    except (WebSocketException, OSError) as error:
        if not stream.status:
            raise Unreachable(f"the command in pod/{pod} was given up: {type(error).__name__}: {error}") from error
    finally:
        stream.socket.shutdown()  # `close` does nothing once the server has closed
    return stream.parse_exit_code(), output.decode(errors="replace"), stream.errors.decode(errors="replace")


def open_in_pod(connection: Connection, namespace: str, pod: str, command: Sequence[str]) -> NodePipe:
    """Start a command in a running container, whose standard input and output are here.

    Arguments and errors as of `run_in_pod`.
    """
    stream = _open(connection, namespace, pod, command, limit_s=HANDSHAKE_LIMIT_S, takes_input=True)
    socket = stream.socket
    return pump_pipe(
        socket.sock, receive=stream.receive, send=stream.send, close=socket.shutdown, explain=stream.explain
    )


class _PodStream:
    """The messages of a command that runs."""

    def __init__(self, socket: Any, what: str) -> None:
        self.socket = socket
        self.errors = b""
        self.status = b""
        self._what = what
        socket.settimeout(None)

    def receive(self) -> bytes | None:
        """Read some of the standard output. None: it has ended."""
        from websocket import ABNF

        code, frame = self.socket.recv_data_frame(True)
        if code == ABNF.OPCODE_CLOSE:
            return None
        if code not in (ABNF.OPCODE_BINARY, ABNF.OPCODE_TEXT) or not frame.data:
            return b""
        channel, data = frame.data[0], bytes(frame.data[1:])
        if channel == _STDERR:
            self.errors = (self.errors + data)[-_ERRORS_BYTES:]
        elif channel == _STATUS:
            self.status += data
        return data if channel == _STDOUT else b""

    def send(self, data: bytes) -> None:
        """Write to the standard input."""
        self.socket.send_binary(bytes([_STDIN]) + data)

    def explain(self) -> str:
        """Say why it has ended, in one line."""
        line = find_last_line(self.errors)
        if not line and self.status:
            try:
                self.parse_exit_code()
            except Unreachable as error:
                line = str(error)
        return line

    def parse_exit_code(self) -> int:
        """Return the exit code of the command that has ended.

        Raises:
            Unreachable: it has none.
            NotRunning: it was not run: the container has ended, or the program is not there.
        """
        try:
            status = json.loads(self.status)
        except ValueError:
            raise Unreachable(f"the connection to {self._what} ended before the command") from None
        if status.get("status") == "Success":
            return 0
        causes = (status.get("details") or {}).get("causes") or []
        codes = [cause["message"] for cause in causes if cause.get("reason") == "ExitCode"]
        if codes:
            return int(codes[0])
        raise NotRunning(f"the command in {self._what} could not be run: {status.get('message')}")


def _open(
    connection: Connection,
    namespace: str,
    pod: str,
    command: Sequence[str],
    *,
    limit_s: float,
    takes_input: bool = False,
) -> _PodStream:
    """Open the websocket of a command. Raises as `run_in_pod`."""
    from kubernetes.stream.ws_client import create_websocket
    from websocket import WebSocketBadStatusException, WebSocketException

    what, verb = f"pod/{pod}", "run a command in"
    path = f"{kube.POD.build_path(namespace, pod)}/exec"
    streams = ["stdin", "stdout", "stderr"] if takes_input else ["stdout", "stderr"]
    query = [
        ("container", kube.CONTAINER),
        *((name, "true") for name in streams),
        *(("command", word) for word in command),
    ]
    url = f"ws{connection.host.removeprefix('http')}{path}?{urlencode(query)}"
    headers = {name.lower(): value for name, value in connection.build_auth_headers().items()}
    try:
        socket = call_limited(
            lambda: create_websocket(connection.configuration, url, headers), min(limit_s, HANDSHAKE_LIMIT_S)
        )
    except WebSocketBadStatusException as error:
        if error.status_code == 403:  # of the body there is only what came with the first bytes
            line = (
                f"{connection.origin} is not allowed to {verb} {what}: it needs the right to create and get pods/exec"
            )
            raise RightError(line) from error
        refusal = Refusal.parse(error.status_code, error.resp_body or b"")
        explained = explain(refusal, verb=verb, what=what, origin=connection.origin)
        if refusal.status != 401:
            is_silent = refusal.status > 500 or _DIALS in refusal.message
            raise (Unreachable if is_silent else NotRunning)(str(explained)) from error
        raise explained from error
    except (WebSocketException, OSError) as error:
        raise Unreachable(f"cannot run a command in {what}: {type(error).__name__}: {error}") from error
    return _PodStream(socket, what)
