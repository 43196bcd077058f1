"""Decides whether an agent's failures end the job, if every agent has its own restart budget.

With muster's own backend the leader decides, in `consensus.failures`.
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
    RendezvousFailed,
    RoundBroken,
    StacksWanted,
)
from muster.agent.runtime.loop import Clock

if TYPE_CHECKING:
    from muster._shared.reports import Failure, FinalFailure, Stack
    from muster.agent.diagnosis.root_cause import DatedFailure
    from muster.agent.rendezvous.verdicts.deciding import Verdict
    from muster.agent.rendezvous.verdicts.restarts import Restarts


class Next(Enum):
    """What to do when a broken round has no worker left."""

    NOTHING = "nothing"
    ROUND = "round"
    END = "end"
    """The job has failed for good."""


class LocalRestartPolicy:
    """Counts one agent's rounds and attempts, and posts `RoundBroken` and `JobEnded`."""

    def __init__(self, clock: Clock, post: PostEvent, config: RendezvousConfig) -> None:
        """Begin before the first round.

        Args:
            clock: the agent's.
            post: gets the rendezvous events.
            config: the job's.
        """
        self._clock = clock
        self._post = post
        self._run_id = config.run_id
        self._max_restarts = config.max_restarts
        self._max_restarts_flag = config.max_restarts_flag
        self._config = config
        self._idle: tuple[Failure, ...] = ()
        """With --hang-action report, the ranks of a hang that was reported."""
        self._restarts: Restarts | None = None
        """What the attempts so far have failed of; None if none has."""
        self._final: FinalFailure | None = None
        self._is_free = False
        self._root: Failure | None = None
        """The failure that has broken the round."""
        self._before: Restarts | None = None
        """What was known before that failure."""
        self._is_provisional = False
        """Whether that failure may be a consequence, so that only `_settle` decides."""
        self._is_own = True
        self._failures: list[DatedFailure] = []
        self._stacks: list[Stack] = []
        self.number = 0
        """The current round; 0 before the first."""
        self.attempt = 0
        self.broken: BreakKind | None = None
        """Why the current round was broken; None while it runs."""
        self.has_ended = False
        """Whether the end was posted, or is not wanted any more."""

    @property
    def restarts_left(self) -> int:
        """How many restarts this agent has left."""
        free = 0 if self._restarts is None else self._restarts.free
        return max(0, self._max_restarts - (self.attempt - free))

    @property
    def repeats(self) -> int:
        """See `Round`."""
        return 0 if self._restarts is None else self._restarts.repeats

    def begin_round(self) -> None:
        """Count the next round, because its workers are about to start."""
        self.number += 1
        self.broken = None
        self._failures, self._stacks = [], []
        self._idle = ()

    def record_failures(self, round_number: int, failures: "tuple[Failure, ...]", *, has_stepped: bool = False) -> bool:
        """Record failed workers; return True if this breaks the round.

        Args:
            round_number: the workers'.
            failures: these workers'.
            has_stepped: whether a worker of the node has done a step in the round.
        """
        if round_number != self.number or self.has_ended:
            return False
        self._record(failures)
        if self.broken is not None:
            return False
        from muster.agent.diagnosis.root_cause import choose_root, describe_failure, is_symptom

        self._before = self._restarts
        verdict = self._decide(choose_root(self._failures), has_stepped=has_stepped)
        is_consequence = self._root is not None and is_symptom(self._root)
        self._is_provisional = is_consequence and self._final is None
        if self._is_provisional:
            self.break_round(BreakKind.FAILURE, describe_failure(self._root))
        else:
            self._follow(verdict)
        return True

    def _follow(self, verdict: "Verdict", *, explains: bool = False) -> None:
        """Post what follows from the root cause; `explains` is that of `RoundBroken`."""
        from muster.agent.diagnosis.root_cause import describe_failure

        if self._final is not None:
            self.break_round(BreakKind.FINAL, self._final.describe(), explains=explains)
        elif verdict.is_wanted and not self._config.is_by_hand:
            self._leave()
        else:
            stays = "; no other node can take the place of its node" if verdict.is_wanted else ""
            self.break_round(BreakKind.FAILURE, f"{describe_failure(self._root)}{stays}", explains=explains)

    def _decide(self, root: "Failure | None", *, has_stepped: bool) -> "Verdict":
        """Decide what follows from a failure of this round, after what was known before."""
        from muster.agent.rendezvous.verdicts.deciding import VerdictRules, decide_verdict
        from muster.agent.rendezvous.verdicts.restarts import Restarts

        config = self._config
        rules = VerdictRules(
            max_restarts=self._max_restarts,
            flag=self._max_restarts_flag,
            stops_on_hang=config.hang_action == "stop",
            stops_on_repeat=not config.is_by_hand,
            policy=config.policy,
        )
        verdict = decide_verdict(root, self._before or Restarts(), self.attempt, rules, has_stepped=has_stepped)
        self._restarts, self._final, self._is_free = verdict.restarts, verdict.final, verdict.is_free
        self._root = root
        return verdict

    def _settle(self, *, has_stepped: bool) -> bool:
        """Decide again once all failures are known, because the first reported one may be a consequence.

        Returns:
            False if this node leaves.
        """
        from muster.agent.diagnosis.root_cause import order_failures

        ordered = order_failures(self._failures, self._stacks)
        root = ordered[0] if ordered and not ordered[0].collateral else None
        if root is not None and root.hung and self._final is None:
            self._explain_hang()
        is_known = root is None or (self._root is not None and root.global_rank == self._root.global_rank)
        if is_known and not self._is_provisional:
            return True
        verdict = self._decide(root or self._root, has_stepped=has_stepped)
        if self._is_provisional:
            self._follow(verdict, explains=True)
        elif self._final is None and verdict.is_wanted and not self._config.is_by_hand:
            self._leave()
        return not self.has_ended

    def _explain_hang(self) -> None:
        """Say which ranks blocked the others. If the job ends, its report says it."""
        from muster.agent.diagnosis.hangs.page import name_hang_cause

        found = name_hang_cause(self._stacks)
        if found is not None:
            self._post(Notice(text=found[0], kind=NoticeKind.HANG_CAUSE, ranks=found[1]))

    def _leave(self) -> None:
        """Have this node end with an exit code that makes its scheduler start another."""
        from muster.agent.diagnosis.root_cause import describe_failure

        self.has_ended = True
        reason = describe_failure(self._root)
        self._post(RendezvousFailed(reason=f"this node leaves the job: {reason}; its scheduler is to start another"))

    @property
    def final(self) -> "FinalFailure | None":
        """Why the job has failed for good; None while it may continue."""
        return self._final

    def get_root(self) -> "Failure | None":
        """Return the root cause of this round's failures."""
        from muster.agent.diagnosis.root_cause import choose_root

        return choose_root(self._failures)

    def record_failed_elsewhere(self, reason: str, root: "Failure | None") -> None:
        """Break the round, because the job has failed for good on another node, which prints the report.

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
        """Have this node's stacks collected with --hang-action report, once until a worker is active again."""
        if round_number != self.number or self.has_ended or self.broken is not None:
            return
        if failures and not self._idle:
            self._post(StacksWanted(round_number=round_number, number=0))
        elif self._idle and not failures:
            self._post(Notice(text="the job goes on: it has not hung", kind=NoticeKind.HANG_OVER))
        self._idle = failures

    def print_hang(self, stacks: "tuple[Stack, ...]", missing: int) -> None:
        """Print what the workers of this node are doing, unless they are active again."""
        if not self._idle:
            return
        from muster.agent.diagnosis.hangs.page import describe_hang, format_known_stacks

        for line in describe_hang(self._idle, stacks):
            self._post(Notice(text=line, kind=NoticeKind.HANG))
        for line in format_known_stacks(stacks, missing=missing):
            self._post(Notice(text=line, kind=NoticeKind.STACK))

    def break_round(self, kind: BreakKind, reason: str, *, explains: bool = False) -> None:
        """Post that the round is broken, or why it was (`explains`)."""
        self.broken = kind
        want_stacks = kind is not BreakKind.MEMBERSHIP
        is_hang = any(each.failure.hung for each in self._failures)
        broken = RoundBroken(
            round_number=self.number,
            kind=kind,
            reason=reason,
            want_stacks=want_stacks,
            is_hang=is_hang,
            cause="" if kind is BreakKind.MEMBERSHIP or self._root is None else self._root.cause,
            is_free=kind is BreakKind.FAILURE and self._is_free,
            is_provisional=kind is BreakKind.FAILURE and self._is_provisional and not explains,
            explains=explains,
        )
        self._post(broken)

    def _record(self, failures: "tuple[Failure, ...]") -> None:
        from muster.agent.diagnosis.root_cause import DatedFailure

        now_s = self._clock.now_s()
        self._failures += [DatedFailure(when_s=now_s - failure.age_s, failure=failure) for failure in failures]

    def record_stopped(
        self,
        round_number: int,
        failures: "tuple[Failure, ...]",
        stacks: "tuple[Stack, ...]",
        *,
        has_stepped: bool = False,
    ) -> Next:
        """Record that no worker of the broken round is left, and decide what follows. See `record_failures`."""
        if round_number != self.number or self.broken is None or self.has_ended:
            return Next.NOTHING
        if self.broken is not BreakKind.MEMBERSHIP:
            self._record(failures)
            self._stacks += stacks
        if self._is_own and self.broken is BreakKind.FAILURE and not self._settle(has_stepped=has_stepped):
            return Next.NOTHING
        if self._final is not None:
            return Next.END
        if has_stepped and self._restarts is not None:
            self._restarts = self._restarts.record_progress()
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
                self._max_restarts + (0 if self._restarts is None else min(self._restarts.free, self.attempt)),
                self._failures,
                tuple(self._stacks),
            )
        self._post(JobEnded(succeeded=succeeded, report=report, prints_report=not succeeded and self._is_own))
