"""Keep a rank's state in the memory of its node, where it survives the worker, and in that of another node.

    from muster import snapshots

    first = 0
    if snapshot := snapshots.load(into=read_state()):        # None: begin with worker.resume_path()
        restore(snapshot.state)
        first = snapshot.step + 1
    for i in range(first, total):
        train(i)
        snapshots.save(i, read_state())                      # every step, or every few, on all ranks

The agents hold the memory, and decide at the start of a round which step all ranks continue from. Without muster
(plain python, torchrun) `save` does nothing and `load` is None, so that a script runs unchanged. torch is imported when
a function is called.

    plain     containers and plain values to bytes and back; runs no code
    layout    where tensors lie in a slot, and which of them share memory
    content   memory files in this process, with huge pages; what is in a slot, and reading it: verified
    contents  what the ranks of the job have saved, on this node and on others
    saving    a state into a slot, and whether ranks agree on what is kept of one of them
    devices   copies from devices
    loading   which content a rank continues from, and its state
    sharded   a sharded state for another number of ranks, through torch.distributed.checkpoint
    buckets   DDP's buckets of the first step

From outside, import `muster.snapshots` only. Inside muster it knows `_shared`, and `worker` for ranks that wait.
"""

import operator
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from muster import worker
from muster._shared.contract import Env, has_feature

if TYPE_CHECKING:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from muster._shared.snapshot_file import WorkerFiles
    from muster.snapshots.saving import Saver

__all__ = ["Snapshot", "load", "reader", "rebuild_buckets", "save"]


class Snapshot(NamedTuple):
    """The state that the job continues from."""

    step: int
    """The step that `save` was called with."""
    state: Any
    """The state as it was saved. It shares no memory with what muster keeps."""


def save(step: int, state: Any, *, replicated: bool = False) -> None:
    """Keep this rank's state of a step. Call it on all ranks, at the same steps, when the step is complete.

    It returns when the tensors may change again. If the state does not fit into the memory that snapshots may take,
    one line says so, and the job goes on without this snapshot. If no slot is free, the save is skipped without a line.
    If nodes join, and the script does not ask `worker.should_stop`, all ranks wait here at one step until the job is
    stopped for the next round, which continues after that step.

    Args:
        step: the step as the script counts it. It must rise, even after `load`.
        state: nested dicts, lists and tuples with tensors and plain values, as `state_dict()` returns them. Include the
            states of the random generators, of the loader and of the scheduler. Tensors may be on devices, sharded
            (DTensor), or share memory.
        replicated: whether the tensors are the same on all ranks (DDP). Then one rank of each node keeps them, and
            every rank can load them, even if the number of ranks changes. Each rank still keeps its own plain values,
            NumPy arrays, and tensors of integers on the CPU (RNG states, positions). One line names tensors that differ
            between ranks.

    Raises:
        TypeError: the step is not an int, or the state has something that cannot be saved in a form that runs no code
            when it is loaded. The message says where it is.
        ValueError: the step is not greater than the last one.
        RuntimeError: `main` runs again in the same process (`worker.in_place`), and has not loaded a snapshot.
    """
    saver = _process.saver if _process.is_open else _open()
    if saver is None:
        return
    if _process.must_load:
        raise RuntimeError("save: main runs again in the same process, and must call load(into=...) before it saves")
    with worker.uninterrupted():
        has_slot = saver.save(step, state, replicated=replicated)

    def complete() -> bool:
        nonlocal has_slot
        with worker.uninterrupted():
            has_slot = has_slot or saver.save_again(state, replicated=replicated)
            saver.wait()
        return has_slot

    worker.wait_for_join(operator.index(step), complete)


def load(*, into: Any = None) -> Snapshot | None:
    """Load this rank's state of the step that the round continues from. Call it on all ranks, before the first `save`.

    Args:
        into: a state like those that the script saves. Its tensors get the saved values and are returned, so they are
            not allocated again. Tensors that it lacks are new. A sharded state needs `into`, which may be sharded
            differently, or over another number of ranks. None: all tensors are new, on the CPU.

    Returns:
        The snapshot. None means that there is none, that a checkpoint on disk is of a later step, that this number of
        ranks cannot continue it, or that the script runs outside muster. Then begin with `worker.resume_path()`.

    Raises:
        ValueError: tensors of `into` differ in type or shape from the saved ones, or were not saved.
        RuntimeError: the memory is damaged. The snapshot is discarded, and the next attempt does not find it. Or this
            node keeps no snapshots, but the other ranks continue from one.
        OSError: no node that can be reached has the state.
    """
    saver = _open_to_read()
    _process.must_load = False
    if saver is None or _process.files is None:
        step = os.environ.get(Env.SNAPSHOT_STEP)
        if step and _process.obstacle:
            raise RuntimeError(
                f"load: the other ranks continue at step {step} from memory, but this rank cannot: {_process.obstacle}"
            )
        return None
    from muster.snapshots.loading import load_state

    saver.wait()
    found = load_state(_process.files, into)
    if found is None:
        return None
    saver.note_loaded(found[0])
    return Snapshot(*found)


def reader() -> Any:
    """Return a `StorageReader` for `torch.distributed.checkpoint.load(state, storage_reader=...)`.

    Returns:
        A reader of the snapshot that `load` would return. Its `step` is the step of the snapshot. None: there is none,
        a checkpoint on disk is of a later step, or the script runs outside muster.
    """
    saver = _open_to_read()
    _process.must_load = False
    if saver is None or _process.files is None:
        return None
    from muster.snapshots.contents import find_step

    saver.wait()
    step = find_step(_process.files)
    if step is None:
        return None
    from muster.snapshots.sharded import RoundReader

    return RoundReader(_process.files, step, saver.note_loaded)


def rebuild_buckets(model: "DistributedDataParallel", compute_loss: "Callable[[], torch.Tensor]") -> None:
    """Give the first step of a DDP model the buckets of all later ones. Call it on all ranks, after wrapping the model.

    Then a job that was restarted from snapshots ends with the bits of one that was not. Without it, the first step
    after a restart sums the gradients of three or more ranks in another order, so the results are equal up to rounding.
    It does two backwards of zeros. Buffers and random states are afterwards as they were, no gradient is left, and
    what hooks of gradients do, they do twice. A model with `find_unused_parameters=True` does not need it.

    Args:
        model: before its first backward.
        compute_loss: returns the loss of one batch, as a step of the script computes it: `lambda: model(batch).mean()`.
            The values of the batch do not matter.

    Raises:
        TypeError: the model is not a DistributedDataParallel.
        ValueError: it has gradients already, unless `main` runs again in the same process (`worker.in_place`).
    """
    from muster.snapshots.buckets import rebuild

    if _process.runs_again:
        model.zero_grad(set_to_none=True)  # of the step that the end of the last round has interrupted
    rebuild(model, compute_loss)


# -- this process ------------------------------------------------------------------------------------------------------


class _Process:
    """Whether this process has looked for its rank's memory, and what it has found."""

    is_open = False
    files: "WorkerFiles | None" = None
    saver: "Saver | None" = None
    obstacle = ""
    """Why the rank has no memory, in words."""
    must_load = False
    """Whether the script's state is that of the round before."""
    runs_again = False
    """Whether this process was a worker of an earlier round."""


_process = _Process()


def _open() -> "Saver | None":
    """Open the rank's memory if this process speaks for the rank. Any failure leaves the script as it would be."""
    _process.is_open = True
    from muster._shared.snapshot_file import find_files, open_files
    from muster.snapshots.content import say
    from muster.snapshots.saving import Saver

    if not has_feature("snapshots", os.environ):
        _process.obstacle = "this agent has no snapshots"
        say(f"{_process.obstacle}: nothing is kept for the next attempt")
        return None
    try:
        where = find_files(os.environ)
        if not where:
            _process.obstacle = "the agent keeps no snapshots (--snapshot-memory 0, or a system without memory files)"
            return None
        _process.files = open_files(where)
        _process.saver = None if _process.files is None else Saver(_process.files)
    except (OSError, ValueError) as error:
        _process.obstacle = f"the memory cannot be used ({error})"
        say(f"cannot use the agent's memory ({error}): nothing is kept for the next attempt")
    return _process.saver


def _open_to_read() -> "Saver | None":
    """Open the rank's memory, unless there is nothing to read: then the agent need not make it."""
    if _process.is_open or os.environ.get(Env.SNAPSHOTS) or os.environ.get(Env.SNAPSHOT_STEP):
        return _process.saver if _process.is_open else _open()
    return None


def end_round() -> None:
    """Complete the last save, and forget the memory of this round. `muster.in_place` calls it between two rounds."""
    if _process.saver is not None:
        _process.saver.close()
    _process.is_open, _process.files, _process.saver = False, None, None
    _process.must_load = _process.runs_again = True


def _forget_if_open() -> None:
    """Let the parent speak for the rank. A fork calls it."""
    if _process.is_open:
        _process.files = _process.saver = None


os.register_at_fork(after_in_child=_forget_if_open)
