"""`muster exec`: finds the nodes that are meant, and runs a command on one or all of them.

One loop moves the bytes. A signal to this process is passed on to the command, and whatever ends this process ends the
command. See `muster.schedulers.node_program.command`.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from torchx.specs import AppState

from muster._shared.contract import describe_exit_code
from muster._shared.control import CommandExit, ControlError, count_nodes
from muster._shared.processes import READ, open_wake_pipe, read_wake_pipe, wait_events
from muster.cli import operations
from muster.cli.answers import say
from muster.schedulers.adapter.scheduler import PluginScheduler
from muster.schedulers.errors import EngineError, SchedulerError, UnknownAppError
from muster.schedulers.lines import LineSplitter
from muster.schedulers.node_program.frames import write_all
from muster.schedulers.node_program.session import WORDS, Order, Session, find_name, start_command
from muster.schedulers.wording.facts import AppFacts
from muster.schedulers.wording.words import word_all

FAILED: Final = 255
"""Exit code of `exec` and `shell` where muster has failed, and not the command: as of `ssh`."""


@dataclass(frozen=True)
class Target:
    """One node."""

    role: str
    index: int
    runs: bool
    """Whether it runs, as its scheduler reports it."""

    def __str__(self) -> str:
        return f"{self.role}/{self.index}"


def find_targets(
    scheduler: PluginScheduler, app_id: str, *, role: str | None, node: int | None, takes_all: bool
) -> list[Target]:
    """Find the nodes that are meant.

    Args:
        scheduler: of the app.
        app_id: its id.
        role: the only one of which nodes are meant. None: of all that run agents, or the only one.
        node: its index. None: 0.
        takes_all: all nodes, also those that do not run.

    Raises:
        ControlError: the app does not run, or has no such role or node.
        UnknownAppError: the app is not known.
    """
    facts = scheduler.read_facts(app_id)
    if facts is None:
        raise UnknownAppError(app_id)
    operations.check_runs(app_id, facts.state, word_all(facts.reasons))
    roles = operations.list_agent_roles(app_id, facts.app.roles, role)
    if not takes_all:
        roles = [operations.choose_agent_role(app_id, roles)]
    nodes = [each for found in roles for each in _list_nodes(facts, found.name)]
    found = nodes if takes_all else [each for each in nodes if each.index == (node or 0) and each.runs]
    if not found:
        which = "node" if takes_all else f"node {node or 0}"
        has = f"it has {count_nodes(len(nodes))}, counted from 0"
        raise ControlError(f"no {which} of {app_id} runs: {has}", CommandExit.REFUSED)
    return found


def _list_nodes(facts: AppFacts, role: str) -> list[Target]:
    """List the nodes of a role, of an elastic one those that it has now."""
    known = [each for each in facts.replicas or () if each.role == role]
    return [
        Target(role, each.id, each.state is AppState.RUNNING)
        for each in sorted(known, key=lambda each: each.id)
        if each.state is not AppState.CANCELLED
    ]


_OPENED_AT_ONCE: Final = 16
_END_LIMIT_S: Final = 10.0
_STOP_LIMIT_S: Final = 1.0
"""After SIGINT or SIGTERM: what the command has started is killed then."""
_CHUNK_BYTES: Final = 1 << 16
_LOOK_S: Final = 1.0
_PASSED_ON: Final = {signal.SIGINT: "INT", signal.SIGTERM: "TERM", signal.SIGHUP: "HUP", signal.SIGQUIT: "QUIT"}


def run(*, handle: str, words: Sequence[str], role: str | None, node: int | None, takes_all: bool) -> int:
    """Run a command on nodes, and return its exit code. Of several codes it is the first that is not 0.

    Raises:
        ControlError: it was not run on any node.
        BrokenPipeError: the reader of what it prints has gone.
    """
    command = words[1:] if words[:1] == ["--"] else words
    if not command:
        raise ControlError("CMD is missing", CommandExit.USAGE)
    code = None
    with operations.open_scheduler(handle) as (scheduler, app_id):
        targets = find_targets(scheduler, app_id, role=role, node=node, takes_all=takes_all)
        app = find_name(app_id)
        runs = [NodeRun(each, Order(app=app, index=each.index, command=list(command))) for each in targets]
        try:
            open_all(scheduler, app_id, runs)
            if not takes_all and runs[0].failure:
                raise ControlError(f"{targets[0]}: {runs[0].failure}", CommandExit.LOST)
            with contextlib.suppress(BrokenPipeError):  # not the scheduler's error
                code = Relay(runs, has_prefix=takes_all).move()
        finally:
            for each in runs:
                each.close()
    if code is None:
        raise BrokenPipeError
    if takes_all:
        return _report(runs)
    if runs[0].failure:
        say(f"{runs[0].target}: {runs[0].failure}")
    return code


class NodeRun:
    """The command on one node."""

    def __init__(self, target: Target, order: Order) -> None:
        self.target = target
        self._order = order
        self.session: Session | None = None
        self._failure = ""

    def open(self, scheduler: PluginScheduler, app_id: str) -> None:
        """Start it. `failure` says what is in the way."""
        if not self.target.runs:
            self._failure = "it does not run"
            return
        try:
            pipe = scheduler.open_in_node(app_id, self.target.role, self.target.index, WORDS)
            self.session = start_command(pipe, self._order)
        except (ControlError, EngineError, SchedulerError, OSError) as error:
            self._failure = str(error)

    @property
    def failure(self) -> str:
        """Why it does not run, or not any more. "": it runs, or has ended by itself."""
        return self._failure if self.session is None else self.session.failure

    @property
    def code(self) -> int:
        """The exit code, once it has ended."""
        return FAILED if self.session is None or self.session.code is None else self.session.code

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes."""
        return self.session is None or self.session.is_over

    def close(self) -> None:
        """End it if it runs."""
        if self.session is not None:
            self.session.close()


def open_all(scheduler: PluginScheduler, app_id: str, runs: Sequence[NodeRun]) -> None:
    """Start a command on nodes, on several at a time."""
    pool = ThreadPoolExecutor(max_workers=min(_OPENED_AT_ONCE, max(1, len(runs))))
    try:
        list(pool.map(lambda each: each.open(scheduler, app_id), runs))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class Relay:
    """Moves input, output and signals between this process and the nodes. It is for one use.

    Args:
        runs: of the nodes.
        has_prefix: each line begins with the name of its node.
    """

    SIGNALS: Sequence[signal.Signals] = (*_PASSED_ON, signal.SIGTSTP)
    """Those that `pass_on` gets."""

    def __init__(self, runs: Sequence[NodeRun], *, has_prefix: bool) -> None:
        self._runs = runs
        self._has_prefix = has_prefix
        self._lines: dict[tuple[NodeRun, int], LineSplitter] = {}
        self._kill_s: float | None = None
        self.reads = True
        """More input may come."""
        self._may_lose_reader = not os.isatty(1)

    def move(self) -> int:
        """Return the exit code of the first node that has failed once all have ended."""
        sys.stdout.flush()
        with watch_signals(self.SIGNALS) as wake:
            while not all(each.is_over for each in self._runs):
                self._step(wake)
            for (run, stream), lines in self._lines.items():
                if lines.has_rest():
                    self._write_lines(run, stream, [lines.take_rest() + b"\n"])
        return next((each.code for each in self._runs if each.code), 0)

    def _list_live(self) -> list[tuple[NodeRun, Session]]:
        return [(each, each.session) for each in self._runs if each.session is not None and not each.is_over]

    def _step(self, wake: int) -> None:
        live = self._list_live()
        wanted = {wake: READ, **({1: 0} if self._may_lose_reader else {})}  # 0 reports a pipe without readers
        owners = {fd: each for each in live for fd in each[1].wanted}
        for _, session in live:
            wanted |= session.wanted
        room = min((session.room_bytes for _, session in live), default=0)
        if self.reads and room > 0 and _may_read():
            wanted[0] = READ
        for fd in wait_events(wanted, _LOOK_S):
            if fd == wake:
                for number in read_wake_pipe(wake):
                    self.pass_on(signal.Signals(number))
            elif fd == 1:
                raise BrokenPipeError
            elif fd == 0:
                self.read_input(min(room, _CHUNK_BYTES))
            elif fd in owners:
                self._read_output(*owners[fd])
        for _, session in live:
            session.check()
        if self._kill_s is not None and time.monotonic() > self._kill_s:
            self._kill_s = None
            self._tell("KILL")

    def read_input(self, limit: int) -> None:
        """Send what has come on standard input, or that it has ended."""
        try:
            data = os.read(0, limit)
        except OSError:
            data = b""
        self.reads = bool(data)
        for _, session in self._list_live():
            session.send_input(data)

    def _read_output(self, run: NodeRun, session: Session) -> None:
        for stream, data in session.receive():
            if not self._has_prefix:
                write_all(stream, data)
                continue
            self._write_lines(run, stream, self._lines.setdefault((run, stream), LineSplitter()).feed(data))

    def _write_lines(self, run: NodeRun, stream: int, lines: Iterable[bytes]) -> None:
        prefix = f"{run.target} ".encode()
        write_all(stream, b"".join(prefix + line for line in lines))

    def pass_on(self, signum: signal.Signals) -> None:
        """Handle a signal to this process."""
        if signum == signal.SIGTSTP:
            self._tell("STOP")
            for _, session in self._list_live():
                session.flush(_STOP_LIMIT_S)  # a node that is not told takes the silence for a loss
            os.kill(os.getpid(), signal.SIGSTOP)
            self._tell("CONT")
            return
        again = self._kill_s is not None
        self._tell("KILL" if again else _PASSED_ON[signum])
        if signum != signal.SIGQUIT:
            self._kill_s = time.monotonic() + _END_LIMIT_S

    def _tell(self, name: str) -> None:
        for _, session in self._list_live():
            session.send_signal(name)


def _may_read() -> bool:
    """Return whether this process may read its standard input.

    In the background, reading a terminal would suspend it.
    """
    try:
        return not os.isatty(0) or os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


@contextlib.contextmanager
def watch_signals(signums: Sequence[signal.Signals]) -> Iterator[int]:
    """Yield a descriptor from which the numbers of these signals are read. Those that are ignored stay so."""
    before = {signum: signal.getsignal(signum) for signum in signums}
    before = {signum: action for signum, action in before.items() if action is not signal.SIG_IGN}
    wake = open_wake_pipe(before)
    try:
        yield wake
    finally:
        for signum, action in before.items():
            signal.signal(signum, action)
        os.close(signal.set_wakeup_fd(-1))
        os.close(wake)


def _report(runs: Sequence[NodeRun]) -> int:
    """Say which nodes have failed, and return the exit code of the first."""
    failed = [each for each in runs if each.code]
    if failed:
        how = [f"{each.target} ({each.failure or describe_exit_code(each.code)})" for each in failed]
        say(f"{len(failed)} of {count_nodes(len(runs))} failed: {', '.join(how)}")
    return failed[0].code if failed else 0
