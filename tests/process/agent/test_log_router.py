"""Real children write through the router: nothing is lost or mixed, and no child is blocked."""

import contextlib
import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from doubles.samples import make_round
from harness import LIMIT_S, PROGRAMS

from muster.agent.config import LogConfig, Std, StdChoice
from muster.agent.errors import InternalError, SpawnError, UsageError
from muster.agent.logs import LogRouter, WorkerStreams, router
from muster.agent.logs.console import Console
from muster.agent.round import Round
from muster.agent.runtime.loop import Loop

SPEW = PROGRAMS / "logs_spew.py"
TEE = StdChoice(default=Std.ALL)


class Node:
    """One agent's loop, router and children; the console is two pipes, with or without a reader."""

    def __init__(
        self, base_dir: str | None, *, nproc: int = 2, reads: bool = True, role: str = "w", **config: Any
    ) -> None:
        self.nproc = nproc
        self.loop = Loop()
        self.console_fds = {"out": os.pipe(), "err": os.pipe()}
        self.printed = {"out": bytearray(), "err": bytearray()}
        self.readers: list[threading.Thread] = []
        if reads:
            self.read_console()
        self.router = LogRouter(
            config=LogConfig(base_dir=base_dir, **config),
            loop=self.loop,
            run_id="job",
            role=role,
            nproc=nproc,
            console=Console(stdout_fd=self.console_fds["out"][1], stderr_fd=self.console_fds["err"][1]),
        )
        self.streams: dict[int, WorkerStreams] = {}
        self.children: list[subprocess.Popen[bytes]] = []

    def read_console(self) -> None:
        for name in self.console_fds:
            self.readers.append(threading.Thread(target=self._read, args=(name,), daemon=True))
            self.readers[-1].start()

    def _read(self, name: str) -> None:
        while chunk := os.read(self.console_fds[name][0], 1 << 16):
            self.printed[name] += chunk

    def open(self, formed: Round) -> None:
        """Open a round's files."""
        opened: list[bool] = []
        self.router.open_round(formed)
        self.router.run_when_open(lambda: opened.append(True))
        self.turn_until(lambda: bool(opened))

    def start(self, command: Sequence[str | Path], **round_changes: Any) -> None:
        """One child per rank, in a new round."""
        formed = make_round(self.nproc, **round_changes)
        self.open(formed)
        for rank in range(self.nproc):
            streams = self.streams[rank] = self.router.open_worker(formed, rank)
            env = {**os.environ, "LOCAL_RANK": str(rank)}
            self.children.append(
                subprocess.Popen(command, stdout=streams.stdout_fd, stderr=streams.stderr_fd, env=env, cwd=PROGRAMS)
            )
            self.router.close_child_ends(rank)

    def wait(self) -> None:
        """Wait until all children have ended."""
        for child in self.children:
            child.wait(timeout=LIMIT_S)
        self.children.clear()

    def turn_until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline_s
            self.loop.turn(0.01)

    def finish(self, limit_s: float = 20.0) -> None:
        """Wait until the children have ended and their output is on disk."""
        self.wait()
        self.drain(limit_s)

    def drain(self, limit_s: float = 20.0) -> None:
        done: list[bool] = []
        self.router.finish_round(lambda: done.append(True), limit_s)
        self.turn_until(lambda: bool(done))
        self.loop.turn(0.0)
        assert done == [True]

    def close(self, limit_s: float = 20.0) -> None:
        """Write out everything; `printed` is complete afterwards."""
        self.router.close(limit_s)
        for _, write_fd in self.console_fds.values():
            os.close(write_fd)
        for reader in self.readers:
            reader.join()
        for read_fd, _ in self.console_fds.values():
            os.close(read_fd)
        self.loop.close()

    def run(self, command: Sequence[str | Path], **round_changes: Any) -> None:
        self.start(command, **round_changes)
        self.finish()
        self.close()


def spew(count: int) -> list[str | Path]:
    return [sys.executable, "-S", SPEW, str(count)]


def spewed(rank: int, count: int) -> bytes:
    lines = b"".join(b"rank %d line %07d %s\n" % (rank, number, b"x" * 60) for number in range(count))
    return lines + b"rank %d ends" % rank


def lines_of(printed: bytes | bytearray, prefix: bytes) -> bytes:
    """What one rank printed, without its prefix."""
    return b"".join(line[len(prefix) :] + b"\n" for line in printed.split(b"\n")[:-1] if line.startswith(prefix))


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) <= before


def read(folder: Path, name: str) -> bytes:
    return (folder / "job/attempt_0" / name).read_bytes()


def test_tee_keeps_every_byte_in_files_and_every_line_whole_on_the_console(tmp_path: Path) -> None:
    node = Node(str(tmp_path), tee=TEE)
    node.run(spew(20_000))
    for rank in range(2):
        assert read(tmp_path, f"{rank}/stdout.log") == spewed(rank, 20_000)
        assert read(tmp_path, f"{rank}/stderr.log") == b"rank %d warns\nrank %d dies" % (rank, rank)
        assert lines_of(node.printed["out"], b"[w%d]:" % rank) == spewed(rank, 20_000) + b"\n"
        assert lines_of(node.printed["err"], b"[w%d]:" % rank) == b"rank %d warns\nrank %d dies\n" % (rank, rank)
    assert node.printed["out"].count(b"\n") == 2 * 20_001
    assert node.printed["err"].count(b"\n") == 4


def test_no_flags_leave_the_workers_the_agents_own_descriptors(tmp_path: Path) -> None:
    node = Node(str(tmp_path))
    formed = make_round(2)
    node.open(formed)
    streams = node.router.open_worker(formed, 0)
    assert (streams.stdout_fd, streams.stderr_fd, streams.stderr_log) == (None, None, None)
    assert streams.error_file == str(tmp_path / "job/attempt_0/0/error.json")
    node.drain()
    assert [thread.name for thread in threading.enumerate() if thread.name == "muster-logs"] == []
    node.close()


def test_the_last_output_of_a_dead_worker_is_available(tmp_path: Path) -> None:
    node = Node(str(tmp_path), redirects=TEE)
    node.start(spew(30_000))
    node.wait()
    assert node.router.read_stderr_tail(1) == ("rank 1 warns", "rank 1 dies")
    node.drain()
    assert node.router.read_stderr_tail(1) == ("rank 1 warns", "rank 1 dies")
    assert node.router.count_captured_bytes(1) == len(spewed(1, 30_000)) + len(b"rank 1 warns\nrank 1 dies")
    node.close()


def test_a_console_without_a_reader_blocks_no_worker_and_gets_everything_later(tmp_path: Path) -> None:
    node = Node(str(tmp_path), tee=TEE, reads=False)
    node.start(spew(100_000))
    node.finish()
    for rank in range(2):
        assert read(tmp_path, f"{rank}/stdout.log") == spewed(rank, 100_000)
    node.read_console()
    node.close()
    for rank in range(2):
        assert lines_of(node.printed["out"], b"[w%d]:" % rank) == spewed(rank, 100_000) + b"\n"


def test_a_descendant_that_holds_the_pipe_does_not_delay_the_end(tmp_path: Path) -> None:
    node = Node(str(tmp_path), nproc=1, tee=TEE)
    ready = tmp_path / "pid"
    node.start(["sh", "-c", f"sleep 600 & echo $! > {ready}; echo last"])
    node.finish(limit_s=0.1)
    assert read(tmp_path, "0/stdout.log") == b"last\n"
    os.kill(int(ready.read_text()), 9)
    node.close()
    assert node.printed["out"] == b"[w0]:last\n"


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """The disk answers again: what is in the pipe is read, to its end."""
    fifo = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(fifo, True)
    reader = threading.Thread(target=lambda: [None for _ in iter(lambda: os.read(fifo, 1 << 16), b"")], daemon=True)
    reader.start()
    yield
    reader.join()
    os.close(fifo)


def test_a_disk_that_hangs_does_not_hang_the_agent(tmp_path: Path) -> None:
    folder = tmp_path / "job/attempt_0/0"
    folder.mkdir(parents=True)
    os.mkfifo(folder / "stdout.log")  # opened for reading and writing, it accepts one pipe's size and then blocks
    node = Node(str(tmp_path), nproc=1, redirects=TEE)
    node.start(spew(20_000), number=2)
    ticks: list[int] = []
    node.turn_until(lambda: node.router.count_captured_bytes(0) > 64 << 10)
    node.loop.call_later(0.01, lambda: ticks.append(1))
    node.turn_until(lambda: bool(ticks))
    assert node.router.read_stderr_tail(0) == ()
    assert node.router.read_stderr_tail(0) == ()
    for child in node.children:
        child.kill()
    node.finish(limit_s=0.05)
    with reading(folder / "stdout.log"):
        node.close()


def test_what_a_disk_that_hung_has_kept_of_one_round_does_not_end_the_output_of_the_next(tmp_path: Path) -> None:
    log = tmp_path / "job/attempt_0/0/stdout.log"
    log.parent.mkdir(parents=True)
    os.mkfifo(log)
    node = Node(str(tmp_path), nproc=1, tee=TEE)
    node.start(spew(20_000), number=2)
    node.turn_until(lambda: node.router.count_captured_bytes(0) > 64 << 10)
    for child in node.children:
        child.kill()
    node.finish(limit_s=0.05)
    node.start(["sh", "-c", "for i in $(seq 40); do echo $i || exit; sleep 0.02; done"], number=3, attempt=1)
    with reading(log):
        node.finish()
        node.close()
    assert (tmp_path / "job/attempt_1/0/stdout.log").read_text().split() == [str(number) for number in range(1, 41)]


@pytest.mark.parametrize(
    "error", [RuntimeError("can't start new thread"), OSError(errno.EMFILE, os.strerror(errno.EMFILE))]
)
def test_without_a_thread_for_the_output_no_pipe_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    node = Node(str(tmp_path), nproc=1, tee=TEE)

    def fail(*_: object, **__: object) -> None:
        raise error

    node.open(make_round(1))
    with monkeypatch.context() as patch:
        patch.setattr(router, "LoopThread", fail)
        with pytest.raises(SpawnError):
            node.router.open_worker(make_round(1), 0)
    node.close()


def test_a_round_that_is_over_before_its_workers_start_leaves_no_open_file(tmp_path: Path) -> None:
    node = Node(str(tmp_path), tee=TEE)
    node.open(make_round(2))
    after_one = len(os.listdir("/proc/self/fd"))
    for number in range(2, 6):
        node.open(make_round(2, number=number))
        node.router.open_round(make_round(2, number=number))  # over before its files are open
    node.open(make_round(2, number=6))
    node.turn_until(lambda: len(os.listdir("/proc/self/fd")) == after_one)
    node.close()


@pytest.mark.parametrize("template", [None, "[${role_name}${rank}]: "])
def test_a_prefix_that_is_not_utf_8_ends_no_agent(tmp_path: Path, template: str | None) -> None:
    """The role's name and the template are bytes of the command line and the environment."""
    node = Node(str(tmp_path), nproc=1, tee=TEE, role="\udcff", prefix_template=template)
    assert node.router.find_stderr_prefix(0, make_round(1)) == "[\ufffd0]"
    node.run(["echo", "line"])
    assert node.printed["out"].startswith(b"[\xff0]:")


def test_a_membership_change_appends_and_a_new_attempt_starts_new_files(tmp_path: Path) -> None:
    node = Node(str(tmp_path), nproc=1, tee=TEE)
    node.start(["echo", "first"], number=1)
    node.finish()
    Path(str(node.streams[0].error_file)).write_text("{}")
    node.start(["echo", "second"], number=2, group_world_size=2, group_rank=1, rank_offset=4)
    assert not Path(str(node.streams[0].error_file)).exists()
    node.finish()
    node.start(["echo", "third"], number=3, attempt=1)
    node.finish()
    node.close()
    assert read(tmp_path, "0/stdout.log") == b"first\nsecond\n"
    assert (tmp_path / "job/attempt_1/0/stdout.log").read_bytes() == b"third\n"
    assert node.printed["out"] == b"[w0]:first\n[w0|n1.r4]:second\n[w0]:third\n"


def test_closing_without_finishing_still_writes_everything(tmp_path: Path) -> None:
    node = Node(str(tmp_path), tee=TEE)
    node.start(spew(5000))
    node.wait()
    node.close()
    assert lines_of(node.printed["out"], b"[w1]:") == spewed(1, 5000) + b"\n"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_agent_whose_log_thread_failed_ends_instead_of_letting_its_workers_hang(tmp_path: Path) -> None:
    node = Node(str(tmp_path), nproc=1, tee=TEE)
    node.start(["true"])
    assert node.router._thread is not None
    node.router._thread.submit(lambda: int("no number"))
    with pytest.raises(InternalError, match="log thread"):
        node.turn_until(lambda: False)
    for child in node.children:
        child.wait(timeout=LIMIT_S)
    for pump in node.router._pumps.values():
        pump.close()
    node.close()


def test_an_unknown_logs_spec_is_the_callers_fault(tmp_path: Path) -> None:
    loop = Loop()
    config = LogConfig(base_dir=str(tmp_path), logs_specs="nothing")
    with pytest.raises(UsageError, match=r"'nothing' among the torchrun\.logs_specs"):
        LogRouter(config=config, loop=loop, run_id="job", role="w", nproc=1)
    loop.close()


@pytest.mark.long
@pytest.mark.torch
def test_a_logs_spec_of_torch_places_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="no torch in this environment")
    from importlib.metadata import EntryPoint

    point = EntryPoint(
        name="own", group="torchrun.logs_specs", value="torch.distributed.elastic.multiprocessing:DefaultLogsSpecs"
    )
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: [point])
    node = Node(str(tmp_path), tee=StdChoice(by_rank={1: Std.OUT}), logs_specs="own")
    node.run(spew(10))
    (log,) = tmp_path.glob("job_*/attempt_0/1/stdout.log")
    assert log.read_bytes() == spewed(1, 10)
    assert lines_of(node.printed["out"], b"[w1]:") == spewed(1, 10) + b"\n"
    assert str(node.streams[1].error_file) == str(log.parent / "error.json")
