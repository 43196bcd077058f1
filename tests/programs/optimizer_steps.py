"""Trains without `muster.worker`; each local rank steps in another way. Then all wait, or rank 0 fails ("raise")."""

import os
import sys
import time

local_rank = int(os.environ["LOCAL_RANK"])


def train(count: int, *optimizers) -> None:
    for _ in range(count):
        for optimizer in optimizers:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


if local_rank == 5:
    assert "torch.optim" not in sys.modules or "torch" in sys.modules  # a warm start may have imported it
else:
    import torch

    model = torch.nn.Linear(2, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

if local_rank == 0:
    train(5, sgd)
elif local_rank == 1:  # a GAN
    critic = torch.optim.Adam(model.parameters())
    train(3, sgd, critic, critic)
elif local_rank == 2:
    from muster import worker

    train(3, sgd)
    worker.step(2, total=9)
    train(20, sgd)
elif local_rank == 3:
    train(4, sgd)
    if os.fork() == 0:
        train(90, sgd)
        os._exit(0)
    assert os.wait()[1] == 0
elif local_rank == 4:

    class Derived(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    def close() -> torch.Tensor:
        loss = model(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss

    train(6, Derived(model.parameters(), lr=0.1))
    solver = torch.optim.LBFGS(model.parameters())  # calls its closure many times a step
    for _ in range(7):
        solver.step(close)

sys.stdout.write("trained\n")
if "raise" in sys.argv:
    raise ValueError("after training")
time.sleep(600)
