"""Images with the workspace in them, for `image_repo`. They need a Docker engine, so nothing else loads this.

The names in the registry and the push are TorchX's. Its build is not used: if it fails, it leaves a container and
layers, and it cannot pack a link to a folder.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Final

from torchx.specs import AppDef
from torchx.workspace.api import walk_workspace

from muster._shared.folders import remove_folder
from muster.schedulers.docker.container_body import stream_context
from muster.schedulers.docker.engine import CALL_TIMEOUT_S, Engine
from muster.schedulers.docker.sdk import DEFAULT_HOST, DockerError, connect, one_line, pick_address, translate_errors
from muster.schedulers.errors import EngineError
from muster.schedulers.workspace.packing import DOCKERFILE, copy_workspace, write_workspace_bundle

_DOCKERIGNORE: Final = ".dockerignore"
_ROOT: Final = (0, 0)


def build_image(image: str, path: str, report: Callable[[str], None]) -> str:
    """Build an image with a folder, by its `Dockerfile.torchx` if it has one, on top of another image.

    Args:
        image: the other image, the registry's or else the engine's own.
        path: the folder. What its `.dockerignore` names is left out, as TorchX does.
        report: called with each line of progress.

    Returns:
        Its id.

    Raises:
        BundleError: see `packing`.
        EngineError: the build failed, and nothing of it is left. It is one line.
    """
    builder = _load_builder()
    with ExitStack() as undo:
        folder = tempfile.mkdtemp(prefix="muster-workspace-")
        undo.callback(remove_folder, folder, ignores_errors=True)
        copied, packed = Path(folder, "copied"), Path(folder, "packed")
        copied.mkdir()
        copy_workspace(path, str(copied))
        _remove_ignored(copied)
        with packed.open("wb") as out:
            write_workspace_bundle(str(copied), out)
        with _translate_errors(), closing(Engine(os.environ)) as engine:
            if not engine.is_available():
                raise EngineError(f"image_repo needs a Docker engine, and none answers at {engine.host}")
            try:
                engine.pull_image(image, report)
            except DockerError as error:
                report(f"{error}; the engine's own is used")
            return engine.build_image(
                stream_context(packed, _ROOT),
                args={"IMAGE": image, "WORKSPACE": "."},
                labels={builder.LABEL_VERSION: "muster"},
                dockerfile=DOCKERFILE,
                on_progress=report,
            )


def plan_images(app: AppDef, cfg: Mapping[str, Any]) -> Mapping[str, Any]:
    """Give the roles the names that their images will have in the registry. Return what to push. Needs no engine."""
    images: Mapping[str, Any] = _load_builder()().dryrun_push_images(app, cfg)
    return images


def push_images(images: Mapping[str, Any]) -> None:
    """Push what `plan_images` returned.

    Raises:
        EngineError: one line.
    """
    builder = _load_builder()
    address = pick_address(os.environ)
    host = address.get("DOCKER_HOST", DEFAULT_HOST)
    with (
        _translate_errors(),
        closing(connect(address, CALL_TIMEOUT_S)) as client,
        translate_errors("push the image with the workspace", host),
    ):
        builder(docker_client=client).push_images(images)


def _remove_ignored(folder: Path) -> None:
    """Remove what its `.dockerignore` names, and folders without content, as TorchX does."""
    if not (folder / _DOCKERIGNORE).exists():
        return
    from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]  # TorchX's own need

    walked = walk_workspace(LocalFileSystem(), str(folder), _DOCKERIGNORE)
    kept = {info["name"] for _, _, files in walked for info in files.values()}
    for base, folders, names in os.walk(folder, topdown=False):
        for path in (os.path.join(base, name) for name in (*names, *folders)):
            if os.path.islink(path) or not os.path.isdir(path):
                if path not in kept:
                    os.unlink(path)
            elif not os.listdir(path):
                os.rmdir(path)


def _load_builder() -> Any:
    try:
        from torchx.workspace.docker_workspace import DockerWorkspaceMixin
    except ImportError as error:
        raise EngineError(
            f"image_repo needs the docker package: pip install 'torchx-muster[docker]' ({error})"
        ) from error
    return DockerWorkspaceMixin


@contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # a DockerError, or TorchX's refused push
        raise EngineError(one_line(error)) from error
