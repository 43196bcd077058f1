"""What the two examples have in common: options, the device, and whether a step is to be saved on disk."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist

from muster import worker


def parse_options(output: str) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=Path(output), help="folder of the checkpoints")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--checkpoint-every", type=int, default=500)
    parser.add_argument("--fail-at", type=int, help="rank 1 kills itself at this step of the first attempt")
    return parser.parse_args()


def join() -> torch.device:
    """Join the other ranks; this rank's device."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    return device


def end_step(i: int, options: argparse.Namespace) -> tuple[bool, bool]:
    """Return whether all ranks save a checkpoint after this step, and whether they stop."""
    if i == options.fail_at and dist.get_rank() == 1 and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
        os.kill(os.getpid(), 9)
    stops = worker.should_stop(i)  # True at the same step on all ranks
    is_due = (i + 1) % options.checkpoint_every == 0 or i + 1 == options.steps
    return stops or is_due or worker.should_checkpoint(i), stops
