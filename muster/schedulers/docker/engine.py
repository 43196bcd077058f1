"""The Docker engine: one method per request, and the state of a container. `sdk` has the connection and its errors."""

import io
import stat
import tarfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass
from typing import Any, Final

from muster.schedulers.docker import sdk
from muster.schedulers.docker.container_body import ImageFacts
from muster.schedulers.docker.spec import Label
from muster.schedulers.timestamps import parse_seconds


@dataclass(frozen=True, kw_only=True)
class ContainerFacts:
    """The current state of a container."""

    id: str
    name: str
    labels: Mapping[str, str]
    status: str
    """created, running, paused, restarting, removing, exited or dead."""
    exit_code: int | None
    """None unless it has ended."""
    oom_killed: bool
    error: str
    """Why the engine could not run it. It is empty otherwise."""
    started_at: str
    finished_at: str
    """RFC 3339, from the engine. It is "0001-..." if it has not happened."""
    gpu_ids: tuple[str, ...] = ()
    memory_bytes: int = 0

    @property
    def incarnation(self) -> int:
        """How often its replica was started before. 0 also for a container of no replica."""
        return int(self.labels.get(Label.INCARNATION, "0"))

    @property
    def running(self) -> bool:
        """Whether its process runs."""
        return self.status in ("running", "paused", "restarting")


def parse_container(data: Mapping[str, Any]) -> ContainerFacts:
    """Parse the answer of `GET /containers/ID/json`."""
    state, host = data["State"], data.get("HostConfig") or {}
    # "removing" occurs before and after the end.
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


_GO_STICKY: Final = 1 << 20
CALL_TIMEOUT_S: Final = 120.0
"""Longest wait for one answer. Pulls and followed logs stream and have none."""


class Engine:
    """The engine that DOCKER_HOST names. Every call may raise EngineUnavailable. Close it to release its sockets.

    Args:
        environ: the environment with DOCKER_HOST and related variables.
        timeout_s: longest wait for one answer.
    """

    def __init__(self, environ: Mapping[str, str], timeout_s: float = CALL_TIMEOUT_S) -> None:
        self._environ = sdk.pick_address(environ)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._client: Any = None

    @property
    def _api(self) -> Any:
        """Connects when first used: a supervisor may start while the engine is unavailable."""
        with self._lock:
            if self._client is None:
                self._client = sdk.connect(self._environ, self._timeout_s)
            return self._client.api

    @property
    def host(self) -> str:
        """Its address, such as unix:///var/run/docker.sock."""
        return self._environ.get("DOCKER_HOST", sdk.DEFAULT_HOST)

    def _translate_errors(self, what: str) -> AbstractContextManager[None]:
        return sdk.translate_errors(what, self.host)

    def close(self) -> None:
        """Release the sockets. Idempotent."""
        with self._lock:
            if self._client is not None:
                self._client.close()

    # -- the engine and its images ------------------------------------------------------------------------------------

    def info(self) -> dict[str, Any]:
        """Return the engine's answer to `GET /info`."""
        with self._translate_errors("read the Docker engine's info"):
            return dict(self._api.info())

    def count_cpus(self) -> int:
        """Return how many CPUs the engine has."""
        return int(self.info()["NCPU"])

    def now_s(self) -> float:
        """Return the engine's own clock, in seconds since the epoch. Its events carry this time."""
        return parse_seconds(self.info()["SystemTime"])

    def is_available(self) -> bool:
        """Return whether an engine answers now."""
        if not sdk.accepts_connections(self.host):
            return False
        try:
            with self._translate_errors("ping the Docker engine"):
                return bool(self._api.ping())
        except sdk.DockerError:
            return False

    def inspect_image(self, image: str) -> ImageFacts:
        """Raise NotFound when the engine does not have the image."""
        with self._translate_errors(f"inspect image {image!r}"):
            data = self._api.inspect_image(image)
        config = data.get("Config") or {}
        return ImageFacts(
            id=data["Id"],
            working_dir=config.get("WorkingDir") or "",
            user=config.get("User") or "",
            entrypoint=tuple(config.get("Entrypoint") or ()),
        )

    def pull_image(self, image: str, on_progress: Callable[[str], None]) -> None:
        """Pull one tag (`latest` when none is named), and report each layer's state once."""
        seen: set[str] = set()
        with self._translate_errors(f"pull image {image!r}"):
            for event in self._api.pull(image, stream=True, decode=True):
                if "error" in event:
                    raise sdk.DockerError(f"cannot pull image {image!r}: {sdk.one_line(event['error'])}")
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
        tag: str | None = None,
    ) -> str:
        """Build from a tar, and return the image's id. A build that fails leaves no container.

        The layers that it has made stay: the next build begins with them.
        """
        image_id = ""
        with self._translate_errors("build the workspace's image"):
            events = self._api.build(
                tag=tag,
                fileobj=context,
                custom_context=True,
                dockerfile=dockerfile,
                buildargs=dict(args),
                labels=dict(labels),
                pull=False,
                rm=True,
                forcerm=True,
                decode=True,
            )
            for event in events:
                if "error" in event:
                    raise sdk.DockerError(f"cannot build the workspace's image: {sdk.one_line(event['error'])}")
                if said := event.get("stream", "").strip():
                    on_progress(said)
                image_id = (event.get("aux") or {}).get("ID", image_id)
        if not image_id:
            raise sdk.DockerError("cannot build the workspace's image: the engine returned no image id")
        return image_id

    def remove_image(self, image: str) -> None:
        """Remove a name, and the image when it was its last name. It is no error if it is missing or in use."""
        with suppress(sdk.NotFound, sdk.Conflict), self._translate_errors(f"remove image {image!r}"):
            self._api.remove_image(image)

    def list_images(self, labels: Mapping[str, str]) -> list[str]:
        """Return the ids of the images that carry all these labels."""
        with self._translate_errors("list images"):
            return [image["Id"] for image in self._api.images(filters={"label": _label_filter(labels)})]

    # -- networks and volumes -----------------------------------------------------------------------------------------

    def create_network(self, name: str, labels: Mapping[str, str]) -> None:
        """Create a bridge network.

        Raises:
            Conflict: the name exists already.
            NoAddressPool: no address range is left.
        """
        with self._translate_errors(f"create network {name!r}"):
            sdk.complete(
                lambda: self._api.create_network(name, driver="bridge", labels=dict(labels), check_duplicate=True)
            )

    def has_network(self, name: str) -> bool:
        """Return whether a network of exactly this name exists."""
        with self._translate_errors(f"find network {name!r}"):
            return any(network["Name"] == name for network in self._api.networks(names=[name]))

    def list_networks(self, labels: Mapping[str, str | None]) -> list[dict[str, Any]]:
        """List networks that carry all these labels, raw."""
        with self._translate_errors("list networks"):
            return list(self._api.networks(filters={"label": _label_filter(labels)}))

    def remove_network(self, network: str) -> None:
        """Remove a network if it exists."""
        with suppress(sdk.NotFound), self._translate_errors(f"remove network {network!r}"):
            self._api.remove_network(network)

    def create_volume(self, name: str, labels: Mapping[str, str]) -> Mapping[str, str]:
        """Create a volume. If one of that name exists, it is the same volume and keeps its labels.

        Returns:
            The labels it has: of two concurrent callers only one gets its own labels.
        """
        with self._translate_errors(f"create volume {name!r}"):
            made = sdk.complete(lambda: self._api.create_volume(name, labels=dict(labels)))
        return dict(made.get("Labels") or {})

    def list_volumes(self, labels: Mapping[str, str | None]) -> dict[str, Mapping[str, str]]:
        """Return the volumes that carry all these labels: name -> its labels."""
        with self._translate_errors("list volumes"):
            found = self._api.volumes(filters={"label": _label_filter(labels)})
        return {volume["Name"]: volume.get("Labels") or {} for volume in found.get("Volumes") or ()}

    def list_unused_volumes(self, labels: Mapping[str, str | None]) -> dict[str, str]:
        """List the volumes with all these labels that no container has: name -> when it was made, in RFC 3339."""
        with self._translate_errors("list volumes"):
            found = self._api.volumes(filters={"label": _label_filter(labels), "dangling": True})
        return {volume["Name"]: str(volume.get("CreatedAt") or "") for volume in found.get("Volumes") or ()}

    def remove_volume(self, name: str) -> None:
        """Remove a volume if it exists."""
        with suppress(sdk.NotFound), self._translate_errors(f"remove volume {name!r}"):
            self._api.remove_volume(name)

    # -- containers ---------------------------------------------------------------------------------------------------

    def create_container(self, name: str, body: Mapping[str, Any]) -> str:
        """Create but do not start, and return the id. Raises Conflict when the name exists already."""
        with self._translate_errors(f"create container {name!r}"):
            return str(sdk.complete(lambda: self._api.create_container_from_config(dict(body), name))["Id"])

    def start_container(self, container: str) -> None:
        """Start a created container."""
        with self._translate_errors(f"start container {container[:12]!r}"):
            self._api.start(container)

    def signal_container(self, container: str, signal: str) -> None:
        """Send a signal to a container's first process if it runs."""
        with (
            suppress(sdk.NotFound, sdk.Conflict),
            self._translate_errors(f"send {signal} to container {container[:12]!r}"),
        ):
            self._api.kill(container, signal)

    def suspend_container(self, container: str, *, suspended: bool) -> None:
        """Freeze all processes of a container if it runs, or let those of a frozen one go on."""
        verb = "pause" if suspended else "unpause"
        with suppress(sdk.NotFound, sdk.Conflict), self._translate_errors(f"{verb} container {container[:12]!r}"):
            getattr(self._api, verb)(container)

    def stop_container(self, container: str, grace_s: float) -> None:
        """Send the polite signal, wait up to `grace_s`, then send SIGKILL. Returns when the container has ended."""
        with suppress(sdk.NotFound), self._translate_errors(f"stop container {container[:12]!r}"):
            self._api.stop(container, timeout=max(0, round(grace_s)))

    def wait_container(self, container: str, timeout_s: float | None = None) -> int:
        """Wait until a container has ended, and return its exit code."""
        with self._translate_errors(f"wait for container {container[:12]!r}"):
            return int(self._api.wait(container, timeout=timeout_s)["StatusCode"])

    def remove_container(self, container: str) -> None:
        """Kill a container if it runs and remove it, if it exists, with its anonymous volumes."""
        try:
            with self._translate_errors(f"remove container {container[:12]!r}"):
                self._api.remove_container(container, v=True, force=True)
        except sdk.NotFound:
            return
        except sdk.Conflict as error:
            if "already in progress" not in str(error):
                raise

    def inspect_container(self, container: str) -> ContainerFacts:
        """Raise NotFound when it does not exist (any more)."""
        with self._translate_errors(f"inspect container {container[:12]!r}"):
            return parse_container(self._api.inspect_container(container))

    def list_states(self, labels: Mapping[str, str | None]) -> list[str]:
        """Return the engine's word for the state of each container with these labels: `created`, `running`, ..."""
        return [container["State"] for container in self._list_raw(labels)]

    def list_container_ids(self, labels: Mapping[str, str | None], *, running_only: bool = False) -> list[str]:
        """Return the ids of the containers that carry all these labels (None: any value)."""
        return [container["Id"] for container in self._list_raw(labels, running_only=running_only)]

    def list_containers(self, labels: Mapping[str, str | None], *, running_only: bool = False) -> list[ContainerFacts]:
        """Return the containers that carry all these labels (None: any value), without any that vanishes.

        The newest of a replica comes last.
        """
        found = []
        for container in self.list_container_ids(labels, running_only=running_only):
            with suppress(sdk.NotFound):
                found.append(self.inspect_container(container))
        return sorted(found, key=lambda facts: facts.incarnation)

    def _list_raw(self, labels: Mapping[str, str | None], *, running_only: bool = False) -> list[dict[str, Any]]:
        with self._translate_errors("list containers"):
            return list(self._api.containers(all=not running_only, filters={"label": _label_filter(labels)}))

    def run_inside(self, container: str, command: Sequence[str]) -> tuple[int, str, str]:
        """Run a command in a running container, and wait for its end.

        Returns:
            Its exit code, standard output and the end of its standard error.
        """
        with self._translate_errors(f"run a command in container {container[:12]!r}"):
            started = self._api.exec_create(container, list(command), stdin=False)["Id"]
            with closing(self._start_inside(started)) as inside:
                output = inside.first + b"".join(iter(inside.receive, None))
            code = self._api.exec_inspect(started)["ExitCode"]
        return code, output.decode(errors="replace"), inside.read_errors()

    def open_inside(self, container: str, command: Sequence[str]) -> sdk.InsideStream:
        """Start a command in a running container, whose standard input and output are here."""
        with self._translate_errors(f"run a command in container {container[:12]!r}"):
            return self._start_inside(self._api.exec_create(container, list(command), stdin=True)["Id"])

    def _start_inside(self, created: str) -> sdk.InsideStream:
        opened = self._api.exec_start(created, socket=True)
        return sdk.InsideStream(opened, sdk.take_early(opened))

    def copy_in(self, container: str, folder: str, archive: bytes | Iterator[bytes]) -> None:
        """Unpack a tar (compressed or not, whole or in pieces) into a folder of a container, which must exist there."""
        with self._translate_errors(f"copy files into container {container[:12]!r}"):
            self._api.put_archive(container, folder, archive)

    def copy_out(self, container: str, path: str, limit_bytes: int) -> bytes | None:
        """Return one file of a container, stopped or not. Return None if it is missing or larger than the limit."""
        try:
            with self._translate_errors(f"copy {path!r} out of container {container[:12]!r}"):
                stream, status = self._api.get_archive(container, path)
                if status["size"] > limit_bytes:
                    stream.close()
                    return None
                packed = b"".join(stream)
        except sdk.NotFound:
            return None
        try:
            with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
                member = archive.next()
                content = archive.extractfile(member) if member is not None and member.isreg() else None
                return None if content is None else content.read()
        except tarfile.TarError as error:
            raise sdk.DockerError(
                f"cannot copy {path!r} out of container {container[:12]!r}: {sdk.one_line(error)}"
            ) from error

    def read_folder_mode(self, container: str, path: str) -> int | None:
        """Return the permissions of a folder of a container. Return None if it is a link, or missing."""
        try:
            with self._translate_errors(f"look at {path!r} in container {container[:12]!r}"):
                stream, status = self._api.get_archive(container, path)
                stream.close()
        except sdk.NotFound:
            return None
        mode = int(status["mode"])  # Go's, with another sticky bit
        return None if status["linkTarget"] else mode & 0o777 | (stat.S_ISVTX if mode & _GO_STICKY else 0)

    # -- streams ------------------------------------------------------------------------------------------------------

    def events(self, actions: Sequence[str], since_s: float) -> Iterator[dict[str, Any]]:
        """Return the events of all containers as they happen. Ends, or raises EngineUnavailable, when the engine stops.

        Args:
            actions: "die", "kill", ...
            since_s: by the engine's clock.
        """
        filters = {"type": "container", "event": list(actions)}
        with self._translate_errors("follow the Docker engine's events"):
            stream = self._api.events(filters=filters, since=f"{since_s:.9f}", decode=True)
            with sdk.close_at_end(stream):
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
    ) -> Iterator[tuple[int, bytes]]:
        """Return the frames of a container's output, one log record each (a line, or 16 KiB of a longer one).

        Yields:
            The number of the stream, 1 for stdout and 2 for stderr, and the record.
        """
        with self._translate_errors(f"read logs of container {container[:12]!r}"):
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
            with sdk.close_at_end(stream):
                yield from sdk.read_frames(self._api, stream, follow=follow)


def _label_filter(labels: Mapping[str, str | None]) -> list[str]:
    return [name if value is None else f"{name}={value}" for name, value in labels.items()]
