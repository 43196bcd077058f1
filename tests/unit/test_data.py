"""`muster.data`: over any history of sizes, faults and preemptions each sample counts once, in one order."""

import random
from collections import deque

import pytest

from muster.data import Sampler

PRIMES = (97, 211, 509)


def read_ahead(sampler, count):
    """A loader that has always fetched `count` parts more than it has returned."""
    fetched = deque()
    for indices in sampler:
        fetched.append(indices)
        if len(fetched) > count:
            yield fetched.popleft()
    yield from fetched


class Job:
    """Ranks that train in step, with the state that all of them continue from."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.size = self.draw.choice(PRIMES)
        self.rules = {
            "batch": self.draw.choice([1, 7, 16, 64]),
            "micro_batch": self.draw.choice([None, 1, 3, 8]),
            "shuffle": False,  # torch's permutation has a test of its own
            "drop_last": self.draw.random() < 0.2,
        }
        self.epochs = 2
        self.trained = []
        """By step: the samples that count."""
        self.state = None

    def run_round(self):
        """Train with some ranks until the end, a preemption (all save), or a fault (the last snapshot counts)."""
        world_size, ahead = self.draw.randint(1, 8), self.draw.choice([0, 2, 5])
        ranks = [Sampler(self.size, **self.rules, rank=rank, world_size=world_size) for rank in range(world_size)]
        for each in ranks:
            if self.state is not None:
                each.load_state_dict(self.state)
        assert ranks[0].steps <= len(self.trained)
        del self.trained[ranks[0].steps :]  # those after the snapshot are trained again
        is_fault = self.draw.random() < 0.5
        left = self.draw.randint(0, 40)
        every = self.draw.choice([1, 3])
        for _ in zip(*(each.epochs(self.epochs) for each in ranks), strict=True):
            readers = [each.read(read_ahead(each, ahead)) for each in ranks]
            while (step := self.read_step(readers)) is not None:
                self.trained.append(step)
                for each in ranks:
                    each.commit()
                states = [each.state_dict() for each in ranks]
                assert states == states[:1] * world_size
                if states[0]["steps"] % every == 0:
                    self.state = states[0]
                left -= 1
                if left < 0:
                    self.state = self.state if is_fault else states[0]
                    return False
        return True

    def read_step(self, readers):
        """One step of all ranks: its samples in order, with the gradient's weights checked."""
        own, sizes = [[] for _ in readers], []
        while True:
            parts = [next(reader, None) for reader in readers]
            if parts[0] is None:
                assert parts == [None] * len(readers)
                return None
            assert len({part.is_last for part in parts}) == 1, "ranks have different numbers of parts"
            assert all(len(part.data) <= (self.rules["micro_batch"] or self.size) for part in parts)
            for found, part in zip(own, parts, strict=True):
                found += part.data if part.weight else []
            sizes += [part.weight for part in parts]
            if parts[0].is_last:
                assert sum(sizes) == pytest.approx(len(readers))
                return [sample for found in own for sample in found]


@pytest.mark.parametrize("batch", range(10))
def test_every_sample_of_an_epoch_counts_once_and_in_one_order(batch):
    for seed in range(batch, 1000, 10):
        job = Job(seed)
        while not job.run_round():
            pass
        end = job.size - job.size % job.rules["batch"] if job.rules["drop_last"] else job.size
        counted = [sample for step in job.trained for sample in step]
        assert counted == [*range(end)] * job.epochs, f"seed {seed}"


def test_a_fault_repeats_the_steps_since_the_last_snapshot_with_the_same_samples():
    before = Sampler(97, 8, shuffle=False, rank=0, world_size=1)
    steps = []
    for part in before.read(before):
        steps.append(part.data)
        before.commit()
        if before.steps == 3:
            snapshot = before.state_dict()
    again = Sampler(97, 8, shuffle=False, rank=0, world_size=1)
    again.load_state_dict(snapshot)
    assert next(again.read(again)).data == steps[3]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_ranks_of_any_number_read_a_stream_as_a_list(world_size):
    def read(rank, begin):
        sampler = Sampler(None, 10, micro_batch=3, shuffle=False, rank=rank, world_size=world_size)
        sampler.samples = begin
        found = []
        for part in sampler.read(sampler.split(lambda position: range(position, 97))):
            found.append((part.step, part.data if part.weight else []))
            if part.is_last:
                sampler.commit()
        assert sampler.samples == 97
        return found

    for begin in (0, 30):
        parts = [part for rank in range(world_size) for part in read(rank, begin)]
        steps = [[sample for step, data in parts if step == number for sample in data] for number in range(10)]
        assert [sample for step in steps for sample in step] == [*range(begin, 97)]


def test_the_length_is_that_of_what_is_left():
    sampler = Sampler(97, 16, micro_batch=4, rank=1, world_size=3)
    assert len(sampler) == len(list(sampler))
    sampler.samples = 48
    assert len(sampler) == len(list(sampler))


def test_each_epoch_has_an_order_of_its_own_and_the_seed_decides_it():
    def read(seed, epoch):
        sampler = Sampler(97, 97, seed=seed, rank=0, world_size=1)
        sampler.epoch = epoch
        return next(iter(sampler))

    orders = [read(0, 0), read(0, 1), read(7, 0)]
    assert all(sorted(order) == [*range(97)] for order in orders)
    assert len(set(map(tuple, orders))) == 3
    assert read(0, 1) == orders[1]


def test_the_same_batch_gives_the_same_gradient_with_any_number_of_ranks():
    """Of a linear model, in float64 with whole numbers: 4, 2 and 4 ranks give the bits of 4 ranks."""
    import torch

    inputs, targets = torch.randint(-8, 8, (64, 3)).double(), torch.randint(-8, 8, (64,)).double()

    def train(sizes):
        weights, losses, state = torch.zeros(3, dtype=torch.float64), [], None
        for world_size in sizes:
            ranks = [Sampler(64, 8, micro_batch=2, rank=rank, world_size=world_size) for rank in range(world_size)]
            for each in ranks:
                if state is not None:
                    each.load_state_dict(state)
            for _ in range(2):
                gradient = torch.zeros(3, dtype=torch.float64)
                for each in ranks:
                    for part in each.read(each):
                        own = weights.clone().requires_grad_()
                        errors = inputs[part.data] @ own - targets[part.data]
                        (errors.square().mean() * part.weight).backward()
                        gradient += own.grad / world_size
                        if part.is_last:
                            each.commit()
                            break
                weights = weights - gradient / 128
                losses.append((inputs @ weights - targets).square().mean().item())
            state = ranks[0].state_dict()
        return losses

    assert train((4, 2, 4)) == train((4, 4, 4))


def test_a_batch_that_is_not_divisible_is_said_once_by_rank_0(capfd):
    for rank in range(2):
        sampler = Sampler(32, 16, rank=rank, world_size=3)
        for _ in range(2):
            next(sampler.read(sampler))
    assert capfd.readouterr().err.count("16 is not divisible by 3 ranks: 1 of them take 6 ") == 1


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ({"size": 0}, "size is 0"),
        ({"batch": 0}, "batch is 0"),
        ({"micro_batch": -1}, "micro_batch is -1"),
        ({"rank": 2}, "rank is 2"),
        ({"size": None}, "shuffle=False"),
        ({"batch": 12, "drop_last": True}, "size is 10, batch is 12"),
    ],
)
def test_what_is_out_of_range_is_named(words, named):
    with pytest.raises(ValueError, match=named):
        Sampler(**{"size": 10, "batch": 2, "rank": 0, "world_size": 2, **words})


def test_a_state_of_another_order_is_refused():
    sampler = Sampler(97, 8, rank=0, world_size=1)
    with pytest.raises(ValueError, match="seed 3, not 0"):
        sampler.load_state_dict({**sampler.state_dict(), "seed": 3})
    with pytest.raises(ValueError, match="200 samples"):
        sampler.load_state_dict({**sampler.state_dict(), "samples": 200})


def test_a_step_is_committed_once_and_not_before_its_last_part():
    sampler = Sampler(32, 16, micro_batch=8, rank=0, world_size=1)
    parts = sampler.read(sampler)
    next(parts)
    with pytest.raises(RuntimeError, match="is_last"):
        sampler.commit()
    next(parts)
    with pytest.raises(RuntimeError, match="step 0 is not committed"):
        next(parts)
    sampler.commit()
    with pytest.raises(RuntimeError, match="is_last"):
        sampler.commit()
