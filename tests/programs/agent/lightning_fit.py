"""A fit of Lightning without a line for muster: it waits at step 30 of 40 until the file argv[1] is there."""

import os
import sys
import time
import warnings

import torch
from lightning.pytorch import LightningModule, Trainer

warnings.simplefilter("ignore")


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, _index: int) -> torch.Tensor:
        while self.trainer.global_step == 30 and not os.path.exists(sys.argv[1]):
            time.sleep(0.05)
        return self.layer(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


loader = torch.utils.data.DataLoader(torch.ones(20, 4), batch_size=1)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
Trainer(max_epochs=4, accumulate_grad_batches=2, accelerator="cpu", devices=1, **quiet).fit(Model(), loader)
