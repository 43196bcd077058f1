"""The stack collector on the test's own clock, with workers whose writes the test controls."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from doubles.clocks import HandClock

from muster._shared import processes
from muster.agent.diagnosis import stacks
from muster.agent.diagnosis.stacks import LIMIT_S, StackCollector, StackTarget
from muster.agent.diagnosis.tracebacks import clean_stacks, read_stderr
from muster.agent.runtime.loop import Loop


class World:
    """Two workers; the test controls what they write and sees which were signalled."""

    def __init__(self, folder: Path) -> None:
        self.clock = HandClock()
        self.loop = Loop(self.clock)
        self.collector = StackCollector(self.loop)
        self.targets = {rank: StackTarget(pid=1000 + rank, stack_file=str(folder / f"{rank}")) for rank in (0, 1)}
        self.signalled: list[int] = []
        self.alive = {1000, 1001}
        self.answers: list[tuple[str, dict[int, str]]] = []

    def collect(self, name: str) -> None:
        self.collector.collect(self.targets, lambda texts: self.answers.append((name, texts)))

    def write(self, rank: int, text: str) -> None:
        with open(self.targets[rank].stack_file, "a", encoding="utf-8") as file:
            file.write(text + "\n")

    def pass_s(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.002)):
            self.clock.at_s += 0.002
            self.loop.turn(0.0)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(tmp_path)
    monkeypatch.setattr(stacks, "can_dump", lambda pid: pid in world.alive)
    monkeypatch.setattr(stacks, "get_stack_signal", lambda: 59)
    monkeypatch.setattr(processes, "send_signal", lambda pids, _signum: world.signalled.extend(pids))
    monkeypatch.setattr(processes, "read_stat", lambda pid: ["S"] if pid in world.alive else None)
    yield world
    world.loop.close()


def test_all_stacks_as_soon_as_they_are_written(world: World) -> None:
    world.collect("stop")
    world.write(0, "at a")
    world.write(1, "at b")
    world.pass_s(0.02)
    assert world.answers == [("stop", {0: "at a", 1: "at b"})]


def test_the_wait_for_a_worker_without_stacks_ends_at_the_limit(world: World) -> None:
    world.collect("stop")
    world.write(0, "at a")
    world.pass_s(LIMIT_S - 0.02)
    assert world.answers == []
    world.pass_s(0.04)
    assert world.answers == [("stop", {0: "at a"})]


def test_repeated_requests_do_not_delay_the_first(world: World) -> None:
    """Each gets its own answer, and none puts off another's."""
    world.write(0, "of earlier days")
    world.collect("stop")
    for number in range(30):
        world.pass_s(0.1)
        world.collect(f"print {number}")
    world.pass_s(LIMIT_S + 0.1)
    assert [name for name, _ in world.answers] == ["stop", *(f"print {number}" for number in range(30))]
    assert all(texts == {} for _, texts in world.answers)


def test_a_stop_is_answered_while_stacks_are_being_printed(world: World) -> None:
    world.collect("print")
    world.pass_s(1.0)
    world.collect("stop")
    world.pass_s(LIMIT_S - 0.5)
    assert [name for name, _ in world.answers] == ["print"]
    world.pass_s(0.6)
    assert [name for name, _ in world.answers] == ["print", "stop"]


def test_a_worker_is_not_signalled_again_before_it_has_answered(world: World) -> None:
    world.collect("print")
    world.collect("stop")
    assert world.signalled == [1000, 1001]
    for rank in (0, 1):
        world.write(rank, "at a")
    world.pass_s(0.02)
    assert world.answers == [("print", {0: "at a", 1: "at a"}), ("stop", {0: "at a", 1: "at a"})]


def test_stacks_from_before_the_request_are_collected_again(world: World) -> None:
    """While the first request waits for rank 1, rank 0 has gone on; each request gets its own and nothing else."""
    world.collect("print")
    world.write(0, "then")
    world.pass_s(0.5)
    world.collect("stop")
    assert world.signalled == [1000, 1001, 1000]
    world.write(0, "now")
    world.pass_s(LIMIT_S + 0.1)
    assert world.answers == [("print", {0: "then"}), ("stop", {0: "now"})]


def test_the_wait_for_a_worker_ends_with_the_worker(world: World) -> None:
    world.collect("stop")
    world.write(0, "at a")
    world.alive.discard(1001)
    world.pass_s(0.02)
    assert world.answers == [("stop", {0: "at a"})]


def test_a_request_can_follow_from_an_answer(world: World) -> None:
    world.alive.clear()
    world.collector.collect({}, lambda _: world.collect("second"))
    world.pass_s(0.02)
    assert world.answers == [("second", {})]


def test_a_stack_file_that_cannot_be_read_gives_no_stack(world: World) -> None:
    world.collect("stop")
    world.write(0, "at a")
    world.pass_s(0.01)
    Path(world.targets[0].stack_file).unlink()
    world.pass_s(LIMIT_S)
    assert world.answers == [("stop", {})]


def test_stacks_are_shown_without_what_explains_nothing() -> None:
    text = """
Thread 0x00007f (most recent call first):
  <no Python frame>

Thread 0x00006f (most recent call first):
  Garbage-collecting
  File "/x/muster/agent/workers/program.py", line 3 in run

Thread 0x00008f (most recent call first):
  File "/lib/python3.11/linecache.py", line 90 in updatecache
  File "/x/muster/agent/workers/program.py", line 3 in run

Current thread 0x00009f (most recent call first):
  File "/lib/python3.11/traceback.py", line 90 in format
  File "/w/main.py", line 3 in step
  File "/x/muster/agent/workers/program.py", line 178 in run
"""
    head = "Current thread 0x00009f (most recent call first):"
    assert clean_stacks(text) == f'{head}\n  File "/w/main.py", line 3 in step'


@pytest.mark.parametrize("by_m", [False, True])
def test_the_stacks_of_a_job_on_another_node_end_with_the_frames_of_its_program(by_m: bool) -> None:
    """The agent that travels with a job is a zip, and workers begin there. `-m` of the program uses runpy, too."""
    head = "Current thread 0x00009f (most recent call first):"
    own = '  File "/w/main.py", line 3 in step\n  File "/w/main.py", line 9 in <module>'
    runpy = '  File "<frozen runpy>", line 88 in _run_code\n  File "<frozen runpy>", line 198 in _run_module_as_main'
    agent = "/a/.muster/muster-agent.zip"
    frames = [
        f'  File "{agent}/muster/agent/workers/program.py", line 250 in run',
        f'  File "{agent}/muster/agent/workers/program.py", line 147 in main',
        f'  File "{agent}/muster/agent/__main__.py", line 32 in main',
        f'  File "{agent}/__main__.py", line 21 in <module>',
        runpy,
    ]
    text = "\n".join([head, own, *([runpy] if by_m else []), *frames])
    assert clean_stacks(f"{text}\n\n{TQDM}\n{LOADER}").startswith(f"{head}\n{own}\n\nThread 0x00007f02")


TQDM = """Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/usr/lib/python3.11/threading.py", line 629 in wait
  File "/v/lib/python3.11/site-packages/tqdm/_monitor.py", line 60 in run
  File "/usr/lib/python3.11/threading.py", line 1045 in _bootstrap_inner
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap
"""
LOADER = """Thread 0x00007f02 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/w/loader.py", line 4 in fill
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap
"""
MAIN = """Current thread 0x00007f03 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/usr/lib/python3.11/queue.py", line 171 in get
"""


def test_the_main_thread_is_first_and_threads_of_libraries_that_wait_are_one_line() -> None:
    text = "\n".join([TQDM, LOADER, TQDM.replace("f01", "f04"), MAIN])
    folded = "Not shown: 2 helper threads waiting for work (tqdm/_monitor.py)"
    assert clean_stacks(text) == f"{MAIN}\n{LOADER}\n{folded}"


def test_a_thread_of_a_library_that_works_is_shown() -> None:
    busy = TQDM.replace('threading.py", line 331 in wait', 'socket.py", line 9 in send')
    assert clean_stacks(f"{busy}\n{MAIN}") == f"{MAIN}\n{busy}".rstrip()


def test_the_thread_that_crashed_is_first() -> None:
    modules = "Extension modules: numpy.core (total: 1)"
    exception, text = read_stderr(f"Fatal Python error: Aborted\n\n{TQDM}\n{MAIN}\n{modules}") or ("", "")
    assert exception == "Fatal Python error: Aborted"
    folded = "Not shown: 1 helper thread waiting for work (tqdm/_monitor.py)"
    assert text == f"Fatal Python error: Aborted\n\n{MAIN}\n{folded}"
    assert read_stderr(f"Fatal Python error: Aborted\n\n{modules}") == (exception, exception)


def test_a_fork_of_the_program_shows_what_the_worker_does() -> None:
    head = "Current thread 0x00007f0000000001 (most recent call first):"
    own = '  File "/w/main.py", line 3 in step'
    outside = ['  File "/p/muster/elastic/fork/tree.py", line 76 in _run', '  File "/w/main.py", line 9 in <module>']
    other = ["Thread 0x00007f0000000002 (most recent call first):", '  File "/w/data.py", line 1 in load']
    text = "\n".join([head, own, '  File "/p/muster/elastic/fork/worker.py", line 70 in run', *outside, "", *other])
    assert clean_stacks(text) == "\n".join([head, own, "", *other])
