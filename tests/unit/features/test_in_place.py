"""What was made for another rank or world size raises an error when it is used in a round in place."""

import signal
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, DistributedSampler

from muster import data, in_place
from muster._shared.contract import Env

pytestmark = pytest.mark.torch
ROWS = torch.arange(16)


@pytest.fixture(autouse=True)
def four_ranks(monkeypatch) -> Iterator[None]:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()


def make_loader() -> Callable[[], Any]:
    loader = DataLoader(ROWS, sampler=DistributedSampler(ROWS, num_replicas=4, rank=1), batch_size=2)
    return lambda: next(iter(loader))


def make_own_sampler() -> Callable[[], Any]:
    sampler = data.Sampler(16, batch=4)
    return lambda: next(sampler.read(DataLoader(ROWS, batch_sampler=sampler)))


def make_mesh() -> Callable[[], Any]:
    mesh = init_device_mesh("cpu", (4,))
    return lambda: mesh.get_group(0)


def make_sharded() -> Callable[[], Any]:
    module = torch.nn.Linear(8, 8)
    fully_shard(module, mesh=init_device_mesh("cpu", (4,)))
    return lambda: module(torch.ones(1, 8))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (make_loader, "DistributedSampler was made for rank 1 of 4, this is rank 1 of 2: make the sampler in main"),
        (make_own_sampler, "Sampler was made for rank 1 of 4, this is rank 1 of 2: make the sampler in main"),
        (make_mesh, "DeviceMesh was made for rank 1 of 4, this is rank 1 of 2: make the mesh in main"),
        (
            make_sharded,
            "FSDPLinear was made for rank 1 of 4, this is rank 1 of 2: call fully_shard in main, on a new module",
        ),
    ],
)
def test_what_was_made_for_another_size_says_what_belongs_into_main(make, told: str, monkeypatch) -> None:
    use = make()
    use()
    monkeypatch.setenv("WORLD_SIZE", "2")
    in_place.refuse_bound(("1", "4"))
    with pytest.raises(RuntimeError) as raised:
        use()
    assert str(raised.value) == told
    make()()  # one that is made now


def test_a_sampler_that_the_script_has_set_anew_is_used(monkeypatch) -> None:
    sampler = DistributedSampler(ROWS, num_replicas=4, rank=1, shuffle=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    in_place.refuse_bound(("1", "4"))
    sampler.__init__(ROWS, num_replicas=2, rank=1, shuffle=False)
    assert list(sampler) == [1, 3, 5, 7, 9, 11, 13, 15]


def test_with_a_process_group_from_before_main_is_called_once(monkeypatch) -> None:
    monkeypatch.setenv(Env.FEATURES, "in_place")
    said: list[str] = []
    slot = in_place.Slot(is_managed=lambda: True, note_stays=bool, look_again=list, say=said.append)
    monkeypatch.setenv("RANK", "0")
    assert in_place.decorate(lambda: 7, slot)() == 7
    assert [line.split(": ")[1] for line in said] == [
        "a process group exists already (init_process_group belongs into main)"
    ]


def test_a_loader_that_starts_its_workers_is_not_interrupted(monkeypatch) -> None:
    """A worker that it had not noted yet belonged to nobody, and lived as long as the rank."""

    class Left(Exception):
        pass

    class Once(in_place.Process):
        def _leave(self) -> None:
            raise Left

    start, workers = BaseProcess.start, []
    process = Once(in_place.Slot(is_managed=lambda: True, note_stays=bool, look_again=list, say=print))
    before = signal.getsignal(process._signum)

    def interrupt() -> None:
        process.is_leaving = True
        signal.raise_signal(process._signum)

    def start_and_interrupt(self: BaseProcess) -> None:
        start(self)
        interrupt()

    def main() -> None:
        workers.extend(iter(DataLoader(ROWS, num_workers=2))._workers)
        interrupt()

    monkeypatch.setattr(BaseProcess, "start", start_and_interrupt)
    try:
        with pytest.raises(Left):
            process.run(main, (), {})
    finally:
        signal.signal(process._signum, before)
    assert len(workers) == 2
