"""Which samples a rank trains on: over any change of the number of ranks, each sample of an epoch once.

    from muster import data, worker

    sampler = data.Sampler(len(dataset), batch=64)
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2)
    if state:
        sampler.load_state_dict(state["sampler"])
    for _ in sampler.epochs(3):
        for part in sampler.read(loader):
            inputs, targets = part.data
            (loss_of(model(inputs), targets).mean() * part.weight).backward()
            if not part.is_last:
                continue                          # a step may have several parts, see `micro_batch`
            optimizer.step()
            optimizer.zero_grad()
            sampler.commit()                      # the samples of this step are trained
            worker.step(part.step)
            snapshots.save(part.step, {"sampler": sampler.state_dict(), ...})

The seed and the epoch decide the order of all samples, whatever the number of ranks. A step takes the next `batch`
samples of this order, and each rank takes its share of them. The state is the number of samples that are trained, not
of those that were read ahead. So a job that continues with more or fewer ranks goes on at the next sample.

The batch of a step stays the same: with fewer ranks, each takes more samples. If the batch does not divide evenly, or
less than a batch is left at the end of an epoch, some ranks take one sample more than others, and `Part.weight` keeps
the gradient that of the mean over the whole batch.

Without muster (plain python, torchrun) this works as well. It uses the standard library, and torch only to shuffle.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

__all__ = ["Part", "Sampler"]


class Part(NamedTuple):
    """What one rank computes in one go."""

    data: Any
    """What the loader has returned."""
    weight: float
    """Multiply the mean loss of this part by it. The gradients of all parts of a step, averaged over the ranks as DDP
    and FSDP do, are then the gradient of the mean over the whole batch. 0: the rank has no sample of its own here, and
    takes part with another's."""
    is_last: bool
    """Whether it is the last part of its step: the optimizer's step follows."""
    step: int
    """The number of steps that are trained before, over all epochs."""


class Sampler:
    """The samples of this rank, as `batch_sampler` of a `DataLoader`. The module's docstring shows the loop.

    Attributes:
        epoch: the current epoch, from 0.
        samples: how many samples of it are trained, of all ranks together.
        steps: how many steps are trained, over all epochs.
    """

    def __init__(
        self,
        size: int | None,
        batch: int,
        *,
        micro_batch: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        """Begin with the first sample of epoch 0.

        Args:
            size: the number of samples in an epoch. None: unknown, for `split` only.
            batch: the samples of one step, of all ranks together.
            micro_batch: the most samples that a rank computes in one go; a share that is larger is split into parts of
                about equal size. None: no limit.
            shuffle: whether each epoch has a random order of its own. Not possible for `split`.
            seed: decides the order; the same on all ranks.
            drop_last: whether an epoch ends with its last full batch.
            rank: this rank among those that read different samples. None: RANK, or 0.
            world_size: their number. None: WORLD_SIZE, or 1.

        Raises:
            ValueError: a number is out of range, or an unknown size is shuffled.
        """
        self._rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        self._world_size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
        for name, value in (("size", size), ("batch", batch), ("micro_batch", micro_batch)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}: 1 or more is needed")
        if not 0 <= self._rank < self._world_size:
            raise ValueError(f"rank is {self._rank}: it must be from 0 to world_size - 1, {self._world_size - 1}")
        if size is None and shuffle:
            raise ValueError("size is None: samples of an unknown number cannot be shuffled (shuffle=False)")
        if size is not None and size < batch and drop_last:
            raise ValueError(f"drop_last leaves nothing of an epoch: size is {size}, batch is {batch}")
        self._size = size if size is None or not drop_last else size - size % batch
        self._batch, self._micro_batch, self._drops_last = batch, micro_batch or batch, drop_last
        self._shuffle, self._seed = shuffle, seed
        self.epoch = self.samples = self.steps = 0
        self._pending: int | None = None
        """The samples of the step whose last part was returned."""
        self._shares: dict[int, tuple[range, ...]] = {}
        """This rank's parts of a step, by the step's size: there are two sizes."""
        self._has_split = self._has_told = False

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs that are left of `count`, beginning with the current one, which may be trained in part."""
        while self.epoch < count:
            yield self.epoch
            self.epoch, self.samples = self.epoch + 1, 0

    def __iter__(self) -> Iterator[list[int]]:
        """Return the indices of this rank's parts, from the first sample that is not trained to the epoch's end."""
        if self._size is None:
            raise ValueError("size is None: only `split` reads samples of an unknown number")
        return self._iterate(self._order(self._size), self.samples, self._size)

    def __len__(self) -> int:
        """Return how many parts are left of the epoch."""
        if self._size is None:
            raise TypeError("size is None: the number of parts is not known")
        full, rest = divmod(self._size - self.samples, self._batch)
        return full * len(self._share(self._batch)) + (len(self._share(rest)) if rest else 0)

    def read(self, loader: Iterable[Any]) -> Iterator[Part]:
        """Yield what is left of the epoch, in parts.

        Args:
            loader: a DataLoader with this sampler as `batch_sampler`, or what `split` returns. A DataLoader may read
                ahead in processes of its own.

        Raises:
            RuntimeError: `commit` was not called after the last part of a step; or a StatefulDataLoader of torchdata
                has loaded a state of its own, which counts what was read ahead.
        """
        if getattr(loader, "next_iter_state", None) is not None:
            raise RuntimeError("load_state_dict of the loader counts what was read ahead: use that of the sampler")
        parts = iter(loader)
        self._tell_shares()
        self._pending = None
        while (wanted := self._count_next()) > 0:
            shares: tuple[range, ...] = ()
            for number, data in enumerate(parts, 1):
                is_split = isinstance(data, _Split)
                if not shares:
                    wanted = data.step_size if is_split else wanted
                    shares = self._share(wanted)
                is_last = number == len(shares)
                self._pending = wanted if is_last else None
                weight = len(shares[number - 1]) * self._world_size / wanted
                yield Part(data.samples if is_split else data, weight, is_last, self.steps)
                if is_last:
                    break
            if not shares:
                return
            if self._pending is not None:
                raise RuntimeError(f"step {self.steps} is not committed: call commit() after the optimizer's step")

    def commit(self) -> None:
        """Count the samples of this step as trained. Call it after the optimizer's step, on all ranks.

        Raises:
            RuntimeError: the step has parts that `read` has not returned yet, or is committed already.
        """
        if self._pending is None:
            raise RuntimeError("no step to commit: call commit() once, after the part with is_last")
        self.samples += self._pending
        self.steps += 1
        self._pending = None

    def split(self, open_at: Callable[[int], Iterable[Any]]) -> Iterator[Any]:
        """Return this rank's parts of a stream: a `_Split` each, for `read`.

        Every rank reads the whole stream and keeps its share. In a DataLoader, an `IterableDataset` returns this from
        `__iter__`, with `batch_size=None` and at most one worker process.

        Args:
            open_at: returns the samples of the current epoch from this position on, such as `dataset.skip`.

        Raises:
            ValueError: samples are shuffled, or processes would read the same samples, or an old position.
        """
        if self._shuffle:
            raise ValueError("a stream cannot be shuffled: pass shuffle=False, and shuffle the stream by a seed")
        torch_data = sys.modules.get("torch.utils.data")
        info = None if torch_data is None else torch_data.get_worker_info()
        if info is not None and info.num_workers > 1:
            raise ValueError(f"num_workers is {info.num_workers}: a stream is read by at most 1 process of each rank")
        if info is not None and self._has_split:
            raise ValueError("persistent_workers is True: the process of a stream must begin anew for each epoch")
        self._has_split = True
        return self._split(iter(open_at(self.samples)), self.samples)

    def state_dict(self) -> dict[str, int]:
        """Return what is trained, for checkpoints and snapshots: the same on all ranks."""
        return {"epoch": self.epoch, "samples": self.samples, "steps": self.steps, "seed": self._seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after what is trained in this state, whatever the number of ranks was.

        Raises:
            ValueError: the order of the samples was another one.
        """
        if state["seed"] != self._seed:
            raise ValueError(f"the state is of seed {state['seed']}, not {self._seed}: its samples have another order")
        if self._size is not None and state["samples"] > self._size:
            raise ValueError(f"the state has {state['samples']} samples of an epoch, which has {self._size} now")
        self.epoch, self.samples, self.steps = state["epoch"], state["samples"], state["steps"]
        self._pending = None

    # -- positions ---------------------------------------------------------------------------------------------------

    def _count_next(self) -> int:
        """Return how many samples the next step has; 0 at the epoch's end."""
        return self._batch if self._size is None else min(self._batch, self._size - self.samples)

    def _share(self, count: int) -> tuple[range, ...]:
        """Return this rank's parts of a step of `count` samples: positions in the step, as many parts on all ranks."""
        if count not in self._shares:
            self._shares[count] = self._divide(count)
        return self._shares[count]

    def _divide(self, count: int) -> tuple[range, ...]:
        base, more = divmod(count, self._world_size)
        begin, own = self._rank * base + min(self._rank, more), base + (self._rank < more)
        parts = -(-(base + (more > 0)) // self._micro_batch)
        size, larger = divmod(own, parts)
        ends = [begin + (number + 1) * size + min(number + 1, larger) for number in range(parts)]
        return tuple(range(first, end) for first, end in zip([begin, *ends], ends, strict=False))

    def _take(self, samples: Sequence[Any], count: int) -> Iterator[Any]:
        """Yield this rank's samples of each part. One without any gets the step's first, with weight 0."""
        for part in self._share(count):
            yield [samples[position] for position in part] or [samples[0]]

    def _order(self, size: int) -> Sequence[int]:
        if not self._shuffle:
            return range(size)
        import torch

        generator = torch.Generator().manual_seed(self._seed + self.epoch)
        order: Sequence[int] = torch.randperm(size, generator=generator)
        return order

    def _iterate(self, order: Sequence[int], begin: int, end: int) -> Iterator[list[int]]:
        for first in range(begin, end, self._batch):
            step = order[first : min(first + self._batch, end)]
            yield from self._take(step if isinstance(step, range) else step.tolist(), len(step))  # type: ignore[attr-defined]

    def _split(self, stream: Iterator[Any], position: int) -> Iterator["_Split"]:
        left = None if self._size is None else self._size - position
        while samples := list(islice(stream, self._batch if left is None else min(self._batch, left))):
            if self._drops_last and len(samples) < self._batch:
                return
            left = None if left is None else left - len(samples)
            for items in self._take(samples, len(samples)):
                yield _Split(items, len(samples))

    def _tell_shares(self) -> None:
        """Say once, on rank 0, that ranks take different numbers of samples."""
        base, more = divmod(self._batch, self._world_size)
        if more == 0 or self._rank != 0 or self._has_told:
            return
        self._has_told = True
        print(
            f"muster.data: a batch of {self._batch} is not divisible by {self._world_size} ranks: {more} of them take"
            f" {base + 1} samples of a step, the others {base}",
            file=sys.stderr,
            flush=True,
        )


class _Split(NamedTuple):
    samples: list[Any]
    """Those of a part."""
    step_size: int
    """How many samples its step has, of all ranks together."""
