"""Builds the AppDef of a distributed PyTorch job: one role, each of whose replicas runs the agent. No shell."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from torchx import specs
from torchx.specs import macros
from torchx.util.types import to_dict

from muster._shared.contract import (
    AGENT_MODULE,
    LISTEN_ADDRESS,
    RDZV_BACKENDS,
    RDZV_CONF_KEYS,
    RDZV_CONF_SECONDS,
    RDZV_CONF_WITHOUT_EFFECT,
    SNAPSHOT_MEMORY,
    RoleKey,
    parse_listen_address,
    parse_seconds,
    parse_snapshot_memory,
)
from muster._shared.verdicts.policy import PolicyError, parse_policy
from muster.components.environment import EnvArgument, GivenEnv, parse_env
from muster.components.errors import ComponentError
from muster.components.names import JobNames, parse_names
from muster.components.resources import ResourceRequest
from muster.components.topology import Bare, Topology, parse_topology

DEBUG_ENV: Final = {
    "CUDA_LAUNCH_BLOCKING": "1",
    "NCCL_DESYNC_DEBUG": "1",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "TORCH_SHOW_CPP_STACKTRACES": "1",
}
"""What `debug` sets. Source: torchx/components/dist.py, the same four on both lines."""

_STARTS: Final = ("auto", "warm", "cold")
_COLLAPSES: Final = ("auto", "on", "off")
_PREFLIGHTS: Final = ("quick", "full", "off")
_HANG_ACTIONS = ("report", "restart", "stop")
_RANK_ORDERS = ("node", "segment")
_TEES: Final = (0, 1, 2, 3)
_PORT_LIMIT: Final = 65535


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """A component's arguments, as the caller gave them."""

    script_args: Sequence[str]
    script: str | None
    module: str | None
    image: str
    name: str
    resources: ResourceRequest
    j: str
    bare: Bare
    """What a number alone means in `j`."""
    env: EnvArgument
    metadata: EnvArgument
    max_retries: int
    mounts: Sequence[str] | None
    debug: bool
    start: str
    preload: str
    hang_timeout: str
    """A number of seconds, or auto, the agent's default. 0: off."""
    hang_action: str | None
    """None: the agent's default."""
    collapse_lines: str
    """auto (the agent's default), on or off."""
    notify: str | None = None
    metrics_port: str | None = None
    """[ADDRESS:]PORT. None: no metrics are served."""
    tracker_run: bool = False
    preflight: str = "quick"
    snapshot_memory: str | None = None
    """The agent's default counts if this, or the next one, is None."""
    snapshot_copies: int | None = None
    rank_order: str | None = None
    on: str | None = None
    """Rules of `_shared.verdicts.policy`."""
    rdzv_port: int = 29500
    rdzv_backend: str = "c10d"
    rdzv_conf: str | None = None
    tee: int = 3
    env_file: str | None = None


def build_application(request: JobRequest) -> Any:
    """Return the `torchx.specs.AppDef` of a job.

    It is pure except for the default of LOGLEVEL, and mutates no argument.

    Raises:
        ComponentError: an argument is wrong.
    """
    _check(request)
    names = parse_names(request.name, script=request.script, module=request.module)
    topology = parse_topology(request.j, bare=request.bare, host=request.resources.find_host())
    if request.rdzv_port == 0 and topology.max_nodes > 1:
        raise ComponentError("--rdzv_port 0 works on one node only; give a port from 1 to 65535")
    env = parse_env(request.env, request.env_file, os.environ)
    role = specs.Role(
        name=names.role,
        image=request.image,
        min_replicas=topology.min_nodes,
        num_replicas=topology.max_nodes,
        entrypoint="python3",
        args=_build_args(request, names, topology),
        env=_build_env(request, env, names),
        resource=request.resources.build_resource(),
        port_map={"c10d": request.rdzv_port},
        max_retries=request.max_retries,
        retry_policy=specs.RetryPolicy.REPLICA,
        mounts=_parse_mounts(request.mounts),
        metadata={**request.resources.build_role_metadata(topology), **_build_env_metadata(env)},
    )
    return specs.AppDef(name=names.run, roles=[role], metadata=_parse_metadata(request.metadata))


def _check(request: JobRequest) -> None:
    if request.max_retries < 0:
        raise ComponentError(f"--max_retries {request.max_retries} is negative; 0 means none")
    if request.tee not in _TEES:
        raise ComponentError(f"--tee {request.tee} is not one of 0 (none), 1 (stdout), 2 (stderr), 3 (both)")
    if not 0 <= request.rdzv_port <= _PORT_LIMIT:
        raise ComponentError(f"--rdzv_port {request.rdzv_port} is not a port from 1 to {_PORT_LIMIT}")
    if request.start not in _STARTS:
        raise ComponentError(f"--start {request.start!r} is not one of {', '.join(_STARTS)}")
    if request.collapse_lines not in _COLLAPSES:
        raise ComponentError(f"--collapse_lines {request.collapse_lines!r} is not one of {', '.join(_COLLAPSES)}")
    if request.preflight not in _PREFLIGHTS:
        raise ComponentError(f"--preflight {request.preflight!r} is not one of {', '.join(_PREFLIGHTS)}")
    if request.rank_order not in (None, *_RANK_ORDERS):
        raise ComponentError(f"--rank_order {request.rank_order!r} is not one of {', '.join(_RANK_ORDERS)}")
    _check_snapshots(request)
    _check_hang(request)
    _check_notify(request)
    _check_metrics_port(request)
    _check_policy(request)
    _check_rdzv_conf(request)


def _check_snapshots(request: JobRequest) -> None:
    memory, copies = request.snapshot_memory, request.snapshot_copies
    if memory is not None and parse_snapshot_memory(str(memory)) is None:
        raise ComponentError(f"--snapshot_memory {memory!r}: must be {SNAPSHOT_MEMORY}")
    if copies not in (None, 0, 1):
        raise ComponentError(f"--snapshot_copies {copies} is not one of 0 (none), 1")


def _check_hang(request: JobRequest) -> None:
    timeout, action = str(request.hang_timeout), request.hang_action
    if timeout != "auto":
        seconds = parse_seconds(timeout)
        if seconds is None:
            raise ComponentError(
                f"--hang_timeout {timeout} is neither auto nor a number of seconds, 0 or more; 0 means never"
            )
        if seconds == 0 and action is not None:
            raise ComponentError(f"--hang_action {action} has no effect with --hang_timeout 0, which means never")
    if action not in (None, *_HANG_ACTIONS):
        raise ComponentError(f"--hang_action {action!r} is not one of {', '.join(_HANG_ACTIONS)}")


def _check_policy(request: JobRequest) -> None:
    """Check the rules as the agent does, so that a wrong one needs no submission."""
    if request.on is None:
        return
    try:
        parse_policy(request.on)
    except PolicyError as error:
        raise ComponentError(f"--on {error}") from error


def _check_notify(request: JobRequest) -> None:
    """Check the command's words. Only the nodes know whether the program exists."""
    if request.notify is None:
        return
    try:
        words = shlex.split(request.notify)
    except ValueError as error:
        raise ComponentError(f"--notify {request.notify!r}: {str(error).lower()}") from error
    if not words:
        raise ComponentError("--notify is empty; give a command, or leave it out")


def _check_metrics_port(request: JobRequest) -> None:
    """Check the address as text. Only the nodes know whether the port is free there."""
    if request.metrics_port is not None and parse_listen_address(str(request.metrics_port)) is None:
        raise ComponentError(f"--metrics_port {request.metrics_port!r} is not {LISTEN_ADDRESS}")


def _check_rdzv_conf(request: JobRequest) -> None:
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


def _build_args(request: JobRequest, names: JobNames, topology: Topology) -> list[str]:
    args = ["-m", AGENT_MODULE]
    args += ["--nnodes", topology.nnodes, "--nproc-per-node", topology.processes]
    args += ["--node-rank", macros.replica_id, "--rank0-env", macros.rank0_env]
    args += ["--rdzv-backend", request.rdzv_backend, "--rdzv-port", str(request.rdzv_port), "--rdzv-id", macros.app_id]
    if request.rdzv_conf:
        args += ["--rdzv-conf", request.rdzv_conf]
    args += ["--max-restarts", str(request.max_retries), "--role", names.role, "--tee", str(request.tee)]
    args += ["--start", request.start, "--preload", request.preload]
    timeout = str(request.hang_timeout)
    if timeout != "auto":
        args += ["--hang-timeout", f"{float(timeout):g}"]
    if request.hang_action is not None:
        args += ["--hang-action", request.hang_action]
    if request.collapse_lines != "auto":
        args += ["--collapse-lines", request.collapse_lines]
    if request.preflight != "quick":
        args += ["--preflight", request.preflight]
    args += _build_snapshot_args(request)
    gpus = int(request.resources.build_resource().gpu)
    if gpus > 0 and request.preflight != "off":
        args += ["--devices", str(gpus)]
    if request.notify is not None:
        args += [f"--notify={request.notify}"]
    if request.metrics_port is not None:
        args += ["--metrics-port", str(request.metrics_port)]
    if request.tracker_run:
        args += ["--tracker-run"]
    if request.rank_order is not None:
        args += ["--rank-order", request.rank_order]
    if request.on is not None:
        args += [f"--on={request.on}"]
    # The program is the first word that is no option.
    args += [request.script] if request.script is not None else ["-m", str(request.module)]
    return [*args, *request.script_args]


def _build_snapshot_args(request: JobRequest) -> list[str]:
    memory, copies = request.snapshot_memory, request.snapshot_copies
    args = [] if memory is None else ["--snapshot-memory", str(memory)]
    return args if copies is None else [*args, "--snapshot-copies", str(copies)]


def _build_env(request: JobRequest, given: GivenEnv, names: JobNames) -> dict[str, str]:
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
