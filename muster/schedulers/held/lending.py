"""Lends a hold's first node to a job that a program starts with `muster.elastic`."""

import os
from dataclasses import dataclass

from muster.schedulers.errors import SchedulerError
from muster.schedulers.held.holds import choose_hold, take_hold
from muster.schedulers.local.holds import Hold
from muster.schedulers.supervision.registry import find_state_dir


@dataclass(frozen=True, kw_only=True)
class LentNode:
    """A node that a job has until its lock is released."""

    handle: str
    folder: str
    """The holder's."""
    lock_fd: int
    """A process that has this file description keeps the hold. The caller closes it."""


def lend_node(name: str | None, job: str, processes: int) -> LentNode:
    """Take a hold of this machine for a job.

    Args:
        name: a handle, an app's id or its beginning. None: the only hold.
        job: its name, for other programs that want the hold. It has a blank, which no app's name has.
        processes: how many workers it starts.

    Raises:
        SchedulerError: there is no such hold, or the job does not fit. It is one line.
        EngineError: the hold runs another job. It is one line.
    """
    hold = choose_hold(find_state_dir(os.environ), name)
    if not isinstance(hold, Hold):
        raise SchedulerError(f"{hold.handle} is not on this machine: functions run only on a hold of this machine")
    held = int(hold.read_states()[0].get("nproc", 0))
    if held and processes > held:
        raise SchedulerError(f"nproc={processes}: {hold.handle} holds at most {held}")
    return LentNode(handle=hold.handle, folder=hold.list_folders()[0], lock_fd=take_hold(hold, job))
