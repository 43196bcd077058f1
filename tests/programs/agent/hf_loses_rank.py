"""A Trainer without a line for muster, whose rank 1 is killed at step 20 of the first attempt. It prints its steps."""

import os

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": ((self.layer(x) - labels) ** 2).mean()}


class Lose(TrainerCallback):
    def on_step_end(self, args: object, state: object, control: object, **_kwargs: object) -> None:
        if state.is_world_process_zero:
            print("step", state.global_step, flush=True)
        elif state.global_step == 20 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), 9)


data = [{"x": torch.full((4,), float(each)), "labels": torch.ones(1)} for each in range(16)]
settings = {"report_to": "none", "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
arguments = TrainingArguments("out", max_steps=30, per_device_train_batch_size=1, **settings)
Trainer(Model(), arguments, train_dataset=data, callbacks=[Lose()]).train()
