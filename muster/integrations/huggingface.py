"""A callback of Hugging Face's Trainer: no step is lost with a worker, and a preempted job resumes at the same step.

    from muster.integrations.huggingface import MusterCallback

    callback = MusterCallback()
    trainer = Trainer(..., callbacks=[callback])
    trainer.train(resume_from_checkpoint=callback.find_resume_path())

Each step is kept in memory (`muster.snapshots`), for DDP: not with FSDP, DeepSpeed or fp16, whose state is
elsewhere; there pass `keep_every=0`. Outside a muster job it does nothing. Steps count from 1, as in `Trainer`.
"""

import dataclasses
import functools
import json
import logging
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import WEIGHTS_NAME

from muster import snapshots, worker


def inject(module: Any) -> None:
    """Give a script's Trainer the callback: `--trainer-callback`.

    A snapshot does not say whose it is. So only one Trainer may train, and only once.

    Args:
        module: transformers.trainer.
    """
    train = module.Trainer.train
    trained: list[object] = []

    @functools.wraps(train)
    def run(self: Any, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(each, MusterCallback) for each in self.callback_handler.callbacks):
            raise RuntimeError("--trainer-callback: the script has given its Trainer a MusterCallback already")
        if trained:
            raise RuntimeError("--trainer-callback: train() is called a second time, which could not resume: use"
                               " MusterCallback in the script")  # fmt: skip
        trained.append(self)
        is_elsewhere = self.args.fp16 or self.is_fsdp_enabled or self.is_deepspeed_enabled
        callback = MusterCallback(keep_every=0 if is_elsewhere else 1)
        self.add_callback(callback)
        if not hasattr(self.model, "_keys_to_ignore_on_save"):  # no model of transformers: the load asks for it
            self.model._keys_to_ignore_on_save = None  # noqa: SLF001
        return train(self, callback.find_resume_path() or resume_from_checkpoint, *args, **kwargs)

    module.Trainer.train = run


class MusterCallback(TrainerCallback):
    """Keeps steps in memory, reports progress and checkpoints, and saves or stops at one step of all ranks."""

    def __init__(self, keep_every: int = 1) -> None:
        """Keep every so many steps in memory; 0: none."""
        self._keep_every = keep_every
        self._kept = 0
        """The step that was kept last."""
        self._loaded: dict[str, Any] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def find_resume_path(self) -> str | None:
        """Find what `Trainer.train` resumes from, the newer of memory and disk. Call it once, on all ranks."""
        snapshot = snapshots.load()
        if snapshot is None:
            return worker.resume_path()
        # Trainer reads from a folder at which step it was. The tensors it gets in on_train_begin.
        self._loaded = snapshot.state
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        (folder / "trainer_state.json").write_text(self._loaded.pop("trainer"))
        rank = f"_{os.environ['RANK']}" if os.environ["WORLD_SIZE"] != "1" else ""
        torch.save(self._loaded.pop("rng"), folder / f"rng_state{rank}.pth")
        torch.save({}, folder / WEIGHTS_NAME)
        logging.getLogger("transformers.trainer").addFilter(lambda record: "missing keys" not in record.getMessage())
        return str(folder)

    def on_train_begin(self, *_: object, model: Any, optimizer: Any, lr_scheduler: Any, **__: object) -> None:
        """Give the model and its optimizer what was kept."""
        for name, part in (("model", model), ("optimizer", optimizer), ("scheduler", lr_scheduler)):
            if name in self._loaded:
                part.load_state_dict(self._loaded.pop(name))

    def on_step_begin(self, *_: object, **__: object) -> None:
        """Trainer has read all of the folder."""
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any,
        optimizer: Any,
        lr_scheduler: Any,
        **_: object,
    ) -> TrainerControl:
        """Act after an optimizer step. All ranks are at the same step when `should_stop` is True."""
        i = state.global_step
        worker.step(i, total=state.max_steps)
        stops = worker.should_stop(i)
        if stops or worker.should_checkpoint(i):
            control.should_save = True
        if stops:
            control.should_training_stop = True
        if not control.should_save:  # else after the checkpoint: a rank that is killed in it saves it again
            self._keep(state, model, optimizer, lr_scheduler)
        return control

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any,
        optimizer: Any,
        lr_scheduler: Any,
        **_: object,
    ) -> TrainerControl:
        """Report that this rank's part of the checkpoint is complete. It counts once all ranks have done so."""
        path = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
        worker.saved(state.global_step, os.path.abspath(path))
        self._keep(state, model, optimizer, lr_scheduler)
        return control

    def _keep(self, state: TrainerState, model: Any, optimizer: Any, lr_scheduler: Any) -> None:
        i = state.global_step
        if not self._keep_every or i % self._keep_every or i == self._kept:
            return
        self._kept = i
        rng = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            rng["cuda"] = torch.cuda.get_rng_state_all()
        parts = {"model": model, "optimizer": optimizer, "scheduler": lr_scheduler}
        kept = {name: part.state_dict() for name, part in parts.items()}
        kept |= {"rng": rng, "trainer": json.dumps(dataclasses.asdict(state))}
        snapshots.save(i, kept, replicated=True)
