"""Replicated and sharded states: of another number of ranks, on this node and from another's memory."""

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from snapshot_memory import Node, worker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from muster import snapshots
from muster._shared.layouts import SnapshotBlock as Block
from muster._shared.snapshot_file import SLOT_SPACE, NotKeptError, RemoteReader
from muster.snapshots import contents

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]  # torch's own, of its tests' process group


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    """Two nodes of two ranks; what an agent answers about another node's ranks comes from its files."""
    made = [Node(2, first_rank=0, world_size=4), Node(2, first_rank=2, world_size=4)]
    yield made
    for node in made:
        node.close()


@pytest.fixture(autouse=True)
def agent(nodes: list[Node], monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Answers `RemoteReader` for all nodes; lists what was read."""
    asked: list[tuple[int, int, int]] = []

    class Reader(RemoteReader):
        def __init__(self, control: Any) -> None:
            assert control.base is not None
            self._base = control.base

        def _find(self, global_rank: int) -> tuple[int, int, int]:
            for node in nodes:
                for local_rank in range(node.ranks):
                    slot = node.control.find_slot(local_rank, self._base)
                    if slot is not None and node.control.read_slots(local_rank)[slot].global_rank == global_rank:
                        return node.content_fds[local_rank], slot, node.control.read_slots(local_rank)[slot].bytes
            raise NotKeptError(f"no node has rank {global_rank}")

        def find_bytes(self, global_rank: int) -> int:
            return self._find(global_rank)[2]

        def read(self, global_rank: int, offset: int, into: memoryview) -> None:
            fd, slot, size = self._find(global_rank)
            assert offset + len(into) <= size
            asked.append((global_rank, offset, len(into)))
            assert os.preadv(fd, [into], slot * (1 << 40) + offset) == len(into)

        def close(self) -> None:
            pass

    monkeypatch.setattr(contents, "RemoteReader", Reader)
    return asked


def save_all(nodes: list[Node], step: int, make: Any, *, replicated: bool = False, grouped: bool = False) -> None:
    for node in nodes:
        for local_rank in range(node.ranks):
            rank = node.first_rank + local_rank
            with group(rank, 4) if grouped else contextlib.nullcontext(), worker(node, local_rank):
                snapshots.save(step, make(rank), replicated=replicated)


def begin_round(nodes: list[Node], lineage: int, base: tuple[int, int], world_size: int) -> None:
    first = 0
    for node in nodes:
        node.begin_round(lineage, base)
        node.first_rank, node.world_size = first, world_size
        first += node.ranks


def load_all(nodes: list[Node]) -> Iterator[tuple[int, Any]]:
    """What each rank continues."""
    for node in nodes:
        for local_rank in range(node.ranks):
            with worker(node, local_rank):
                found = snapshots.load()
            yield node.first_rank + local_rank, None if found is None else found.state


def make_replicated(rank: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rank)
    return {"w": torch.arange(300_000.0), "rng": generator.get_state(), "position": rank}


def test_replicated_tensors_are_kept_once_a_node_and_plain_values_by_each_rank(nodes: list[Node]) -> None:
    save_all(nodes, 5, make_replicated, replicated=True)
    sizes = [slot.bytes for node in nodes for rank in range(2) for slot in node.control.read_slots(rank) if slot.bytes]
    assert min(sizes[0], sizes[2]) > 1_200_000
    assert max(sizes[1], sizes[3]) < 600_000
    begin_round(nodes, 2, (1, 5), 4)
    for node in nodes:
        for local_rank in range(2):
            with worker(node, local_rank):
                into = {"w": torch.zeros(300_000)}
                state = snapshots.load(into=into).state  # type: ignore[union-attr]
            wanted = make_replicated(node.first_rank + local_rank)
            assert state["position"] == wanted["position"]
            assert torch.equal(state["rng"], wanted["rng"])
            assert torch.equal(into["w"], wanted["w"])


def make_own(rank: int) -> dict[str, Any]:
    """Each rank's own, as a script may have it that does not think of it."""
    return {
        "w": torch.arange(3000.0),
        "position": torch.tensor(10 + rank),
        "order": torch.arange(5) * rank,
        "mask": torch.tensor([rank == 2]),
    }


def test_integers_and_booleans_on_the_cpu_are_each_ranks_own(nodes: list[Node]) -> None:
    """A sampler's position is no weight."""
    save_all(nodes, 5, make_own, replicated=True)
    begin_round(nodes, 2, (1, 5), 4)
    for rank, state in load_all(nodes):
        for name, value in make_own(rank).items():
            assert torch.equal(state[name], value), name


@pytest.mark.parametrize("differs", [False, True])
def test_what_differs_though_it_is_replicated_is_named(nodes, differs, capsys) -> None:
    def make(rank: int, step: int) -> dict[str, Any]:
        own = float(rank) if differs else 7.0
        complex_one = torch.tensor([1 + own * 1j])
        model = {"w": torch.arange(3000.0) + step, "c": complex_one.conj(), "half": torch.full((3,), own).half()}
        return {"model": model, "rng": torch.full((4,), rank, dtype=torch.uint8), "loss": torch.tensor(own)}

    node = nodes[1]
    for rank in (0, 1):  # the slots have the last steps when the second rank looks
        with worker(node, rank):
            for step in range(5, 9) if rank else (5, 6, 7):
                snapshots.save(step, make(node.first_rank + rank, step), replicated=True)
    said = "\n".join(line for line in capsys.readouterr().err.splitlines() if "replicated" in line)
    assert ("state['model']['c'] and 2 more differ" in said, bool(said)) == (differs, differs)


@pytest.mark.parametrize("more", [True, False])
def test_a_replicated_state_serves_more_ranks_a_node_that_has_nothing_and_fewer(nodes, agent, more) -> None:
    save_all(nodes, 5, make_replicated, replicated=True)
    nodes.append(Node(2))
    left = nodes if more else nodes[1:2]
    begin_round(left, 2, (1, 5), 2 * len(left))
    for rank, state in load_all(left):
        assert state["position"] == rank % 4
        assert torch.equal(state["w"], make_replicated(0)["w"])
    assert not more or {rank for rank, _, _ in agent} >= {0, 1}


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_what_a_rank_had_for_itself_and_was_lost_with_its_node_is_another_ranks(nodes: list[Node], lost: int) -> None:
    """One rank a node, and no copy of what the lost one had saved; another node takes its place."""
    while nodes:
        nodes.pop().close()
    nodes += [Node(1, first_rank=rank, world_size=3) for rank in range(3)]
    save_all(nodes, 5, make_replicated, replicated=True)
    nodes[lost].close()
    nodes[lost] = Node(1)
    begin_round(nodes, 2, (1, 5), 3)
    states = [state for _, state in load_all(nodes)]
    assert all(torch.equal(state["w"], make_replicated(0)["w"]) for state in states)
    assert [state["position"] for state in states] == [
        (0 if lost else 1) if rank == lost else rank for rank in range(3)
    ]


def test_a_state_of_each_rank_cannot_serve_another_number_of_ranks(nodes, capsys) -> None:
    save_all(nodes, 5, lambda rank: {"w": torch.ones(rank + 1)})
    begin_round([nodes[0]], 2, (1, 5), 2)
    assert [state for _, state in load_all(nodes[:1])] == [None, None]
    (line,) = capsys.readouterr().err.splitlines()
    assert "neither replicated nor" in line


def test_what_comes_damaged_from_another_node_is_not_used(nodes: list[Node]) -> None:
    save_all(nodes, 5, make_replicated, replicated=True)
    begin_round([nodes[0], (last := Node(1))], 2, (1, 5), 3)
    nodes.append(last)
    for node in nodes[:2]:
        os.pwrite(node.content_fds[0], b"\x7f", 300_000)
    with worker(last), pytest.raises(RuntimeError, match="damaged"):
        snapshots.load()


# -- sharded -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def group(rank: int, world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


WHOLE = {
    "even": torch.arange(32.0).reshape(8, 4),
    "uneven": torch.arange(15.0).reshape(5, 3),
    "small": torch.arange(2.0),
    "columns": torch.arange(24, dtype=torch.int16).reshape(3, 8),
    "large": torch.arange(400_000.0).reshape(1000, 400),
}


def make_sharded(rank: int, world_size: int, *, zeros: bool = False) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world_size,))
    state: dict[str, Any] = {}
    for name, whole in WHOLE.items():
        dimension = 1 if name == "columns" else 0
        parts = torch.chunk(whole, world_size, dim=dimension)
        empty = whole.narrow(dimension, 0, 0)
        local = (parts[rank] if rank < len(parts) else empty).clone()
        state[name] = DTensor.from_local(
            torch.zeros_like(local) if zeros else local,
            mesh,
            [Shard(dimension)],
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )
    return {"model": state, "whole": torch.full((3,), 0.0 if zeros else 4.0), "step": 0 if zeros else 9, "rank": rank}


def assert_sharded(state: dict[str, Any], rank: int, world_size: int) -> None:
    wanted = make_sharded(rank, world_size)
    for name, value in wanted["model"].items():
        assert torch.equal(state["model"][name].to_local(), value.to_local()), name
    assert torch.equal(state["whole"], wanted["whole"])
    assert state["step"] == 9


@pytest.mark.parametrize("world_size", [4, 2, 6])
def test_a_sharded_state_serves_any_number_of_ranks(nodes: list[Node], world_size: int) -> None:
    save_all(nodes, 3, lambda rank: make_sharded(rank, 4), grouped=True)
    then = {2: nodes[:1], 4: nodes, 6: [*nodes, Node(2)]}[world_size]
    begin_round(then, 2, (1, 3), world_size)
    for node in then:
        for local_rank in range(2):
            rank = node.first_rank + local_rank
            with group(rank, world_size), worker(node, local_rank):
                into = make_sharded(rank, world_size, zeros=True)
                snapshot = snapshots.load(into=into)
                assert snapshot.step == 3
                assert_sharded(snapshot.state, rank, world_size)
                assert_sharded(into, rank, world_size) if world_size != 4 else None
                assert snapshot.state["rank"] == rank % 4
                other = make_sharded(rank, world_size, zeros=True)
                torch.distributed.checkpoint.load(other, storage_reader=snapshots.reader(), no_dist=True)
                assert_sharded(other, rank, world_size)
    if world_size == 6:
        then[2].close()


def test_a_reader_is_what_load_would_be(nodes: list[Node], capsys: pytest.CaptureFixture[str]) -> None:
    """It gives way to a newer checkpoint, and tells the agent what was loaded, and damage is given up."""
    nodes[0].world_size = 2
    for rank in range(2):
        with group(rank, 2), worker(nodes[0], rank):
            snapshots.save(3, make_sharded(rank, 2))
    begin_round([nodes[0]], 2, (1, 3), 2)
    with group(0, 2), worker(nodes[0], 0, MUSTER_RESUME_PATH="/ckpt/5", MUSTER_RESUME_STEP="5"):
        assert snapshots.reader() is None
    with group(0, 2), worker(nodes[0]):
        reader = snapshots.reader()
        assert reader.step == 3
        assert nodes[0].control.read_block(0, Block.LOADED) == 0
        dcp.load(make_sharded(0, 2, zeros=True), storage_reader=reader, no_dist=True)
        assert nodes[0].control.read_block(0, Block.LOADED) == 1 + 3
        with pytest.raises(ValueError, match="above 3"):
            snapshots.save(3, {})
    said = [re.findall(r"step \d|/ckpt/\d", line) for line in capsys.readouterr().err.splitlines()]
    assert said == [["step 5", "/ckpt/5", "step 3"], ["step 3"]]
    begin_round([nodes[0]], 3, (1, 3), 2)
    slot = nodes[0].control.find_slot(0, (1, 3))
    assert slot is not None
    os.pwrite(nodes[0].content_fds[0], b"\x7f", slot * SLOT_SPACE + 300_000)
    with group(0, 2), worker(nodes[0]), pytest.raises(dcp.CheckpointException, match="step 3 is damaged"):
        dcp.load(make_sharded(0, 2, zeros=True), storage_reader=snapshots.reader(), no_dist=True)
    assert nodes[0].control.find_slot(0, (1, 3)) is None


def test_only_the_rows_that_are_needed_cross_the_network(nodes: list[Node], agent: list[tuple[int, int, int]]) -> None:
    def make(rank: int) -> dict[str, Any]:
        local = torch.full((4_000_000,), float(rank))
        return {"x": DTensor.from_local(local, init_device_mesh("cpu", (4,)), [Shard(0)], run_check=False)}

    save_all(nodes, 3, make, grouped=True)
    begin_round([nodes[0]], 2, (1, 3), 2)
    for local_rank in range(2):
        with group(local_rank, 2), worker(nodes[0], local_rank):
            mesh = init_device_mesh("cpu", (2,))
            into = {"x": DTensor.from_local(torch.zeros(8_000_000), mesh, [Shard(0)], run_check=False)}
            assert snapshots.load(into=into) is not None
            local = into["x"].to_local()
            assert (local[0].item(), local[-1].item()) == (2.0 * local_rank, 2.0 * local_rank + 1)
        if local_rank == 0:  # ranks 0 and 1 are on this node: only where parts are is read of the others
            assert sum(size for _, _, size in agent) < 20_000


def test_another_sharding_of_as_many_ranks_is_read_from_all(nodes: list[Node]) -> None:
    save_all(nodes, 3, lambda rank: make_sharded(rank, 4), grouped=True)
    begin_round(nodes, 2, (1, 3), 4)
    with group(1, 4), worker(nodes[0], 1):
        mesh = init_device_mesh("cpu", (4,))
        into = make_sharded(1, 4, zeros=True)
        into["model"] = {
            name: DTensor.from_local(torch.zeros_like(whole), mesh, [Replicate()], run_check=False)
            for name, whole in WHOLE.items()
        }
        assert snapshots.load(into=into) is not None
    for name, whole in WHOLE.items():
        assert torch.equal(into["model"][name].to_local(), whole)


def test_a_sharded_state_needs_into(nodes: list[Node]) -> None:
    with group(0, 4), worker(nodes[0]):
        snapshots.save(3, make_sharded(0, 4))
    begin_round(nodes, 2, (1, 3), 4)
    with group(0, 4), worker(nodes[0]), pytest.raises(ValueError, match="needs into="):
        snapshots.load()
    begin_round(nodes[:1], 2, (1, 3), 2)
    with group(0, 2), worker(nodes[0]), pytest.raises(ValueError, match="needs into="):
        snapshots.load()


def test_saving_is_no_collective(nodes: list[Node], monkeypatch: pytest.MonkeyPatch) -> None:
    with group(0, 4), worker(nodes[0]):
        state = make_sharded(0, 4)
        state["more"] = distribute_tensor(torch.ones(8), init_device_mesh("cpu", (4,)), [Shard(0)])
        for name in ("all_gather_object", "all_gather", "broadcast", "barrier", "scatter", "gather_object"):
            monkeypatch.setattr(dist, name, None)
        snapshots.save(3, state)
        snapshots._process.saver.wait()  # type: ignore[union-attr]
        assert nodes[0].control.find_slot(0, (1, 3)) is not None
