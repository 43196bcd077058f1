"""The memory of snapshots as an agent makes it, without an agent: for tests of `muster.snapshots` in one process."""

import contextlib
import mmap
import os
from collections.abc import Iterator, Mapping
from typing import Any

from muster import snapshots
from muster._shared.contract import Env
from muster._shared.layouts import SnapshotBlock as Block
from muster._shared.layouts import SnapshotHeader as Header
from muster._shared.snapshot_file import BLOCK_BYTES, MAGIC, SLOT_SPACE, SLOTS, Control


class Node:
    """Memory files of one node. What its agent would do with them, the test does."""

    def __init__(self, ranks: int = 1, *, first_rank: int = 0, world_size: int | None = None) -> None:
        self.ranks, self.first_rank = ranks, first_rank
        self.world_size = ranks if world_size is None else world_size
        self._stack = contextlib.ExitStack()
        self.control_fd = self._create((1 + ranks) * BLOCK_BYTES)
        self.content_fds = [self._create(SLOTS * SLOT_SPACE) for _ in range(ranks)]
        self.control = Control(mmap.mmap(self.control_fd, 0))
        self.words = self.control.words
        self.words[Header.MAGIC], self.words[Header.RANKS] = MAGIC, ranks
        for local_rank, fd in enumerate(self.content_fds):
            self.control.write_block(local_rank, Block.FILE, fd)
        self.begin_round(1, None)

    def _create(self, size: int) -> int:
        fd = os.memfd_create("test-snapshots", os.MFD_CLOEXEC)
        self._stack.callback(os.close, fd)
        os.ftruncate(fd, size)
        return fd

    def begin_round(self, lineage: int, base: tuple[int, int] | None) -> None:
        """As the agent does before it starts workers."""
        self.words[Header.ROUND] = self.words[Header.LINEAGE] = lineage
        self.words[Header.BASE_LINEAGE], self.words[Header.BASE_STEP] = (base[0], base[1] + 1) if base else (0, 0)
        self.words[Header.CONFIRMED] = self.words[Header.HOLD] = 0
        for local_rank in range(self.ranks):
            self.control.write_block(local_rank, Block.OWNER, 0)
            self.control.write_block(local_rank, Block.LOADED, 0)

    def confirm(self, step: int) -> None:
        """As the agent does when all ranks have the step."""
        self.words[Header.CONFIRMED] = step + 1

    def build_env(self, local_rank: int) -> dict[str, str]:
        round_number = self.words[Header.ROUND]
        return {
            Env.SNAPSHOTS: f"/proc/{os.getpid()}/fd/{self.control_fd}:{round_number}:{local_rank}",
            "LOCAL_RANK": str(local_rank),
            "RANK": str(self.first_rank + local_rank),
            "WORLD_SIZE": str(self.world_size),
        }

    def close(self) -> None:
        self._stack.close()


@contextlib.contextmanager
def worker(node: Node, local_rank: int = 0, **more: str) -> Iterator[None]:
    """Be a worker that has just started, for a while."""
    with process({**node.build_env(local_rank), **more}):
        yield


@contextlib.contextmanager
def process(variables: Mapping[str, str]) -> Iterator[None]:
    """Be a process with these variables that has not looked for its memory."""
    names = {Env.SNAPSHOTS, Env.RESUME_PATH, Env.RESUME_STEP, "LOCAL_RANK", "RANK", "WORLD_SIZE"}
    before = {name: os.environ.pop(name, None) for name in names}
    kept = vars(snapshots._process).copy()
    snapshots._process.is_open, snapshots._process.files, snapshots._process.saver = False, None, None
    os.environ.update(variables)
    try:
        yield
    finally:
        if snapshots._process.saver is not None:
            snapshots._process.saver.wait()
        for name in names:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})
        snapshots._process.__dict__.clear()
        snapshots._process.__dict__.update(kept)


def save_and_load(state: Any, into: Any = None, *, replicated: bool = False) -> Any:
    """The state that a worker gets after one that has saved this."""
    node = Node()
    try:
        with worker(node):
            snapshots.save(3, state, replicated=replicated)
        node.begin_round(2, (1, 3))
        with worker(node):
            snapshot = snapshots.load(into=into)
        assert snapshot is not None
        assert snapshot.step == 3
        return snapshot.state
    finally:
        node.close()
