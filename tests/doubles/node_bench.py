"""One node in memory: the real supervisor, loop, worker pool, stack collector, hang watch and signal watch.

Time, the kernel's processes, the starter, the log files and rendezvous are fakes. A test says what happens when
(`Bench.at`), runs the agent to its end (`Bench.run`), and looks at what it did: `Bench.calls` (of rendezvous),
`Bench.lines` (on the console), `Bench.signals` (sent to workers).

Time passes only when the loop would wait: the next timer is then due at once.
"""

import contextlib
import itertools
import os
import selectors
import signal
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from doubles.clocks import HandClock
from doubles.samples import make_round

from muster.agent.config import AgentConfig, LogConfig, RendezvousConfig
from muster.agent.errors import SpawnError
from muster.agent.logs import WorkerStreams
from muster.agent.node.round_workers import AgentParts
from muster.agent.node.supervisor import Supervisor
from muster.agent.rendezvous.interface import (
    BreakKind,
    JobEnded,
    JobMembers,
    LeaderClock,
    NodeMessage,
    RendezvousEvent,
    RoundBroken,
    RoundFormed,
    Summary,
)
from muster.agent.round import Round
from muster.agent.runtime.event_log import EventLog, EventRecord
from muster.agent.runtime.loop import Loop
from muster.agent.runtime.signals import OwnSessions
from muster.agent.workers.program import get_stack_signal
from muster.agent.workers.spec import Program, ProgramKind, WorkerSpec

T = TypeVar("T")

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD, signal.SIGUSR2)


class JumpingSelector(selectors.DefaultSelector):
    """Where the real one would wait for a timer, the clock jumps to it."""

    def __init__(self, clock: HandClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "the agent waits for ever: no timer is set and no descriptor is ready"
            self._clock.at_s += timeout
        return ready


class BenchLoop(Loop):
    """Reads what the real one reads in a thread: the test's time stands still meanwhile."""

    def call_in_thread(
        self, read: Callable[[], T], then: Callable[[T], None], without: Callable[[RuntimeError], T] | None = None
    ) -> None:
        self.call_soon(lambda: then(read()))


class FakeProcess:
    """A worker. `ends_with` maps a signal to (delay in seconds, status); a signal that it lacks is ignored."""

    def __init__(self, pid: int, spec: WorkerSpec) -> None:
        self.pid = pid
        self.spec = spec
        self.is_alive = True
        self.ends_with: dict[int, tuple[float, int]] = {signal.SIGTERM: (0.01, -15), signal.SIGKILL: (0.0, -9)}
        self.stack_text = "Thread 0x1\n  in train\n"


class FakeChildren:
    """In place of `runtime.signals.ChildWatch`."""

    def __init__(self) -> None:
        self.callbacks: dict[int, Callable[[int], None]] = {}
        self.on_orphan_end: Callable[[int], None] | None = None
        self.sessions = OwnSessions()

    def watch(self, pid: int, on_end: Callable[[int], None]) -> None:
        self.callbacks[pid] = on_end

    def hold_orphans(self, holds: bool, holder: object = None) -> None:
        pass

    def reap(self) -> None:
        pass

    def close(self) -> None:
        self.callbacks.clear()


class FakeLease:
    """In place of the guard's."""

    def __init__(self) -> None:
        self.fencings = 0

    def count_fencings(self) -> int:
        return self.fencings

    def record_not_ended(self) -> None:
        pass


class FakeThread:
    """In place of the thread that opens files: everything runs on the agent's loop."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop

    def submit(self, command: Callable[[], None]) -> None:
        self.loop.call_soon(command)

    def reply(self, command: Callable[[], None]) -> None:
        self.loop.call_soon(command)


class FakeFiles:
    """In place of what reads and opens files."""

    def __init__(self, loop: Loop) -> None:
        self.thread = FakeThread(loop)
        self.is_hanging = False
        """The disk does not answer."""

    def call(self, read: Callable[[], Any], limit_s: float = 2.0) -> Any:
        return None if self.is_hanging else read()


class FakeLogs:
    """In place of `LogRouter`: no pipes, and files only for stacks and errors."""

    def __init__(self, bench: "Bench", folder: Path) -> None:
        self._bench = bench
        self._folder = folder
        self.run_dir = None
        self.files = FakeFiles(bench.loop)
        self.opened: set[int] = set()
        """Local ranks whose descriptors are open in the agent."""
        self.no_descriptors_for: int | None = None

    def open_round(self, round: Round) -> None:  # noqa: A002
        assert not self.opened

    def run_when_open(self, then: Callable[[], None]) -> None:
        then()

    def open_worker(self, round: Round, local_rank: int) -> WorkerStreams:  # noqa: A002
        if local_rank == self.no_descriptors_for:
            raise SpawnError(f"cannot make pipes for local rank {local_rank}: {os.strerror(24)}")
        self.opened.add(local_rank)
        return WorkerStreams(
            stdout_fd=None,
            stderr_fd=None,
            error_file=str(self._folder / f"{local_rank}.json"),
            stack_file=str(self._folder / f"{local_rank}.stack"),
            stdout_log=None,
            stderr_log=None,
        )

    def close_child_ends(self, local_rank: int) -> None:
        self.opened.discard(local_rank)

    def finish_round(self, on_finished: Callable[[], None], _limit_s: float = 1.0) -> None:
        self._bench.loop.call_soon(on_finished)

    def read_stderr_tail(self, local_rank: int) -> tuple[str, ...]:
        return ()

    def read_stderr_text(self, local_rank: int) -> str:
        return ""

    def count_captured_bytes(self, local_rank: int) -> int:
        return 0

    def read_last_line(self, local_rank: int) -> bytes:
        return b""

    def print_line(self, line: str) -> None:
        is_last = line.startswith(("succeeded after ", "failed after ", "stopped after "))
        (self._bench.last_lines if is_last else self._bench.lines).append(line)

    def mute_notices(self) -> None:
        self._bench.lines_muted = True

    status = None

    def hide_status(self) -> None:
        """The bench has no terminal."""

    def print_text(self, text: str) -> None:
        self._bench.lines.append(text)

    def report_incomplete_logs(self, line: str) -> None:
        self._bench.lines.append(line)

    def close(self, *, notice_s: float) -> None:
        del notice_s
        assert not self.opened


class FakeStarter:
    """Starts workers of the bench's kernel, after a delay."""

    def __init__(self, bench: "Bench") -> None:
        self._bench = bench
        self.prepare_s = 0.0
        self.start_s = 0.01
        self.parked = 0
        self.stores: list[int] = []
        """Port and number of workers, of the one there is."""
        self.lose_store: Callable[[str], None] | None = None
        self._batch = itertools.count()
        self._current = -1

    def prepare(self, on_read: Callable[[], None], on_prepared: Callable[[], None]) -> None:
        if self.prepare_s:
            self._bench.loop.call_later(self.prepare_s, on_prepared)
        else:
            on_prepared()
        on_read()

    def can_host_store(self) -> bool:
        return True

    def start_store(self, addr: str, port: int, on_lost: Callable[[str], None]) -> None:
        self.stores.append(port)
        self.lose_store = on_lost

    def end_store(self) -> None:
        self.stores.clear()

    def start(
        self,
        specs: Iterable[WorkerSpec],
        on_started: Callable[[int, int], None],
        on_failed: Callable[[int, SpawnError], None],
    ) -> None:
        self._current = batch = next(self._batch)
        for spec in specs:
            self._bench.loop.call_later(self.start_s, lambda spec=spec: self._start(batch, spec, on_started))

    def _start(self, batch: int, spec: WorkerSpec, on_started: Callable[[int, int], None]) -> None:
        if batch == self._current:
            on_started(spec.local_rank, self._bench.make_process(spec).pid)

    def park(self, count: int) -> None:
        self.parked += 1

    def cancel(self) -> None:
        self._current = -1

    def list_own_pids(self) -> Container[int]:
        return ()

    def close(self) -> None:
        pass


NAMES = {
    "Prepared": "prepared",
    "AllStarted": "started",
    "Failed": "failed",
    "Idle": "idle",
    "StoodStill": "still",
    "AllSucceeded": "succeeded",
    "DrainAsked": "drain asked",
    "DrainReported": "drain reported",
    "DrainDone": "drain done",
    "Asked": "asked",
    "StacksTaken": "stacks",
    "Saved": "saved",
    "PartReport": "part report",
    "Stopped": "stopped",
    "Leaving": "leaving",
}
HIDDEN = ("is_urgent", "port", "has_stepped", "can_host_store", "ends_job", "is_interrupt", "is_planned", "offers")
"""Fields that are no part of a call's detail."""


class FakeRendezvous:
    """Records calls as (name, round number or None, detail); what follows is up to the test."""

    def __init__(self, bench: "Bench") -> None:
        self._bench = bench
        self.summaries: list[Summary] = []
        self.members: JobMembers | None = None
        """What it knows as the leader."""

    def _record(self, name: str, number: int | None = None, detail: Any = None) -> None:
        self._bench.record_call(name, number, detail)

    def join(
        self,
        *,
        is_prepared: bool = True,
        can_host_store: Callable[[], bool] = bool,
        list_offers: Callable[[], tuple[object, ...]] = tuple,
        on_stream: Callable[[str, Any], None] | None = None,
    ) -> None:
        self._record("join", detail=is_prepared)

    def send(self, message: NodeMessage) -> None:
        values = dict(vars(message))
        number = values.pop("round_number", None)
        values = {name: values[name] for name in values if name not in HIDDEN}
        detail = tuple(values.values()) if len(values) > 1 else next(iter(values.values()), None)
        self._record(NAMES[type(message).__name__], number, detail)

    def send_summary(self, summary: Summary) -> None:
        self.summaries.append(summary)

    def open_stream(
        self, feature: str, address: tuple[str, int], on_open: Callable[[Any], None], on_failed: Callable[[str], None]
    ) -> None:
        on_failed("there is no network")

    def read_members(self) -> JobMembers | None:
        return self.members

    def read_clock(self) -> LeaderClock | None:
        return None

    def close(self) -> None:
        self._record("closed")


class Bench:
    """One node of `nproc` workers."""

    def __init__(self, folder: Path, *, nproc: int = 2, **config: Any) -> None:
        self.clock = HandClock()
        self.loop: Loop = BenchLoop(self.clock)
        self.loop._selector.close()
        self.loop._selector = JumpingSelector(self.clock)
        self.lease = FakeLease()
        self.children = FakeChildren()
        self.starter = FakeStarter(self)
        self.logs = FakeLogs(self, folder)
        self.lines: list[str] = []
        self.last_lines: list[str] = []
        self.lines_muted = False
        self.calls: list[tuple[str, int | None, Any]] = []
        self.answers: dict[tuple[str, int | None], Callable[[], None]] = {}
        self.records: list[EventRecord] = []
        self.processes: list[FakeProcess] = []
        self.signals: list[tuple[int, int]] = []
        """(local rank, signal) for each that reached a live worker; stack signals are not listed."""
        self.newest = 0
        """The number of the round that formed last."""
        self.deaf: set[int] = set()
        """Local ranks whose workers ignore SIGTERM."""
        self.post: Callable[[RendezvousEvent], None] = lambda event: None
        self._pids = itertools.count(4_000_000_000)  # no real process has these
        event_log = EventLog(self.clock)
        event_log.add_sink(self)
        self.supervisor = Supervisor(
            AgentConfig(
                program=Program(kind=ProgramKind.SCRIPT, target="train.py"),
                nproc=nproc,
                rendezvous=RendezvousConfig(
                    backend="muster", run_id="run", host="h", port=1, node_index=0, min_nodes=1, max_nodes=1
                ),
                logs=LogConfig(base_dir=os.devnull),
                node_name="host",
                **config,
            ),
            AgentParts(
                witnesses=(),
                loop=self.loop,
                lease=self.lease,  # type: ignore[arg-type]
                logs=self.logs,  # type: ignore[arg-type]
                event_log=event_log,
                children=self.children,  # type: ignore[arg-type]
                starter=self.starter,
                placements=(),
                early={},
                connect=self._connect,
            ),
        )

    def _connect(self, post: Callable[[RendezvousEvent], None]) -> FakeRendezvous:
        self.post = post
        return FakeRendezvous(self)

    # -- what the test says -----------------------------------------------------------------------------------------

    def at(self, delay_s: float, act: Callable[[], object]) -> None:
        """Do something at a time after the agent's start."""
        self.loop.call_later(delay_s, lambda: (act(), None)[1])

    def on(self, name: str, number: int | None, act: Callable[[], object]) -> None:
        """Do something when the agent calls rendezvous so."""
        self.answers[name, number] = lambda: (act(), None)[1]

    def form(self, number: int = 1, attempt: int = 0, *, is_held: bool = False, hosts_store: bool = False) -> None:
        self.newest = number
        nproc = self.supervisor._config.nproc
        formed = make_round(
            nproc,
            number=number,
            attempt=attempt,
            repeats=attempt,
            restarts_left=3,
            master_addr="127.0.0.1",
            master_port=29500,
            use_agent_store=hosts_store,
            hosts_store=hosts_store,
            lineage=number,
        )
        self.post(RoundFormed(round=formed, is_held=is_held))

    def break_round(
        self, number: int = 1, kind: BreakKind = BreakKind.FAILURE, *, reason: str = "why", stacks: bool = False
    ) -> None:
        self.post(RoundBroken(round_number=number, kind=kind, reason=reason, want_stacks=stacks))

    def end_job(self, *, succeeded: bool) -> None:
        self.post(JobEnded(succeeded=succeeded))

    def end_worker(self, local_rank: int, code: int) -> None:
        """The newest worker of that rank ends by itself, if there is one."""
        for worker in [each for each in self.processes if each.spec.local_rank == local_rank][-1:]:
            self._end(worker, code)

    def worker(self, local_rank: int) -> FakeProcess:
        """The newest worker of that rank."""
        return next(each for each in reversed(self.processes) if each.spec.local_rank == local_rank)

    def error_file(self, local_rank: int) -> str:
        """Where the worker of that rank would write its exception."""
        return self.worker(local_rank).spec.error_file or ""

    def run(self) -> int:
        """Run the agent to its end; its exit code."""
        return self.supervisor.run()

    def names(self, *wanted: str) -> list[tuple[str, int | None]]:
        """The calls of rendezvous in order, all or only those of the wanted names."""
        return [(name, number) for name, number, _ in self.calls if not wanted or name in wanted]

    def details(self, name: str) -> list[Any]:
        """What the calls of that name passed."""
        return [detail for called, _, detail in self.calls if called == name]

    # -- called by the fakes ----------------------------------------------------------------------------------------

    def write(self, record: EventRecord) -> None:
        self.records.append(record)

    def close(self) -> None:
        pass

    def record_call(self, name: str, number: int | None, detail: Any) -> None:
        self.calls.append((name, number, detail))
        answer = self.answers.pop((name, number), None)
        if answer is not None:
            answer()

    # -- the kernel -------------------------------------------------------------------------------------------------

    def make_process(self, spec: WorkerSpec) -> FakeProcess:
        live = [each.spec.local_rank for each in self.processes if each.is_alive]
        assert spec.local_rank not in live, "two workers of one rank live at once"
        process = FakeProcess(next(self._pids), spec)
        if spec.local_rank in self.deaf:
            del process.ends_with[signal.SIGTERM]
        self.processes.append(process)
        return process

    def _end(self, process: FakeProcess, code: int) -> None:
        if process.is_alive:
            process.is_alive = False
            self.children.callbacks.pop(process.pid)(code)

    def send_signal(self, pids: Iterable[int], signum: int) -> None:
        for process in [each for each in self.processes if each.pid in set(pids) and each.is_alive]:
            if signum == get_stack_signal():
                with open(process.spec.stack_file or os.devnull, "a", encoding="utf-8") as file:
                    file.write(process.stack_text)
            elif signum != signal.SIGCONT:
                self.signals.append((process.spec.local_rank, signum))
                if signum in process.ends_with:
                    delay_s, code = process.ends_with[signum]
                    self.loop.call_later(delay_s, lambda process=process, code=code: self._end(process, code))

    def list_descendants(self, _root: int, *, keep: Container[int] = (), spare: Container[int] = ()) -> list[int]:
        return [each.pid for each in self.processes if each.is_alive and each.pid not in (*spare, *keep)]


@contextlib.contextmanager
def open_bench(monkeypatch: pytest.MonkeyPatch, folder: Path, **config: Any) -> Iterator[Bench]:
    """A bench whose processes are the kernel's for this process; signal handlers are restored afterwards."""
    handlers = {signum: signal.getsignal(signum) for signum in HANDLED}
    bench = Bench(folder, **config)
    monkeypatch.setattr("muster.agent.node.supervisor.become_subreaper", lambda: None)
    monkeypatch.setattr("muster._shared.processes.send_signal", bench.send_signal)
    monkeypatch.setattr("muster._shared.processes.list_descendants", bench.list_descendants)
    monkeypatch.setattr("muster._shared.processes.read_stat", lambda pid: ["S"])
    monkeypatch.setattr("muster.agent.diagnosis.stacks.can_dump", lambda pid: True)
    with contextlib.suppress(ImportError):  # a job without this feature has nothing to wait for
        monkeypatch.setattr("muster.agent.features.hangs.samples.APART_S", 0.0)
        monkeypatch.setattr(
            "muster.agent.features.hangs.sessions.read_sessions",
            lambda stack_files, _sizes=None: {pid: {} for pid in stack_files},
        )
    try:
        yield bench
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        bench.loop.close()
