"""A model that learns by rules that are the same in any process: a test computes what a job of it must end with.

All ranks share the weights. Each has random numbers and a place in its data of its own.
"""

import hashlib
import io
from collections.abc import Sequence
from typing import Any

import torch

torch.set_num_threads(1)
SIZE = 500


class Learner:
    """One rank."""

    def __init__(self, rank: int, ballast_bytes: int = 0) -> None:
        self.step = 0
        self.weights = torch.linspace(-1.0, 1.0, SIZE)
        self.momentum = torch.zeros(SIZE)
        self.gradient = torch.zeros(SIZE)
        """What has been added up since the ranks exchanged it last."""
        self.numbers = torch.Generator().manual_seed(rank)
        self.position = rank
        self.ballast = torch.zeros(ballast_bytes // 8, dtype=torch.int64)
        """Has the number of the step everywhere."""

    def accumulate(self) -> None:
        self.step += 1
        batch = torch.randn(SIZE, generator=self.numbers)
        self.position = (31 * self.position + 7) % 1009
        self.gradient += self.weights * batch + self.position / 1009
        self.ballast.fill_(self.step)

    def apply(self, gradients: Sequence[torch.Tensor]) -> None:
        """Learn from the gradients of all ranks, in the order of the ranks."""
        mean = gradients[0].clone()
        for gradient in gradients[1:]:
            mean += gradient
        self.momentum.mul_(0.9).add_(mean / len(gradients))
        self.weights -= 0.01 * torch.tanh(self.momentum)
        self.gradient.zero_()

    def read_state(self) -> dict[str, Any]:
        tensors = {name: getattr(self, name) for name in ("weights", "momentum", "gradient", "ballast")}
        return {**tensors, "numbers": self.numbers.get_state(), "position": self.position, "step": self.step}

    def restore(self, state: dict[str, Any]) -> None:
        assert bool((state["ballast"] == state["step"]).all()), "the state is of several steps"
        for name in ("weights", "momentum", "gradient"):
            getattr(self, name).copy_(state[name])
        self.numbers.set_state(state["numbers"])
        self.position, self.step = state["position"], state["step"]

    def compute_digest(self) -> str:
        """Of all bits that the rank has."""
        tensors = (self.weights, self.momentum, self.gradient, self.numbers.get_state())
        data = b"".join(tensor.numpy().tobytes() for tensor in tensors)
        return hashlib.sha256(data + f"{self.position} {self.step}".encode()).hexdigest()[:16]


def train(ranks: Sequence[Learner], last: int, every: int) -> None:
    """Train all ranks of a job up to a step, as the job does that exchanges gradients after every `every` steps."""
    while ranks[0].step < last:
        for rank in ranks:
            rank.accumulate()
        if ranks[0].step % every == 0:
            gradients = [rank.gradient.clone() for rank in ranks]
            for rank in ranks:
                rank.apply(gradients)


def resume(old: Sequence[Learner], sources: Sequence[int], *, is_replicated: bool) -> list[Learner]:
    """Continue what `torch.save` has written of the old ranks.

    Args:
        old: all ranks.
        sources: for each new rank the old one that it continues.
        is_replicated: the weights are those of rank 0.
    """
    files = [io.BytesIO() for _ in old]
    for rank, file in zip(old, files, strict=True):
        torch.save(rank.read_state(), file)
    states = [torch.load(io.BytesIO(file.getvalue()), weights_only=True) for file in files]
    new = [Learner(rank) for rank in range(len(sources))]
    for rank, source in zip(new, sources, strict=True):
        shared = {name: states[0][name] for name in ("weights", "momentum", "gradient")} if is_replicated else {}
        rank.restore({**states[source], **shared})
    return new
