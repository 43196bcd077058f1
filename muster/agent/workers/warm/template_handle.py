"""Controls one template process from the agent: starts it, requests forks, receives its messages, and ends it."""

import json
import os
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from muster._shared.records import record
from muster.agent.errors import SpawnError
from muster.agent.runtime.loop import Loop
from muster.agent.workers import program
from muster.agent.workers.cold import spawn
from muster.agent.workers.spec import Program, ProgramKind, WorkerSpec

if TYPE_CHECKING:
    from muster.agent.workers.warm.forking import TemplateMessage

_MAX_FORKS_PER_REQUEST = 200
"""The kernel passes at most 253 descriptors with a message."""

MESSAGE_BYTES = 65536


@record
class TemplateOptions:
    """The settings with which a template is started."""

    program: Program
    nproc: int
    env: dict[str, str]
    """What all workers' environments have in common, including OMP_NUM_THREADS."""
    preload: str = "auto"
    cpus: frozenset[int] | None = None
    """CPU affinity. With bound workers, it has as many CPUs as the worker with the fewest, because libraries count them
    at import, and their thread pools can grow later but not shrink."""

    def build_spec(self, *args: str, stdout_fd: int = 1, stderr_fd: int = 2) -> WorkerSpec:
        """Build the spec of one of our processes in this environment; `program.main` gets the words."""
        command = Program(kind=ProgramKind.COMMAND, target=sys.executable, args=tuple(program.build_argv(args)))
        return WorkerSpec(
            local_rank=-1, program=command, env=self.env, stdout_fd=stdout_fd, stderr_fd=stderr_fd, cpus=self.cpus
        )


class TemplateHandle:
    """A running template. Close it to end it; the agent's reaper collects its exit.

    It may start before most of the agent is imported. Messages that arrive before `watch` stay in the socket.
    """

    is_image = False
    """True for the program's own image, see `workers.image`."""

    def __init__(self, loop: Loop, options: TemplateOptions) -> None:
        """Start the process.

        Args:
            loop: calls back with messages.
            options: what to start it with.

        Raises:
            SpawnError: the process cannot be started.
        """
        self._loop = loop
        self._on_message: Callable[[TemplateMessage], None] | None = None
        self.pending_sockets: list[socket.socket] = []
        """Our ends of the sockets of workers that were requested but not reported yet."""
        self.started_s = loop.clock.now_s()
        """When it started, by the loop's clock."""
        self._control: socket.socket | None = None
        self._stderr_fd = -1
        with ExitStack() as on_failure, ExitStack() as stack:
            on_failure.callback(self.close)
            try:
                self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                theirs = stack.enter_context(theirs)
                # Each worker repeats the imports' output, from the template's memory files.
                out_fd = os.memfd_create("stdout")
                stack.callback(os.close, out_fd)
                self._stderr_fd = os.memfd_create("stderr")
            except OSError as error:
                raise SpawnError(f"cannot start the template: {error.strerror}", error.errno) from error
            self._control.setblocking(False)
            known = (program.TEMPLATE, str(theirs.fileno()), str(os.getpid()), options.preload)
            args = (*known, *list_program(options.program))
            spec = options.build_spec(*args, stdout_fd=out_fd, stderr_fd=self._stderr_fd)
            # Like a cold worker, for the same inheritance. (glibc's posix_spawn leaves its two internal signals
            # ignored.)
            self.pid = spawn(spec, keep_fds=[theirs.fileno()])
            on_failure.pop_all()

    def watch(self, on_message: "Callable[[TemplateMessage], None]") -> None:
        """Call back on the loop with each message (see `template`)."""
        self._on_message = on_message
        if self._control is not None:
            self._loop.watch_readable(self._control.fileno(), self.receive)

    def receive(self) -> None:
        """Receive the messages that the template has sent so far, and call back with each."""
        while self._control is not None and self._on_message is not None:
            try:
                data = self._control.recv(MESSAGE_BYTES)
            except BlockingIOError:
                return
            except ConnectionError:
                data = b""
            if not data:
                self.close_control()
                return
            self._on_message(json.loads(data))

    def request_forks(self, count: int) -> str | None:
        """Request `count` forks; return why the agent cannot request them, or None if it did.

        A dying template does not answer; `ChildWatch` collects its exit.
        """
        while count > 0 and self._control is not None:
            batch = min(count, _MAX_FORKS_PER_REQUEST)
            what = "a worker" if batch == 1 else f"{batch} workers"
            try:
                pairs = _make_pairs(batch)
            except OSError as error:
                return f"cannot make sockets for {what}: {error.strerror}"
            try:
                message = json.dumps({"fork": batch}).encode()
                socket.send_fds(self._control, [message], [theirs.fileno() for _, theirs in pairs])
            except OSError as error:
                for ours, _ in pairs:
                    ours.close()
                if isinstance(error, ConnectionError):
                    return None
                # No answer would come. Descriptors in transit are limited per user, and data loaders send them too.
                return f"cannot send sockets for {what}: {error.strerror}"
            finally:
                for _, theirs in pairs:
                    theirs.close()
            self.pending_sockets += [ours for ours, _ in pairs]
            count -= batch
        return None

    def read_last_line(self) -> str:
        """Return the last line that the template has written to its stderr; "" if there is none."""
        size = os.fstat(self._stderr_fd).st_size
        lines = os.pread(self._stderr_fd, 4096, max(0, size - 4096)).decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def close_control(self) -> None:
        """Close the control socket. The template ends at its next read, and so do workers that were not reported."""
        if self._control is not None:
            self._loop.unwatch(self._control.fileno())
            self._control.close()
            self._control = None
        for one in self.pending_sockets:
            one.close()
        self.pending_sockets.clear()

    def close(self) -> None:
        """Close the control socket and all descriptors. Idempotent."""
        self.close_control()
        if self._stderr_fd >= 0:
            os.close(self._stderr_fd)
            self._stderr_fd = -1


def list_program(program: Program) -> tuple[str, ...]:
    """Return the program as the template reads it from its command line."""
    return program.kind.value, program.target, *program.args


def _make_pairs(count: int) -> list[tuple[socket.socket, socket.socket]]:
    """Make all pairs, or raise OSError and make none."""
    with ExitStack() as stack:
        pairs: list[tuple[socket.socket, socket.socket]] = []
        for _ in range(count):
            pairs.append(socket.socketpair())
            stack.callback(pairs[-1][0].close)
            stack.callback(pairs[-1][1].close)
        stack.pop_all()
    return pairs


def release_worker(parked: socket.socket, spec: WorkerSpec) -> int | None:
    """Send a parked worker its spec; return None if the worker has ended. Close the socket.

    The spec is sent in a memory file, because an environment may be larger than a socket accepts without blocking.

    Returns:
        That file's descriptor, which the caller closes.

    Raises:
        SpawnError: that file cannot be made (no descriptor is left, or RLIMIT_FSIZE is too small) or sent.
    """
    try:
        memory_fd = make_memory_file(spec.to_json().encode())
    except OSError as error:
        parked.close()
        raise SpawnError(f"cannot send a parked worker its spec: {error.strerror}", error.errno) from error
    try:
        socket.send_fds(parked, [b"!"], [memory_fd, spec.stdout_fd, spec.stderr_fd])
    except OSError as error:
        os.close(memory_fd)
        if isinstance(error, ConnectionError):
            return None
        raise SpawnError(f"cannot send a parked worker its spec: {error.strerror}", error.errno) from error
    finally:
        parked.close()
    return memory_fd


def make_memory_file(data: bytes) -> int:
    """Return the descriptor of a memory file with the data, positioned at its end."""
    memory_fd = os.memfd_create("release")
    try:
        _write_all(memory_fd, data)
    except OSError:
        os.close(memory_fd)
        raise
    return memory_fd


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
