"""A history of events through the leader's pure state machine."""

from doubles.samples import make_failure
from doubles.sent import show_sent

from muster._shared.reports import Failure
from muster.agent.rendezvous.consensus.actions import CheckLease, RoundStart, SetTimer
from muster.agent.rendezvous.consensus.decisions import decide
from muster.agent.rendezvous.consensus.events import Joined, LeaseChecked, MemberLost, Reported, TimerFired
from muster.agent.rendezvous.consensus.members import ConsensusRules, MemberRecord
from muster.agent.rendezvous.consensus.recovery import RecoveryRecord
from muster.agent.rendezvous.consensus.state import JobState, NewRound, build_initial_state
from muster.agent.rendezvous.interface import AllSucceeded, DrainBegun, DrainReport, DrainReported
from muster.agent.rendezvous.report_messages import Failed, Stopped


def rules(min_nodes: int, max_nodes: int, max_restarts: int = 1) -> ConsensusRules:
    return ConsensusRules(
        run_id="r",
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        max_restarts=max_restarts,
        join_timeout_s=60.0,
        last_call_s=3.0,
        rejoin_wait_s=4.3,
    )


def member(
    number: int,
    *,
    index: int | None = -1,
    nproc: int = 1,
    recovery: RecoveryRecord | None = None,
    ranks: tuple[int | None, ...] = (),
) -> MemberRecord:
    return MemberRecord(
        id=f"m{number}",
        index=number if index == -1 else index,
        nproc=nproc,
        role="default",
        host=f"h{number}",
        port=1000 + number,
        is_leader=number == 0,
        recovery=recovery or RecoveryRecord(),
        group_ranks=ranks,
    )


def failure(node: int, *, age_s: float = 0.0, **changes) -> Failure:
    values = {"node_index": node, "host": f"h{node}", "global_rank": node, "exit_code": 1, **changes}
    return make_failure(node=node, age_s=age_s, **values)


class Leader:
    """A history: feeds events at given times and keeps the last actions."""

    def __init__(self, rules_: ConsensusRules, *, takeover: bool = False) -> None:
        self.now_s = 0.0
        self.is_lease_held = True
        self.stops_for_joins = False
        """Whether ranks ask `should_stop`: else a member refuses to stop at one step when nodes join."""
        self.state: JobState = build_initial_state(rules_, 0.0, takeover=takeover)
        self.actions: list = []

    def feed(self, event, *, after_s: float = 0.0) -> list:
        self.now_s += after_s
        self.state, actions = decide(self.state, event, self.now_s)
        self.actions = [each for each in show_sent(actions) if not isinstance(each, CheckLease | SetTimer)]
        if any(isinstance(each, CheckLease) for each in actions):
            before, answer = self.actions, self.feed(LeaseChecked(is_held=self.is_lease_held))
            self.actions = before + answer
        begun = next((each for each in self.actions if isinstance(each, DrainBegun) and not each.is_asked), None)
        if begun is not None and self.state.phase.drain.is_join and not self.stops_for_joins:
            report = DrainReport(ceiling=0, refusal="no rank asks")
            refused = DrainReported(round_number=begun.round_number, drain=begun.drain, report=report)
            self.feed(Reported(id="m0", message=refused))
        return self.actions

    def join(self, *members: int | MemberRecord, after_s: float = 0.0) -> list:
        """Each of them joins, after the same time."""
        for each in members:
            self.feed(Joined(member=member(each) if isinstance(each, int) else each), after_s=after_s)
        return self.actions

    def lose(self, number: int, *, after_s: float = 0.0) -> list:
        return self.feed(MemberLost(id=f"m{number}", reason="connection closed"), after_s=after_s)

    def fail(self, number: int, *, after_s: float = 0.0, suspicion_s: float = 0.0, **changes) -> list:
        """A worker of this member fails in the newest round."""
        failed = Failed(round_number=self.state.round_number, failures=(failure(number, **changes),))
        return self.feed(Reported(id=f"m{number}", message=failed, suspicion_s=suspicion_s), after_s=after_s)

    def succeed(self, *numbers: int, after_s: float = 0.0) -> list:
        for number in numbers:
            done = AllSucceeded(round_number=self.state.round_number)
            self.feed(Reported(id=f"m{number}", message=done), after_s=after_s)
        return self.actions

    def wait(self, for_s: float) -> list:
        """Let time pass and the timer fire."""
        return self.feed(TimerFired(round_number=self.state.round_number), after_s=for_s)

    def next_due_s(self) -> float:
        return self.state.timer.due_s

    def form(self, count: int) -> NewRound:
        self.join(*range(count))
        return self.formed()

    def form_by_last_call(self, count: int) -> NewRound:
        self.join(*range(count))
        self.wait(3.1)
        return self.formed()

    def formed(self) -> NewRound:
        """The round that the last event formed: each of its members was told so."""
        new = self.state.formed[0]
        told = [action.ids for action in self.actions if isinstance(action, RoundStart)]
        assert told == [(each.id,) for each in new.assignments], self.actions
        return new

    def formed_of(self) -> list[str]:
        return [each.id for each in self.formed().assignments]

    def reform(self, *numbers: int) -> list[str]:
        """Whose workers stop; those of which the next round is formed after the fence."""
        self.stop_all(*numbers)
        self.wait(0.31)
        return self.formed_of()

    def only(self, kind):
        found = [action for action in self.actions if isinstance(action, kind)]
        assert len(found) == 1, self.actions
        return found[0]

    def stop_all(self, *numbers: int) -> None:
        for number in numbers:
            stopped = Stopped(round_number=self.state.round_number, port=2000 + number)
            self.feed(Reported(id=f"m{number}", message=stopped))
