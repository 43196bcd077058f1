"""Runs a command in a pod: `kubectl exec`, over the websocket of the client library.

Source: the websocket subprotocols v5.channel.k8s.io and v4.channel.k8s.io: the first byte of a message is its channel,
1 standard output, 2 standard error, 3 a Status at the end. The library reads these too. But it waits for the socket
where the rest of a TLS record may be in the connection's own buffer already, and it parses Status as YAML.
"""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlencode

from muster._shared.control import call_limited
from muster.schedulers.errors import RightError
from muster.schedulers.kubernetes.api.connection import Connection
from muster.schedulers.kubernetes.api.errors import NotRunning, Refusal, Unreachable, explain
from muster.schedulers.kubernetes.kinds import POD
from muster.schedulers.node_program.pipe import NodePipe, find_last_line, pump_pipe

_STDIN: Final = 0
_STDOUT: Final = 1
_STDERR: Final = 2
_STATUS: Final = 3
_ERRORS_BYTES: Final = 4000

HANDSHAKE_LIMIT_S: Final = 30.0
_WHY_LIMIT_S: Final = 5.0

_DIALS: Final = "dialing backend"
"""What the API server says of a kubelet that does not answer."""

_RIGHT: Final = "it needs the right to create and get pods/exec"


def run_in_pod(
    connection: Connection, namespace: str, pod: str, container: str, command: Sequence[str], *, limit_s: float
) -> tuple[int, str, str]:
    """Run a command in a running container, and wait for its end.

    Args:
        connection: to the cluster.
        namespace: of the pod.
        pod: its name.
        container: of the pod.
        command: program and arguments. No shell runs it.
        limit_s: after this long it is given up.

    Returns:
        Its exit code, standard output and standard error.

    Raises:
        EngineError: the server does not accept the account. RightError: it lacks the right, which the line names.
        NotRunning: the container does not run.
        Unreachable: there was no response within the limit.
    """
    what = f"pod/{pod}"
    socket = _connect(connection, namespace, pod, container, command, limit_s=limit_s)
    try:
        return _read(socket, what, limit_s)
    finally:
        socket.shutdown()  # `close` does nothing once the server has closed


def open_in_pod(connection: Connection, namespace: str, pod: str, container: str, command: Sequence[str]) -> NodePipe:
    """Start a command in a running container, whose standard input and output are here.

    Arguments and errors as of `run_in_pod`.
    """
    socket = _connect(connection, namespace, pod, container, command, limit_s=HANDSHAKE_LIMIT_S, takes_input=True)
    stream = _PodStream(socket, f"pod/{pod}")
    return pump_pipe(
        socket.sock, receive=stream.receive, send=stream.send, close=socket.shutdown, explain=stream.explain
    )


class _PodStream:
    """The messages of a command that runs."""

    def __init__(self, socket: Any, what: str) -> None:
        self._socket = socket
        self._what = what
        self._errors = b""
        self._status = b""
        socket.settimeout(None)

    def receive(self) -> bytes | None:
        """Read some of the standard output. None: it has ended."""
        from websocket import ABNF

        code, frame = self._socket.recv_data_frame(True)
        if code == ABNF.OPCODE_CLOSE:
            return None
        if code not in (ABNF.OPCODE_BINARY, ABNF.OPCODE_TEXT) or not frame.data:
            return b""
        channel, data = frame.data[0], bytes(frame.data[1:])
        if channel == _STDERR:
            self._errors = (self._errors + data)[-_ERRORS_BYTES:]
        elif channel == _STATUS:
            self._status += data
        return data if channel == _STDOUT else b""

    def send(self, data: bytes) -> None:
        """Write to the standard input."""
        self._socket.send_binary(bytes([_STDIN]) + data)

    def explain(self) -> str:
        """Say why it has ended, in one line."""
        line = find_last_line(self._errors)
        if not line and self._status:
            try:
                _parse_exit_code(self._status, self._what)
            except Unreachable as error:
                line = str(error)
        return line


def _connect(
    connection: Connection,
    namespace: str,
    pod: str,
    container: str,
    command: Sequence[str],
    *,
    limit_s: float,
    takes_input: bool = False,
) -> Any:
    """Open the websocket of a command. Raises as `run_in_pod`."""
    from kubernetes.stream.ws_client import create_websocket
    from websocket import WebSocketBadStatusException, WebSocketException

    what = f"pod/{pod}"
    path = f"{POD.build_path(namespace, pod)}/exec"
    streams = ["stdin", "stdout", "stderr"] if takes_input else ["stdout", "stderr"]
    query = [("container", container), *((name, "true") for name in streams), *(("command", word) for word in command)]
    url = f"ws{connection.host.removeprefix('http')}{path}?{urlencode(query)}"
    headers = {name.lower(): value for name, value in connection.build_auth_headers().items()}
    try:
        return call_limited(
            lambda: create_websocket(connection.configuration, url, headers), min(limit_s, HANDSHAKE_LIMIT_S)
        )
    except WebSocketBadStatusException as error:
        refusal = Refusal.parse(error.status_code, error.resp_body or b"")
        explained = explain(refusal, verb="run a command in", what=what, path=path, origin=connection.origin)
        if refusal.status == 403:
            refusal = _ask_why(connection, url, headers) or refusal
            raise RightError(
                f"{explain(refusal, verb='run a command in', what=what, path=path, origin=connection.origin)}; {_RIGHT}"
            ) from error
        if refusal.status != 401:
            is_silent = refusal.status > 500 or _DIALS in refusal.message
            raise (Unreachable if is_silent else NotRunning)(str(explained)) from error
        raise explained from error
    except (WebSocketException, OSError) as error:
        raise Unreachable(f"cannot run a command in {what}: {type(error).__name__}: {error}") from error


def _ask_why(connection: Connection, url: str, headers: Mapping[str, str]) -> Refusal | None:
    """Return the whole refusal: the handshake has only the part of it that came with its first bytes, or nothing.

    What is refused to a websocket is refused to a plain request, and a plain one runs nothing.
    """
    from urllib3.exceptions import HTTPError

    try:
        response = connection.pool.request(
            "GET", f"http{url.removeprefix('ws')}", headers=dict(headers), timeout=_WHY_LIMIT_S, retries=False
        )
    except (HTTPError, OSError):
        return None
    return Refusal.parse(response.status, response.data) if response.status == 403 else None


def _read(socket: Any, what: str, limit_s: float) -> tuple[int, str, str]:
    """Read the channels until the command has ended."""
    from websocket import ABNF, WebSocketException

    channels = {_STDOUT: b"", _STDERR: b"", _STATUS: b""}
    deadline_s = time.monotonic() + limit_s
    try:
        while True:
            socket.settimeout(max(0.01, deadline_s - time.monotonic()))
            code, frame = socket.recv_data_frame(True)
            if code == ABNF.OPCODE_CLOSE:
                break
            if code in (ABNF.OPCODE_BINARY, ABNF.OPCODE_TEXT) and frame.data and frame.data[0] in channels:
                channels[frame.data[0]] += frame.data[1:]
    except (WebSocketException, OSError) as error:
        if not channels[_STATUS]:
            raise Unreachable(f"the command in {what} was given up: {type(error).__name__}: {error}") from error
    output, errors = (channels[number].decode(errors="replace") for number in (_STDOUT, _STDERR))
    return _parse_exit_code(channels[_STATUS], what), output, errors


def _parse_exit_code(data: bytes, what: str) -> int:
    """Return the exit code of the command.

    Raises:
        Unreachable: it has none.
        NotRunning: it was not run: the container has ended, or the program is not there.
    """
    try:
        status = json.loads(data)
    except ValueError:
        raise Unreachable(f"the connection to {what} ended before the command") from None
    if status.get("status") == "Success":
        return 0
    causes = (status.get("details") or {}).get("causes") or []
    codes = [cause["message"] for cause in causes if cause.get("reason") == "ExitCode"]
    if codes:
        return int(codes[0])
    raise NotRunning(f"the command in {what} could not be run: {status.get('message')}")
