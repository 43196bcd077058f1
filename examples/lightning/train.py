"""Trains a small network with Lightning; whatever ends a worker, it resumes at the same step.

    torchx run -s local_cwd dist.ddp -j 2x2 --script examples/lightning/train.py

Needs lightning 2.6 or newer. It runs unchanged under torchrun.
"""

import argparse
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

import lightning  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.utils.data import DataLoader, IterableDataset  # noqa: E402

from muster.integrations.lightning import MusterCallback  # noqa: E402


class Batches(IterableDataset):
    """The batches of this rank, from one step on: Lightning restores steps, but not how far a DataLoader was."""

    def __init__(self, first: int) -> None:
        self._first = first

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Batch i is the same after a restart."""
        rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        i = self._first
        while True:
            inputs = torch.randn(32, 16, generator=torch.Generator().manual_seed(i * ranks + rank))
            yield inputs, inputs.square().sum(dim=1, keepdim=True)
            i += 1


class Network(lightning.LightningModule):
    """A regression."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss of one batch."""
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.layers(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader:
        """Called when the checkpoint has been loaded: the next step is known."""
        return DataLoader(Batches(self.trainer.global_step), batch_size=None)


class FailAt(lightning.Callback):
    """Ends rank 1 as the kernel does when memory runs out."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: object) -> None:
        """Fail once, in the first attempt only."""
        is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        if trainer.global_step == self._step and trainer.global_rank == 1 and is_first:
            os.kill(os.getpid(), 9)


def main() -> None:
    """Train, from the last step on that all ranks have."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=Path("out/lightning"), help="folder of the checkpoints")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--save-every", type=int, default=250)
    parser.add_argument("--fail-at", type=int, default=0, help="rank 1 kills itself at this step of the first attempt")
    options = parser.parse_args()
    torch.manual_seed(0)
    callback = MusterCallback(options.output, options.save_every)
    trainer = lightning.Trainer(
        max_steps=options.steps,
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        callbacks=[callback, FailAt(options.fail_at)],
        plugins=[callback.checkpoints],
        default_root_dir=options.output,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    path = callback.find_resume_path()
    if path:
        print(f"resumes from {path}", flush=True)
    trainer.fit(Network(), ckpt_path=path, weights_only=True)  # a pickle would run code
    trainer.save_checkpoint(options.output / "last.ckpt")


main()
if dist.is_initialized():
    dist.destroy_process_group()
