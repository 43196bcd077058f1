"""Trains a small GPT-2 from scratch with Hugging Face's Trainer; a preempted job resumes at the same step.

    torchx run -s local_cwd dist.ddp -j 2x2 --workspace examples/huggingface --script train.py

Needs transformers and accelerate. It runs unchanged under torchrun.
"""

import argparse
import warnings
from pathlib import Path

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from muster_callback import MusterCallback  # noqa: E402
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments  # noqa: E402

from muster import worker  # noqa: E402


class Sequences(torch.utils.data.Dataset):
    """Numbers that count up, each sequence from another one on."""

    def __len__(self) -> int:
        """How many."""
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """One of them, as a language model wants it."""
        tokens = (torch.arange(8) + index * 7) % 32
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    """Train, from the last checkpoint of all ranks on."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=Path("out/huggingface"), help="folder of the checkpoints")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--save-every", type=int, default=250)
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
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Sequences(), callbacks=[MusterCallback()])
    path = worker.resume_path()
    if path:
        print(f"resumes from {path}", flush=True)
    trainer.train(resume_from_checkpoint=path)


main()
if dist.is_initialized():
    dist.destroy_process_group()
