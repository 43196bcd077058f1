"""Creates an app's objects on the engine: network, volumes, containers with the agent and the user's code in them.

The submitting command creates all of an app at once, and removes all of it if one step fails. Later the supervisor
creates single containers again. The files that are copied into containers (the payload) lie beside the app's state from
its submission to its end. A workspace may be large, so it is never held in memory.
"""

import os
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

from muster._shared.contract import AGENT_BUNDLE_NAME, Env
from muster.schedulers.docker import container_body as bodies
from muster.schedulers.docker.container_body import ImageFacts
from muster.schedulers.docker.engine import Engine
from muster.schedulers.docker.running_apps import reservations
from muster.schedulers.docker.sdk import Conflict, DockerError, NoAddressPool, NotFound
from muster.schedulers.docker.spec import CACHE_DIR, HOST_NETWORK, AppRequest, ContainerRequest
from muster.schedulers.workspace.packing import write_workspace_bundle


@dataclass(frozen=True, kw_only=True)
class Payload:
    """What is copied into containers."""

    agent: bytes
    """The agent's bundle. It is empty if no container gets it."""
    workspaces: Mapping[str, Path]
    """Key -> packed folder."""


def build_payload(payload: Payload) -> dict[str, bytes | Path]:
    """Name -> content (or a file with it) of the files that store the payload beside the app's state."""
    return {AGENT_BUNDLE_NAME: payload.agent, **payload.workspaces}


def read_payload(folder: Path, app: AppRequest) -> Payload:
    """Read what `build_payload` has built. The result is empty once the payload has been removed."""
    agent = folder / AGENT_BUNDLE_NAME
    return Payload(agent=agent.read_bytes() if agent.exists() else b"", workspaces=_list_workspaces(folder, app))


def remove_payload(folder: Path, app: AppRequest) -> None:
    """Remove it at the app's end: no container is created any more."""
    for file in (folder / AGENT_BUNDLE_NAME, *_list_workspaces(folder, app).values()):
        file.unlink(missing_ok=True)


def _list_workspaces(folder: Path, app: AppRequest) -> dict[str, Path]:
    return {key: folder / key for key in (container.workspace for container in app.containers) if key is not None}


class PackedWorkspaces:
    """The folders that this process has packed, as files without a name beside the state of the apps.

    /tmp may be in memory. The kernel removes the files when the process ends, however it ends. A submitted app has its
    own, which has a name.
    """

    def __init__(self) -> None:
        self._open: dict[str, BinaryIO] = {}

    @property
    def files(self) -> Mapping[str, Path]:
        """Key -> a path that leads to the file as long as it is open."""
        return {key: Path(f"/proc/self/fd/{file.fileno()}") for key, file in self._open.items()}

    def pack(self, path: str, state_dir: Path) -> str:
        """Pack a folder and return its key, which follows from its content.

        Args:
            path: the folder.
            state_dir: the user's folder for muster's state.

        Raises:
            BundleError: see `write_workspace_bundle`.
        """
        with ExitStack() as undo:
            out = undo.enter_context(_open_unnamed(state_dir))
            key = f"workspace-{write_workspace_bundle(path, out)[:12]}.tar"
            out.flush()
            if key not in self._open:
                self._open[key] = out
                weakref.finalize(self, out.close)
                undo.pop_all()
        return key

    def remove(self) -> None:
        """Remove all of them. Idempotent."""
        while self._open:
            self._open.popitem()[1].close()


def _open_unnamed(folder: Path) -> BinaryIO:
    """Open a file without a name in a folder. It can get one, unlike `tempfile.TemporaryFile`."""
    try:
        fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:  # not every file system can
        fd, name = tempfile.mkstemp(dir=folder)
        os.unlink(name)
    return open(fd, "w+b")


_PASSWD_LIMIT_BYTES = 1 << 20
_REMOVERS = 8
_ROOT = ("", "0", "root")


class Creator:
    """Creates the containers of one app on one engine."""

    def __init__(self, engine: Engine, app: AppRequest, payload: Payload) -> None:
        self._engine = engine
        self._app = app
        self._payload = payload
        self._images: dict[str, ImageFacts] = {}
        self._owners: dict[str, tuple[int, int]] = {}

    def create(
        self, container: ContainerRequest, incarnation: int, checkpoint: str = "", *, is_alone: bool = False
    ) -> str:
        """Create one container with everything in it, not started.

        Args:
            container: its request.
            incarnation: how often its replica was started before.
            checkpoint: what the replica's last container has kept, see `Env.CHECKPOINT`.
            is_alone: see `build_body`.

        Returns:
            Its id.

        Raises:
            Conflict: a container of this name exists.
            DockerError: the engine refused. Nothing of the container is left.
        """
        image = self._inspect_image(container.image)
        body = bodies.build_body(
            self._app, container, incarnation=incarnation, image=image, cpus=self._cpus, is_alone=is_alone
        )
        if checkpoint:
            body["Env"].append(f"{Env.CHECKPOINT}={checkpoint}")
        name = bodies.build_container_name(container, incarnation)
        with ExitStack() as undo:
            created = self._engine.create_container(name, body)
            undo.callback(self._engine.remove_container, created)
            self._copy_files(created, container, image)
            undo.pop_all()
        return created

    def _copy_files(self, created: str, container: ContainerRequest, image: ImageFacts) -> None:
        if container.runs_agent:
            self._engine.copy_in(created, bodies.choose_state_place(container), bodies.pack_state_dir(container))
        if any(mount["Target"] == CACHE_DIR for mount in container.mounts):
            self._engine.copy_in(created, CACHE_DIR, bodies.pack_cache_dirs())
        if container.bundled and not container.read_only:
            self._engine.copy_in(created, "/", bodies.pack_agent(self._payload.agent))
        if container.workspace is None:
            return
        folder = bodies.choose_working_dir(container, image)
        owner = self._find_owner(created, container, image)
        is_changeable = folder != "/" and not container.read_only and not bodies.lies_on_mount(container, folder)
        if owner[0] != 0 and is_changeable:
            # WORKDIR's folder is root's.
            mode = self._engine.read_folder_mode(created, folder)
            if mode is not None:
                self._engine.copy_in(created, "/", bodies.pack_folder(folder, owner, mode))
        if bodies.needs_workspace_copy(container):
            workspace = self._payload.workspaces[container.workspace]
            self._engine.copy_in(created, folder, bodies.stream_with_owner(workspace, owner))

    def _find_owner(self, created: str, container: ContainerRequest, image: ImageFacts) -> tuple[int, int]:
        user = container.user or image.user
        if user in _ROOT:
            return 0, 0
        if image.id not in self._owners:
            self._owners[image.id] = _read_owner(self._engine, created, user)
        return self._owners[image.id]

    def _inspect_image(self, name: str) -> ImageFacts:
        if name not in self._images:
            self._images[name] = self._engine.inspect_image(name)
        return self._images[name]

    @cached_property
    def _cpus(self) -> int:
        return self._engine.count_cpus()


def create_app(engine: Engine, app: AppRequest, payload: Payload, gpus: Sequence[str] = ()) -> AppRequest:
    """Create the network, volumes and all containers of an app. Start none.

    Args:
        engine: the one that will run the app.
        app: what was requested.
        payload: what is copied into the containers.
        gpus: what `reservations.check_gpus` found free.

    Returns:
        The request as it was carried out: with the ids of its GPUs and its ports.

    Raises:
        DockerError: it is one line. `remove_app` removes what was created before.
    """
    app = reservations.reserve_gpus(engine, app, gpus)
    app = reservations.reserve_ports(engine, app)
    _join_network(engine, app)
    if any(container.bundled and container.read_only for container in app.containers):
        _fill_agent_volume(engine, app, payload)
    creator = Creator(engine, app, payload)
    try:
        for container in app.containers:
            creator.create(container, 0)
    except Conflict as error:
        raise DockerError(f"{error}; remove it or give the app another name") from error
    return app


def _join_network(engine: Engine, app: AppRequest) -> None:
    if not app.owns_network:
        if app.network != HOST_NETWORK and not engine.has_network(app.network):
            raise DockerError(
                f"network {app.network!r} does not exist; create it with: docker network create {app.network}"
            )
        return
    try:
        engine.create_network(app.network, app.labels)
    except NoAddressPool as error:
        raise DockerError(
            f"{error}: remove unused networks (docker network prune) or name an existing one with -cfg network=NAME"
        ) from error
    except Conflict as error:
        raise DockerError(f"{error}; give the app another name") from error


def _fill_agent_volume(engine: Engine, app: AppRequest, payload: Payload) -> None:
    """Copy the agent onto its volume through a container that mounts it writable and never runs."""
    name = bodies.build_agent_volume_name(app)
    engine.create_volume(name, app.labels)
    body = bodies.build_idle_body(app, engine.inspect_image(app.containers[0].image), name)
    loader = engine.create_container(f"{name}-loader", body)
    try:
        engine.copy_in(loader, "/", bodies.pack_agent(payload.agent))
    finally:
        engine.remove_container(loader)


def ensure_images(engine: Engine, app: AppRequest, report_progress: Callable[[str], None]) -> None:
    """Ensure that the engine has every image, by the `pull` option.

    Raises:
        DockerError: an image is missing and cannot be pulled. The message names it.
    """
    for image in dict.fromkeys(container.base_image or container.image for container in app.containers):
        if image.startswith("sha256:") or app.pull == "never":
            if not _has_image(engine, image):
                raise DockerError(f"the engine has no image {image!r}, and pull=never forbids pulling it")
        elif app.pull == "always" or not _has_image(engine, image):
            report_progress(f"pulling image {image}")
            engine.pull_image(image, report_progress)


def build_images(
    engine: Engine, app: AppRequest, workspaces: Mapping[str, Path], report_progress: Callable[[str], None]
) -> None:
    """Build the images that hold a workspace, for `image_repo`.

    The workspace's own `Dockerfile.torchx` is used, with TorchX's build arguments IMAGE and WORKSPACE.

    Raises:
        DockerError: the build failed. The text is its last message.
    """
    wanted = {container.image: container for container in app.containers if container.base_image is not None}
    for name, container in wanted.items():
        engine.build_image(
            bodies.stream_context(workspaces[container.workspace or ""], _read_image_owner(engine, app, container)),
            args={"IMAGE": container.base_image or "", "WORKSPACE": "."},
            labels=app.labels,
            dockerfile=bodies.DOCKERFILE,
            on_progress=report_progress,
            tag=name,
        )


def _read_image_owner(engine: Engine, app: AppRequest, container: ContainerRequest) -> tuple[int, int]:
    """Return the user and group id of a container whose image is not built yet."""
    image = engine.inspect_image(container.base_image or "")
    user = container.user or image.user
    if user in _ROOT:
        return 0, 0
    created = engine.create_container(f"{app.app_id}-owner", bodies.build_idle_body(app, image))
    try:
        return _read_owner(engine, created, user)
    finally:
        engine.remove_container(created)


def _read_owner(engine: Engine, created: str, user: str) -> tuple[int, int]:
    passwd = engine.copy_out(created, "/etc/passwd", _PASSWD_LIMIT_BYTES) or b""
    return bodies.parse_user(user, passwd.decode(errors="replace"))


def _has_image(engine: Engine, image: str) -> bool:
    try:
        engine.inspect_image(image)
    except NotFound:
        return False
    return True


def remove_app(engine: Engine, labels: Mapping[str, str]) -> None:
    """Remove everything that carries an app's labels: containers, then network, volumes and images.

    Args:
        engine: the one that has the app.
        labels: `AppRequest.labels`. Objects without both of them are not touched.
    """
    with ThreadPoolExecutor(_REMOVERS) as pool:
        list(pool.map(engine.remove_container, engine.list_container_ids(labels)))
    for network in engine.list_networks(labels):
        engine.remove_network(network["Id"])
    for volume in engine.list_volumes(labels):
        engine.remove_volume(volume)
    for image in engine.list_images(labels):
        engine.remove_image(image)
