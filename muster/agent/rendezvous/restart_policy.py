"""Decides whether one agent's failures end the job, where the agent is alone or every agent has its own restart budget.

For `--standalone`, `static` with one node, and the backends of torch's registry. With muster's own backend the leader
decides, in `consensus.failures`.
"""

from enum import Enum
from typing import TYPE_CHECKING

from muster.agent.config import RendezvousConfig
from muster.agent.rendezvous.interface import (
    BreakKind,
    JobEnded,
    Notice,
    NoticeKind,
    PostEvent,
    RoundBroken,
    StacksWanted,
)
from muster.agent.runtime.clock import Clock

if TYPE_CHECKING:  # only a failure loads them
    from muster._shared.reports import Failure, FinalFailure, Stack
    from muster.agent.diagnosis.root_cause import DatedFailure


class Next(Enum):
    """What to do when no worker of a broken round is left."""

    NOTHING = "nothing"
    ROUND = "round"
    END = "end"
    """The job has failed for good."""


class LocalRestartPolicy:
    """Counts one agent's rounds and attempts, and posts `RoundBroken` and `JobEnded`."""

    def __init__(self, clock: Clock, post: PostEvent, config: RendezvousConfig) -> None:
        self._clock = clock
        self._post = post
        self._run_id = config.run_id
        self._max_restarts = config.max_restarts
        self._max_restarts_flag = config.max_restarts_flag
        self._stops_on_hang = config.hang_action == "stop"
        self._idle: tuple[Failure, ...] = ()
        """With --hang-action report: the ranks of a hang that was reported."""
        self._startup_signature: str | None = None
        self._final: FinalFailure | None = None
        self._is_own = True
        self._failures: list[DatedFailure] = []
        self._stacks: list[Stack] = []
        self.number = 0
        """The current round; 0 before the first."""
        self.attempt = 0
        self.broken: BreakKind | None = None
        """Why the current round was broken; None while it runs."""
        self.has_ended = False
        """True once the end was posted, or is not wanted any more."""

    @property
    def restarts_left(self) -> int:
        """How many restarts this agent has left."""
        return self._max_restarts - self.attempt

    def begin_round(self) -> None:
        """Count the next round: its workers are about to start."""
        self.number += 1
        self.broken = None
        self._failures, self._stacks = [], []
        self._idle = ()

    def record_failures(self, round_number: int, failures: "tuple[Failure, ...]") -> bool:
        """Record failed workers; True when this breaks the round."""
        if round_number != self.number or self.has_ended:
            return False
        self._record(failures)
        if self.broken is not None:
            return False
        from muster.agent.diagnosis.root_cause import choose_root, describe_failure, find_signature
        from muster.agent.rendezvous.restart_budget import find_final_failure

        root = choose_root(self._failures)
        self._final = find_final_failure(
            root,
            self._startup_signature,
            self.attempt,
            self._max_restarts,
            self._max_restarts_flag,
            stops_on_hang=self._stops_on_hang,
        )
        self._startup_signature = find_signature(root)
        if self._final is None:
            self.break_round(BreakKind.FAILURE, describe_failure(root))
        else:
            self.break_round(BreakKind.FINAL, self._final.describe())
        return True

    @property
    def final(self) -> "FinalFailure | None":
        """Why the job has failed for good; None while it may go on."""
        return self._final

    def get_root(self) -> "Failure | None":
        """The root cause of this round's failures."""
        from muster.agent.diagnosis.root_cause import choose_root

        return choose_root(self._failures)

    def record_failed_elsewhere(self, reason: str, root: "Failure | None") -> None:
        """Break the round: the job has failed for good on another node, which prints the report.

        Args:
            reason: why, in one line.
            root: the root cause, as that node sent it.
        """
        if self.has_ended or self._final is not None:
            return
        from muster._shared.reports import FinalFailure

        self._final, self._is_own = FinalFailure(cause=reason), False
        self._record((root,) if root is not None else ())
        if self.broken is None:
            self.break_round(BreakKind.FINAL, reason)

    def record_idle(self, round_number: int, failures: "tuple[Failure, ...]") -> None:
        """With --hang-action report: have the stacks of this node collected, once until a worker is active again."""
        if round_number != self.number or self.has_ended or self.broken is not None:
            return
        if failures and not self._idle:
            self._post(StacksWanted(round_number=round_number, number=0))
        elif self._idle and not failures:
            self._post(Notice(text="the job goes on: it has not hung", kind=NoticeKind.HANG_OVER))
        self._idle = failures

    def print_hang(self, stacks: "tuple[Stack, ...]", missing: int) -> None:
        """Print what the workers of this node do, unless they are active again."""
        if not self._idle:
            return
        from muster.agent.diagnosis.hangs.page import describe_hang, format_known_stacks

        for line in describe_hang(self._idle, stacks):
            self._post(Notice(text=line, kind=NoticeKind.HANG))
        for line in format_known_stacks(stacks, missing=missing):
            self._post(Notice(text=line, kind=NoticeKind.STACK))

    def break_round(self, kind: BreakKind, reason: str) -> None:
        """Post that the round is broken."""
        self.broken = kind
        want_stacks = kind is not BreakKind.MEMBERSHIP
        is_hang = any(each.failure.hung for each in self._failures)
        broken = RoundBroken(
            round_number=self.number, kind=kind, reason=reason, want_stacks=want_stacks, is_hang=is_hang
        )
        self._post(broken)

    def _record(self, failures: "tuple[Failure, ...]") -> None:
        from muster.agent.diagnosis.root_cause import DatedFailure

        now_s = self._clock.now_s()
        self._failures += [DatedFailure(when_s=now_s - failure.age_s, failure=failure) for failure in failures]

    def record_stopped(self, round_number: int, failures: "tuple[Failure, ...]", stacks: "tuple[Stack, ...]") -> Next:
        """Record that no worker of the broken round is left, and decide what follows."""
        if round_number != self.number or self.broken is None or self.has_ended:
            return Next.NOTHING
        if self.broken is not BreakKind.MEMBERSHIP:
            self._record(failures)
            self._stacks += stacks
        if self._final is not None:
            return Next.END
        if self.broken is BreakKind.FAILURE:
            self.attempt += 1
        return Next.ROUND

    def end_job(self, *, succeeded: bool, is_drained: bool = False) -> None:
        """Post the job's end, once."""
        if self.has_ended:
            return
        self.has_ended = True
        report = None
        if is_drained:
            self._post(JobEnded(succeeded=False, is_drained=True))
            return
        if not succeeded:
            from muster._shared.reports import FinalFailure
            from muster.agent.diagnosis.root_cause import build_report

            report = build_report(
                self._run_id,
                self._final or FinalFailure(cause=""),
                self.attempt,
                self._max_restarts,
                self._failures,
                tuple(self._stacks),
            )
        self._post(JobEnded(succeeded=succeeded, report=report, prints_report=not succeeded and self._is_own))
