"""Keeps the job's last complete checkpoint in the run's folder. If that outlives the node, the next agent reads it.

All nodes of a job write the same content, perhaps into one folder. The file is removed when the job has succeeded.
"""

import contextlib
import os
import stat
from collections.abc import Callable

from muster._shared.contract import LogNames, has_controls
from muster.agent.errors import EnvironmentFault
from muster.agent.logs import open_own, replace_file
from muster.agent.round import Checkpoint

_LIMIT_BYTES = 1 << 16


def find(run_dir: str | None, carried: str) -> Checkpoint | None:
    """Find the checkpoint that an earlier incarnation of this job kept in the run's folder, or an adapter carried over.

    Workers load what it names, and a checkpoint of torch may run code, so another user's file is refused.

    Args:
        run_dir: this agent's; None if it has none.
        carried: the content of the file of the replica that this one replaces, if an adapter has read it; otherwise "".
            It is kept here as well, because a next incarnation may need it.

    Raises:
        EnvironmentFault: another user has put the file there.
    """
    own = _read(run_dir) if run_dir is not None else None
    other = _parse(carried)
    if other is None or (own is not None and own.number >= other.number):
        return own
    if run_dir is not None:
        write(run_dir, other, lambda _: None)
    return other


def _read(run_dir: str) -> Checkpoint | None:
    path = os.path.join(run_dir, LogNames.CHECKPOINT)
    try:
        with open(open_own(path, os.O_RDONLY), encoding="utf-8") as file:
            is_file = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            return _parse(file.read(_LIMIT_BYTES)) if is_file else None
    except PermissionError as error:
        raise EnvironmentFault(f"does not continue from {error.filename or path}: {error.strerror}") from error
    except (OSError, ValueError):
        return None


def _parse(text: str) -> Checkpoint | None:
    """Parse a file; return None for anything that no agent has written, because a job must not end because of it."""
    if not text:
        return None
    from muster._shared.codec import decode
    from muster._shared.foreign_files import parse_json

    try:
        found = decode(Checkpoint, parse_json(text))
    except ValueError:
        return None
    return found if found.number > 0 and found.path and not has_controls(found.path) else None


def write(run_dir: str, checkpoint: Checkpoint, on_error: Callable[[str], None]) -> None:
    """Write the file, whole or not at all. This may block, so never call it on the loop.

    Args:
        run_dir: this agent's.
        checkpoint: the last one.
        on_error: gets a line if the file cannot be written.
    """
    path = os.path.join(run_dir, LogNames.CHECKPOINT)
    from muster._shared.codec import encode

    try:
        replace_file(path, encode(checkpoint, _LIMIT_BYTES).encode())
    except OSError as error:
        on_error(f"cannot write {path}: {error.strerror}")


def remove(run_dir: str) -> None:
    """Remove the file. This may block, so never call it on the loop."""
    with contextlib.suppress(OSError):  # another agent removed it
        os.unlink(os.path.join(run_dir, LogNames.CHECKPOINT))
