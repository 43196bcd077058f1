"""Builds the AppDef of a distributed PyTorch job: one role, each of whose replicas runs the agent. No shell."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import Any, Final

from torchx import specs
from torchx.specs import macros
from torchx.util.types import to_dict

from muster._shared.contract import (
    AGENT_MODULE,
    RDZV_BACKENDS,
    RDZV_CONF_KEYS,
    RDZV_CONF_SECONDS,
    RDZV_CONF_WITHOUT_EFFECT,
    RoleKey,
    parse_seconds,
)
from muster.components.environment import EnvArgument, GivenEnv, parse_env
from muster.components.errors import ComponentError
from muster.components.flags import build_flags
from muster.components.resources import ResourceRequest
from muster.components.topology import Bare, Topology, parse_topology

DEFAULT_EXPERIMENT: Final = "default-experiment"
"""The experiment of a job whose --name has none. Source: torchx/components/structured_arg.py."""


@dataclass(frozen=True, kw_only=True)
class JobNames:
    """The names of a job."""

    experiment: str
    run: str
    """Also the AppDef's name."""
    role: str


def parse_names(name: str, *, script: str | None, module: str | None) -> JobNames:
    """Derive a job's names from `--name` and the program.

    Args:
        name: `{experiment}/{run}`, `{experiment}/`, `/{run}`, `{run}` or `/`. Defaults: `DEFAULT_EXPERIMENT`, and the
            script's or module's own name as the run.
        script: path of the main script. Exactly one of `script` and `module` must be given.
        module: dotted name of the main module.

    Raises:
        ComponentError: no program, two programs, or an invalid one.
    """
    role = _name_role(script, module)
    experiment, slash, run = name.partition("/")
    if not slash:
        experiment, run = "", name
    return JobNames(experiment=experiment or DEFAULT_EXPERIMENT, run=run or role, role=role)


def get_role_name(script: str | None, m: str | None) -> str:
    """Do as TorchX's function of the same name, which components of others call.

    Returns:
        The script's own name, or else the module's.

    Raises:
        ComponentError: neither was given, or the module's name is wrong.
    """
    return _name_role(script or None, None if script else m or None)


def _name_role(script: str | None, module: str | None) -> str:
    if (script is None) == (module is None):
        given = "neither was given" if script is None else f"both were given: --script {script!r} and -m {module!r}"
        raise ComponentError(f"give exactly one of --script and -m; {given}; for example: --script main.py")
    if script is not None:
        return _name_script(script)
    last = str(module).rpartition(".")[2]
    if not last or str(module).startswith("-"):
        raise ComponentError(f"-m {module!r} is not the dotted name of a module; for example: -m package.train")
    return last


def _name_script(script: str) -> str:
    if script.startswith("-"):
        raise ComponentError(f"--script {script!r} looks like an option; write ./{script} if it is a file")
    stem = PurePosixPath(script).stem
    if not stem:
        raise ComponentError(f"--script {script!r} is not the path of a file; for example: --script main.py")
    return stem


DEBUG_ENV: Final = {
    "CUDA_LAUNCH_BLOCKING": "1",
    "NCCL_DESYNC_DEBUG": "1",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "TORCH_SHOW_CPP_STACKTRACES": "1",
}
"""What `debug` sets. Source: torchx/components/dist.py, the same four on both lines."""

_TEES: Final = (0, 1, 2, 3)
_PORT_LIMIT: Final = 65535


_DEFAULTS: Final = {"rdzv_port": 29500, "rdzv_backend": "c10d", "rdzv_conf": None, "tee": 3}
"""The parameters that `dist.spmd` does not have."""


def build_application(arguments: Mapping[str, Any], resources: ResourceRequest, bare: Bare) -> Any:
    """Return the `torchx.specs.AppDef` of a job.

    It is pure except for the default of LOGLEVEL, and mutates no argument.

    Args:
        arguments: of a component, by the names of its parameters.
        resources: of a node.
        bare: what a number alone means in `j`.

    Raises:
        ComponentError: an argument is wrong.
    """
    request = SimpleNamespace(**{**_DEFAULTS, **arguments})
    _check(request)
    names = parse_names(request.name, script=request.script, module=request.m)
    topology = parse_topology(request.j, bare=bare, host=resources.find_host())
    if request.rdzv_port == 0 and topology.max_nodes > 1:
        raise ComponentError("--rdzv_port 0 works on one node only; give a port from 1 to 65535")
    env = parse_env(request.env, request.env_file, os.environ)
    resource = resources.build_resource()
    flags = build_flags({**arguments, "devices": int(resource.gpu)})
    role = specs.Role(
        name=names.role,
        image=request.image,
        min_replicas=topology.min_nodes,
        num_replicas=topology.max_nodes,
        entrypoint="python3",
        args=_build_args(request, names, topology, flags),
        env=_build_env(request, env, names),
        resource=resource,
        port_map={"c10d": request.rdzv_port},
        max_retries=request.max_retries,
        retry_policy=specs.RetryPolicy.REPLICA,
        mounts=_parse_mounts(request.mounts),
        metadata={**resources.build_role_metadata(topology), **_build_env_metadata(env)},
    )
    return specs.AppDef(name=names.run, roles=[role], metadata=_parse_metadata(request.metadata))


def _check(request: SimpleNamespace) -> None:
    if request.max_retries < 0:
        raise ComponentError(f"--max_retries {request.max_retries} is negative; 0 means none")
    if request.tee not in _TEES:
        raise ComponentError(f"--tee {request.tee} is not one of 0 (none), 1 (stdout), 2 (stderr), 3 (both)")
    if not 0 <= request.rdzv_port <= _PORT_LIMIT:
        raise ComponentError(f"--rdzv_port {request.rdzv_port} is not a port from 1 to {_PORT_LIMIT}")
    _check_rdzv_conf(request)


def _check_rdzv_conf(request: SimpleNamespace) -> None:
    """Check at submission, because a job may wait hours in a queue before its agents refuse the value."""
    known = (*RDZV_CONF_KEYS, *RDZV_CONF_WITHOUT_EFFECT)
    for pair in request.rdzv_conf.split(",") if request.rdzv_conf else ():
        key, _, value = (part.strip() for part in pair.partition("="))
        problem = ""
        if not (key and value):
            problem = f"{pair!r} is not key=value"
        elif request.rdzv_backend in RDZV_BACKENDS and key not in known:
            problem = f"unknown key {key!r}; the keys are {', '.join(known)}"
        elif request.rdzv_backend in RDZV_BACKENDS and key in RDZV_CONF_SECONDS and parse_seconds(value) is None:
            problem = f"{key}={value} is not a number of seconds, 0 or more"
        if problem:
            example = "join_timeout=600,last_call_timeout=30"
            raise ComponentError(f"--rdzv_conf {request.rdzv_conf!r}: {problem}; for example: {example}")


def _build_args(request: SimpleNamespace, names: JobNames, topology: Topology, flags: Sequence[str]) -> list[str]:
    args = ["-m", AGENT_MODULE]
    args += ["--nnodes", topology.nnodes, "--nproc-per-node", topology.processes]
    args += ["--node-rank", macros.replica_id, "--rank0-env", macros.rank0_env]
    args += ["--rdzv-backend", request.rdzv_backend, "--rdzv-port", str(request.rdzv_port), "--rdzv-id", macros.app_id]
    if request.rdzv_conf:
        args += ["--rdzv-conf", request.rdzv_conf]
    args += ["--max-restarts", str(request.max_retries), "--role", names.role, "--tee", str(request.tee), *flags]
    # The program is the first word that is no option.
    args += [request.script] if request.script is not None else ["-m", str(request.m)]
    return [*args, *request.script_args]


def _build_env(request: SimpleNamespace, given: GivenEnv, names: JobNames) -> dict[str, str]:
    env = dict(given.values)
    env["TORCHX_TRACKING_EXPERIMENT_NAME"] = names.experiment
    env["TORCHX_TRACKING_RUN_NAME"] = names.run
    env.setdefault("LOGLEVEL", os.getenv("LOGLEVEL", "WARNING"))
    if request.debug:
        env.update(DEBUG_ENV)
    return env


def _parse_metadata(given: EnvArgument) -> dict[str, str]:
    try:
        return dict(to_dict(given)) if isinstance(given, str) else dict(given or {})
    except ValueError as error:
        raise ComponentError(f"--metadata {given!r} is not KEY=VALUE,KEY=VALUE") from error


def _build_env_metadata(given: GivenEnv) -> dict[str, str]:
    return {RoleKey.SECRET_ENV: ",".join(given.taken)} if given.taken else {}


def _parse_mounts(mounts: Sequence[str] | None) -> list[Any]:
    if not mounts:
        return []
    try:
        return list(specs.parse_mounts(list(mounts)))
    except (KeyError, ValueError) as error:
        # Missing src or dst: only that word.
        problem = str(error.args[0])
        problem = f"{problem} is missing" if problem in {"src", "dst"} else problem
        example = "type=bind,src=/host,dst=/job,readonly"
        if "invalid mount type" in problem:
            example += "; a claim of Kubernetes, or a volume of Docker: type=volume,src=NAME,dst=/job"
        raise ComponentError(f"--mounts {','.join(mounts)!r}: {problem}; for example: {example}") from error
