"""The only module that imports Docker's SDK. It translates the SDK's errors, which the scheduler prints as one line."""

import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from typing import Any, Final

from muster._shared.contract import show_controls
from muster.schedulers.node_program.pipe import NodePipe, find_last_line, pump_pipe


def one_line(text: object) -> str:
    """Return the text with its lines joined into one."""
    return show_controls(" ".join(str(text).split()))


class DockerError(RuntimeError):
    """An error of the engine or the machine: one line with the request and the engine's answer."""


class EngineUnavailable(DockerError):
    """No engine answers (any more). It may answer again later."""


class NotFound(DockerError):
    """The object does not exist on the engine."""


class UnreadableLogs(DockerError):
    """The container's log driver keeps no output that could be read."""


class Conflict(DockerError):
    """The name exists already, or the object is in use."""


class CannotStart(DockerError):
    """A container was created but its command could not be started. `str()` is the engine's message."""


class NoAddressPool(DockerError):
    """The engine has no address pool left for another network (about 31 with its defaults)."""


ADDRESS_VARIABLES: Final = ("DOCKER_HOST", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH")
"""They say where the engine is and how to connect to it."""

DEFAULT_HOST: Final = "unix:///var/run/docker.sock"

CONNECT_LIMIT_S: Final = 10.0
"""Longest wait for an engine's first answer."""

CREATE_LIMIT_S: Final = 30.0
"""How long an interrupt waits for the answer to a request that creates something."""

_FRAME_HEADER: Final = struct.Struct(">BxxxL")
"""Number of the stream, three bytes of padding, length of what follows."""


def pick_address(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an environment that say where the engine is."""
    return {name: environ[name] for name in ADDRESS_VARIABLES if environ.get(name)}


def is_configured(environ: Mapping[str, str]) -> bool:
    """Return whether the environment names an engine, or this machine has a socket of one."""
    return bool(environ.get("DOCKER_HOST")) or os.path.exists(DEFAULT_HOST.removeprefix("unix://"))


def accepts_connections(host: str) -> bool:
    """Return whether something listens at an engine's local address.

    The SDK leaves its socket open when it cannot connect.
    """
    if not host.startswith("unix://"):
        return True
    with socket.socket(socket.AF_UNIX) as end:
        try:
            end.connect(host.removeprefix("unix://"))
        except OSError:
            return False
    return True


def connect(environ: Mapping[str, str], timeout_s: float) -> Any:
    """Connect as the `docker` command does.

    Args:
        environ: what `pick_address` returned.
        timeout_s: longest wait for one answer.

    Raises:
        DockerError: the SDK is not installed, or the address is invalid.
    """
    try:
        import docker
    except ImportError as error:
        raise DockerError("the Docker adapter needs the docker package: pip install 'torchx-muster[docker]'") from error
    with translate_errors("connect to the Docker engine", environ.get("DOCKER_HOST", DEFAULT_HOST)):
        # Asks for the version at once: a silent address shows soon.
        client = docker.from_env(environment=dict(environ), timeout=min(timeout_s, CONNECT_LIMIT_S), max_pool_size=64)
    client.api.timeout = timeout_s
    return client


@contextmanager
def close_at_end(stream: Any) -> Iterator[None]:
    """Close a stream at once: the SDK's own `close` leaves the descriptor open until garbage collection."""
    try:
        yield
    finally:
        with suppress(OSError):  # not connected any more
            stream.close()
        stream._response.close()  # noqa: SLF001  # no public way


def read_frames(api: Any, stream: Any, *, follow: bool) -> Iterator[tuple[int, bytes]]:
    """Return the frames of a container's output with the number of their stream, which the SDK's own iteration drops.

    Args:
        api: the SDK's low-level client.
        stream: what its `logs(..., stream=True)` returned. Nothing may have been read from it.
        follow: wait without a limit for the next frame. Otherwise wait as long as for any answer.

    Source: Docker's Engine API, "Attach to a container", stream format.
    """
    response = stream._response  # noqa: SLF001  # no public way
    if follow:
        api._disable_socket_timeout(api._get_raw_response_socket(response))  # noqa: SLF001  # as its own iteration does
    while len(header := response.raw.read(_FRAME_HEADER.size)) == _FRAME_HEADER.size:
        number, length = _FRAME_HEADER.unpack(header)
        yield number, response.raw.read(length)


def take_early(opened: Any) -> bytes:
    """Return what the SDK has read of a command's output together with the head of the engine's answer.

    The SDK keeps this in a buffer, and reads on from the connection: of a quick command it loses everything if this
    process was slow to read the head. Source: docker-py's issue 3332.

    Args:
        opened: what the SDK's `exec_start(..., socket=True)` returned. Nothing may have been read from it.
    """
    reader = opened._response.raw._fp.fp  # noqa: SLF001  # no public way
    if hasattr(reader, "channel"):  # Paramiko's
        return bytes(reader._rbuffer)  # noqa: SLF001
    connection = getattr(opened, "_sock", opened)
    connection.settimeout(0)  # else it waits for more if there is nothing
    try:
        return bytes(reader.peek())
    except OSError:  # TLS has nothing
        return b""
    finally:
        connection.settimeout(None)


@contextmanager
def translate_errors(what: str, host: str) -> Iterator[None]:
    """Turn the SDK's and the transport's errors into ours. `what` completes "cannot ..."."""
    import docker.errors
    import requests.exceptions
    import urllib3.exceptions

    try:
        yield
    except docker.errors.APIError as error:
        message = one_line(error.explanation or error)
        raise _error_class(error.status_code, message)(f"cannot {what}: {message}") from error
    except (
        *(requests.exceptions.RequestException, urllib3.exceptions.HTTPError, ConnectionError),
        docker.errors.DockerException,  # raised if the first connection fails
    ) as error:
        raise EngineUnavailable(f"cannot {what}: no Docker engine answers at {host} ({_root_cause(error)})") from error


def _error_class(status: int | None, message: str) -> type[DockerError]:
    if "address pool" in message or "failed to allocate network" in message:
        return NoAddressPool
    if "logging driver does not support reading" in message:
        return UnreadableLogs
    return {404: NotFound, 409: Conflict}.get(status or 0, DockerError)


def _root_cause(error: BaseException) -> str:
    """Return the system's message, without the exceptions that wrap it."""
    layer: BaseException | None = error
    while layer is not None:
        if isinstance(layer, OSError) and layer.strerror:
            return layer.strerror
        layer = layer.__context__
    return one_line(error) or type(error).__name__


def complete(call: Callable[[], Any]) -> Any:
    """Carry out a request that creates something: an interrupt is raised when the engine has answered.

    Else the engine would create it after the caller has looked for all that it must remove.
    """
    answer: Future[Any] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:  # noqa: BLE001  # raised in the thread that waits
            answer.set_exception(error)

    try:
        threading.Thread(target=run, name="docker-create", daemon=True).start()
        return answer.result()
    except BaseException:
        wait([answer], CREATE_LIMIT_S)
        raise


_ERRORS: Final = 2
_ERRORS_BYTES: Final = 4000
_CHUNK_BYTES: Final = 1 << 16


class InsideStream:
    """The input and output of a command.

    Args:
        opened: what the SDK's `exec_start(..., socket=True)` has returned.
        early: see `take_early`.
    """

    def __init__(self, opened: Any, early: bytes) -> None:
        self._opened = opened
        self.connection: Any = getattr(opened, "_sock", opened)
        self.connection.settimeout(None)
        self._rest = b""
        self._errors = b""
        self.first = self._add(early)
        """The standard output that came before the first `receive`."""

    def receive(self) -> bytes | None:
        """Read some of the standard output. None: it has ended."""
        data = self.connection.recv(_CHUNK_BYTES)
        return self._add(data) if data else None

    def _add(self, data: bytes) -> bytes:
        self._rest += data
        output = b""
        while len(self._rest) >= _FRAME_HEADER.size:
            number, length = _FRAME_HEADER.unpack_from(self._rest)
            end = _FRAME_HEADER.size + length
            if len(self._rest) < end:
                break
            content, self._rest = self._rest[_FRAME_HEADER.size : end], self._rest[end:]
            if number == _ERRORS:
                self._errors = (self._errors + content)[-_ERRORS_BYTES:]
            else:
                output += content
        return output

    def send(self, data: bytes) -> None:
        """Write to its standard input."""
        self.connection.sendall(data)

    def pump(self) -> NodePipe:
        """Carry the bytes of the command in both directions from now on, in threads."""
        return pump_pipe(
            self.connection,
            first=self.first,
            receive=self.receive,
            send=self.send,
            close=self.close,
            explain=self.explain,
        )

    def close(self) -> None:
        """Close the connection: the standard input ends."""
        response = getattr(self._opened, "_response", None)
        for each in (response, self._opened, self.connection):  # the last to close closes the descriptor
            with suppress(OSError):
                if each is not None:
                    each.close()

    def read_errors(self) -> str:
        """Return the end of the standard error."""
        return self._errors.decode(errors="replace")

    def explain(self) -> str:
        """Return the last line of the standard error."""
        return find_last_line(self._errors)
