"""`--logs-specs`: a torch plug-in (`torchrun.logs_specs` entry points) decides where logs go.

Importing torch costs the agent about a second and 200 MB, but only with this flag.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from muster.agent.config import LogConfig, Std, StdChoice
from muster.agent.errors import InternalError, UsageError
from muster.agent.logs.files import STACKS
from muster.agent.logs.routing import DISCARDED, INHERITED, StreamRoute, WorkerRoute
from muster.agent.round import Round

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
    from torch.distributed.elastic.multiprocessing import Std as TorchStd

_GROUP = "torchrun.logs_specs"


class TorchLayout:
    """Calls the plug-in once per attempt, because torch's own empties the attempt's folder at each call."""

    def __init__(self, config: LogConfig, *, run_id: str, role: str) -> None:
        """Load and construct the plug-in.

        Raises:
            UsageError: there is no such entry point, or torch is not installed.
        """
        self._config = config
        self._run_id = run_id
        self._role = role
        self._specs = _construct_specs(config)
        self._attempt: int | None = None
        self._dest: LogsDest | None = None
        root = self._specs.root_log_dir
        self.run_dir: str | None = None if root in (None, "None", os.devnull) else str(root)

    def open_round(self, round: Round, nproc: int) -> None:  # noqa: A002
        """See `routing.Layout`."""
        if self._attempt != round.attempt:
            envs = {rank: build_env(round, rank, nproc, run_id=self._run_id, role=self._role) for rank in range(nproc)}
            self._dest = self._specs.reify(envs)
            self._attempt = round.attempt

    def route_worker(self, local_rank: int) -> WorkerRoute:
        """See `routing.Layout`."""
        dest = self._dest
        if dest is None:
            raise InternalError("route_worker came before open_round")
        error_file = dest.error_files.get(local_rank) or None
        if error_file == os.devnull:
            error_file = None
        return WorkerRoute(
            streams={
                Std.OUT: self._route_stream(dest.stdouts, dest.tee_stdouts, dest.filtered_stdout, Std.OUT, local_rank),
                Std.ERR: self._route_stream(dest.stderrs, dest.tee_stderrs, dest.filtered_stderr, Std.ERR, local_rank),
            },
            error_file=error_file,
            stack_file=os.path.join(os.path.dirname(error_file), STACKS) if error_file else None,
        )

    def _route_stream(
        self, files: dict[int, str], teed: dict[int, str], filtered: str, std: Std, local_rank: int
    ) -> StreamRoute:
        path = files.get(local_rank, "")
        if not path:
            return INHERITED
        if path == os.devnull:
            return DISCARDED
        config = self._config
        filters = config.duplicate_stdout_filters if std is Std.OUT else config.duplicate_stderr_filters
        shown = local_rank in teed
        return StreamRoute(
            captured=True,
            path=path,
            to_console=shown,
            filtered_path=filtered if filters and shown and filtered else None,
        )

    def close(self) -> None:
        """See `routing.Layout`. The plug-in owns its folders."""


def build_env(round: Round, local_rank: int, nproc: int, *, run_id: str, role: str) -> dict[str, str]:  # noqa: A002
    """Build the variables that a plug-in may need about a worker: torchrun's for ranks and run."""
    return {
        "RANK": str(round.rank_offset + local_rank),
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(round.group_rank),
        "ROLE_RANK": str(round.role_rank_offset + local_rank),
        "ROLE_NAME": role,
        "LOCAL_WORLD_SIZE": str(nproc),
        "WORLD_SIZE": str(round.world_size),
        "GROUP_WORLD_SIZE": str(round.group_world_size),
        "ROLE_WORLD_SIZE": str(round.role_world_size),
        "MASTER_ADDR": round.master_addr,
        "MASTER_PORT": str(round.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(round.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(round.attempt + round.restarts_left),
        "TORCHELASTIC_RUN_ID": run_id,
    }


def _construct_specs(config: LogConfig) -> "LogsSpecs":
    from muster._shared.programs import find_entry_points

    found = find_entry_points(_GROUP)
    point = found.get(config.logs_specs or "")
    if point is None:
        known = ", ".join(sorted(found)) or "none is installed"
        raise UsageError(f"--logs-specs: no {config.logs_specs!r} among the {_GROUP} entry points ({known})")
    try:
        make: Callable[..., LogsSpecs] = point.load()
        specs = make(
            log_dir=config.base_dir,
            redirects=_convert_choice(config.redirects),
            tee=_convert_choice(config.tee),
            local_ranks_filter=set(config.local_ranks_filter) if config.local_ranks_filter is not None else None,
        )
    except (ImportError, AttributeError, TypeError) as error:
        raise UsageError(f"--logs-specs {config.logs_specs}: {type(error).__name__}: {error}") from error
    return specs


def _convert_choice(choice: StdChoice) -> "TorchStd | dict[int, TorchStd]":
    from torch.distributed.elastic.multiprocessing import Std as TorchStd

    if not choice.by_rank:
        return TorchStd(int(choice.default))
    return {rank: TorchStd(int(std)) for rank, std in choice.by_rank.items()}
