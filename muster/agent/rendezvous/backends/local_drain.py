"""A drain of a job of one node: what the leader does elsewhere. Imported when one begins."""

from muster.agent.rendezvous.consensus.drain import NO_COMMON_STEP, choose_step, describe_commit, describe_end
from muster.agent.rendezvous.interface import (
    DrainBegun,
    DrainCommitted,
    DrainReport,
    DrainWithdrawn,
    Notice,
    PostEvent,
)
from muster.agent.runtime.clock import Clock

_NUMBER = 1


class LocalDrain:
    """The one drain of a round: a node that asked for one leaves when it is withdrawn."""

    def __init__(self, clock: Clock, post: PostEvent, *, round_number: int, reason: str, limit_s: float) -> None:
        self._clock = clock
        self._post = post
        self._round_number = round_number
        self._reason = reason
        self._begun_s = clock.now_s()
        self._is_decided = False
        self._step: int | None = None
        post(DrainBegun(round_number=round_number, drain=_NUMBER, limit_s=limit_s))

    def decide(self, report: DrainReport) -> None:
        """Commit or withdraw it: the first report decides."""
        if self._is_decided:
            return
        self._is_decided = True
        step = self._step = None if report.refusal is not None else choose_step([report])
        if step is None:
            reason = report.refusal or NO_COMMON_STEP
            self._post(DrainWithdrawn(round_number=self._round_number, drain=_NUMBER, reason=reason))
            return
        line = describe_commit(f"this node {self._reason}", step, [report], self._clock.now_s() - self._begun_s)
        self._post(DrainCommitted(round_number=self._round_number, drain=_NUMBER, step=step))
        self._post(Notice(text=line))

    def report_end(self, last_rank: int) -> None:
        """All ranks have ended, this one as the last."""
        if self._step is not None:
            self._post(Notice(text=describe_end(self._step, self._clock.now_s() - self._begun_s, last_rank)))
