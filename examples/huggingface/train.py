"""Trains a small GPT-2 from scratch with Hugging Face's Trainer; whatever ends a worker, it resumes at the same step.

    torchx run -s local_cwd dist.ddp -j 2x2 --script examples/huggingface/train.py

Needs transformers and accelerate. It runs unchanged under torchrun.
"""

import argparse
import os
import warnings
from pathlib import Path

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from transformers import (  # noqa: E402
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from muster.integrations.huggingface import MusterCallback  # noqa: E402


class Sequences(torch.utils.data.Dataset):
    """Numbers that count up, each sequence from another one on."""

    def __len__(self) -> int:
        """Return how many examples there are."""
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return one example, as a language model expects it."""
        tokens = (torch.arange(8) + index * 7) % 32
        return {"input_ids": tokens, "labels": tokens}


class FailAt(TrainerCallback):
    """Ends rank 1 as the kernel does when memory runs out."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Fail once, in the first attempt only."""
        is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        if state.global_step == self._step and args.process_index == 1 and is_first:
            os.kill(os.getpid(), 9)


def main() -> None:
    """Train, from the last step on that all ranks have."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=Path("out/huggingface"), help="folder of the checkpoints")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--save-every", type=int, default=250)
    parser.add_argument("--fail-at", type=int, default=0, help="rank 1 kills itself at this step of the first attempt")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2))
    arguments = TrainingArguments(
        output_dir=str(options.output),
        max_steps=options.steps,
        save_steps=options.save_every,
        save_total_limit=3,
        per_device_train_batch_size=8,
        lr_scheduler_type="constant",
        logging_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),  # else ranks without a GPU do not train together
        disable_tqdm=True,
    )
    callback = MusterCallback()
    callbacks = [callback, FailAt(options.fail_at)]
    trainer = Trainer(model=model, args=arguments, train_dataset=Sequences(), callbacks=callbacks)
    path = callback.find_resume_path()
    if path:
        print(f"resumes from {path}", flush=True)
    trainer.train(resume_from_checkpoint=path)


main()
if dist.is_initialized():
    dist.destroy_process_group()
