"""Routes the workers' output to files and the console: what the supervisor uses."""

import errno
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from muster._shared.records import record
from muster.agent.config import LogConfig, Std
from muster.agent.errors import SpawnError
from muster.agent.logs.console import Console, Feed
from muster.agent.logs.files import RunFolder
from muster.agent.logs.lines import build_common_prefix, build_prefix, find_last_frame
from muster.agent.logs.opening import FileOpener, OnTrouble, WorkerFiles, raise_broken
from muster.agent.logs.routing import FolderLayout, Layout, WorkerStreams, shows_stderr
from muster.agent.round import Round
from muster.agent.runtime.loop import Loop, LoopThread, Timer

if TYPE_CHECKING:
    from muster._shared.job_view import JobStatus
    from muster.agent.logs.pump import PumpGroup, StreamPump

_TAIL_LINES = 20
_TAIL_LINE_CHARS = 500
_REST_LIMIT_S = 0.2
"""How long a read of a stream's tail may wait for the pump thread."""


class LogRouter:
    """Gives workers their pipes, and sends what they write to files and console. Close it.

    All methods are for the agent's one thread. Each round calls `open_round` and `run_when_open`; then for each worker
    `open_worker` and, once it was started (or could not be), `close_child_ends`; and when all have ended
    `finish_round`. One thread reads the pipes and writes the files, one opens files, and one writes the console. So
    nothing here waits long for a disk or a terminal.
    """

    def __init__(
        self,
        *,
        config: LogConfig,
        loop: Loop,
        run_id: str,
        role: str,
        nproc: int,
        console: Console | None = None,
    ) -> None:
        """Make the run's folder. If that fails, print one line and write no files.

        Args:
            config: the flags.
            loop: the agent's.
            run_id: names the run's folder.
            role: used in the prefix.
            nproc: workers on this node.
            console: closed by `close`; None means one on descriptors 1 and 2.

        Raises:
            UsageError: `--logs-specs` names no entry point, or one that cannot be used.
        """
        self._config = config
        self._loop = loop
        self._run_id = run_id
        self._role = role
        self._nproc = nproc
        self._console = console or Console(
            clock=loop.clock,
            has_colour=config.has_colour,
            marks_bars=config.marks_bars,
            merges_lines=config.merges_lines,
        )
        self._thread: LoopThread | None = None
        self._group: PumpGroup | None = None
        self._pumps: dict[tuple[int, Std], StreamPump] = {}
        self._feeds: dict[tuple[int, Std], Feed] = {}
        self._child_fds: dict[int, list[int]] = {}
        self._reported_incomplete = False
        self._is_muted = False
        self._closed = False
        self.status: JobStatus | None = None
        """The job's status when it was last looked at; None if it was not."""
        self._files = FileOpener(
            config,
            loop,
            self._choose_layout(),
            nproc=nproc,
            on_trouble=OnTrouble(report_no_files=self._report_no_files, report_incomplete=self.report_incomplete_logs),
        )

    @property
    def run_dir(self) -> str | None:
        """`<log_dir>/<run_id>`; None if there are no files."""
        return self._files.run_dir

    # -- a round ----------------------------------------------------------------------------------------------------

    def open_round(self, round: Round) -> None:  # noqa: A002
        """Make the attempt's folder, now that ranks are known.

        A round of the same attempt appends to the same files.
        """
        self._pumps, self._feeds = {}, {}
        self._console.begin_launch()
        if self._thread is not None and self._group is not None:
            # Its streams have ended, or the disk hung: its limit is not this round's.
            self._thread.submit(self._group.close)
            self._group = None
        self._files.open_round(round)

    def run_when_open(self, then: Callable[[], None]) -> None:
        """Call `then` when the round's files are open or cannot be, perhaps at once, and within a limit."""
        self._files.run_when_open(then)

    def open_worker(self, round: Round, local_rank: int) -> WorkerStreams:  # noqa: A002
        """Make one worker's pipes. The round is the one whose files are open.

        Raises:
            SpawnError: too many open files, or too many threads.
        """
        files = self._files.hand_out(local_rank)
        plan = files.route
        template = self._config.prefix_template
        source = _Source(
            local_rank=local_rank,
            global_rank=round.rank_offset + local_rank,
            prefix=build_prefix(role=self._role, local_rank=local_rank, round=round, template=template),
            name_ranks=lambda ranks: build_common_prefix(
                role=self._role, global_ranks=ranks, round=round, template=template
            ),
        )
        self._child_fds[local_rank] = []
        try:
            fds = {std: self._open_stream(source, std, files) for std in plan.streams}
        except (OSError, SpawnError) as error:
            self.close_child_ends(local_rank)
            self._files.take_back([file for std, file in files.logs.items() if (local_rank, std) not in self._pumps])
            if isinstance(error, SpawnError):
                raise
            raise SpawnError(f"cannot make pipes for local rank {local_rank}: {error.strerror}", error.errno) from error
        return WorkerStreams(
            stdout_fd=fds[Std.OUT],
            stderr_fd=fds[Std.ERR],
            error_file=plan.error_file,
            stack_file=plan.stack_file,
            stdout_log=plan.streams[Std.OUT].path,
            stderr_log=plan.streams[Std.ERR].path,
        )

    def close_child_ends(self, local_rank: int) -> None:
        """Close our copies of the worker's descriptors once it has started or failed to. Idempotent."""
        for fd in self._child_fds.pop(local_rank, ()):
            os.close(fd)

    def finish_round(self, on_finished: Callable[[], None], limit_s: float = 1.0) -> None:
        """Read the rest of the pipes after all workers have ended, close the files, then call back on the loop.

        This does not wait for the console.

        Args:
            on_finished: called once.
            limit_s: how long to read a pipe that another process still holds open.
        """
        for local_rank in list(self._child_fds):
            self.close_child_ends(local_rank)
        call_once = _Once(on_finished)
        thread, group = self._thread, self._group
        if thread is None or group is None:
            self._loop.call_soon(call_once)
            return
        thread.submit(lambda: group.finish(limit_s, lambda: thread.reply(call_once)))
        # A hanging disk must not stop the agent.
        call_once.timer = self._loop.call_later(limit_s + 1.0, call_once)

    # -- the run's folder -------------------------------------------------------------------------------------------

    @property
    def files(self) -> FileOpener:
        """Runs in its thread everything else that reads or writes the run's folder."""
        return self._files

    # -- captured output --------------------------------------------------------------------------------------------

    def read_stderr_tail(self, local_rank: int) -> tuple[str, ...]:
        """Return the last lines of the worker's stderr, oldest first, even after its end; empty if not captured."""
        lines = self.read_stderr_text(local_rank).rstrip("\n").split("\n")[-_TAIL_LINES:]
        return tuple(line[:_TAIL_LINE_CHARS] for line in lines) if lines != [""] else ()

    def read_stderr_text(self, local_rank: int) -> str:
        """Return the last 64 KiB or less of the worker's stderr, with progress bars reduced to their last state."""
        pump = self._pumps.get((local_rank, Std.ERR))
        if pump is None:
            return ""
        if self._thread is not None:
            self._thread.run(pump.read_rest, _REST_LIMIT_S)
        return b"\n".join(find_last_frame(line) for line in pump.tail.split(b"\n")).decode("utf-8", "replace")

    def find_stderr_prefix(self, local_rank: int, of: Round) -> str | None:
        """Return the prefix of a worker's stderr on the console, "" for none; None if the console does not have it.

        Args:
            local_rank: the worker's rank on its node.
            of: the round as its node sees it, which may be another node.
        """
        has_prefix = shows_stderr(self._config, local_rank, has_files=self.run_dir is not None)
        if not has_prefix:
            return None if has_prefix is None else ""
        template = self._config.prefix_template
        prefix = build_prefix(role=self._role, local_rank=local_rank, round=of, template=template)
        return prefix.decode("utf-8", "replace").rstrip(": ")

    def find_merged_prefix(self, local_rank: int) -> str | None:
        """Return the prefix of the worker's last traceback on the console, if others have written the same."""
        feed = self._feeds.get((local_rank, Std.ERR))
        prefix = feed.merged_traceback if feed is not None else b""
        return prefix.decode("utf-8", "replace").rstrip(": ") or None

    def count_captured_bytes(self, local_rank: int) -> int:
        """Return how many bytes of the worker's output were captured in this round."""
        return sum(pump.bytes_seen for (rank, _), pump in self._pumps.items() if rank == local_rank)

    def read_last_line(self, local_rank: int) -> bytes:
        """Return the end of the worker's last output, unchanged; empty if its output is not captured."""
        pumps = [pump for (rank, _), pump in self._pumps.items() if rank == local_rank and pump.end]
        end = max(pumps, key=lambda pump: pump.read_s).end if pumps else b""
        return find_last_frame(end.rstrip().rpartition(b"\n")[2])

    # -- the agent's own output -------------------------------------------------------------------------------------

    def print_line(self, line: str) -> None:
        """Print a line of the agent on standard error, with its prefix; never within a worker's line.

        Any thread may call this, also after the loop's last turn.
        """
        self._console.print_line(line)

    def print_notice(self, line: str) -> None:
        """Print a line about a part of the agent, unless this node is leaving, when the line explains nothing."""
        if not self._is_muted:
            self.print_line(line)

    def mute_notices(self) -> None:
        """Print no notices from now on, because the node leaves."""
        self._is_muted = True

    def report_incomplete_logs(self, line: str) -> None:
        """Print once that log files will be incomplete, because a full disk affects all. Any thread may call it.

        Args:
            line: which file cannot be written, and why.
        """
        if not self._reported_incomplete:
            self._reported_incomplete = True
            self.print_line(f"{line}; the job goes on, but log files are incomplete")

    def print_text(self, text: str) -> None:
        """Print a text of the agent (the report) unchanged and in one piece."""
        self._console.print_text(text)

    def show_status(self, status: "JobStatus") -> None:
        """Keep the status for the summary; on a terminal, show it in the last row."""
        self.status = status
        if self._config.shows_status:
            from muster._shared.console.summary import format_status_line

            self._console.show_status(format_status_line(status))

    def hide_status(self) -> None:
        """Show no last row any more, because the job has ended."""
        if self._config.shows_status:
            self._console.show_status("")

    def wait_for_output(self, cap_s: float) -> None:
        """Wait, within this limit, until the workers' lines on the console precede what is printed next."""
        self._console.wait_for_output(cap_s)

    def hold_console(self) -> None:
        """Print nothing more until `release_console`. Log files still get everything."""
        self._console.hold()

    @property
    def is_console_held(self) -> bool:
        """Whether everything that came before `hold_console` is printed."""
        return self._console.is_held

    def release_console(self) -> None:
        """Print again. Idempotent."""
        self._console.release()

    @property
    def has_colour(self) -> bool:
        """Whether `print_text` may get colours."""
        return self._console.has_colour(Std.ERR)

    def close(self, limit_s: float = 2.0, notice_s: float = 1.0) -> None:
        """Write out everything and release everything. Idempotent.

        Args:
            limit_s: for log files that hang.
            notice_s: see `Console.close`.
        """
        thread, group = self._thread, self._group
        self._thread = None
        for local_rank in list(self._child_fds):
            self.close_child_ends(local_rank)
        if thread is not None:
            if group is not None:
                thread.submit(group.close)
            if not thread.close(limit_s):
                self.print_line("writing to a log file hangs: it may lack the end of the output")
        if not self._closed and not self._files.close(limit_s):
            self.print_line("the disk with the log files hangs: their last records may be missing")
        self._closed = True
        self._console.close(notice_s=notice_s)

    # -- files, pipes and the thread --------------------------------------------------------------------------------

    def _choose_layout(self) -> Callable[[], Layout]:
        """Return what makes the layout.

        A plug-in is loaded here, because its import may take any time and touches no log file.
        """
        if self._config.logs_specs is None:
            return self._make_layout
        from muster.agent.logs.torch_logs_specs import TorchLayout

        try:
            layout = TorchLayout(self._config, run_id=self._run_id, role=self._role)
        except OSError as error:
            failure = error
            return lambda: _raise_error(failure)
        return lambda: layout

    def _make_layout(self) -> Layout:
        """Make the layout; called in the thread for files.

        Raises:
            OSError: the run's folder cannot be made.
        """
        if self._config.base_dir == os.devnull:
            return FolderLayout(self._config, None)
        folder = RunFolder(self._config.base_dir, self._run_id, links_latest=self._config.links_latest)
        if folder.base_owner is not None:
            self.print_line(f"user {folder.base_owner} can replace logs and checkpoint.json in {folder.run_dir}")
        return FolderLayout(self._config, folder)

    def _report_no_files(self, error: OSError) -> None:
        where = error.filename or self._config.base_dir
        self.print_line(f"no log files, console only: cannot write to {where}: {error.strerror}")

    def _open_stream(self, source: "_Source", std: Std, files: WorkerFiles) -> int | None:
        plan = files.route.streams[std]
        child_fds = self._child_fds[source.local_rank]
        if plan.discarded:
            child_fds.append(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC))
            return child_fds[-1]
        if not plan.captured:
            return None
        from muster.agent.logs.pump import open_pipe

        self._start_thread()  # first, so that no pipe leaks
        read_fd, write_fd = open_pipe()
        child_fds.append(write_fd)
        self._start_pump(source, std, files, read_fd)
        return write_fd

    def _start_pump(self, source: "_Source", std: Std, files: WorkerFiles, read_fd: int) -> None:
        from muster.agent.logs.pump import LineFilter, StreamPump

        plan = files.route.streams[std]
        thread, group = self._start_thread()
        shown = self._config.local_ranks_filter is None or source.local_rank in self._config.local_ranks_filter
        file = files.logs.get(std)
        lost = plan.path is not None and file is None
        filtered, config = files.filtered.get(std), self._config
        needles = config.duplicate_stdout_filters if std is Std.OUT else config.duplicate_stderr_filters

        def open_feed() -> Feed:
            feed = self._console.open_feed(std, source.prefix, source.global_rank, source.name_ranks)
            self._feeds[source.local_rank, std] = feed
            return feed

        pump = StreamPump(
            loop=thread.loop,
            read_fd=read_fd,
            file=file,
            feed=open_feed() if plan.to_console or (lost and shown) else None,
            open_fallback_feed=lambda: open_feed() if shown else None,
            line_filter=None if filtered is None else LineFilter(prefix=source.prefix, needles=needles, file=filtered),
            keeps_tail=std is Std.ERR,
            on_end=group.remove,
        )
        self._pumps[source.local_rank, std] = pump
        thread.submit(lambda: group.add(pump))

    def _start_thread(self) -> "tuple[LoopThread, PumpGroup]":
        if self._thread is None:
            try:
                self._thread = LoopThread(self._loop, "muster-logs", on_failure=raise_broken)
            except RuntimeError as error:  # `threading`'s EAGAIN
                shortage = os.strerror(errno.EAGAIN)
                raise SpawnError(f"cannot start a thread for the workers' output: {shortage}", errno.EAGAIN) from error
        if self._group is None:
            from muster.agent.logs.pump import PumpGroup

            self._group = PumpGroup(self._thread.loop)
        return self._thread, self._group


def _raise_error(error: OSError) -> NoReturn:
    raise error


@record
class _Source:
    """The worker whose output a stream carries."""

    local_rank: int
    global_rank: int
    prefix: bytes
    """The prefix of its lines on the console."""
    name_ranks: Callable[[Sequence[int]], bytes]
    """Builds the prefix of lines that several global ranks of this node have written alike."""


class _Once:
    """Calls the callback only the first time."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback: Callable[[], None] | None = callback
        self.timer: Timer | None = None

    def __call__(self) -> None:
        callback, self._callback = self._callback, None
        if self.timer is not None:
            self.timer.cancel()
        if callback is not None:
            callback()
