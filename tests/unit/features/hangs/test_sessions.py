"""What is read of the processes of the workers' sessions, also while the disk with their stack files hangs."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.agent.features.hangs import sessions
from muster.agent.features.hangs.sessions import FileSizes, read_sessions
from muster.agent.runtime import loop

OWN_SESSION = os.getsid(0)


class Disk:
    """The disk with the stack files."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.asked: list[str] = []

    def find_size_bytes(self, path: str) -> int:
        self.asked.append(path)
        self.answers.wait()
        return 7


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """It hangs until the test says otherwise."""
    made = Disk()
    monkeypatch.setattr(sessions, "_size_bytes", made.find_size_bytes)
    yield made
    made.answers.set()


def test_a_disk_that_hangs_delays_no_look_and_holds_one_thread(disk: Disk) -> None:
    """What is not known does not count as output; CPU time and the other files of /proc do not need that disk."""
    sizes = FileSizes(limit_s=0.0)
    for _ in range(3):
        found = read_sessions({OWN_SESSION: "/hangs/stacks.txt"}, sizes)[OWN_SESSION]
        own = next(reading for (pid, _), reading in found.items() if pid == os.getpid())
        assert (own.written_bytes, own.cpu_s > 0.0) == (None, True)
    assert disk.asked == ["/hangs/stacks.txt"]


def test_a_disk_that_answers_again_is_asked_again(disk: Disk) -> None:
    sizes = FileSizes(limit_s=0.0)
    others = set(threading.enumerate())  # another test's may still run
    assert sizes.read(["a"]) == {}
    disk.answers.set()
    (thread,) = [each for each in set(threading.enumerate()) - others if each.name == "muster-limited"]
    thread.join()
    sizes._limit_s = 60.0
    assert sizes.read(["b"]) == {"b": 7}


def test_a_look_without_a_thread_is_repeated(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_run: object, _name: str) -> None:
        raise RuntimeError("can't start new thread")

    disk.answers.set()
    sizes = FileSizes(limit_s=60.0)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "start_thread", fail)
        with pytest.raises(RuntimeError, match="new thread"):
            sizes.read(["a"])
    assert sizes.read(["b"]) == {"b": 7}


def test_what_workers_write_into_their_stack_files_is_not_counted(tmp_path: Path) -> None:
    stack_file = tmp_path / "stacks.txt"
    stack_file.write_bytes(b"x" * 1_000_000)
    counted = {}
    for path in (None, str(stack_file)):
        found = read_sessions({OWN_SESSION: path}, FileSizes(limit_s=60.0))[OWN_SESSION]
        counted[path] = next(reading.written_bytes for (pid, _), reading in found.items() if pid == os.getpid())
    whole, rest = counted.values()
    assert whole is not None
    assert rest is not None
    assert whole - rest > 900_000
