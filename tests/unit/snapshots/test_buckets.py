"""`rebuild_buckets`: the buckets of the first step, and that nothing else is changed."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from muster import snapshots

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def wrap(**options: bool) -> DistributedDataParallel:
    parts = [torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(), torch.nn.Linear(8, 1)]
    return DistributedDataParallel(torch.nn.Sequential(*parts), bucket_cap_mb=0.0001, **options)


def list_buckets(model: DistributedDataParallel, steps: int) -> list[list[list[int]]]:
    """The sizes of the gradients in each bucket of each step."""
    found: list[list[list[int]]] = [[]]

    def reduce(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        found[-1].append([each.numel() for each in bucket.gradients()])
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    model.register_comm_hook(None, reduce)
    for _ in range(steps):
        model(torch.ones(4, 8)).sum().backward()
        found.append([])
    return found[:-1]


def seed() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


def draw() -> tuple[float, ...]:
    return float(torch.rand(())), random.random(), float(np.random.rand())


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}])
def test_the_first_step_has_the_buckets_of_all_others_and_nothing_else_changes(options: dict[str, bool]) -> None:
    first, *_, last = list_buckets(wrap(**options), 5)
    assert first != last, "torch needs no help any more"
    model = wrap(**options)
    kept = [each.detach().clone() for each in (*model.parameters(), *model.buffers())]
    seed()
    drawn = draw()
    seed()

    def compute_loss() -> torch.Tensor:
        draw()
        return model(torch.full((4, 8), float("inf"))).sum()

    snapshots.rebuild_buckets(model, compute_loss)
    assert draw() == drawn
    assert all(map(torch.equal, (*model.parameters(), *model.buffers()), kept))
    assert all(each.grad is None for each in model.parameters())
    assert list_buckets(model, 2) == [last, last]


def test_what_is_not_to_be_rebuilt_is_refused() -> None:
    model = wrap()
    with pytest.raises(TypeError, match=r"Sequential .* DistributedDataParallel"):
        snapshots.rebuild_buckets(model.module, lambda: torch.zeros(()))
    model(torch.ones(4, 8)).sum().backward()
    with pytest.raises(ValueError, match="the first backward"):
        snapshots.rebuild_buckets(model, lambda: torch.zeros(()))
