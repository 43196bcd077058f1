"""Mappings of memory files, and huge pages: what is in a file stays, whether the system gives them or not."""

import ctypes
import mmap
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from snapshot_memory import Node, worker

from muster import snapshots
from muster._shared.snapshot_file import SLOT_SPACE, SLOTS
from muster.snapshots import content
from muster.snapshots.content import HUGE_BYTES, Mapping, take_huge_pages

pytestmark = pytest.mark.torch

BOTH = mmap.PROT_READ | mmap.PROT_WRITE
SIZE = 3 * HUGE_BYTES + 12345


@pytest.fixture
def fd() -> Iterator[int]:
    made = os.memfd_create("test-mapping")
    os.ftruncate(made, SLOTS * SLOT_SPACE)
    yield made
    os.close(made)


@pytest.fixture(params=["huge", "small", "some"])
def pages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the system gives: huge pages if it has them, none, or only the first."""
    left = {"huge": 1_000_000, "small": 0, "some": 1}[request.param]
    collapse = Mapping.collapse

    def refuse(self: Mapping, start: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError("Resource temporarily unavailable")
        collapse(self, start)

    monkeypatch.setattr(Mapping, "collapse", refuse)
    return str(request.param)


def find_address(memory: Any) -> int:
    return int(content.view_bytes(memory).data_ptr())


def count_huge(address: int) -> int:
    """Bytes of memory files that are mapped at an address by huge pages."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith(f"{address:x}-"))
    line = next(line for line in lines[first:] if line.startswith("ShmemPmdMapped:"))
    return int(line.split()[1]) * 1024


@pytest.mark.parametrize("size", [1, 4096, HUGE_BYTES - 1, HUGE_BYTES, SIZE])
@pytest.mark.parametrize("slot", range(SLOTS))
def test_a_mapping_is_that_part_of_the_file(fd: int, size: int, slot: int) -> None:
    data = random.Random(size).randbytes(size)
    os.pwrite(fd, data, slot * SLOT_SPACE)
    one = Mapping(fd, slot * SLOT_SPACE, size, mmap.PROT_READ)
    assert bytes(one.memory) == data
    assert len(one.bytes) == size
    assert one.bytes.numpy().tobytes() == data
    assert one.memory.readonly
    other = Mapping(fd, slot * SLOT_SPACE, size, BOTH)
    other.memory[size - 1] = data[-1] ^ 1
    assert one.memory[size - 1] == os.pread(fd, 1, slot * SLOT_SPACE + size - 1)[0] == data[-1] ^ 1
    if size >= HUGE_BYTES:
        assert find_address(one.memory) % HUGE_BYTES == 0


def test_a_mapping_lasts_as_long_as_what_is_used_of_it(fd: int) -> None:
    before = Path("/proc/self/maps").read_text().count("test-mapping")
    for _ in range(5):
        one = Mapping(fd, 0, SIZE, BOTH)
        part, tensor = one.memory[10:20], one.bytes[HUGE_BYTES:]
        del one
        tensor.fill_(7)
        part[:] = b"0123456789"
        assert os.pread(fd, 10, 10) == b"0123456789"
        assert set(os.pread(fd, SIZE, HUGE_BYTES)[: SIZE - HUGE_BYTES]) == {7}
        del part, tensor
    assert Path("/proc/self/maps").read_text().count("test-mapping") == before


def test_what_cannot_be_mapped_is_an_error(fd: int) -> None:
    reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    try:
        with pytest.raises(PermissionError):
            Mapping(reader, 0, SIZE, BOTH)
    finally:
        os.close(reader)


def test_what_is_in_a_file_stays_when_its_pages_are_replaced(fd: int, pages: str) -> None:
    """Also what was never written, what is mapped, and what another thread writes meanwhile."""
    data = random.Random(1).randbytes(SIZE)
    os.pwrite(fd, data[:HUGE_BYTES], 0)
    os.pwrite(fd, data[2 * HUGE_BYTES + 5000 :], 2 * HUGE_BYTES + 5000)
    wanted = data[:HUGE_BYTES] + bytes(HUGE_BYTES + 5000) + data[2 * HUGE_BYTES + 5000 :]
    before = Mapping(fd, 0, SIZE, BOTH)
    assert bytes(before.memory) == wanted
    ended, written = threading.Event(), bytearray(1)

    def write() -> None:
        while not ended.is_set():
            written[0] = (written[0] + 1) % 256
            before.memory[100] = before.memory[HUGE_BYTES + 1] = written[0]
            assert before.memory[100] == before.memory[HUGE_BYTES + 1] == written[0]

    writer = threading.Thread(target=write)
    writer.start()
    for _ in range(3):
        take_huge_pages(fd, 0, SIZE)
    ended.set()
    writer.join()
    for at in (100, HUGE_BYTES + 1):
        wanted = wanted[:at] + bytes(written) + wanted[at + 1 :]
    assert bytes(before.memory) == wanted
    assert os.pread(fd, SIZE, 0) == wanted
    assert os.fstat(fd).st_blocks * 512 <= 4 * HUGE_BYTES, pages


def test_where_the_system_has_huge_pages_memory_is_in_them(fd: int) -> None:
    one = Mapping(fd, 0, HUGE_BYTES, BOTH)
    os.posix_fallocate(fd, 0, 1)
    try:
        one.collapse(0)
    except OSError as error:
        pytest.skip(f"the system gives a memory file no huge page: {error}")
    take_huge_pages(fd, SLOT_SPACE, SIZE)
    found = Mapping(fd, SLOT_SPACE, SIZE, mmap.PROT_READ)
    found.populate(1, SIZE)
    assert count_huge(find_address(found.memory)) == 3 * HUGE_BYTES


def test_no_huge_page_is_taken_for_what_is_smaller(fd: int) -> None:
    take_huge_pages(fd, 0, HUGE_BYTES - 1)
    assert os.fstat(fd).st_blocks == 0


def test_a_large_state_is_kept_and_loaded_on_all_kinds_of_pages(pages: str) -> None:
    node = Node()

    def make(step: int) -> dict[str, Any]:
        weight = torch.arange(1_500_000, dtype=torch.float32) + step
        return {
            "weight": weight,
            "part": weight[5:900_000:3],
            "half": weight.bfloat16().view(1500, 1000).t(),
            "n": step,
        }

    step = 0
    for start in range(3):
        with worker(node):
            if start:
                into = make(-1)
                snapshot = snapshots.load(into=into)
                assert (snapshot.step, snapshot.state["n"]) == (step, step)
                for name, wanted in make(step).items():
                    assert name == "n" or torch.equal(into[name], wanted), pages
            for _ in range(5 - start):
                step += 1
                snapshots.save(step, make(step))
        node.begin_round(2 + start, (1 + start, step))
    node.close()


@pytest.mark.parametrize("block", [0, 20, 45])
def test_damage_anywhere_in_a_large_state_is_found(pages: str, block: int) -> None:
    node = Node()
    state = {"x": torch.ones(3_000_000), "y": torch.zeros(7)}
    with worker(node):
        snapshots.save(0, state)
    at = (1 << 18) * block + 9000
    before = os.pread(node.content_fds[0], 1, at)
    os.pwrite(node.content_fds[0], bytes([before[0] ^ 1]), at)
    node.begin_round(2, (1, 0))
    with worker(node), pytest.raises(RuntimeError, match=f"block {block} is wrong"):
        snapshots.load(into=state)
    assert node.control.find_slot(0, (1, 0)) is None, pages
    node.close()


def test_errors_of_the_system_are_said(monkeypatch: pytest.MonkeyPatch, fd: int) -> None:
    def refuse(*_: object) -> int:
        ctypes.set_errno(12)
        return -1

    monkeypatch.setattr(content, "find_call", lambda _: refuse)
    one = Mapping(fd, 0, 4096, BOTH)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        one.collapse(0)
    one.populate(0, 4096)
