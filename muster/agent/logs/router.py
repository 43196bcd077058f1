"""Where the workers' output goes: the agent's side of it."""

import contextlib
import errno
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from muster.agent.config import LogConfig, Std
from muster.agent.errors import InternalError, SpawnError
from muster.agent.logs.console import Console
from muster.agent.logs.files import LogFile, RunFolder
from muster.agent.logs.lines import build_prefix, last_frame
from muster.agent.logs.pump import PumpGroup, StreamPump, open_pipe
from muster.agent.logs.pump_thread import PumpThread
from muster.agent.logs.routing import FolderLayout, Layout, StreamRoute, WorkerStreams
from muster.agent.round import Round
from muster.agent.runtime.loop import Loop, Timer

if TYPE_CHECKING:  # only with filters
    from muster.agent.logs.line_filter import LineFilter

_TAIL_LINES = 20
_TAIL_LINE_CHARS = 500
_LOOK_S = 0.2
"""How long a question about a stream may wait for the pump thread."""


class LogRouter:
    """Gives workers their pipes, and takes what comes out to files and console. Close it.

    All methods are for the agent's one thread. In each round: `open_round`, per worker `open_worker` and, once it was
    started (or could not be), `close_child_ends`; when all are gone `finish_round`. Pipes are emptied and files
    written by a thread of their own, the console by another: nothing here waits for a disk or a terminal.
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
        """Make the run's folder; when that fails, say so in one line and do without files.

        Args:
            config: the flags.
            loop: the agent's.
            run_id: names the run's folder.
            role: stands in the prefix.
            nproc: workers on this node.
            console: closed by `close`; None: one on descriptors 1 and 2.

        Raises:
            UsageError: `--logs-specs` names nothing, or something that cannot be used.
        """
        self._config = config
        self._loop = loop
        self._run_id = run_id
        self._role = role
        self._nproc = nproc
        self._console = console or Console(clock=loop.clock)
        self._thread: PumpThread | None = None
        self._group: PumpGroup | None = None
        self._round: Round | None = None
        self._pumps: dict[tuple[int, Std], StreamPump] = {}
        self._child_fds: dict[int, list[int]] = {}
        self._filtered: dict[str, LogFile] = {}
        self._told_trouble = False
        self._layout = self._make_layout()

    @property
    def run_dir(self) -> str | None:
        """`<log_dir>/<run_id>`; None when there are no files."""
        return self._layout.run_dir

    # -- a round ----------------------------------------------------------------------------------------------------

    def open_round(self, round: Round) -> None:  # noqa: A002
        """The ranks are known: make the attempt's folder. The same attempt again appends to the same files."""
        if self._round is None or self._round.attempt != round.attempt:
            self._close_filtered()
        self._round = round
        self._pumps = {}
        try:
            self._layout.open_round(round, self._nproc)
        except OSError as error:
            self._go_without_files(error)
            self._layout.open_round(round, self._nproc)

    def open_worker(self, local_rank: int) -> WorkerStreams:
        """Make one worker's pipes and files.

        Raises:
            SpawnError: too many open files.
        """
        if self._round is None:
            raise InternalError("open_worker came before open_round")
        plan = self._layout.plan_worker(local_rank)
        prefix = build_prefix(
            role=self._role, local_rank=local_rank, round=self._round, template=self._config.prefix_template
        )
        if plan.error_file is not None:
            with contextlib.suppress(OSError):  # an earlier round of this attempt may have left one
                os.unlink(plan.error_file)
        self._child_fds[local_rank] = []
        try:
            fds = {std: self._open_stream(local_rank, std, stream, prefix) for std, stream in plan.streams.items()}
        except OSError as error:
            self.close_child_ends(local_rank)
            raise SpawnError(f"cannot make pipes for local rank {local_rank}: {error.strerror}") from error
        return WorkerStreams(
            stdout_fd=fds[Std.OUT],
            stderr_fd=fds[Std.ERR],
            error_file=plan.error_file,
            stack_file=plan.stack_file,
            stdout_log=plan.streams[Std.OUT].path,
            stderr_log=plan.streams[Std.ERR].path,
        )

    def close_child_ends(self, local_rank: int) -> None:
        """The worker has its descriptors, or never will: close ours. Idempotent."""
        for fd in self._child_fds.pop(local_rank, ()):
            os.close(fd)

    def finish_round(self, on_drained: Callable[[], None], limit_s: float = 1.0) -> None:
        """All workers are gone: take the rest out of the pipes, flush the files, then call back on the agent's loop.

        Does not wait for the console.

        Args:
            on_drained: called once.
            limit_s: how long a pipe that somebody else still holds open is read.
        """
        for local_rank in list(self._child_fds):
            self.close_child_ends(local_rank)
        tell = _Once(on_drained)
        thread, group = self._thread, self._group
        if thread is None or group is None:
            self._loop.call_soon(tell)
            return
        thread.submit(lambda: group.finish(limit_s, lambda: thread.reply(tell)))
        # A disk that hangs must not keep the agent from going on.
        tell.timer = self._loop.call_later(limit_s + 1.0, tell)

    # -- questions --------------------------------------------------------------------------------------------------

    def stderr_tail(self, local_rank: int) -> tuple[str, ...]:
        """The last lines of the worker's stderr, oldest first; empty when it is not captured. Also after its end."""
        lines = self.stderr_text(local_rank).rstrip("\n").split("\n")[-_TAIL_LINES:]
        return tuple(line[:_TAIL_LINE_CHARS] for line in lines) if lines != [""] else ()

    def stderr_text(self, local_rank: int) -> str:
        """The last 64 KiB or less of the worker's stderr, with progress bars reduced to their last state."""
        pump = self._pumps.get((local_rank, Std.ERR))
        if pump is None:
            return ""
        if self._thread is not None:
            self._thread.run(pump.drain, _LOOK_S)
        return b"\n".join(last_frame(line) for line in pump.tail.split(b"\n")).decode("utf-8", "replace")

    def bytes_seen(self, local_rank: int) -> int:
        """How many bytes the worker has written in this round, as far as they are captured."""
        return sum(pump.bytes_seen for (rank, _), pump in self._pumps.items() if rank == local_rank)

    # -- the agent's own --------------------------------------------------------------------------------------------

    def say(self, line: str) -> None:
        """A line of the agent's own on standard error, marked as such; never within a worker's line."""
        self._console.say(line)

    def tell_trouble(self, line: str) -> None:
        """Say, once, that log files will be incomplete: a full disk concerns all of them. May be called by any thread.

        Args:
            line: which file cannot be written, and why.
        """
        if not self._told_trouble:
            self._told_trouble = True
            self.say(f"{line}; the job goes on, its log files are incomplete: what does not fit is on the console only")

    def print_page(self, text: str) -> None:
        """A page of the agent's own (the report), as it is, in one piece."""
        self._console.print_page(text)

    def close(self, limit_s: float = 2.0) -> None:
        """Get everything out, release everything. Idempotent.

        Args:
            limit_s: see `Console.close`; also the limit for log files that hang.
        """
        thread, group = self._thread, self._group
        self._thread = None
        for local_rank in list(self._child_fds):
            self.close_child_ends(local_rank)
        if thread is not None and group is not None:
            thread.submit(group.close)
            thread.submit(self._close_filtered)
            if not thread.close(limit_s):
                self.say("a log file takes no more data, the end of the output may be missing in it")
        self._console.close(limit_s)
        self._layout.close()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _make_layout(self) -> Layout:
        if self._config.base_dir == os.devnull and self._config.logs_specs is None:
            return FolderLayout(self._config, None)
        try:
            if self._config.logs_specs is not None:
                from muster.agent.logs.torch_logs_specs import TorchLayout

                return TorchLayout(self._config, run_id=self._run_id, role=self._role)
            return FolderLayout(self._config, RunFolder(self._config.base_dir, self._run_id))
        except OSError as error:
            return self._go_without_files(error)

    def _go_without_files(self, error: OSError) -> Layout:
        where = error.filename or self._config.base_dir
        self.say(f"no log files, console only: cannot write to {where}: {error.strerror}")
        self._layout = FolderLayout(self._config, None)
        return self._layout

    def _open_stream(self, local_rank: int, std: Std, plan: StreamRoute, prefix: bytes) -> int | None:
        if plan.discarded:
            fd = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            self._child_fds[local_rank].append(fd)
            return fd
        if not plan.captured:
            return None
        read_fd, write_fd = open_pipe()
        self._child_fds[local_rank].append(write_fd)
        self._start_pump(local_rank, std, plan, prefix, read_fd)
        return write_fd

    def _start_pump(self, local_rank: int, std: Std, plan: StreamRoute, prefix: bytes, read_fd: int) -> None:
        thread, group = self._start_thread()
        shown = self._config.local_ranks_filter is None or local_rank in self._config.local_ranks_filter
        file = self._open_file(plan.path)
        lost = plan.path is not None and file is None
        pump = StreamPump(
            loop=thread.loop,
            read_fd=read_fd,
            file=file,
            feed=self._console.feed(std, prefix) if plan.to_console or (lost and shown) else None,
            rescue_feed=lambda: self._console.feed(std, prefix) if shown else None,
            duplicator=self._make_duplicator(std, plan, prefix),
            keeps_tail=std is Std.ERR,
            on_end=group.ended,
        )
        self._pumps[local_rank, std] = pump
        thread.submit(lambda: group.add(pump))

    def _start_thread(self) -> tuple[PumpThread, PumpGroup]:
        if self._thread is None or self._group is None:
            try:
                self._thread = PumpThread(self._loop)
            except RuntimeError as error:  # what `threading` makes of EAGAIN
                raise SpawnError(f"no thread for the workers' output: {os.strerror(errno.EAGAIN)}") from error
            self._group = PumpGroup(self._thread.loop)
        return self._thread, self._group

    def _open_file(self, path: str | None) -> LogFile | None:
        if path is None:
            return None
        try:
            return LogFile(path, self.tell_trouble)
        except OSError as error:
            self.tell_trouble(f"cannot write {path}: {error.strerror}")
            return None

    def _make_duplicator(self, std: Std, plan: StreamRoute, prefix: bytes) -> "LineFilter | None":
        path = plan.filtered_path
        if path is None:
            return None
        if path not in self._filtered:
            file = self._open_file(path)
            if file is None:
                return None
            self._filtered[path] = file
        config = self._config
        needles = config.duplicate_stdout_filters if std is Std.OUT else config.duplicate_stderr_filters
        from muster.agent.logs.line_filter import LineFilter

        return LineFilter(prefix=prefix, needles=needles, file=self._filtered[path])

    def _close_filtered(self) -> None:
        for file in self._filtered.values():
            file.close()
        self._filtered = {}


class _Once:
    """Calls through the first time."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback: Callable[[], None] | None = callback
        self.timer: Timer | None = None

    def __call__(self) -> None:
        callback, self._callback = self._callback, None
        if self.timer is not None:
            self.timer.cancel()
        if callback is not None:
            callback()
