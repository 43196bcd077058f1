"""A callback of Hugging Face's Trainer: a preempted job stops all its ranks after one step, saves, and resumes there.

    trainer = Trainer(..., callbacks=[MusterCallback()])
    trainer.train(resume_from_checkpoint=worker.resume_path())

Copy it. Outside a muster job it does nothing. Steps count from 1 here, as in `Trainer`.
"""

import os

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from muster import worker


class MusterCallback(TrainerCallback):
    """Reports progress and checkpoints, and lets the job save or stop at one step of all ranks."""

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> TrainerControl:
        """After an optimizer step: all ranks are at the same one when `should_stop` is True."""
        worker.step(state.global_step, total=state.max_steps)
        stops = worker.should_stop(state.global_step)
        if stops or worker.should_checkpoint(state.global_step):
            control.should_save = True
        if stops:
            control.should_training_stop = True
        return control

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> TrainerControl:
        """This rank's part of the checkpoint is complete; it counts once all ranks have said so."""
        path = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
        worker.saved(state.global_step, os.path.abspath(path))
        return control
