"""Checks before anything of an app is created whether the engine can run it: one temporary container per image.

It runs the role's own Python with the role's own environment and mounts, so the result is the one the job would get.
The temporary container (a probe) has the image, environment and mounts of a role. `reservations` runs probes, too.
Successful results are cached per engine and image. Failures are not, so that a repaired image is accepted at once.
"""

import hashlib
import json
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from muster._shared.foreign_files import read_whole
from muster.schedulers.docker.container_body import ImageFacts, build_body, choose_working_dir
from muster.schedulers.docker.engine import Engine
from muster.schedulers.docker.sdk import CannotStart, DockerError, EngineUnavailable, one_line
from muster.schedulers.docker.spec import DEFAULT_ULIMITS, AppRequest, ContainerRequest
from muster.schedulers.failure_report import explain_start_failure
from muster.schedulers.supervision.app_folder import write_text
from muster.schedulers.wording.words import word

_LIMIT_S: Final = 60.0
_NOT_PROBED: Final = frozenset({"Memory", "MemorySwap", "ShmSize", "LogConfig", "PortBindings"})
"""A probe needs no memory, its output must be readable, and its ports free."""

MARK: Final = "muster-probe:"
"""Begins what a probe's own program prints: the image's entrypoint, which runs it, may print a banner before."""


def find_words(output: str) -> list[str] | None:
    """Return the words after the last mark, of that line. None: the program has not run."""
    _, mark, rest = output.rpartition(MARK)
    return rest.partition("\n")[0].split() if mark else None


def build_probe_body(
    app: AppRequest,
    container: ContainerRequest,
    command: Sequence[str],
    *,
    image: ImageFacts,
    cpus: int,
    network: str = "none",
) -> dict[str, Any]:
    """Return the body of `POST /containers/create` for a container like a replica's, which runs once and is removed."""
    config = {**select_probed(container), "LogConfig": {"Type": "json-file"}}
    # Its volume is empty, and devices take time.
    like = replace(container, command=tuple(command), read_only=False, gpu_ids=(), host_config=config)
    body = build_body(replace(app, network=network), like, incarnation=0, image=image, cpus=cpus)
    body.pop("NetworkingConfig", None)
    body["Labels"] = dict(app.labels)  # without a replica's
    return body


def select_probed(container: ContainerRequest) -> dict[str, Any]:
    """Return what a probe shares of the `HostConfig` of a replica."""
    return {name: value for name, value in container.host_config.items() if name not in _NOT_PROBED}


def run_probe(engine: Engine, name: str, body: Mapping[str, Any]) -> tuple[int, str]:
    """Run a container to its end, for at most a minute, and remove it.

    Returns:
        Its exit code and its output.

    Raises:
        CannotStart: the engine could not run the command.
        DockerError: another error of the engine.
    """
    created = engine.create_container(name, body)
    try:
        try:
            engine.start_container(created)
        except EngineUnavailable:
            raise
        except DockerError as error:
            raise CannotStart(str(error)) from error
        exit_code = engine.wait_container(created, _LIMIT_S)
        output = b"".join(record for _, record in engine.logs(created))
        return exit_code, output.decode(errors="replace")
    finally:
        engine.remove_container(created)


_NO_COMMAND: Final = "/muster-image-check-without-command"
"""Does not exist, on purpose: for a role without our agent, only the steps before the command are checked."""

# Must compile on any Python, 2.7 included.
_PROBE: Final = r"""
import sys
found = []
if sys.version_info >= (3, 4):
    import importlib.util
    found = [name for name in ('torch', 'muster') if importlib.util.find_spec(name)]
print('\nmuster-probe: %d.%d %s' % (sys.version_info[0], sys.version_info[1], ' '.join(found)))
"""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What the engine supports."""

    init: bool = True
    """It has a tiny init."""
    default_ulimits: bool = True
    """Whether it can raise limits. A rootless or confined engine cannot."""


def check_images(engine: Engine, app: AppRequest, cache_dir: Path) -> AppRequest:
    """Check each image once.

    Args:
        engine: the one that will run the app. It has the images already.
        app: what will run.
        cache_dir: the folder of cached results.

    Returns:
        The app as this engine can run it: without an init or raised limits if the engine refuses them, and with the
        image's own interpreter where its entrypoint is one.

    Raises:
        DockerError: one line that names the image and what it lacks.
    """
    info = engine.info()
    findings = Findings()
    images = {name: engine.inspect_image(name) for name in {container.image for container in app.containers}}
    app = replace(app, containers=tuple(_use_interpreter(each, images[each.image]) for each in app.containers))
    for container in app.containers:
        _check_tmpfs(container, images[container.image])
    seen = set()
    for container in app.containers:
        if (container.image, container.runs_agent) in seen:
            continue
        seen.add((container.image, container.runs_agent))
        image = images[container.image]
        file = cache_dir / f"{_build_cache_key(info, container, image)}.json"
        found = _read_cache(file)
        if found is None:
            found = _Probe(engine=engine, app=app, container=container, image=image, cpus=int(info["NCPU"])).run()
            _write_cache(file, found)
        findings = Findings(
            init=findings.init and found.init, default_ulimits=findings.default_ulimits and found.default_ulimits
        )
    return _apply(app, findings)


def _check_tmpfs(container: ContainerRequest, image: ImageFacts) -> None:
    """Raise DockerError: the workspace would be below a mount that is made when the container starts."""
    folder = choose_working_dir(container, image)
    for path in container.host_config.get("Tmpfs", {}) if container.workspace is not None else ():
        if posixpath.commonpath([path, folder]) == path:
            raise DockerError(f"tmpfs: {path!r} would hide the workspace, which is copied into {folder!r}")


def _use_interpreter(container: ContainerRequest, image: ImageFacts) -> ContainerRequest:
    """Return the same container, whose agent runs on the interpreter that is the image's entrypoint.

    With a path the role asks for an interpreter of its own choice, and then the entrypoint is in its way.
    """
    if not (container.runs_agent and image.interpreter and "/" not in container.command[0]):
        return container
    return replace(container, command=(image.interpreter, *container.command[1:]))


def _apply(app: AppRequest, findings: Findings) -> AppRequest:
    containers = app.containers if findings.default_ulimits else tuple(map(_lower_limits, app.containers))
    return replace(app, init=findings.init, containers=containers)


def _lower_limits(container: ContainerRequest) -> ContainerRequest:
    """Return the same container with the user's limits only."""
    limits = container.host_config["Ulimits"]
    given = [each for each in limits if (each["Soft"], each["Hard"]) != DEFAULT_ULIMITS.get(each["Name"])]
    return replace(container, host_config={**container.host_config, "Ulimits": given})


@dataclass(frozen=True, kw_only=True)
class _Probe:
    """One temporary container, tried with fewer features until it starts."""

    engine: Engine
    app: AppRequest
    container: ContainerRequest
    image: ImageFacts
    cpus: int

    def run(self) -> Findings:
        """Find what the engine supports, and raise DockerError if the container does not start at all."""
        findings = Findings()
        while True:
            output = self._try_start(findings)
            if "rlimit" in output and findings.default_ulimits:
                findings = replace(findings, default_ulimits=False)
            elif "docker-init" in output and findings.init:
                findings = replace(findings, init=False)
            elif output and not (_NO_COMMAND in output and not self.container.runs_agent):
                raise DockerError(self._explain(output))
            else:
                return findings

    def _try_start(self, findings: Findings) -> str:
        """Start it once, and return the error, empty if it ran well."""
        try:
            exit_code, output = run_probe(self.engine, f"{self.container.name}-image-check", self._build_body(findings))
        except CannotStart as error:
            return str(error)
        words = find_words(output)
        if self.container.runs_agent and words is None and (exit_code == 0 or self.image.entrypoint):
            raise DockerError(self._explain_entrypoint(output))
        if exit_code != 0:
            return output.strip() or f"exit code {exit_code}"
        if self.container.runs_agent:
            self._check_words(words or [])
        return ""

    def _build_body(self, findings: Findings) -> dict[str, Any]:
        runs_agent = self.container.runs_agent
        command = (self.container.command[0], "-c", _PROBE) if runs_agent else (_NO_COMMAND,)
        app = _apply(replace(self.app, containers=(self.container,)), findings)
        return build_probe_body(app, app.containers[0], command, image=self.image, cpus=self.cpus)

    def _explain(self, output: str) -> str:
        container = self.container
        why = word(explain_start_failure(output, self._name, container.command[0], runs_agent=container.runs_agent))
        return f"role {container.role!r} {why}"

    @property
    def _name(self) -> str:
        return self.container.base_image or self.container.image

    def _explain_entrypoint(self, output: str) -> str:
        shown = f"; it printed {one_line(output)[:200]!r}" if output.strip() else ""
        words = f" {list(self.image.entrypoint)}" if self.image.entrypoint else ""
        return f"image {self._name!r} does not run the command that it is given: see its entrypoint{words}{shown}"

    def _check_words(self, words: Sequence[str]) -> None:
        """Check what our own probe has found against the agent's needs."""
        name, (version, *found) = self._name, words
        if tuple(int(part) for part in version.split(".")) < (3, 10):
            raise DockerError(f"image {name!r} has Python {version}; muster's agent needs Python 3.10 or newer")
        if "torch" not in found:
            raise DockerError(f"image {name!r} has Python {version} but no torch; use --image to name one with both")
        if "muster" not in found and not self.container.bundled:
            raise DockerError(f"image {name!r} has no muster; leave out -cfg agent=image to have the agent copied in")


def _build_cache_key(info: Mapping[str, Any], container: ContainerRequest, image: ImageFacts) -> str:
    """Return a hash of everything on which the result depends."""
    env = {name: value for name, value in container.env.items() if name.startswith(("PYTHON", "PATH", "LD_"))}
    known = [
        info.get("ID"),
        info.get("ServerVersion"),
        image.id,
        container.command[0],
        container.runs_agent,
        container.bundled,
        env,
        [dict(mount) for mount in container.mounts],
        container.user,
        select_probed(container),
    ]
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:32]


def _read_cache(file: Path) -> Findings | None:
    try:
        return Findings(**json.loads(read_whole(file)))
    except (OSError, ValueError, TypeError):
        return None


def _write_cache(file: Path, findings: Findings) -> None:
    """Cache the result. If that fails, the next submission checks again."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps(asdict(findings)))
    except OSError:
        return
