"""The ends of children: workers by a descriptor each, orphans by looking first; and how a sweep waits for them."""

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import cached_property

import pytest
from harness import LIMIT_S
from subreaper import list_descendants

from muster._shared import processes
from muster.agent.runtime.loop import Loop
from muster.agent.runtime.signals import ChildWatch, SignalWatch
from muster.agent.workers import cold
from muster.agent.workers.cold import CommandStarter
from muster.agent.workers.pool import LiveWorker, WorkerEnd, WorkerPool
from muster.agent.workers.spec import Program, ProgramKind, WorkerSpec
from muster.schedulers.node_program.command import Command
from muster.schedulers.node_program.frames import Channel
from muster.schedulers.processes import driver

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
        self.spawned: set[int] = set()
        self.orphans: list[int] = []
        """Of those that it has spawned: an earlier test may have left this process another child."""
        self.children.on_orphan_end = lambda pid: self.orphans.append(pid) if pid in self.spawned else None
        self.codes: dict[int, int] = {}
        self.signals: SignalWatch | None = None
        self.started: list[LiveWorker] = []
        self.ended: list[WorkerEnd] = []

    @cached_property
    def pool(self) -> WorkerPool:
        """It hears of orphans from then on."""
        return WorkerPool(
            self.loop,
            self.children,
            CommandStarter(),
            on_started=self.started.append,
            on_spawn_failed=lambda *failed: pytest.fail(str(failed)),
            on_ended=self.ended.append,
        )

    def watch_signals(self) -> None:
        self.signals = SignalWatch(
            self.loop, self.children, handled=(), on_signal=lambda _: None, on_stacks=lambda: None
        )

    def spawn(self, code: int) -> int:
        """A child that ends with `code` at once."""
        return self.spawn_shell(f"exit {code}")

    def spawn_shell(self, text: str) -> int:
        pid = os.posix_spawn("/bin/sh", ["sh", "-c", text], os.environ)
        self.spawned.add(pid)
        return pid

    def watch(self, pid: int) -> None:
        self.children.watch(pid, lambda code: self.codes.__setitem__(pid, code))

    def turn_until(self, holds: Callable[[], object]) -> None:
        limit = self.loop.call_later(LIMIT_S, lambda: pytest.fail("timed out"))
        while not holds():
            self.loop.turn()
        limit.cancel()

    def start_sleepers(self, count: int) -> None:
        program = Program(kind=ProgramKind.COMMAND, target="sleep", args=("1000",))
        specs = [WorkerSpec(local_rank=rank, program=program, env=dict(os.environ)) for rank in range(count)]
        self.pool.start(1, specs)

    def sweep(self) -> None:
        swept: list[bool] = []
        self.pool.sweep(lambda: swept.append(True), lambda pids: pytest.fail(f"{pids} did not end"), limit_s=60.0)
        self.turn_until(lambda: swept)

    def close(self) -> None:
        if self.signals is not None:
            self.signals.close()
        self.children.close()
        self.loop.close()


@pytest.fixture
def parent() -> Iterator[Parent]:
    processes.become_subreaper()
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


@pytest.mark.parametrize("is_late", [False, True])
def test_a_child_ends_by_its_own_descriptor_without_any_signal(parent: Parent, is_late: bool) -> None:
    """One that ended before it is watched keeps its status."""
    pid = parent.spawn(5)
    if is_late:
        wait_for_zombie(pid)
    parent.watch(pid)
    parent.turn_until(lambda: pid in parent.codes)
    assert parent.codes == {pid: 5}


def test_without_pidfds_each_child_is_asked_for_at_sigchld(parent: Parent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
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


def test_a_child_that_a_thread_collects_meanwhile_is_no_orphan(parent: Parent, monkeypatch: pytest.MonkeyPatch) -> None:
    look = os.waitid

    def look_and_collect(*args: int) -> object:
        found = look(*args)
        if found is not None:
            os.waitpid(found.si_pid, 0)
        return found

    wait_for_zombie(parent.spawn(1))
    monkeypatch.setattr(os, "waitid", look_and_collect)
    parent.children.reap()
    assert parent.orphans == []


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
    list_parents = processes.list_parents

    def count() -> dict[int, int]:
        looks.append(1)
        return list_parents()

    parent.watch_signals()
    # Each worker has a child, which becomes an orphan. It stays when its child is killed first.
    program = Program(kind=ProgramKind.COMMAND, target="sh", args=("-c", "sleep 1000 & echo; wait; exec sleep 1000"))
    read_fd, write_fd = os.pipe()
    specs = [
        WorkerSpec(local_rank=rank, program=program, env=dict(os.environ), stdout_fd=write_fd) for rank in range(12)
    ]
    parent.pool.start(1, specs)
    os.close(write_fd)
    said = b""
    while len(said) < 12:
        said += os.read(read_fd, 100)
    os.close(read_fd)
    monkeypatch.setattr(processes, "list_parents", count)
    parent.sweep()
    assert sorted(end.worker.local_rank for end in parent.ended) == list(range(12))
    assert {end.code for end in parent.ended} == {-signal.SIGKILL}
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
    monkeypatch.setattr(processes, "send_signal", lambda pids, signum: None)  # as if the kernel kept them
    parent.start_sleepers(2)
    given_up: list[tuple[int, ...]] = []
    parent.pool.sweep(lambda: pytest.fail("they are still there"), given_up.append, limit_s=0.2)
    parent.turn_until(lambda: given_up)
    assert {worker.pid for worker in parent.started} <= set(given_up[0])  # this process may have children of its own


# -- what may take long ------------------------------------------------------------------------------------------------


def test_a_long_look_at_all_processes_does_not_hold_up_the_loop(
    parent: Parent, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_turned = threading.Event()
    list_descendants = processes.list_descendants

    def look(root: int, **left_out: frozenset[int]) -> list[int]:
        assert has_turned.wait(30), "the loop waits for the look"
        return list_descendants(root, **left_out)

    monkeypatch.setattr(processes, "list_descendants", look)
    parent.start_sleepers(2)
    parent.loop.call_later(0.05, has_turned.set)
    parent.sweep()
    assert {end.code for end in parent.ended} == {-signal.SIGKILL}


def test_what_was_collected_during_a_look_is_not_killed(parent: Parent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number may be another process's by then."""
    parent.start_sleepers(2)
    pids = [worker.pid for worker in parent.started]
    killed: list[list[int]] = []
    send_signal = processes.send_signal

    def record(targets: set[int], signum: int) -> None:
        killed.append(sorted(targets))
        send_signal(targets, signum)

    def look(_root: int, **_left_out: frozenset[int]) -> list[int]:
        if not killed:
            os.kill(pids[0], signal.SIGKILL)
            wait_until_over = time.monotonic() + 30
            while len(parent.ended) < 1 and time.monotonic() < wait_until_over:
                time.sleep(0.001)
            return pids
        return []

    monkeypatch.setattr(processes, "send_signal", record)
    monkeypatch.setattr(processes, "list_descendants", look)
    parent.sweep()
    assert killed[0] == [pids[1]]


def test_a_look_without_a_thread_left_happens_all_the_same(parent: Parent, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    parent.start_sleepers(2)
    parent.sweep()
    assert len(parent.ended) == 2


def test_an_error_of_a_look_is_raised_on_the_loop(parent: Parent, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(_root: int, **_left_out: frozenset[int]) -> list[int]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(processes, "list_descendants", look)
    parent.pool.sweep(lambda: pytest.fail("not swept"), lambda pids: pytest.fail(f"{pids} did not end"), limit_s=60.0)
    with pytest.raises(OSError, match="Too many open files"):
        parent.turn_until(lambda: False)


def test_a_program_whose_disk_hangs_does_not_hold_up_the_loop(parent: Parent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold, "_EXEC_LIMIT_S", 0.05)
    monkeypatch.setattr(os, "execvpe", lambda *_: time.sleep(1000))
    parent.start_sleepers(3)
    assert [worker.local_rank for worker in parent.started] == [0, 1, 2]


SHOW = "grep -E 'Sig(Blk|Ign)' /proc/self/status; ls -x /proc/self/fd; cut -d ' ' -f 6 /proc/$$/stat"


def start_worker() -> tuple[int, int]:
    """Its process id, and a descriptor with what it prints; so do the next two."""
    read_fd, write_fd = os.pipe()
    words = Program(kind=ProgramKind.COMMAND, target="sh", args=("-c", SHOW))
    pid = cold.spawn(WorkerSpec(local_rank=0, program=words, env=dict(os.environ), stdout_fd=write_fd))
    os.close(write_fd)
    return pid, read_fd


def start_replica() -> tuple[int, int]:
    read_fd, write_fd = os.pipe()
    pid = driver.spawn(driver.Launch(command=["/bin/sh", "-c", SHOW], env=os.environ, cwd="/"), write_fd, 2)
    os.close(write_fd)
    return pid, read_fd


def start_beside() -> tuple[int, int]:
    made = Command.__new__(Command)
    made._is_tty, made.channel = False, Channel(*os.pipe())
    pid, stdin, (output, errors) = made._spawn(["sh", "-c", SHOW], os.environ, "/", (24, 80))
    os.close(stdin)
    os.close(errors)
    os.set_blocking(output, True)
    return pid, output


@pytest.mark.parametrize("start", [start_worker, start_replica, start_beside], ids=lambda start: start.__name__)
def test_a_program_inherits_nothing_but_its_streams(
    start: Callable[[], tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python may know no close_range(2), and the limit of descriptors may be a thousand million."""
    monkeypatch.setattr(os, "closerange", lambda *_: time.sleep(60))
    monkeypatch.delattr(os, "close_range", raising=False)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1_000_000, hard), hard))
    other = os.open(os.devnull, os.O_RDONLY)
    os.set_inheritable(other, True)
    ignored = {signum: signal.signal(signum, signal.SIG_IGN) for signum in (signal.SIGINT, signal.SIGQUIT)}
    try:
        pid, read_fd = start()
        with open(read_fd) as output:
            blocked, is_ignored, descriptors, session = output.read().splitlines()
        assert os.waitpid(pid, 0)[1] == 0
    finally:
        for signum, handler in ignored.items():
            signal.signal(signum, handler)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(other)
    kept = {*ignored} if start is start_worker else ()  # nohup
    of_libc = 0b11 << 31  # Python cannot set them, and what started the tests may ignore them
    assert int(is_ignored.split()[1], 16) & ~of_libc == sum(1 << signum - 1 for signum in kept)
    assert (int(blocked.split()[1], 16), descriptors.split(), int(session)) == (0, ["0", "1", "2", "3"], pid)


def test_an_exec_that_fails_after_the_limit_is_a_worker_that_fails(
    parent: Parent, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_limit_passed, pass_limit = os.pipe()

    def exec_late(*_: object) -> None:
        os.read(has_limit_passed, 1)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    monkeypatch.setattr(cold, "_EXEC_LIMIT_S", 0.05)
    monkeypatch.setattr(processes, "close_all_but", lambda *_: None)
    monkeypatch.setattr(os, "execvpe", exec_late)
    parent.start_sleepers(1)
    assert len(parent.started) == 1
    os.write(pass_limit, b"!")
    parent.turn_until(lambda: parent.ended)
    assert parent.ended[0].code == 127
    os.close(has_limit_passed)
    os.close(pass_limit)
