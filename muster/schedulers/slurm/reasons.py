"""What Slurm's states and reasons mean for an app."""

import time
from typing import Final

from torchx.specs import AppState

from muster.schedulers.adapter import Code, Reason
from muster.schedulers.slurm.client import QueueEntry
from muster.schedulers.wording.words import ENDS

_NAMES: Final = {
    AppState.PENDING: "PENDING CONFIGURING REQUEUED REQUEUE_HOLD REQUEUE_FED SPECIAL_EXIT RESV_DEL_HOLD",
    AppState.RUNNING: "RUNNING COMPLETING SIGNALING STAGE_OUT RESIZING SUSPENDED STOPPED",
    AppState.SUCCEEDED: "COMPLETED",
    AppState.CANCELLED: "CANCELLED",
    AppState.FAILED: "BOOT_FAIL DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED REVOKED TIMEOUT",
}
STATES: Final = {name: state for state, names in _NAMES.items() for name in names.split()}
"""The states of a job. An app may go on in another job."""


def explain_wait(entry: QueueEntry) -> Reason:
    """Return why a job waits, and until when."""
    is_known = entry.start_s is not None and entry.start_s >= time.time() and "held" not in entry.reason.lower()
    at_s = entry.start_s if is_known else None
    return Reason(code=Code.SLURM_WAITS, job=entry.job_id, word=entry.reason, what=entry.reason, at_s=at_s)


def explain_end(entry: QueueEntry) -> Reason | None:
    """Return why Slurm has ended a job. None: its exit code alone says it."""
    is_by_slurm = entry.state in ENDS
    return Reason(code=Code.SLURM_ENDED, job=entry.job_id, word=entry.state) if is_by_slurm else None
