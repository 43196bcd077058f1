"""A callback of Lightning: no step is lost with a worker, and a preempted job resumes at the same step.

    from muster.integrations.lightning import MusterCallback

    callback = MusterCallback("checkpoints")
    trainer = Trainer(..., callbacks=[callback], plugins=[callback.checkpoints])
    trainer.fit(model, ckpt_path=callback.find_resume_path(), weights_only=True)

Each step is kept in memory (`muster.snapshots`), for DDP: not with FSDP or DeepSpeed, whose state is
elsewhere; there pass `keep_every=0`. Outside a muster job it does nothing. Steps count from 1, as in
`Trainer.global_step`.
"""

from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from muster import snapshots, worker


class _Checkpoints(TorchCheckpointIO):
    """Reads a checkpoint from memory, where there is one."""

    loaded: dict[str, Any] | None = None

    def load_checkpoint(self, path: Any, *args: Any, **more: Any) -> dict[str, Any]:
        """Give what was kept in memory, once; else read the file."""
        loaded, self.loaded = self.loaded, None
        return loaded or super().load_checkpoint(path, *args, **more)


class MusterCallback(lightning.Callback):
    """Keeps steps in memory, reports progress and checkpoints, and saves or stops at one step of all ranks."""

    def __init__(self, folder: str | Path, save_every: int = 0, keep_every: int = 1) -> None:
        """Save into `folder` when the job asks for it, and every `save_every` steps; 0: only then.

        Every `keep_every` steps are kept in memory; 0: none.
        """
        self.checkpoints = _Checkpoints()
        self._folder = Path(folder).absolute()
        self._save_every, self._keep_every = save_every, keep_every
        self._last = 0
        self._rng: dict[str, Any] = {}

    def find_resume_path(self) -> str | None:
        """Find what `Trainer.fit` resumes from, the newer of memory and disk. Call it once, on all ranks."""
        snapshot = snapshots.load()
        if snapshot is None:
            return worker.resume_path()
        self.checkpoints.loaded = snapshot.state
        return "memory"

    def on_load_checkpoint(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Take the random states of a snapshot. A checkpoint on disk is rank 0's and has none."""
        self._rng = checkpoint.get("rng", {})

    def on_train_batch_start(self, *_: object) -> None:
        """Restore the random states, because the loaders have begun by now and drawn from the generators."""
        if self._rng:
            torch.set_rng_state(self._rng["cpu"])
            if torch.cuda.is_available():
                torch.cuda.set_rng_state(self._rng["cuda"])
            self._rng = {}

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Act after a batch that completes an optimizer step. With gradient accumulation, others do not."""
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
        # After the checkpoint: a rank that is killed in it continues before this step, and saves it again.
        if self._keep_every and i % self._keep_every == 0:
            kept = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)  # noqa: SLF001  # as save_checkpoint
            kept["rng"] = {"cpu": torch.get_rng_state()}
            if torch.cuda.is_available():
                kept["rng"]["cuda"] = torch.cuda.get_rng_state()
            snapshots.save(i, kept, replicated=True)
        if stops:
            trainer.should_stop = True
