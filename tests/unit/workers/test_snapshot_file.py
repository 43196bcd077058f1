"""The memory that agent and workers share for snapshots: what one writes the other reads; what stays."""

import itertools
import mmap
import os
import random
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from muster._shared import snapshot_file
from muster._shared.contract import Env
from muster._shared.layouts import SnapshotBlock as Block
from muster._shared.layouts import SnapshotHeader as Header
from muster._shared.snapshot_file import (
    ANSWER,
    BLOCK_BYTES,
    COMPLETE,
    EMPTY,
    MAGIC,
    REQUEST,
    WRITING,
    Control,
    RemoteReader,
    Slot,
    build_address,
    choose_held,
    choose_slot,
    compute_limit,
    find_files,
    open_files,
    read_available_bytes,
)
from muster.agent.workers.status_page import StatusPage


def make_slot(lineage, step, state=COMPLETE):
    return Slot(state, lineage, step, 100, 0, 1, False)


@pytest.fixture
def control():
    control = Control(mmap.mmap(-1, 3 * BLOCK_BYTES))
    control.words[Header.MAGIC], control.words[Header.RANKS], control.words[Header.LINEAGE] = MAGIC, 2, 7
    return control


def save(control, step, rank=0):
    slot = control.begin_save(rank)
    assert slot is not None
    control.end_save(rank, slot, make_slot(control.lineage, step))
    return slot


def steps(control, rank=0):
    return sorted(slot.step for slot in control.read_slots(rank) if slot.state == COMPLETE)


def test_what_is_saved_is_read(control):
    slot = control.begin_save(1)
    assert control.read_slots(1)[slot].state == WRITING
    assert control.find_slot(1, (7, 4)) is None
    saved = Slot(COMPLETE, 7, 4, 1000, 1, 2, True)
    control.end_save(1, slot, saved)
    assert control.read_slots(1)[slot] == saved
    assert control.find_slot(1, (7, 4)) == slot
    assert control.find_slot(0, (7, 4)) is None
    assert control.find_slot(1, None) is None
    control.empty_slot(1, slot)
    assert control.read_slots(1)[slot].state == EMPTY


def test_the_base_and_then_the_confirmed_generation_stay(control):
    save(control, 1)
    control.words[Header.BASE_LINEAGE], control.words[Header.BASE_STEP], control.words[Header.LINEAGE] = 7, 2, 8
    for step in range(2, 6):
        save(control, step)
    assert steps(control) == [1, 4, 5]
    control.words[Header.CONFIRMED] = 5 + 1
    for step in range(6, 10):
        save(control, step)
    assert steps(control) == [5, 8, 9]


def test_what_is_held_stays_beside_the_confirmed_one(control):
    save(control, 1)
    control.words[Header.CONFIRMED] = 2
    control.words[Header.HOLD] = 3 + 1
    for step in range(2, 9):
        save(control, step)
    assert steps(control) == [1, 3, 8]


def test_a_save_without_a_free_slot_is_left_out_and_counted(control):
    pinned = save(control, 1)
    save(control, 2)
    control.words[Header.CONFIRMED] = 3
    save(control, 3)
    control.words[Header.HOLD] = 3 + 1
    control.write_block(0, Block.PIN, pinned + 1)
    assert control.begin_save(0) is None
    assert control.read_block(0, Block.SKIPPED) == 1
    assert steps(control) == [1, 2, 3]
    control.write_block(0, Block.PIN, 0)
    assert control.begin_save(0) == pinned


def test_a_hold_that_comes_while_the_slot_is_chosen_wins(control, monkeypatch):
    """The agent looks at the slots after it has written its word, the worker at the word after it has marked a slot."""
    for step in range(1, 4):
        save(control, step)
    choose = snapshot_file.choose_slot
    calls = itertools.count()

    def agent_acts(*args):
        chosen = choose(*args)
        if next(calls) == 0:
            control.words[Header.HOLD] = 1 + 1
        return chosen

    monkeypatch.setattr(snapshot_file, "choose_slot", agent_acts)
    slot = control.begin_save(0)
    assert steps(control) == [1, 3]
    assert control.read_slots(0)[slot].state == WRITING


@pytest.mark.parametrize("seed", range(200))
def test_nothing_that_is_needed_is_chosen(seed):
    draw = random.Random(seed)
    slots = [make_slot(draw.randint(1, 2), draw.randint(1, 4), draw.randint(0, 2)) for _ in range(3)]
    confirmed = draw.choice([None, (1, 2), (2, 2)])
    held = choose_held(slots, 2, draw.randint(1, 4))
    pinned = draw.randint(-1, 2)
    chosen = choose_slot(slots, confirmed, held, pinned)
    needed = [
        n == pinned or (s.generation in (confirmed, held) and s.generation is not None) for n, s in enumerate(slots)
    ]
    assert (chosen is None) == all(needed)
    if chosen is not None:
        assert not needed[chosen]
        older = [s.generation for n, s in enumerate(slots) if not needed[n] and n != chosen]
        assert all((slots[chosen].generation or (-1, -1)) <= (each or (-1, -1)) for each in older)


# -- opening -----------------------------------------------------------------------------------------------------------

needs_memfd = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memory files, which only Linux has")


@pytest.fixture
def files():
    fd = os.memfd_create("muster-test")
    content = os.memfd_create("muster-test")
    os.ftruncate(fd, 2 * BLOCK_BYTES)
    control = Control(mmap.mmap(fd, 2 * BLOCK_BYTES))
    control.words[Header.MAGIC], control.words[Header.RANKS], control.words[Header.ROUND] = MAGIC, 1, 5
    control.write_block(0, Block.FILE, content)
    yield control, f"/proc/{os.getpid()}/fd/{fd}", content
    os.close(fd)
    os.close(content)


@needs_memfd
@pytest.mark.parametrize("fd", [7, None])
def test_the_agent_makes_the_files_when_the_first_worker_wants_them(fd):
    page = StatusPage(nproc=2, round_number=3, attempt=0)
    try:
        variables = page.build_env(1)
        assert not page.is_memory_wanted
        with ThreadPoolExecutor() as threads:
            found = threads.submit(find_files, variables)
            while not page.is_memory_wanted:
                assert not found.done()
            page.answer_memory(fd)
            assert found.result() == (None if fd is None else f"/proc/{os.getpid()}/fd/7:3:1")
        assert not page.is_memory_wanted
        assert find_files(variables) == found.result()
    finally:
        page.close()


@needs_memfd
def test_a_worker_opens_its_files(files):
    control, path, content = files
    assert find_files({}) is None
    assert find_files({Env.SNAPSHOTS: f"{path}:5:0"}) == f"{path}:5:0"
    opened = open_files(f"{path}:5:0")
    assert control.words[Header.USED] == 1
    assert control.read_block(0, Block.OWNER) == os.getpid()
    fd = opened.open_content(0)
    os.pwrite(fd, b"state", 0)
    os.close(fd)
    assert os.pread(content, 5, 0) == b"state"
    assert snapshot_file.measure_used(opened) >= 4096


@needs_memfd
def test_a_second_process_of_a_rank_gets_none(files):
    control, path, _ = files
    control.write_block(0, Block.OWNER, os.getppid())
    assert open_files(f"{path}:5:0") is None
    assert control.words[Header.USED] == 0


@needs_memfd
@pytest.mark.parametrize(
    ("word", "value", "place"), [(Header.MAGIC, 1, "5:0"), (Header.ROUND, 5, "6:0"), (1, 1, "5:1")]
)
def test_files_of_something_else_are_refused(files, word, value, place):
    control, path, _ = files
    control.words[word] = value
    with pytest.raises(ValueError, match=r"another version|another round"):
        open_files(f"{path}:{place}")


# -- the limit ---------------------------------------------------------------------------------------------------------


def test_a_rank_may_take_its_part_of_the_share(control):
    control.words[Header.SHARE] = 400
    limit = compute_limit(control.words, 0, lambda: 60_000)
    assert limit == (60_000 * 400 // 1000 // (2 * 3), 24_000, 3)
    control.words[Header.COPIES] = 1
    limit = compute_limit(control.words, 40_000, lambda: 60_000)
    assert limit == (40_000 // (2 * 5), 40_000, 5)


def test_a_limit_in_bytes_counts_as_well(control):
    assert compute_limit(control.words, 0, lambda: 1) is None
    control.words[Header.LIMIT] = 600
    assert compute_limit(control.words, 0, lambda: 1) == (100, 600, 3)
    control.words[Header.SHARE] = 500
    assert compute_limit(control.words, 0, lambda: 240) == (20, 120, 3)
    assert compute_limit(control.words, 0, lambda: None) == (100, 600, 3)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_tightest_ancestor_counts(tmp_path):
    write(tmp_path / "proc/meminfo", "MemTotal: 100 kB\nMemAvailable: 90 kB\n")
    write(tmp_path / "proc/self/cgroup", "0::/pod/container\n")
    assert read_available_bytes(f"{tmp_path}/") == 90 * 1024
    write(tmp_path / "sys/fs/cgroup/pod/container/memory.max", "max\n")
    write(tmp_path / "sys/fs/cgroup/pod/memory.max", "50000\n")
    write(tmp_path / "sys/fs/cgroup/pod/memory.current", "20000\n")
    assert read_available_bytes(f"{tmp_path}/") == 30000
    write(tmp_path / "sys/fs/cgroup/pod/memory.stat", "anon 1\ninactive_file 5000\n")
    assert read_available_bytes(f"{tmp_path}/") == 35000
    write(tmp_path / "sys/fs/cgroup/memory.max", "60000\n")
    write(tmp_path / "sys/fs/cgroup/memory.current", "70000\n")
    assert read_available_bytes(f"{tmp_path}/") == 0


def test_cgroups_of_version_1_count(tmp_path):
    write(tmp_path / "proc/self/cgroup", "5:cpu,memory:/docker/a\n1:pids:/docker/a\n")
    assert read_available_bytes(f"{tmp_path}/") is None
    write(tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes", "50000\n")
    write(tmp_path / "sys/fs/cgroup/memory/memory.usage_in_bytes", "20000\n")
    assert read_available_bytes(f"{tmp_path}/") == 30000


# -- another node's memory ---------------------------------------------------------------------------------------------


@needs_memfd
def test_ranges_of_another_ranks_state_come_through_the_agents_socket(control):
    with pytest.raises(OSError, match="no snapshot"):
        RemoteReader(control)
    control.words[Header.SOCKET], control.words[Header.SOCKET + 1] = random.getrandbits(62), random.getrandbits(62)
    control.words[Header.BASE_LINEAGE], control.words[Header.BASE_STEP] = 7, 4
    content = bytes(range(256))
    asked = []

    def answer(listener):
        connection, _ = listener.accept()
        with connection:
            while request := connection.recv(REQUEST.size, socket.MSG_WAITALL):
                lineage, step, rank, offset, length = REQUEST.unpack(request)
                asked.append((lineage, step, rank))
                known = rank == 1
                is_whole = known and offset + length <= len(content)
                ranges = content[offset : offset + length] if is_whole else b""
                connection.sendall(ANSWER.pack(len(content) if known else -1) + ranges)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(build_address(control))
        listener.listen()
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        reader = RemoteReader(control)
        assert reader.find_bytes(1) == 256
        into = bytearray(100)
        reader.read(1, 50, memoryview(into))
        assert into == content[50:150]
        with pytest.raises(OSError, match="200 to 300 of rank 1"):
            reader.read(1, 200, memoryview(into))
        with pytest.raises(OSError, match="of rank 2"):
            reader.find_bytes(2)
        reader.close()
        thread.join()
    assert set(asked) == {(7, 3, 1), (7, 3, 2)}
