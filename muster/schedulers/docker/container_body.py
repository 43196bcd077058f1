"""Builds the bodies and archives for a container: pure, from the request and facts about the engine and the image."""

import io
import posixpath
import re
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from muster._shared.contract import AGENT_BUNDLE_NAME, Env
from muster.schedulers.agent_command import is_python
from muster.schedulers.docker.spec import AGENT_DIR, HOST_NETWORK, STATE_DIR, AppRequest, ContainerRequest, Label
from muster.schedulers.gpus import CACHE_FOLDERS

WORKSPACE_DIR: Final = "/workspace"
"""Working directory of a container whose image names none: files must not be copied into the image's root."""

DOCKERFILE: Final = "Dockerfile.torchx"
"""TorchX's name of the file in a workspace from which its image is built."""

_PYTHON_SWITCHES: Final = re.compile("-[bBdEiIOPqsSuv]+")
"""Switches that take no value and do not say what is run."""

_PIECE_BYTES: Final = 1 << 20
_DEFAULT_DOCKERFILE: Final = "ARG IMAGE\nFROM $IMAGE\nCOPY --chown={}:{} . .\n"


@dataclass(frozen=True, kw_only=True)
class ImageFacts:
    """Facts about an image."""

    id: str
    working_dir: str
    user: str
    entrypoint: tuple[str, ...] = ()

    @property
    def interpreter(self) -> str:
        """The Python interpreter that the entrypoint runs, and that takes what follows for its arguments.

        "": there is none. It may stand behind an init (`tini -- python3`), and have switches of its own (`python3 -u`).
        """
        words = list(self.entrypoint)
        while len(words) > 1 and _PYTHON_SWITCHES.fullmatch(words[-1]):
            del words[-1]
        return words[-1] if words and is_python(words[-1]) else ""


def build_container_name(container: ContainerRequest, incarnation: int) -> str:
    """Return a text such as `APP-ROLE-REPLICA`, and `-rN` for the N-th replacement: names are unique on an engine."""
    return f"{container.name}-r{incarnation}" if incarnation else container.name


def choose_working_dir(container: ContainerRequest, image: ImageFacts) -> str:
    """Return the folder in which the command starts and into which the workspace is copied."""
    if not needs_workspace_copy(container) or image.working_dir not in ("", "/"):
        return image.working_dir or "/"
    return WORKSPACE_DIR


def choose_command(container: ContainerRequest, image: ImageFacts) -> list[str]:
    """Return what follows the image's entrypoint: only the agent's arguments where that is its interpreter."""
    is_given = container.runs_agent and container.command[0] == image.interpreter
    return list(container.command[1:] if is_given else container.command)


def needs_workspace_copy(container: ContainerRequest) -> bool:
    """Return whether the user's code is copied into the container, not built into the image."""
    return container.workspace is not None and container.base_image is None


def build_agent_volume_name(app: AppRequest) -> str:
    """Name of the volume that holds the agent if the container's root is read-only."""
    return f"{app.app_id}-agent"


def build_body(
    app: AppRequest,
    container: ContainerRequest,
    *,
    incarnation: int,
    image: ImageFacts,
    cpus: int,
    is_alone: bool = False,
) -> dict[str, Any]:
    """Return the body of `POST /containers/create`.

    Args:
        app: the app.
        container: one of it.
        incarnation: how often its replica was started before.
        image: its image.
        cpus: how many the engine has.
        is_alone: no other container of its role runs, so none remembers the last round: its agent may form one.
    """
    env = dict(container.env)
    if container.runs_agent and incarnation:
        name, number = (Env.JOB_INCARNATION, incarnation + 1) if is_alone else (Env.INCARNATION, incarnation)
        env[name] = str(number)
    run_dir = container.find_run_file("")
    body: dict[str, Any] = {
        "Image": image.id,
        "Cmd": choose_command(container, image),
        "Env": [f"{name}={value}" for name, value in env.items()],
        "WorkingDir": choose_working_dir(container, image),
        "Labels": {
            **container.labels,
            **app.labels,
            Label.ROLE: container.role,
            Label.REPLICA: str(container.replica),
            Label.INCARNATION: str(incarnation),
            **({} if run_dir is None else {Label.RUN_DIR: run_dir}),
        },
        "StopSignal": "SIGTERM",
        "StopTimeout": max(1, round(app.grace_s)),
        "HostConfig": _build_host_config(app, container, image, cpus),
    }
    if container.user:
        body["User"] = container.user
    if ports := container.host_config.get("PortBindings"):
        body["ExposedPorts"] = {port: {} for port in ports}
    if app.network != HOST_NETWORK:
        body["Hostname"] = container.hostname
        endpoint = {"Aliases": list(container.aliases)}
        body["NetworkingConfig"] = {"EndpointsConfig": {app.network: endpoint}}
    return body


def build_idle_body(app: AppRequest, image: ImageFacts, volume: str = "") -> dict[str, Any]:
    """Return a container that never runs: through it files of an image are read, or the agent is put on its volume."""
    mounts = [{"Type": "volume", "Source": volume, "Target": AGENT_DIR}] if volume else []
    config = {"NetworkMode": "none", "Mounts": mounts}
    return {"Image": image.id, "Cmd": ["true"], "Labels": dict(app.labels), "HostConfig": config}


def _build_host_config(app: AppRequest, container: ContainerRequest, image: ImageFacts, cpus: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        # Engine policies retry what must not be retried.
        "RestartPolicy": {"Name": "no"},
        "AutoRemove": False,
        "NetworkMode": app.network,
        "Init": app.init,
        "Mounts": [*container.mounts, *(_build_read_only_mounts(app, container, image) if container.read_only else ())],
        "ReadonlyRootfs": container.read_only,
    }
    config |= container.host_config
    if container.read_only:
        config["Tmpfs"] = {"/tmp": "exec", **config.get("Tmpfs", {})}  # noqa: S108  # inside the container
    if container.cpus is not None:
        # The engine refuses more than its CPUs.
        config["NanoCpus"] = int(min(container.cpus, cpus) * 1e9)
    if container.gpu_ids:
        ids = list(container.gpu_ids)
        config["DeviceRequests"] = [{"DeviceIDs": ids, "Capabilities": [["gpu", "compute", "utility"]]}]
    return config


def _build_read_only_mounts(app: AppRequest, container: ContainerRequest, image: ImageFacts) -> list[dict[str, Any]]:
    """Mount the agent's volume and two writable folders: nothing can be copied into a read-only root."""
    mounts = []
    if container.bundled:
        mounts.append({"Type": "volume", "Source": build_agent_volume_name(app), "Target": AGENT_DIR, "ReadOnly": True})
    if container.runs_agent:
        mounts.append({"Type": "volume", "Target": choose_state_place(container)})
    folder = choose_working_dir(container, image)
    mounted = {mount["Target"] for mount in container.mounts}
    if needs_workspace_copy(container) and folder not in mounted:
        # A volume from the image, removed with the container.
        mounts.append({"Type": "volume", "Target": folder})
    return mounts


def pack_agent(bundle: bytes) -> bytes:
    """Return a tar for the root of a container: the agent's bundle in its folder."""
    return _pack({AGENT_DIR: None, f"{AGENT_DIR}/{AGENT_BUNDLE_NAME}": bundle})


def choose_state_place(container: ContainerRequest) -> str:
    """Return where `pack_state_dir` is unpacked.

    Below a read-only root a volume is there: an engine does not change the mode of a volume itself, which is root's,
    but that of a folder in it.
    """
    return posixpath.dirname(STATE_DIR) if container.read_only else "/"


def pack_state_dir(container: ContainerRequest) -> bytes:
    """Return a tar with the folder for logs and the report, writable by any user."""
    return _pack({posixpath.relpath(STATE_DIR, choose_state_place(container)): None}, mode=0o1777)


def pack_cache_dirs() -> bytes:
    """Build a tar for a volume with compile caches: a folder each, writable by any user, since the volume is root's."""
    return _pack(dict.fromkeys(CACHE_FOLDERS), mode=0o1777)


def lies_on_mount(container: ContainerRequest, folder: str) -> bool:
    """Return whether a folder is, or lies in, what is mounted into the container.

    Its owner is not the container's matter.
    """
    targets = (str(mount["Target"]).rstrip("/") for mount in container.mounts)
    return any(f"{folder}/".startswith(f"{target}/") for target in targets)


def pack_folder(path: str, owner: tuple[int, int], mode: int) -> bytes:
    """Return a tar for the root of a container with one folder, which may exist already."""
    return _pack({path: None}, mode, owner)


def _pack(entries: Mapping[str, bytes | None], mode: int = 0o755, owner: tuple[int, int] = (0, 0)) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, content in entries.items():
            entry = tarfile.TarInfo(path.lstrip("/"))
            entry.mode = mode if content is None else 0o644
            entry.uid, entry.gid = owner
            entry.type = tarfile.DIRTYPE if content is None else tarfile.REGTYPE
            entry.size = len(content or b"")
            archive.addfile(entry, io.BytesIO(content or b""))
    return buffer.getvalue()


def stream_with_owner(workspace: Path, owner: tuple[int, int]) -> Iterator[bytes]:
    """Yield a tar of a packed workspace whose entries the image's user owns, which must be able to read and write it.

    Piece by piece: a workspace need not fit into memory.
    """
    with tarfile.open(workspace) as source:
        for entry in source:
            (entry.uid, entry.gid), entry.uname, entry.gname = owner, "", ""
            yield from _stream_entry(source, entry)
    yield bytes(2 * tarfile.BLOCKSIZE)


def stream_context(workspace: Path, owner: tuple[int, int]) -> Iterator[bytes]:
    """Yield a build context: a packed workspace, and a Dockerfile that copies it in if the workspace has none.

    Args:
        workspace: the packed one.
        owner: user and group of the copied files.
    """
    names = set()
    with tarfile.open(workspace) as source:
        for entry in source:
            names.add(entry.name)
            yield from _stream_entry(source, entry)
    if DOCKERFILE not in names:
        entry = tarfile.TarInfo(DOCKERFILE)
        content = _DEFAULT_DOCKERFILE.format(*owner).encode()
        entry.size = len(content)
        yield entry.tobuf(tarfile.PAX_FORMAT)
        yield content + _pad(entry.size)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _stream_entry(source: tarfile.TarFile, entry: tarfile.TarInfo) -> Iterator[bytes]:
    # TarFile.addfile writes files whole.
    yield entry.tobuf(tarfile.PAX_FORMAT, errors="surrogateescape")
    content = source.extractfile(entry) if entry.isreg() else None
    if content is not None:
        while piece := content.read(_PIECE_BYTES):
            yield piece
        yield _pad(entry.size)


def _pad(size_bytes: int) -> bytes:
    return bytes(-size_bytes % tarfile.BLOCKSIZE)


def parse_user(user: str, passwd: str) -> tuple[int, int]:
    """Return the ids of an image's USER (`name`, `1000`, `1000:1000`) by its own /etc/passwd, or root's if unknown."""
    name, _, group = user.partition(":")
    uid, gid = (int(name), 0) if name.isdigit() else (0, 0)
    for line in passwd.splitlines():
        words = line.split(":")
        if len(words) > 3 and words[2].isdigit() and words[3].isdigit() and name in (words[0], words[2]):
            uid, gid = int(words[2]), int(words[3])
            break
    return uid, int(group) if group.isdigit() else gid
