"""What jobs can be submitted to from here: a Docker engine, a Kubernetes cluster, Slurm. Each is asked once."""

import os
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Final

from muster.cli.doctor.machine import Observation, Verdict, hide_credentials

_LIMIT_S: Final = 5.0


def look_at_services(environ: Mapping[str, str]) -> Iterator[Observation]:
    """Look at each of them. One that fails does not end the others."""
    if find_spec("torchx") is None:
        text = "not installed: no job is submitted from here; agents and the Python API do not need it"
        advice = "pip install 'torchx-muster[torchx]'"
        yield Observation(name="TorchX", verdict=Verdict.ABSENT, text=text, advice=advice)
        return
    yield _try("Docker", _look_at_docker, environ)
    yield _try("Kubernetes", _look_at_cluster, environ)
    yield _try("Slurm", _look_at_slurm, environ)


def _try(name: str, look: Callable[[Mapping[str, str]], Observation], environ: Mapping[str, str]) -> Observation:
    try:
        return look(environ)
    except Exception as error:  # noqa: BLE001  # of libraries and programs of others
        text = hide_credentials(" ".join(f"{type(error).__name__}: {error}".split())[:400])
        return Observation(name=name, verdict=Verdict.WARNING, text=f"cannot be asked: {text}")


def _look_at_docker(environ: Mapping[str, str]) -> Observation:
    """Return the engine, and whether it gives containers GPUs."""
    from muster.schedulers.docker.engine import Engine
    from muster.schedulers.docker.sdk import DockerError

    engine = Engine(environ, _LIMIT_S)
    host = hide_credentials(engine.host)
    try:
        info = engine.info()
    except DockerError as error:
        advice = "start it, or name another with DOCKER_HOST; only -s local_docker and docker need it"
        return Observation(name="Docker", verdict=Verdict.ABSENT, text=hide_credentials(str(error)), advice=advice)
    finally:
        engine.close()
    runtimes = sorted(info.get("Runtimes") or ())
    has_gpus = "nvidia" in runtimes or bool(info.get("CDISpecDirs"))
    facts = {
        "host": host,
        "version": info.get("ServerVersion"),
        "cpus": info.get("NCPU"),
        "memory_bytes": info.get("MemTotal"),
        "runtimes": runtimes,
        "cgroup": f"v{info.get('CgroupVersion', '?')}",
    }
    text = f"engine {facts['version']} at {host}, {'with' if 'nvidia' in runtimes else 'without'} NVIDIA's runtime"
    if not has_gpus and os.path.exists("/dev/nvidiactl"):
        advice = "install the NVIDIA Container Toolkit: containers get no GPU without it"
        return Observation(name="Docker", verdict=Verdict.WARNING, text=text, advice=advice, facts=facts)
    return Observation(name="Docker", verdict=Verdict.OK, text=text, facts=facts)


def _look_at_cluster(environ: Mapping[str, str]) -> Observation:  # noqa: ARG001  # its library reads the process's
    """Return the API server of the current context, with the user's credentials."""
    from muster.schedulers.errors import EngineError
    from muster.schedulers.kubernetes.api.connection import Access, open_connection

    try:
        connection = open_connection(Access())
    except EngineError as error:
        return Observation(name="Kubernetes", verdict=Verdict.ABSENT, text=hide_credentials(str(error)))
    host = hide_credentials(connection.host)
    facts = {"host": host, "context": connection.origin, "namespace": connection.namespace}
    url = f"{connection.host}/api/v1/namespaces/{connection.namespace}/pods?limit=1"
    try:
        answer = connection.pool.request(
            "GET", url, headers=connection.build_auth_headers(), timeout=_LIMIT_S, retries=False
        )
    except Exception as error:  # noqa: BLE001  # urllib3's, and those of plug-ins for credentials
        cause = hide_credentials(" ".join(str(error).split())[:200])
        text = f"{connection.origin}: {host} does not answer ({cause})"
        advice = "check the network and the kubeconfig: kubectl version"
        return Observation(name="Kubernetes", verdict=Verdict.WARNING, text=text, advice=advice, facts=facts)
    where = f"{connection.origin}, namespace {connection.namespace}"
    facts["status"] = answer.status
    if answer.status in (401, 403):
        advice = (
            f"log in again, or ask for the right to see pods: kubectl auth can-i list pods -n {connection.namespace}"
        )
        text = f"{where}: pods may not be listed ({answer.status})"
        return Observation(name="Kubernetes", verdict=Verdict.WARNING, text=text, advice=advice, facts=facts)
    return Observation(name="Kubernetes", verdict=Verdict.OK, text=where, facts=facts)


def _look_at_slurm(environ: Mapping[str, str]) -> Observation:
    """Return its commands, and whether its controller answers."""
    from muster.schedulers.errors import EngineError, NotConfiguredError
    from muster.schedulers.slurm.client import run

    version = ""
    try:
        version = run(["sinfo", "--version"], limit_s=_LIMIT_S, waits=False).strip()
        partitions = sorted(run(["sinfo", "-h", "-o", "%P"], limit_s=_LIMIT_S, waits=False).split())
    except NotConfiguredError as error:
        return Observation(name="Slurm", verdict=Verdict.ABSENT, text=str(error))
    except EngineError as error:
        text = f"{version or 'its version is not known'}: {error}"
        advice = "check the controller: scontrol ping"
        return Observation(name="Slurm", verdict=Verdict.WARNING, text=text, advice=advice)
    facts = {"version": version, "partitions": partitions, "job": environ.get("SLURM_JOB_ID")}
    inside = f"; inside job {facts['job']}" if facts["job"] else ""
    text = f"{version}, partitions {', '.join(partitions) or 'none'}{inside}"
    return Observation(name="Slurm", verdict=Verdict.OK, text=text, facts=facts)
