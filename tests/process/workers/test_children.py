"""The ends of children: workers by a descriptor each, orphans by looking first; and how a sweep waits for them."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from subreaper import list_descendants

from muster import _processes
from muster.agent.runtime.loop import Loop
from muster.agent.runtime.signals import ChildWatch, SignalWatch
from muster.agent.workers.cold import CommandStarter
from muster.agent.workers.pool import LiveWorker, WorkerEnd, WorkerPool
from muster.agent.workers.spec import Program, ProgramKind, WorkerSpec

TRACER = """
import ctypes, sys, time
seize = 0x4206
print("attached" if ctypes.CDLL(None).ptrace(seize, int(sys.argv[1]), None, None) == 0 else "failed", flush=True)
time.sleep(1000)
"""


class Parent:
    """This process as a parent with a loop."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.children = ChildWatch(self.loop)
        self.orphans: list[int] = []
        self.children.on_orphan_end = self.orphans.append
        self.codes: dict[int, int] = {}
        self.signals: SignalWatch | None = None

    def watch_signals(self) -> None:
        self.signals = SignalWatch(
            self.loop, self.children, handled=(), on_signal=lambda _: None, on_stacks=lambda: None
        )

    def spawn(self, code: int) -> int:
        """A child that ends with `code` at once."""
        return self.spawn_shell(f"exit {code}")

    def spawn_shell(self, text: str) -> int:
        return os.posix_spawn("/bin/sh", ["sh", "-c", text], os.environ)

    def watch(self, pid: int) -> None:
        self.children.watch(pid, lambda code: self.codes.__setitem__(pid, code))

    def turn_until(self, holds: Callable[[], object]) -> None:
        limit = self.loop.call_later(30, lambda: pytest.fail("timed out"))
        while not holds():
            self.loop.turn()
        limit.cancel()

    def close(self) -> None:
        if self.signals is not None:
            self.signals.close()
        self.children.close()
        self.loop.close()


@pytest.fixture
def parent() -> Iterator[Parent]:
    _processes.become_subreaper()
    before = set(os.listdir("/proc/self/fd"))
    made = Parent()
    yield made
    made.close()
    for pid in list_descendants(os.getpid()):
        os.kill(pid, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    assert set(os.listdir("/proc/self/fd")) <= before


def wait_for_zombie(pid: int) -> None:
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def test_a_child_ends_by_its_own_descriptor_without_any_signal(parent: Parent) -> None:
    pid = parent.spawn(5)
    parent.watch(pid)
    parent.turn_until(lambda: pid in parent.codes)
    assert parent.codes == {pid: 5}


def test_a_child_that_ended_before_it_is_watched_keeps_its_status(parent: Parent) -> None:
    pid = parent.spawn(6)
    wait_for_zombie(pid)
    parent.watch(pid)
    parent.turn_until(lambda: pid in parent.codes)
    assert parent.codes == {pid: 6}


def test_without_pidfds_each_child_is_asked_for_at_sigchld(parent: Parent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    monkeypatch.delattr(os, "waitid")  # as on macOS
    parent.watch_signals()
    pids = [parent.spawn(code) for code in (3, 4)]
    for pid in pids:
        parent.watch(pid)
    parent.turn_until(lambda: len(parent.codes) == 2)
    assert list(map(parent.codes.get, pids)) == [3, 4]


def test_the_last_callback_counts(parent: Parent) -> None:
    pid, first = parent.spawn(2), []
    parent.children.watch(pid, first.append)
    parent.watch(pid)
    parent.turn_until(lambda: pid in parent.codes)
    assert first == []


def test_an_orphan_is_collected_and_a_worker_keeps_its_status(parent: Parent) -> None:
    worker = parent.spawn(9)
    wait_for_zombie(worker)
    parent.watch(worker)
    orphan = parent.spawn(1)
    wait_for_zombie(orphan)
    parent.children.reap()
    assert (parent.codes, parent.orphans) == ({worker: 9}, [orphan])


def test_an_orphan_that_may_be_an_unreported_worker_stays_until_it_is_known(parent: Parent) -> None:
    parent.children.hold_orphans(True)
    worker = parent.spawn(11)
    wait_for_zombie(worker)
    parent.children.reap()
    assert parent.orphans == []
    parent.watch(worker)
    other = parent.spawn(1)
    wait_for_zombie(other)
    parent.turn_until(lambda: worker in parent.codes)
    assert parent.codes == {worker: 11}
    parent.children.hold_orphans(False)
    parent.turn_until(lambda: parent.orphans)
    assert parent.orphans == [other]


def test_a_status_that_another_thread_took_is_no_success(parent: Parent) -> None:
    pid = parent.spawn(0)
    parent.watch(pid)
    os.waitpid(pid, 0)
    parent.turn_until(lambda: pid in parent.codes)
    assert parent.codes == {pid: 1}


def test_a_sweep_does_not_list_all_processes_at_each_death(parent: Parent, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    list_parents = _processes.list_parents

    def count() -> dict[int, int]:
        looks.append(1)
        return list_parents()

    started: list[LiveWorker] = []
    ended: list[WorkerEnd] = []
    swept: list[bool] = []
    pool = WorkerPool(
        parent.loop,
        parent.children,
        CommandStarter(),
        on_started=started.append,
        on_spawn_failed=lambda *failed: pytest.fail(str(failed)),
        on_ended=ended.append,
    )
    parent.watch_signals()
    # Each worker has a child, which becomes an orphan.
    program = Program(kind=ProgramKind.COMMAND, target="sh", args=("-c", "sleep 1000 & echo; wait"))
    read_fd, write_fd = os.pipe()
    specs = [
        WorkerSpec(local_rank=rank, program=program, env=dict(os.environ), stdout_fd=write_fd) for rank in range(12)
    ]
    pool.start(1, specs)
    os.close(write_fd)
    said = b""
    while len(said) < 12:
        said += os.read(read_fd, 100)
    os.close(read_fd)
    monkeypatch.setattr(_processes, "list_parents", count)
    pool.sweep(lambda: swept.append(True), lambda pids: pytest.fail(f"{pids} did not end"), limit_s=60.0)
    parent.turn_until(lambda: swept)
    assert sorted(end.worker.local_rank for end in ended) == list(range(12))
    assert {end.code for end in ended} == {-signal.SIGKILL}
    assert not list_descendants(os.getpid())
    assert len(looks) < 12


def test_a_debugger_that_collects_first_costs_no_time(parent: Parent) -> None:
    """With a tracer, the descriptor is readable before the child can be collected: no busy loop may follow."""
    tracer = subprocess.Popen(
        [sys.executable, "-c", TRACER, str(child := parent.spawn_shell("exec sleep 1000"))],
        stdout=subprocess.PIPE,
        text=True,
    )
    with tracer:
        assert tracer.stdout is not None
        assert tracer.stdout.readline() == "attached\n"
        parent.watch(child)
        os.kill(child, signal.SIGKILL)
        turns = 0
        over: list[bool] = []
        parent.loop.call_later(0.3, lambda: over.append(True))
        while not over:
            parent.loop.turn()
            turns += 1
        assert child not in parent.codes
        tracer.kill()
    parent.watch_signals()
    parent.turn_until(lambda: child in parent.codes)
    assert parent.codes == {child: -signal.SIGKILL}
    assert turns < 10


def test_a_sweep_gives_up_what_does_not_end(parent: Parent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_processes, "send_signal", lambda pids, signum: None)  # as if the kernel kept them
    started: list[LiveWorker] = []
    pool = WorkerPool(
        parent.loop,
        parent.children,
        CommandStarter(),
        on_started=started.append,
        on_spawn_failed=lambda *failed: pytest.fail(str(failed)),
        on_ended=lambda end: None,
    )
    program = Program(kind=ProgramKind.COMMAND, target="sleep", args=("1000",))
    pool.start(1, [WorkerSpec(local_rank=rank, program=program, env=dict(os.environ)) for rank in range(2)])
    given_up: list[tuple[int, ...]] = []
    pool.sweep(lambda: pytest.fail("they are still there"), given_up.append, limit_s=0.2)
    parent.turn_until(lambda: given_up)
    assert given_up == [tuple(sorted(worker.pid for worker in started))]
