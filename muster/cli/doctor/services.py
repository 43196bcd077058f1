"""What jobs can be submitted to from here: a Docker engine, a Kubernetes cluster, Slurm. Each is asked once."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from muster.cli.doctor.observations import Observation, Verdict, hide_credentials

_LIMIT_S: Final = 5.0
_OBJECT: Final = re.compile(r"^<[^>]*>: |^\w+\([^)]*\): ")
"""Which of its objects has failed, as urllib3's text begins."""


def look_at_services(environ: Mapping[str, str]) -> Iterator[Observation]:
    """Look at each of them. One that fails does not end the others."""
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
    from muster.schedulers.docker.engine.client import Engine
    from muster.schedulers.docker.engine.errors import DockerError, EngineUnavailable

    engine = Engine(environ, _LIMIT_S)
    host = hide_credentials(engine.host)
    try:
        info = engine.info()
    except EngineUnavailable as error:
        advice = "start it, or name another with DOCKER_HOST; only -s local_docker and docker need it"
        return Observation(name="Docker", verdict=Verdict.ABSENT, text=hide_credentials(str(error)), advice=advice)
    except DockerError as error:
        text = hide_credentials(str(error))
        return Observation(name="Docker", verdict=Verdict.ABSENT, text=text, advice="only -s local_docker needs it")
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
        cause = hide_credentials(_OBJECT.sub("", " ".join(str(error).split()))[:200])
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
    if shutil.which("sinfo", path=environ.get("PATH")) is None:
        return Observation(
            name="Slurm", verdict=Verdict.ABSENT, text="its commands are not here (no sinfo on the PATH)"
        )
    version, asked = _run(["sinfo", "--version"]), _run(["sinfo", "-h", "-o", "%P"])
    partitions = sorted(asked.stdout.split())
    facts = {"version": version.stdout.strip(), "partitions": partitions, "job": environ.get("SLURM_JOB_ID")}
    if asked.returncode:
        if "configuration source" in asked.stderr:  # Slurm's words where it finds no slurm.conf and no controller
            text = "its commands are here, but no configuration of a cluster (slurm.conf)"
            return Observation(name="Slurm", verdict=Verdict.ABSENT, text=text, facts=facts)
        reason = " ".join(asked.stderr.split())[:200] or f"sinfo exited with code {asked.returncode}"
        text = f"{facts['version'] or 'its version is not known'}: {reason}"
        advice = "check the controller: scontrol ping"
        return Observation(name="Slurm", verdict=Verdict.WARNING, text=text, advice=advice, facts=facts)
    inside = f"; inside job {facts['job']}" if facts["job"] else ""
    text = f"{facts['version']}, partitions {', '.join(partitions) or 'none'}{inside}"
    return Observation(name="Slurm", verdict=Verdict.OK, text=text, facts=facts)


def _run(words: list[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(words, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
