"""`muster.data` with the loaders that scripts use: what counts is what was trained, not what was read ahead."""

import itertools

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, IterableDataset, TensorDataset  # noqa: E402
from torch.utils.data.distributed import DistributedSampler  # noqa: E402

from muster.data import Sampler  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")]  # torchdata 0.11

SIZE, BATCH = 211, 16
SAMPLES = TensorDataset(torch.arange(SIZE))


class Stream(IterableDataset):
    """The samples as a stream, which one process reads ahead."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        return self.sampler.split(lambda position: iter(range(position, SIZE)))


def load_all(sampler, processes):
    return DataLoader(SAMPLES, batch_sampler=sampler, num_workers=processes)


def load_stateful(sampler, processes):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    return stateful.StatefulDataLoader(SAMPLES, batch_sampler=sampler, num_workers=processes)


def load_stream(sampler, processes):
    return DataLoader(Stream(sampler), batch_size=None, num_workers=min(processes, 1))


def list_samples(part):
    data = part.data[0].tolist() if isinstance(part.data[0], torch.Tensor) else part.data
    return data if part.weight else []


def train(load, processes, world_size, state, steps):
    """Train some steps in all ranks; return the samples of each, and the state to continue from."""
    trained = []
    for rank in range(world_size):
        sampler = Sampler(SIZE, BATCH, shuffle=False, rank=rank, world_size=world_size)
        loader = load(sampler, processes)
        if state is not None:
            sampler.load_state_dict(state)
        own = [[]]
        for part in sampler.read(loader):
            own[-1] += list_samples(part)
            if part.is_last:
                sampler.commit()
                own.append([])
                if len(own) > steps:
                    break
        trained.append(own)
    return [[*itertools.chain(*step)] for step in itertools.zip_longest(*trained, fillvalue=[])], sampler.state_dict()


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("load", [load_all, load_stateful, load_stream])
def test_three_ranks_then_two_then_five_train_each_sample_once(load, processes):
    trained, state = [], None
    for world_size, steps in ((3, 4), (2, 5), (5, 100)):
        found, state = train(load, processes, world_size, state, steps)
        trained += found
    assert [*itertools.chain(*trained)] == [*range(SIZE)]


def test_a_state_of_a_loader_which_counts_what_was_read_ahead_is_refused():
    loader = load_stateful(Sampler(SIZE, BATCH, rank=0, world_size=1), 0)
    loader.load_state_dict(loader.state_dict())
    sampler = loader.batch_sampler
    with pytest.raises(RuntimeError, match="use that of the sampler"):
        next(sampler.read(loader))


def test_a_stream_is_not_read_by_two_processes():
    sampler = Sampler(None, BATCH, shuffle=False, rank=0, world_size=1)
    with pytest.raises(ValueError, match="num_workers is 2"):
        list(sampler.read(DataLoader(Stream(sampler), batch_size=None, num_workers=2)))


def test_a_process_that_lives_on_would_read_an_old_position(capfd):
    sampler = Sampler(SIZE, BATCH, shuffle=False, rank=0, world_size=1)
    loader = DataLoader(Stream(sampler), batch_size=None, num_workers=1, persistent_workers=True)

    def train():
        for _ in sampler.epochs(2):
            for _ in sampler.read(loader):
                sampler.commit()

    with pytest.raises(RuntimeError, match="exited unexpectedly"):  # its own error is on the console
        train()
    assert "persistent_workers is True" in capfd.readouterr().err


def test_what_torchs_sampler_repeats():
    """As the page on elastic jobs says: 10 of 25 steps of 4 ranks, then 2 ranks that skip 10 batches."""
    skipped = 10 * 10
    before = [[*DistributedSampler(range(1000), 4, rank, shuffle=False)][:skipped] for rank in range(4)]
    after = [[*DistributedSampler(range(1000), 2, rank, shuffle=False)][skipped:] for rank in range(2)]
    assert len({*itertools.chain(*before)} & {*itertools.chain(*after)}) == 200
