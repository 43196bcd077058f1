"""A callback of Lightning: a preempted job stops all its ranks after one step, saves, and resumes there.

    trainer = Trainer(..., callbacks=[MusterCallback("checkpoints")])
    trainer.fit(model, ckpt_path=worker.resume_path(), weights_only=True)

Copy it. Outside a muster job it does nothing. Steps count from 1 here, as in `Trainer.global_step`.
"""

from pathlib import Path
from typing import Any

import lightning

from muster import worker


class MusterCallback(lightning.Callback):
    """Reports progress and checkpoints, and lets the job save or stop at one step of all ranks."""

    def __init__(self, folder: str | Path, save_every: int = 0) -> None:
        """Save into `folder` when the job asks for it, and every `save_every` steps; 0: only then."""
        self._folder = Path(folder).absolute()
        self._save_every = save_every
        self._last = 0

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After a batch: one that completes no optimizer step (gradient accumulation) is none."""
        i = trainer.global_step
        if i == self._last:
            return
        self._last = i
        worker.step(i, total=trainer.max_steps if trainer.max_steps > 0 else None)
        stops = worker.should_stop(i)
        if stops or worker.should_checkpoint(i) or (self._save_every and i % self._save_every == 0):
            path = self._folder / f"step-{i}.ckpt"
            trainer.save_checkpoint(path)  # all ranks are here at the same step
            worker.saved(i, path)
        if stops:
            trainer.should_stop = True
