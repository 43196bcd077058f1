"""Keeps a rank's state in the memory of its node, where it survives the worker, and in that of another node.

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
    content   what is in a slot, and reading it: verified
    contents  what the ranks of the job have saved, on this node and on others
    saving    a state into a slot
    devices   copies from devices
    agreement whether ranks agree on what is kept of one of them
    loading   which content a rank continues from, and its state
    sharded   a sharded state for another number of ranks, through torch.distributed.checkpoint

From outside, import `muster.snapshots` only. Inside muster it knows `_shared` alone.
"""

import os
from typing import TYPE_CHECKING, Any, NamedTuple

from muster._shared.contract import Env

if TYPE_CHECKING:
    from muster._shared.snapshot_file import WorkerFiles
    from muster.snapshots.saving import Saver

__all__ = ["Snapshot", "load", "reader", "save"]


class Snapshot(NamedTuple):
    """The state that the job continues from."""

    step: int
    """The step that `save` was called with."""
    state: Any
    """As it was saved. Nothing of it shares memory with what muster keeps."""


def save(step: int, state: Any, *, replicated: bool = False) -> None:
    """Keep this rank's state of a step. Call it on all ranks, at the same steps, when the step is whole.

    Returns when the tensors may change again. A state that does not fit into the memory that snapshots may take is
    refused in one line, and the job goes on; so is, without a line, a save for which no slot is free.

    Args:
        step: the step as the script counts it. It must rise, also after `load`.
        state: nested dicts, lists and tuples with tensors and plain values: what `state_dict()` gives. RNG states, the
            loader's and the scheduler's state belong to it. Tensors may be on devices, sharded (DTensor), or share
            memory.
        replicated: the tensors are the same on all ranks (DDP): one rank of each node keeps them, and any rank's can
            be loaded by any other, also when the number of ranks changes. Plain values, tensors of integers on the CPU
            (RNG states, positions) and NumPy arrays are kept by each rank. One line names what differs all the same.

    Raises:
        TypeError: the step is no int, or the state has something that cannot be written in a form that runs no code
            when it is loaded; the message says where.
        ValueError: the step is not above the last one.
    """
    saver = _process.saver if _process.is_open else _open()
    if saver is not None:
        saver.save(step, state, replicated=replicated)


def load(*, into: Any = None) -> Snapshot | None:
    """Give this rank's state of the step that the round continues from. Call it on all ranks, before the first `save`.

    Args:
        into: a state such as one would save. Tensors of it get the saved values, and are those of the result: nothing
            is allocated. What it lacks is new. A sharded state needs it, and may be sharded otherwise or over another
            number of ranks. None: all tensors are new, on the CPU.

    Returns:
        None where there is no snapshot: begin with `worker.resume_path()`. Also where the checkpoint there is of a
        later step, where another number of ranks cannot continue it, and outside muster.

    Raises:
        ValueError: tensors of `into` have another type or shape than the saved ones, or are not among them.
        RuntimeError: what is in memory is not what was saved. It was given up: the next attempt does not find it. Or
            this node keeps no snapshots, and the other ranks continue one.
        OSError: no node that can be reached has it.
    """
    saver = _process.saver if _process.is_open else _open()
    if saver is None or _process.files is None:
        step = os.environ.get(Env.SNAPSHOT_STEP)
        if step and _process.obstacle:
            raise RuntimeError(
                f"load: the other ranks continue at step {step} from memory, and here {_process.obstacle}"
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
    """Give a `StorageReader` of what `load` would: for `torch.distributed.checkpoint.load(state, storage_reader=...)`.

    Returns:
        None where `load` returns None; begin as there. Its `step` is the step of the snapshot.
    """
    saver = _process.saver if _process.is_open else _open()
    if saver is None or _process.files is None:
        return None
    from muster.snapshots.contents import find_step

    saver.wait()
    step = find_step(_process.files)
    if step is None:
        return None
    from muster.snapshots.sharded import RoundReader

    return RoundReader(_process.files, step, saver.note_loaded)


# -- this process ------------------------------------------------------------------------------------------------------


class _Process:
    """Whether this process has looked for its rank's memory, and what it has found."""

    is_open = False
    files: "WorkerFiles | None" = None
    saver: "Saver | None" = None
    obstacle = ""
    """Why the rank has no memory, in words."""


_process = _Process()


def _open() -> "Saver | None":
    """Open the rank's memory if this process speaks for the rank. Any failure leaves the script as it would be."""
    _process.is_open = True
    if not os.environ.get(Env.SNAPSHOTS):
        _process.obstacle = "the agent keeps no snapshots (--snapshot-memory 0, or a system without memory files)"
        return None
    from muster._shared.snapshot_file import open_files
    from muster.snapshots.content import say
    from muster.snapshots.saving import Saver

    try:
        _process.files = open_files(os.environ)
        _process.saver = None if _process.files is None else Saver(_process.files)
    except (OSError, ValueError) as error:
        _process.obstacle = f"the memory cannot be used ({error})"
        say(f"cannot use the memory {os.environ[Env.SNAPSHOTS]!r} ({error}): nothing is kept for the next attempt")
    return _process.saver


def _forget_if_open() -> None:
    """In a fork: the parent speaks for the rank."""
    if _process.is_open:
        _process.files = _process.saver = None


os.register_at_fork(after_in_child=_forget_if_open)
