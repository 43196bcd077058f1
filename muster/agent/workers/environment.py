"""Builds a worker's environment, which is torchrun's, from one round and one local rank. Pure.

Source: torch/distributed/elastic/agent/server/local_elastic_agent.py (`_start_workers`, `_set_local_rank_env`) and
torch/distributed/launcher/api.py of torch 2.13, compared name by name in tests/conformance.
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from muster._shared.contract import DEFAULT_RUN_ID, Env
from muster._shared.records import replace
from muster.agent.config import AgentConfig
from muster.agent.errors import UsageError
from muster.agent.workers.spec import Program, ProgramKind

if TYPE_CHECKING:  # imported before the template
    from muster.agent.round import Round


def build_worker_env(config: AgentConfig, round: "Round", local_rank: int, *, error_file: str | None) -> dict[str, str]:  # noqa: A002
    """Build the whole environment of one worker.

    Args:
        config: the agent's; `base_env` is what the worker inherits.
        round: the round the worker takes part in.
        local_rank: 0 to nproc - 1.
        error_file: where the worker writes its error.json. None means that there is no folder for it (`--log-dir
            /dev/null`): the variable is then empty, as torchrun leaves it.

    Raises:
        UsageError: with --virtual-local-rank, a variable names fewer devices than there are workers.
    """
    env = build_common_env(config)
    env.update(
        RANK=str(round.rank_offset + local_rank),
        LOCAL_RANK=str(local_rank),
        GROUP_RANK=str(round.group_rank),
        ROLE_RANK=str(round.role_rank_offset + local_rank),
        ROLE_NAME=config.role,
        WORLD_SIZE=str(round.world_size),
        LOCAL_WORLD_SIZE=str(config.nproc),
        GROUP_WORLD_SIZE=str(round.group_world_size),
        ROLE_WORLD_SIZE=str(round.role_world_size),
        MASTER_ADDR=round.master_addr,
        MASTER_PORT=str(round.master_port),
        TORCHELASTIC_RESTART_COUNT=str(round.attempt),
        TORCHELASTIC_MAX_RESTARTS=str(config.max_restarts),
        TORCHELASTIC_RUN_ID=config.rendezvous.run_id,
        TORCHELASTIC_USE_AGENT_STORE=str(round.use_agent_store),
        TORCHELASTIC_SIGNALS_TO_HANDLE=",".join(config.signals_to_handle),
        TORCHELASTIC_ERROR_FILE=error_file or "",
    )
    if round.checkpoint is not None:
        env[Env.RESUME_PATH] = round.checkpoint.path
        env[Env.RESUME_STEP] = str(round.checkpoint.step)
    env[Env.WATCHED] = "0" if config.hang_timeout_s is None else "1"
    env.update(_build_run_names(config, round))
    if config.control_fd is not None:
        env[Env.ROUND] = str(round.number)
    if config.program.kind is ProgramKind.COMMAND:
        # For Python below a command. An empty entry would mean the working directory.
        env |= _join_paths(env.get("PYTHONPATH"), _find_bundle(), _find_torch_backend())
    if config.virtual_local_rank:
        env["LOCAL_RANK"] = "0"
        env |= build_device_env(config.base_env, local_rank)
    return env


def _build_run_names(config: AgentConfig, round: "Round") -> dict[str, str]:  # noqa: A002
    """Return the variables by which scripts and traces know the job after a restart."""
    run_id = config.rendezvous.run_id
    names = {} if run_id == DEFAULT_RUN_ID else {Env.JOB_ID: run_id, Env.ATTEMPT_ID: f"{run_id}-{round.attempt}"}
    if config.trace_parent:
        from muster.agent.workers import run_names

        names |= run_names.build_trace_env(config.trace_parent, round.number)
    return names


def _find_bundle() -> str | None:
    """Return the bundle that this agent runs from, or the folder where it is unpacked; both hold `muster.worker`.

    None means that the agent runs from an installed package.
    """
    archive: str | None = getattr(globals().get("__loader__"), "archive", None)
    if archive is not None:
        return os.path.abspath(archive)
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return os.path.dirname(package) if os.path.exists(f"{package}/_bundled.py") else None


def _find_torch_backend() -> str | None:
    """Return the folder that names `workers.program`'s hook to torch.

    Return None in a zip, where torch would not find it.
    """
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "torch_backend")
    return folder if os.path.isdir(folder) else None


def _join_paths(*paths: str | None) -> dict[str, str]:
    """Join paths with `PYTHONPATH`, if there is any."""
    known = [path for path in paths if path]
    return {"PYTHONPATH": os.pathsep.join(known)} if known else {}


def build_common_env(config: AgentConfig) -> dict[str, str]:
    """Build what all workers' environments have in common, for any round and rank. The warm template gets it too."""
    env = dict(config.base_env)
    if config.omp_num_threads is not None:
        env.setdefault("OMP_NUM_THREADS", str(config.omp_num_threads))
    # torch's default. With torchrun's 1, NCCL ends communicators first and writes no dumps.
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    env.setdefault("PYTHONBREAKPOINT", "muster.worker.breakpoint")
    return env


def build_device_env(env: Mapping[str, str], local_rank: int) -> dict[str, str]:
    """Choose the one device that a worker sees with --virtual-local-rank.

    ROCm reads HIP_VISIBLE_DEVICES first, if it is not empty, so its devices are then divided, and both variables set.

    Raises:
        UsageError: the inherited variable names no device for this rank.
    """
    names = ["HIP_VISIBLE_DEVICES"] * bool(env.get("HIP_VISIBLE_DEVICES")) + ["CUDA_VISIBLE_DEVICES"]
    visible = env.get(names[0])
    if visible is None:
        return dict.fromkeys(names, str(local_rank))
    devices = [name.strip() for name in visible.split(",") if name.strip()]
    if local_rank >= len(devices):
        raise UsageError(
            f"--virtual-local-rank gives every worker its own device: {names[0]}={visible!r} names "
            f"{len(devices)}, too few for local rank {local_rank}"
        )
    return dict.fromkeys(names, devices[local_rank])


def substitute_macros(program: Program, local_rank: int) -> Program:
    """Substitute `${local_rank}` by the rules of `string.Template` (`$$` is a dollar), as torchrun does.

    As with torchrun, the executable of `--no-python` stays unchanged.
    """
    args = tuple(_substitute(arg, local_rank) for arg in program.args)
    if program.kind is ProgramKind.COMMAND:
        return replace(program, args=args)
    return replace(program, target=_substitute(program.target, local_rank), args=args)


def _substitute(text: str, local_rank: int) -> str:
    if "$" not in text:
        return text
    from string import Template

    return Template(text).safe_substitute(local_rank=local_rank)
