"""Decides where each of a worker's two streams goes, from the flags alone. Pure."""

from typing import Protocol

from muster._shared.contract import LogNames
from muster._shared.records import record
from muster.agent.config import LogConfig, Std
from muster.agent.logs.files import STACKS, RunFolder, build_filtered_path, build_log_path, build_rank_dir
from muster.agent.round import Round


@record
class StreamRoute:
    """Where one stream of one worker goes."""

    captured: bool
    """Whether the agent reads the stream through a pipe. If False, it is inherited or discarded."""
    path: str | None = None
    """The log file."""
    to_console: bool = False
    discarded: bool = False
    """Whether the worker gets /dev/null."""
    filtered_path: str | None = None
    """A second file, for lines that match one of `--duplicate-*-filters`."""


INHERITED = StreamRoute(captured=False)
DISCARDED = StreamRoute(captured=False, discarded=True)


@record
class WorkerRoute:
    """One worker's streams and files."""

    streams: dict[Std, StreamRoute]
    """Keys Std.OUT and Std.ERR."""
    error_file: str | None
    stack_file: str | None


@record
class WorkerStreams:
    """The streams with which a worker is started.

    The router closes the descriptors, see `LogRouter.close_child_ends`.
    """

    stdout_fd: int | None
    """Write end for the worker's descriptor 1; None means the agent's own."""
    stderr_fd: int | None
    error_file: str | None
    stack_file: str | None
    stdout_log: str | None
    stderr_log: str | None


class Layout(Protocol):
    """Decides where a round's output goes: our `FolderLayout`, or one of torch's logs specs."""

    run_dir: str | None
    """Folder of the run; None if there are no files."""

    def open_round(self, round: Round, nproc: int) -> None:  # noqa: A002
        """Make the folders that the round needs.

        Raises:
            OSError: a folder cannot be made.
        """
        ...

    def route_worker(self, local_rank: int) -> WorkerRoute:
        """Decide the route of one worker of the open round."""
        ...

    def close(self) -> None:
        """Release what was claimed. Idempotent."""
        ...


class FolderLayout:
    """`<log_dir>/<run_id>/attempt_<n>/<local_rank>/`, or no files at all."""

    def __init__(self, config: LogConfig, folder: RunFolder | None) -> None:
        self._config = config
        self._folder = folder
        self._attempt_dir: str | None = None
        self.run_dir = folder.run_dir if folder else None

    def open_round(self, round: Round, nproc: int) -> None:  # noqa: A002
        """See `Layout`."""
        self._attempt_dir = None
        if self._folder is not None:
            self._attempt_dir = self._folder.open_attempt(round, nproc)

    def route_worker(self, local_rank: int) -> WorkerRoute:
        """See `Layout`."""
        streams = {std: route_stream(self._config, std, local_rank, self._attempt_dir) for std in (Std.OUT, Std.ERR)}
        if self._attempt_dir is None:
            return WorkerRoute(streams=streams, error_file=None, stack_file=None)
        rank_dir = build_rank_dir(self._attempt_dir, local_rank)
        return WorkerRoute(
            streams=streams, error_file=f"{rank_dir}/{LogNames.ERROR}", stack_file=f"{rank_dir}/{STACKS}"
        )

    def close(self) -> None:
        """See `Layout`."""
        if self._folder is not None:
            self._folder.close()


def shows_stderr(config: LogConfig, local_rank: int, *, has_files: bool) -> bool | None:
    """Return whether a rank's stderr is on the console: True with a prefix, False without one, None if it is not there.

    Args:
        config: the flags.
        local_rank: the rank on its node.
        has_files: whether there are log files.
    """
    if config.logs_specs is not None:
        return None  # only the plug-in knows
    route = route_stream(config, Std.ERR, local_rank, "" if has_files else None)
    if route.captured:
        return True if route.to_console else None
    return None if route.discarded else False


def route_stream(config: LogConfig, std: Std, local_rank: int, attempt_dir: str | None) -> StreamRoute:
    """Decide one stream as torchrun does.

    `--local-ranks-filter` applies only to the console: a filtered rank's file is still written. A filtered rank without
    redirection prints nothing, but its stderr is still read, because a report shows its last lines.

    Args:
        config: the flags.
        std: Std.OUT or Std.ERR.
        local_rank: the worker's rank on this node.
        attempt_dir: the attempt's folder. None means that there are no files, and what would go to one goes to the
            console.
    """
    redirected = bool(config.redirects.of(local_rank) & std)
    teed = bool(config.tee.of(local_rank) & std)
    shown = config.local_ranks_filter is None or local_rank in config.local_ranks_filter
    if not redirected and not teed:
        if shown:
            return StreamRoute(captured=True, to_console=True) if config.shows_prefixed else INHERITED
        return StreamRoute(captured=True) if std is Std.ERR else DISCARDED
    if attempt_dir is None:
        return StreamRoute(captured=True, to_console=shown)
    filters = config.duplicate_stdout_filters if std is Std.OUT else config.duplicate_stderr_filters
    return StreamRoute(
        captured=True,
        path=build_log_path(attempt_dir, local_rank, std),
        to_console=shown and teed,
        filtered_path=build_filtered_path(attempt_dir, std) if filters and shown and teed else None,
    )
