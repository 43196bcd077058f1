"""A Trainer without a line for muster: it waits at step 30 until the file argv[1] is there."""

import os
import sys
import time

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.integrations import KubeflowCallback

KubeflowCallback._MIN_UPDATE_INTERVAL = 0.0  # 5 s; a test has no time


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": ((self.layer(x) - labels) ** 2).mean()}


class Wait(TrainerCallback):
    def on_step_end(self, args: object, state: object, control: object, **_kwargs: object) -> None:
        while state.global_step == 30 and not os.path.exists(sys.argv[1]):
            time.sleep(0.05)


data = [{"x": torch.ones(4), "labels": torch.ones(1)} for _ in range(8)]
settings = {"report_to": "none", "save_strategy": "no", "logging_steps": 1, "use_cpu": True, "disable_tqdm": True}
arguments = TrainingArguments("out", max_steps=40, per_device_train_batch_size=1, **settings)
Trainer(Model(), arguments, train_dataset=data, callbacks=[Wait()]).train()
