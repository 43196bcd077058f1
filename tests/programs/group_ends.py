"""Ends with process groups in ways that torch alone does not survive now and then, or ever: argv[1] says how."""

import sys
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def train() -> DistributedDataParallel:
    """A step; the model knows the process group."""
    model = DistributedDataParallel(torch.nn.Linear(8, 2))
    model(torch.ones(4, 8)).sum().backward()
    return model


def reduce() -> None:
    dist.all_reduce(torch.ones(4))


def begin_reduce() -> None:
    """Nobody waits for it. Rank 1 comes 3 s later, when rank 0 is at its end."""
    if dist.get_rank() == 1:
        threading.Event().wait(3)
    dist.all_reduce(torch.ones(4), async_op=True)


def destroy_with_model() -> None:
    model = train()
    begin_reduce()
    dist.destroy_process_group()
    del model  # the last that knows the group


def leave_group() -> None:
    begin_reduce()


def leave_reduced() -> None:
    reduce()
    print("reduced")


def gather_and_destroy() -> None:
    model = train()
    parts = [torch.zeros(2), torch.zeros(2)]
    dist.all_gather(parts, torch.ones(2))
    dist.destroy_process_group()
    del model


def accelerate() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, data = accelerator.prepare(
        model, optimizer, torch.utils.data.DataLoader(torch.ones(64, 8), batch_size=4)
    )
    for batch in data:
        loss = model(batch).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        accelerator.gather(loss.detach())
    accelerator.end_training()


def fail() -> None:
    """Rank 0 raises while a collective is pending that rank 1 never joins."""
    reduce()
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(4), async_op=True)
        raise ValueError("expected")
    threading.Event().wait(1000)


def fail_and_destroy() -> None:
    try:
        fail()
    finally:
        dist.destroy_process_group()


def fail_and_exit() -> None:
    try:
        fail()
    except ValueError:
        sys.exit(3)


WAYS: dict[str, Callable[[], None]] = {
    each.__name__: each
    for each in (
        *(destroy_with_model, leave_group, leave_reduced, gather_and_destroy, accelerate),
        *(fail, fail_and_destroy, fail_and_exit),
    )
}

if __name__ == "__main__":
    way = sys.argv[1]
    if way != "accelerate":
        dist.init_process_group("gloo")
    WAYS[way]()
