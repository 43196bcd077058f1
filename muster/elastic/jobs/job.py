"""One job as the program that started it sees it: start the agent, wait, collect output, records and results."""

import codecs
import contextlib
import os
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from muster._shared.codec import decode
from muster._shared.contract import Env
from muster._shared.foreign_files import parse_json, read_whole
from muster._shared.reports import Report
from muster.agent.driven import REPORT_NAME
from muster.agent.errors import EnvironmentFault
from muster.elastic.jobs.call import check_no_import
from muster.elastic.jobs.cell import CellOutput, is_cell
from muster.elastic.jobs.file_timers import PATH_VARIABLE, FileTimers, are_switched_on
from muster.elastic.jobs.process import FOLDER_MARK, AgentProcess
from muster.elastic.jobs.results import WorkerServer
from muster.elastic.rendezvous import CallersRendezvous
from muster.elastic.tail import Screen

if TYPE_CHECKING:
    from muster.elastic.jobs.held import HeldNode

_REST_LIMIT_S = 1.0
"""How long, after the job's end, to read output that a process outside the job holds open."""

Record = Mapping[str, Any]
"""One record of the agent's event log, see `muster.agent.runtime.event_log.EventRecord`."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a job ended on this node."""

    code: int | None
    """The agent's exit code, see `contract.ExitCode`. None: the guard was killed, and the agent ended with it."""
    error: str | None = None
    """One line, if the agent could not start or the nodes did not find each other."""
    report: Report | None = None
    """The failure report of the whole job."""
    ranks: tuple[int, ...] = ()
    """This node's global ranks in the last round, in order of local rank."""
    signum: int | None = None
    """The last signal that this process received for the job and passed on."""
    records: tuple[Record, ...] = field(default=(), repr=False)
    """The last few."""


class Job:
    """One node of a job. Call `run` once, in any thread. `stop` and `kill` may be called from any other."""

    def __init__(
        self,
        flags: Sequence[str],
        *,
        environ: Mapping[str, str],
        server: WorkerServer | None = None,
        rendezvous: CallersRendezvous | None = None,
        on_record: Callable[[Record], None] | None = None,
        handled_signals: Sequence[str] = (),
        on_signal: Callable[[int, Callable[[], None]], None] | None = None,
        screen: Screen | None = None,
        held: "HeldNode | None" = None,
    ) -> None:
        """Start the agent.

        Args:
            flags: its command line, from the first flag to the program's last argument.
            environ: its environment, and that of its workers.
            server: serves function workers. At the end `run` stops its listening. None: the program is a command.
            rendezvous: a handler of this process, closed by `run`. `flags` name its backend. None: the agent's own.
            on_record: called in `run`'s thread with each record of the agent's event log.
            handled_signals: names of signals. While `run` waits in the main thread, those with their default effect are
                passed on to the job instead.
            on_signal: called in place of that with the first signal, and with a function that passes it on. The second
                signal is passed on at once.
            screen: the job's lines are printed there, above what else it shows. None: the job writes to this process's
                own streams.
            held: the node of a hold where the agent waits already. It is closed with the job. None: it is started.

        Raises:
            EnvironmentFault: the agent cannot be started.
            UsageError: see `check_no_import`.
        """
        self._server = server
        self._rendezvous = rendezvous
        self._on_record = on_record
        self._handled_signals = handled_signals
        self._on_signal = on_signal
        self._screen = screen
        self._selector = selectors.DefaultSelector()
        self._outputs: dict[int, _Output | CellOutput] = {}
        self._records: list[Record] = []
        self._ranks: tuple[int, ...] = ()
        self._error: str | None = None
        self._code: int | None = None
        self._has_ended = False
        self._signum: int | None = None
        self._timers: FileTimers | None = None
        if are_switched_on(environ):
            environ = {PATH_VARIABLE: os.path.join(FOLDER_MARK, "timers"), **environ}
        stdout_fd: int | None
        stderr_fd: int | None
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as child_ends:
            undo.callback(self._close_outputs)
            if held is not None:
                undo.callback(held.close)
            check_no_import()
            if screen is None and is_cell(sys.stdout):
                environ = {**environ, Env.LIVE_BARS: "1"}
                stdout_fd = stderr_fd = self._open_pipe(CellOutput(sys.stdout), child_ends)
            else:
                stdout_fd, stderr_fd = (self._open_output(name, child_ends) for name in ("stdout", "stderr"))
            self._process = AgentProcess(
                flags,
                environ=environ,
                stdout_fd=stdout_fd,
                stderr_fd=stderr_fd,
                fork_tree=None if server is None else server.fork_tree,
                own_fds=tuple(self._outputs),
                held=held,
            )
            if are_switched_on(environ):
                self._open_timers(environ[PATH_VARIABLE])
            undo.pop_all()

    def _open_timers(self, path: str) -> None:
        try:
            self._timers = FileTimers(path.replace(FOLDER_MARK, self._process.folder))
        except OSError as error:
            self._process.close()
            raise EnvironmentFault(f"{PATH_VARIABLE}={path}: {error.strerror}") from error

    def _open_output(self, name: str, child_ends: contextlib.ExitStack) -> int | None:
        """Make a pipe for one of the job's streams when `sys.<name>` is not this process's own descriptor.

        In a notebook, or under a test runner, the program's text goes elsewhere: the job's must go there too.
        """
        stream = getattr(sys, name)
        number = 1 if name == "stdout" else 2
        is_own = stream is getattr(sys, f"__{name}__") or _is_descriptor(stream, number)
        if stream is None or (is_own and self._screen is None):
            return None
        return self._open_pipe(_Output(stream, self._screen), child_ends)

    def _open_pipe(self, output: "_Output | CellOutput", child_ends: contextlib.ExitStack) -> int:
        read_fd, write_fd = os.pipe()
        child_ends.callback(os.close, write_fd)
        os.set_blocking(read_fd, False)
        self._outputs[read_fd] = output
        return write_fd

    @property
    def folder(self) -> str:
        """The job's private folder."""
        return self._process.folder

    # -- from any thread --------------------------------------------------------------------------------------------

    def stop(self, signum: int = signal.SIGTERM) -> None:
        """Stop this node politely: the workers get the signal and the grace period."""
        self._process.send_signal(signum)

    def kill(self) -> None:
        """Kill every process of this node's part of the job."""
        self._process.kill()

    # -- waiting ----------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Wait for the job's end. No process of it is left then.

        When a signal handler of the caller raises, the job is stopped first. A second exception kills it.
        """
        try:
            with handle_signals(self._handled_signals, self._pass_on):
                self._wait()
            self._copy_rest()
            return Outcome(
                code=self._code,
                error=self._error,
                report=self._read_report(),
                ranks=self._ranks,
                signum=self._signum,
                records=tuple(self._records),
            )
        finally:
            self._close()

    def _wait(self) -> None:
        self._selector.register(self._process.control_fd, selectors.EVENT_READ, self._receive)
        for fd in self._outputs:
            self._selector.register(fd, selectors.EVENT_READ, lambda fd=fd: self._copy_output(fd))
        if self._rendezvous is not None:
            self._rendezvous.connect(self._process.send)
        if self._server is not None:
            self._server.watch(self._selector, self._process.folder)
        if self._timers is not None:
            self._selector.register(self._timers.fd, selectors.EVENT_READ, self._timers.receive)
        try:
            self._turn_until_ended()
        except BaseException as error:  # signal handlers may raise anything
            self._report_interrupt(error)
            self.stop()
            try:
                self._turn_until_ended()
            except BaseException:  # a second Ctrl-C: stop impolitely
                self.kill()
                self._turn_until_ended()
                raise
            raise

    def _report_interrupt(self, error: BaseException) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # a caller without stderr
            print(
                f"[muster] interrupted by {type(error).__name__}: stopping the workers; a second exception kills them",
                file=sys.stderr,
                flush=True,
            )

    def _turn_until_ended(self) -> None:
        while not self._has_ended:
            for key, _ in self._selector.select(None if self._timers is None else self._timers.find_wait_s()):
                key.data()
            if self._timers is not None:
                self._timers.expire()

    def _receive(self) -> None:
        messages = self._process.receive()
        if messages is None:  # the guard was killed
            self._selector.unregister(self._process.control_fd)
            self._has_ended = True
            return
        for message in messages:
            if "rendezvous" in message and self._rendezvous is not None:
                self._rendezvous.handle(message["rendezvous"])
            elif "record" in message:
                self._keep_record(message["record"])
            elif "error" in message:
                self._error = message["error"]
            elif "ended" in message:
                self._code, self._has_ended = message["ended"], True

    def _keep_record(self, record: Record) -> None:
        if record["what"] == "workers_started":
            self._ranks = tuple(record["ranks"])
        elif record["what"] == "rendezvous_lost":
            self._error = record["detail"].get("reason")
        self._records = [*self._records[-31:], record]
        if self._on_record is not None:
            self._on_record(record)

    def _read_report(self) -> Report | None:
        try:
            return decode(Report, parse_json(read_whole(os.path.join(self._process.folder, REPORT_NAME), 64 << 20)))
        except OSError:
            return None

    def _close(self) -> None:
        if self._rendezvous is not None:
            self._rendezvous.close()
        self._process.close()
        if self._server is not None:
            self._server.stop_listening()
        if self._timers is not None:
            self._timers.close()
        self._close_outputs()

    def _close_outputs(self) -> None:
        for fd, output in self._outputs.items():
            os.close(fd)
            output.close()
        self._outputs.clear()
        self._selector.close()

    # -- the caller's signals ---------------------------------------------------------------------------------------

    def _pass_on(self, signum: int, _frame: object) -> None:
        is_first, self._signum = self._signum is None, signum
        if is_first and self._on_signal is not None:
            self._on_signal(signum, lambda: self._process.send_signal(signum))
        else:
            self._process.send_signal(signum)

    # -- output -----------------------------------------------------------------------------------------------------

    def _copy_output(self, fd: int) -> None:
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return
        if data:
            self._outputs[fd].write(data)
            return
        self._selector.unregister(fd)
        os.close(fd)
        self._outputs.pop(fd).close()

    def _copy_rest(self) -> None:
        until_s = time.monotonic() + _REST_LIMIT_S
        while self._outputs and (left_s := until_s - time.monotonic()) > 0:
            for key, _ in self._selector.select(left_s):
                key.data()


@contextlib.contextmanager
def handle_signals(names: Sequence[str], handle: Callable[[int, object], None]) -> Iterator[None]:
    """Handle what would end this process, in its main thread. Handlers of the caller's own and ignored signals stay."""
    old: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for name in names:
            signum = int(signal.Signals[name])
            if signal.getsignal(signum) in (signal.SIG_DFL, signal.default_int_handler):
                old[signum] = signal.signal(signum, handle)
    try:
        yield
    finally:
        for signum, handler in old.items():
            signal.signal(signum, handler)


class _Output:
    """Where one of the job's streams goes in this process."""

    def __init__(self, stream: TextIO, screen: Screen | None) -> None:
        self._stream = stream
        self._screen = screen
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""
        """The rest of a line, for a screen: lines are printed whole there."""

    def write(self, data: bytes) -> None:
        text = self._decoder.decode(data)
        if self._screen is None:
            self._stream.write(text)
            self._stream.flush()
            return
        lines, newline, self._rest = (self._rest + text).rpartition("\n")
        self._screen.write(self._stream, lines + newline, file="output", bar=None)

    def close(self) -> None:
        if self._screen is not None and self._rest:
            self._screen.write(self._stream, f"{self._rest}\n", file="output", bar=None)


def _is_descriptor(stream: Any, number: int) -> bool:
    try:
        return bool(stream.fileno() == number)
    except (OSError, ValueError, AttributeError):
        return False
