"""What the agents of one role say of their job. Standard library only: drivers read it in a supervisor."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from muster.schedulers.wording.reasons import Reasons

if TYPE_CHECKING:  # see `failure_report`
    from muster._shared.job_view import JobStatus


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """What the agents of one role say of their job while it runs. See `adapter.records`."""

    trouble: Reasons = ()
    """A hang with which it goes on, and why it forms a new round."""
    attempt: int = 0
    """How often workers were restarted in place because one failed."""
    status: "JobStatus | None" = None
    """How far it is. None: it has not reported it."""
