"""Trains a small network on handwritten digits: a data-parallel job that survives restarts.

    torchx run -s local_cwd dist.ddp -j 2x4 --script examples/digits/train.py
    torchx run -s local_cwd dist.ddp -j 2x4 --script examples/digits/train.py -- --epochs 20 --output /shared/digits

It needs nothing but torch. When a worker or a node is lost, all workers are started again: the last epoch's
checkpoint is read and training goes on from there. On a cluster, let --output be a folder that all nodes share.
"""

import argparse
import gc
import gzip
import json
import os
import warnings
from pathlib import Path
from typing import Any

# torch says so on import, once per worker; nothing here needs numpy
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset  # noqa: E402

SIDE = 8
PIXELS = SIDE * SIDE
BRIGHTEST = 16
CLASSES = 10


def main() -> None:
    """Join the other workers, train, part."""
    options = parse_options()
    torch.set_num_threads(1)  # the workers of a node share its cores
    torch.manual_seed(options.seed)
    device = join_process_group()
    learn(options, device)
    gc.collect()  # the model goes first: outliving its process group, it may wait for that for ever (torch 2.13, gloo)
    dist.barrier()  # rank 0 hosts the store: no rank may still need it when rank 0 exits
    dist.destroy_process_group()


def learn(options: argparse.Namespace, device: torch.device) -> None:
    """Train and test, from the last checkpoint on, and write the result."""
    train_set, test_set = (TensorDataset(*part) for part in read_digits(options.data))
    model = DistributedDataParallel(build_model().to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    checkpoint = options.output / "checkpoint.pt"
    first_epoch = load_checkpoint(checkpoint, model, optimizer, device)

    sampler = DistributedSampler(train_set, seed=options.seed)
    loader = DataLoader(train_set, batch_size=options.batch_size, sampler=sampler)
    accuracy = test(model, test_set, device)
    for epoch in range(first_epoch, options.epochs):
        sampler.set_epoch(epoch)  # another order in every epoch
        loss = train(model, optimizer, loader, device)
        accuracy = test(model, test_set, device)
        save_checkpoint(checkpoint, model, optimizer, epoch + 1)
        say(f"epoch {epoch + 1:2d}/{options.epochs}  loss {loss:.4f}  test accuracy {accuracy:.4f}")

    if dist.get_rank() == 0:
        result = {"accuracy": accuracy, "epochs": options.epochs, "world_size": dist.get_world_size()}
        write_atomically(options.output / "result.json", json.dumps(result).encode())
        checkpoint.unlink(missing_ok=True)  # done: the next run starts from scratch
    say(f"test accuracy {accuracy:.4f}, written to {options.output / 'result.json'}")


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(__file__).with_name("digits.csv.gz"))
    parser.add_argument("--output", type=Path, default=Path("out/digits"), help="folder of result.json and checkpoints")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=16, help="images per worker and step")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def join_process_group() -> torch.device:
    """Meet the other workers; the environment that the launcher sets says who and where they are."""
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    say(f"{dist.get_world_size()} workers on {dist.get_backend()}")
    return device


def read_digits(path: Path) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Read the data set as (images, labels) for training and for testing; every fifth image is for testing.

    A row of the file is one image: 64 pixels of 0 (white) to 16 (black), then the digit it shows.
    """
    with gzip.open(path, "rt") as file:
        values = bytearray(int(value) for row in file for value in row.split(","))
    rows = torch.frombuffer(values, dtype=torch.uint8).view(-1, PIXELS + 1)
    images, labels = rows[:, :PIXELS].float() / BRIGHTEST, rows[:, PIXELS].long()
    for_test = torch.arange(len(rows)) % 5 == 0
    return (images[~for_test], labels[~for_test]), (images[for_test], labels[for_test])


def build_model() -> nn.Module:
    """Build one convolution and one layer, which is enough for digits of 8x8 pixels."""
    return nn.Sequential(
        nn.Unflatten(1, (1, SIDE, SIDE)),
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (SIDE // 2) ** 2, CLASSES),
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any], device: torch.device) -> float:
    """Train one epoch on this worker's share of the images; return the mean loss of all workers."""
    total = torch.zeros((), device=device)
    for images, labels in loader:
        loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)
    return float(total / (len(loader) * dist.get_world_size()))


def test(model: DistributedDataParallel, test_set: TensorDataset, device: torch.device) -> float:
    """Return the share of test images that are read correctly; each worker tests its part."""
    images, labels = (part[dist.get_rank() :: dist.get_world_size()].to(device) for part in test_set.tensors)
    with torch.no_grad():
        right = (model.module(images).argmax(dim=1) == labels).sum()
    dist.all_reduce(right)
    return int(right) / len(test_set)


def save_checkpoint(
    path: Path, model: DistributedDataParallel, optimizer: torch.optim.Optimizer, epochs_done: int
) -> None:
    """Rank 0 writes what a restart needs; a reader sees the whole old file or the whole new one."""
    if dist.get_rank() != 0:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epochs_done": epochs_done}
    unfinished = path.with_suffix(f".{os.getpid()}")
    torch.save(state, unfinished)
    unfinished.replace(path)


def load_checkpoint(
    path: Path, model: DistributedDataParallel, optimizer: torch.optim.Optimizer, device: torch.device
) -> int:
    """Take up the last run's state, if there is one; returns how many epochs it had done."""
    # rank 0 looks for all: were each to look for itself, some could start from scratch while others resume
    found = torch.tensor(int(path.exists()), device=device)
    dist.broadcast(found, src=0)
    if not found:
        return 0
    state = torch.load(path, map_location=device, weights_only=True)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    say(f"resumed after epoch {state['epochs_done']}")
    return int(state["epochs_done"])


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees all of it or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_bytes(content)
    unfinished.replace(path)


def say(text: str) -> None:
    """Print once for the job, not once per worker."""
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
