"""The Docker engine, through its SDK: the only module that imports `docker`, and the one boundary for its errors."""

import io
import re
import tarfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from muster.schedulers.docker.container import EngineFacts, ImageFacts
from muster.schedulers.docker.faults import Conflict, DockerFault, EngineGone, NoAddressPool, NotThere

_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d)", re.ASCII)

ADDRESS_VARIABLES: Final = ("DOCKER_HOST", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH")
"""Where the engine is, and how to talk to it."""

DEFAULT_HOST: Final = "unix:///var/run/docker.sock"

CALL_TIMEOUT_S: Final = 120.0
"""Longest wait for one answer; pulls and followed logs stream and have none."""


@dataclass(frozen=True, kw_only=True)
class ContainerFacts:
    """A container as the engine sees it now."""

    id: str
    name: str
    labels: Mapping[str, str]
    status: str
    """created, running, paused, restarting, removing, exited or dead."""
    exit_code: int | None
    """None unless it has ended."""
    oom_killed: bool
    error: str
    """Why the engine could not run it; empty otherwise."""
    started_at: str
    finished_at: str
    """RFC 3339, as the engine says; "0001-..." when it has not happened."""
    gpu_ids: tuple[str, ...] = ()
    memory_bytes: int = 0

    @property
    def running(self) -> bool:
        """Whether its process lives."""
        return self.status in ("running", "paused", "restarting")


class Engine:
    """The engine that DOCKER_HOST names. Every call may raise EngineGone. Close it to release its sockets.

    Args:
        environ: where DOCKER_HOST and its kin are read.
        timeout_s: longest wait for one answer.
    """

    def __init__(self, environ: Mapping[str, str], timeout_s: float = CALL_TIMEOUT_S) -> None:
        self._environ = pick_address(environ)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._client: Any = None

    @property
    def _api(self) -> Any:
        """Connects when first used: a supervisor may be started while the engine is away."""
        with self._lock:
            if self._client is None:
                self._client = _connect(self._environ, self._timeout_s)
            return self._client.api

    def _translated(self, what: str) -> AbstractContextManager[None]:
        return _translated(what, self._environ.get("DOCKER_HOST", DEFAULT_HOST))

    def close(self) -> None:
        """Release the sockets. Idempotent."""
        with self._lock:
            if self._client is not None:
                self._client.close()

    # -- the engine and its images ------------------------------------------------------------------------------------

    def info(self) -> dict[str, Any]:
        """What the engine says of itself, raw."""
        with self._translated("ask the Docker engine about itself"):
            return dict(self._api.info())

    def facts(self) -> EngineFacts:
        """What building containers needs to know."""
        return EngineFacts(cpus=int(self.info()["NCPU"]))

    def now_s(self) -> float:
        """The engine's own clock, in seconds since the epoch: what its events are dated by."""
        return parse_time(self.info()["SystemTime"])

    def answers(self) -> bool:
        """Whether an engine is there now."""
        try:
            with self._translated("ping the Docker engine"):
                return bool(self._api.ping())
        except DockerFault:
            return False

    def inspect_image(self, image: str) -> ImageFacts:
        """Raises NotThere when the engine does not have the image."""
        with self._translated(f"look at image {image!r}"):
            data = self._api.inspect_image(image)
        config = data.get("Config") or {}
        return ImageFacts(id=data["Id"], working_dir=config.get("WorkingDir") or "", user=config.get("User") or "")

    def pull_image(self, image: str, on_progress: Callable[[str], None]) -> None:
        """Pull one tag (`latest` when none is named), telling each layer's state once."""
        repository, tag = _split_tag(image)
        seen: set[str] = set()
        with self._translated(f"pull image {image!r}"):
            for event in self._api.pull(repository, tag=tag, stream=True, decode=True):
                if "error" in event:
                    raise DockerFault(f"cannot pull image {image!r}: {_one_line(event['error'])}")
                line = f"{event.get('id', '')} {event.get('status', '')}".strip()
                if line and line not in seen and "progress" not in event:
                    seen.add(line)
                    on_progress(line)

    def build_image(
        self,
        context: Any,
        *,
        args: Mapping[str, str],
        labels: Mapping[str, str],
        dockerfile: str,
        on_progress: Callable[[str], None],
    ) -> str:
        """Build from a tar; returns the image's id."""
        image_id = ""
        with self._translated("build the workspace's image"):
            events = self._api.build(
                fileobj=context,
                custom_context=True,
                dockerfile=dockerfile,
                buildargs=dict(args),
                labels=dict(labels),
                pull=False,
                rm=True,
                decode=True,
            )
            for event in events:
                if "error" in event:
                    raise DockerFault(f"cannot build the workspace's image: {_one_line(event['error'])}")
                if event.get("stream", "").strip():
                    on_progress(event["stream"].strip())
                image_id = (event.get("aux") or {}).get("ID", image_id)
        if not image_id:
            raise DockerFault("cannot build the workspace's image: the engine named no image at the end")
        return image_id

    def tag_image(self, image_id: str, repository: str, tag: str) -> None:
        """Give an image a name."""
        with self._translated(f"tag image {repository}:{tag}"):
            self._api.tag(image_id, repository, tag=tag, force=True)

    def remove_image(self, image: str) -> None:
        """Remove a name, and the image when it was the last one; not being there, or in use by others, is fine."""
        try:
            with self._translated(f"remove image {image!r}"):
                self._api.remove_image(image)
        except (NotThere, Conflict):
            return

    def list_images(self, labels: Mapping[str, str]) -> list[str]:
        """Ids of the images that carry all these labels."""
        with self._translated("list images"):
            return [image["Id"] for image in self._api.images(filters={"label": _label_filter(labels)})]

    # -- networks and volumes -----------------------------------------------------------------------------------------

    def create_network(self, name: str, labels: Mapping[str, str]) -> None:
        """Make a bridge network.

        Raises:
            Conflict: the name is taken.
            NoAddressPool: no address range is left.
        """
        with self._translated(f"create network {name!r}"):
            self._api.create_network(name, driver="bridge", labels=dict(labels), check_duplicate=True)

    def has_network(self, name: str) -> bool:
        """Whether a network of exactly this name exists."""
        with self._translated(f"look for network {name!r}"):
            return any(network["Name"] == name for network in self._api.networks(names=[name]))

    def list_networks(self, labels: Mapping[str, str | None]) -> list[dict[str, Any]]:
        """Networks that carry all these labels, raw."""
        with self._translated("list networks"):
            return list(self._api.networks(filters={"label": _label_filter(labels)}))

    def remove_network(self, network: str) -> None:
        """Not being there is fine."""
        try:
            with self._translated(f"remove network {network!r}"):
                self._api.remove_network(network)
        except NotThere:
            return

    def create_volume(self, name: str, labels: Mapping[str, str]) -> None:
        """Make a volume; one of that name that exists is the same volume."""
        with self._translated(f"create volume {name!r}"):
            self._api.create_volume(name, labels=dict(labels))

    def list_volumes(self, labels: Mapping[str, str | None]) -> list[str]:
        """Names of the volumes that carry all these labels."""
        with self._translated("list volumes"):
            found = self._api.volumes(filters={"label": _label_filter(labels)})
        return [volume["Name"] for volume in found.get("Volumes") or ()]

    def remove_volume(self, name: str) -> None:
        """Not being there is fine."""
        try:
            with self._translated(f"remove volume {name!r}"):
                self._api.remove_volume(name)
        except NotThere:
            return

    # -- containers ---------------------------------------------------------------------------------------------------

    def create_container(self, name: str, body: Mapping[str, Any]) -> str:
        """Create but do not start; returns the id. Raises Conflict when the name is taken."""
        with self._translated(f"create container {name!r}"):
            return str(self._api.create_container_from_config(dict(body), name)["Id"])

    def start_container(self, container: str) -> None:
        """Start a created container."""
        with self._translated(f"start container {container[:12]!r}"):
            self._api.start(container)

    def signal_container(self, container: str, signal: str) -> None:
        """Send a signal to its first process; one that has ended is fine."""
        try:
            with self._translated(f"send {signal} to container {container[:12]!r}"):
                self._api.kill(container, signal)
        except (NotThere, Conflict):
            return

    def stop_container(self, container: str, grace_s: float) -> None:
        """The polite signal, up to `grace_s`, then SIGKILL. Returns when it has ended; one that has is fine."""
        try:
            with self._translated(f"stop container {container[:12]!r}"):
                self._api.stop(container, timeout=max(0, round(grace_s)))
        except NotThere:
            return

    def wait_container(self, container: str, timeout_s: float | None = None) -> int:
        """Wait until it has ended; returns its exit code."""
        with self._translated(f"wait for container {container[:12]!r}"):
            return int(self._api.wait(container, timeout=timeout_s)["StatusCode"])

    def remove_container(self, container: str) -> None:
        """Kill it if it runs and remove it with its anonymous volumes; not being there is fine."""
        try:
            with self._translated(f"remove container {container[:12]!r}"):
                self._api.remove_container(container, v=True, force=True)
        except NotThere:
            return
        except Conflict as error:
            if "already in progress" not in str(error):
                raise

    def inspect_container(self, container: str) -> ContainerFacts:
        """Raises NotThere when it does not exist (any more)."""
        with self._translated(f"look at container {container[:12]!r}"):
            return _container_facts(self._api.inspect_container(container))

    def has_unstarted(self, labels: Mapping[str, str]) -> bool:
        """Whether containers with these labels wait for their first start."""
        with self._translated("list containers"):
            return bool(self._api.containers(all=True, filters={"label": _label_filter(labels), "status": "created"}))

    def list_container_ids(self, labels: Mapping[str, str | None], *, running_only: bool = False) -> list[str]:
        """Ids of the containers that carry all these labels (None: any value)."""
        with self._translated("list containers"):
            found = self._api.containers(all=not running_only, filters={"label": _label_filter(labels)})
        return [container["Id"] for container in found]

    def list_containers(self, labels: Mapping[str, str | None], *, running_only: bool = False) -> list[ContainerFacts]:
        """The containers that carry all these labels (None: any value). One that vanishes meanwhile is left out."""
        ids = self.list_container_ids(labels, running_only=running_only)
        return [facts for facts in map(self._inspect_or_none, ids) if facts is not None]

    def _inspect_or_none(self, container: str) -> ContainerFacts | None:
        try:
            return self.inspect_container(container)
        except NotThere:
            return None

    def copy_in(self, container: str, folder: str, archive: bytes) -> None:
        """Unpack a tar (compressed or not) into a folder of a container, which must exist there."""
        with self._translated(f"copy files into container {container[:12]!r}"):
            self._api.put_archive(container, folder, archive)

    def copy_out(self, container: str, path: str, limit_bytes: int) -> bytes | None:
        """One file of a container, stopped or not; None when it is not there or larger than the limit."""
        try:
            with self._translated(f"copy {path!r} out of container {container[:12]!r}"):
                stream, status = self._api.get_archive(container, path)
                if status["size"] > limit_bytes:
                    stream.close()
                    return None
                packed = b"".join(stream)
        except NotThere:
            return None
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            member = archive.next()
            content = archive.extractfile(member) if member is not None and member.isreg() else None
            return None if content is None else content.read()

    # -- streams ------------------------------------------------------------------------------------------------------

    def events(self, actions: Sequence[str], since_s: float | None = None) -> Iterator[dict[str, Any]]:
        """What happens to any container of the engine, as it happens. Ends, or raises EngineGone, with the engine.

        Args:
            actions: "die", "kill", ...
            since_s: by the engine's clock.
        """
        filters = {"type": "container", "event": list(actions)}
        since = None if since_s is None else f"{since_s:.9f}"
        with self._translated("follow the Docker engine's events"):
            stream = self._api.events(filters=filters, since=since, decode=True)
            with _closed_at_end(stream):
                yield from stream

    def logs(
        self,
        container: str,
        *,
        stdout: bool = True,
        stderr: bool = True,
        follow: bool = False,
        timestamps: bool = False,
        since_s: float | None = None,
        until_s: float | None = None,
    ) -> Iterator[bytes]:
        """Frames of a container's output, one log record each (a line, or 16 KiB of a longer one)."""
        with self._translated(f"read logs of container {container[:12]!r}"):
            stream = self._api.logs(
                container,
                stdout=stdout,
                stderr=stderr,
                stream=True,
                follow=follow,
                timestamps=timestamps,
                since=since_s,
                until=until_s,
            )
            with _closed_at_end(stream):
                yield from stream


def pick_address(environ: Mapping[str, str]) -> dict[str, str]:
    """Of an environment, what says where the engine is."""
    return {name: environ[name] for name in ADDRESS_VARIABLES if environ.get(name)}


def _connect(environ: Mapping[str, str], timeout_s: float) -> Any:
    """Connect as the `docker` command does."""
    try:
        import docker
    except ImportError as error:
        raise DockerFault("the Docker adapter needs the docker package: pip install 'torchx-muster[docker]'") from error
    with _translated("connect to the Docker engine", environ.get("DOCKER_HOST", DEFAULT_HOST)):
        return docker.from_env(environment=dict(environ), timeout=timeout_s, max_pool_size=64)


@contextmanager
def _closed_at_end(stream: Any) -> Iterator[None]:
    """The SDK's own `close` leaves the descriptor open until the collector comes by."""
    try:
        yield
    finally:
        with suppress(OSError):  # not connected any more
            stream.close()
        stream._response.close()  # noqa: SLF001  # no public way


def _container_facts(data: Mapping[str, Any]) -> ContainerFacts:
    state, host = data["State"], data.get("HostConfig") or {}
    # "removing" comes before and after the end; the process is what counts.
    ended = state["Status"] in ("exited", "dead") or (state["Status"] == "removing" and not state.get("Running"))
    ids = tuple(i for request in host.get("DeviceRequests") or () for i in request.get("DeviceIDs") or ())
    return ContainerFacts(
        id=data["Id"],
        name=data["Name"].lstrip("/"),
        labels=data["Config"].get("Labels") or {},
        status=state["Status"],
        exit_code=state["ExitCode"] if ended else None,
        oom_killed=bool(state.get("OOMKilled")),
        error=state.get("Error") or "",
        started_at=state.get("StartedAt") or "",
        finished_at=state.get("FinishedAt") or "",
        gpu_ids=ids,
        memory_bytes=host.get("Memory") or 0,
    )


def parse_time(text: str) -> float:
    """RFC 3339 with up to nanoseconds -> seconds since the epoch (to the microsecond)."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not an RFC 3339 time")
    fraction = (match[2] or "")[:6].ljust(6, "0")
    zone = "+00:00" if match[3] == "Z" else match[3]
    return datetime.fromisoformat(f"{match[1]}.{fraction}{zone}").timestamp()


def _label_filter(labels: Mapping[str, str | None]) -> list[str]:
    return [name if value is None else f"{name}={value}" for name, value in labels.items()]


def _split_tag(image: str) -> tuple[str, str]:
    """`host:5000/a/b:tag` -> (`host:5000/a/b`, `tag`); a digest counts as a tag, as the SDK has it."""
    if "@" in image:
        repository, _, digest = image.partition("@")
        return repository, digest
    head, colon, tag = image.rpartition(":")
    return (head, tag) if colon and "/" not in tag else (image, "latest")


def _one_line(text: object) -> str:
    return " ".join(str(text).split())


@contextmanager
def _translated(what: str, host: str) -> Iterator[None]:
    """Turn the SDK's and the transport's errors into ours; `what` completes "cannot ..."."""
    import docker.errors
    import requests.exceptions
    import urllib3.exceptions

    try:
        yield
    except docker.errors.APIError as error:
        said = _one_line(error.explanation or error)
        raise _error_class(error.status_code, said)(f"cannot {what}: {said}") from error
    except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError, ConnectionError) as error:
        raise EngineGone(f"cannot {what}: no Docker engine answers at {host} ({_root_cause(error)})") from error
    except docker.errors.DockerException as error:  # what the SDK makes of a first connection that fails
        raise EngineGone(f"cannot {what}: no Docker engine answers at {host} ({_root_cause(error)})") from error


def _error_class(status: int | None, said: str) -> type[DockerFault]:
    if "address pool" in said or "failed to allocate network" in said:
        return NoAddressPool
    return {404: NotThere, 409: Conflict}.get(status or 0, DockerFault)


def _root_cause(error: BaseException) -> str:
    """What the system said, without the layers that were wrapped around it."""
    layer: BaseException | None = error
    while layer is not None:
        if isinstance(layer, OSError) and layer.strerror:
            return layer.strerror
        layer = layer.__context__
    return _one_line(error) or type(error).__name__
