"""Which checkpoint all ranks have saved, as the leader counts it, and who learns of it."""

from doubles.samples import make_failure
from doubles.sent import show_sent

from muster.agent.rendezvous.consensus.actions import RecoveryChanged, RoundFacts
from muster.agent.rendezvous.consensus.decisions import decide
from muster.agent.rendezvous.consensus.events import (
    Joined,
    LeaseChecked,
    MemberLost,
    Reported,
    RoundAcknowledged,
    TimerFired,
)
from muster.agent.rendezvous.consensus.members import ConsensusRules, MemberRecord
from muster.agent.rendezvous.consensus.recovery import RecoveryRecord
from muster.agent.rendezvous.consensus.state import RoundRunning, build_initial_state
from muster.agent.rendezvous.interface import Saved
from muster.agent.rendezvous.member.recovery import MemberRecovery
from muster.agent.rendezvous.report_messages import Failed, Stopped
from muster.agent.round import Checkpoint

NODES = 3


class Leader:
    """A leader of three nodes; the round runs."""

    def __init__(self, *, known: dict[int, Checkpoint] | None = None, min_nodes: int = NODES) -> None:
        rules = ConsensusRules(
            run_id="r",
            min_nodes=min_nodes,
            max_nodes=NODES,
            max_restarts=3,
            join_timeout_s=600,
            last_call_s=1,
            rejoin_wait_s=5,
        )
        self.now_s = 0.0
        self.state = build_initial_state(rules, 0.0, takeover=False)
        for index in range(NODES):
            recovery = RecoveryRecord(checkpoint=(known or {}).get(index))
            self.feed(
                Joined(
                    member=MemberRecord(
                        id=str(index),
                        index=index,
                        nproc=2,
                        role="r",
                        host=f"h{index}",
                        port=1,
                        is_leader=index == 0,
                        recovery=recovery,
                    )
                )
            )
        self.begin()

    def begin(self) -> None:
        self.feed(LeaseChecked(is_held=True))
        for member_id in self.state.assignments:
            self.feed(Reported(id=member_id, message=RoundAcknowledged(round_number=self.state.round_number)))
        assert isinstance(self.state.phase, RoundRunning)

    def feed(self, event) -> list:
        self.state, actions = decide(self.state, event, self.now_s)
        return show_sent(actions)

    def save(self, index: int, step: int, path: str = "") -> Checkpoint | None:
        """The checkpoint that all members are told of, if this report completes one."""
        saved = Reported(id=str(index), message=Saved(round_number=self.state.round_number, step=step, path=path))
        completed = [each for each in self.feed(saved) if isinstance(each, RecoveryChanged)]
        assert len(completed) <= 1
        if not completed:
            return None
        assert set(completed[0].ids) == set(self.state.members)
        checkpoint: Checkpoint | None = completed[0].recovery.value.checkpoint
        assert checkpoint == self.state.checkpoint
        return checkpoint


def test_the_last_report_completes_it_and_the_lowest_rank_names_the_path():
    leader = Leader()
    assert leader.save(2, 9, "/of node 2") is None
    assert leader.save(1, 9, "/of node 1") is None
    assert leader.save(1, 9, "/of node 1") is None  # once more
    assert leader.save(0, 9) == Checkpoint(number=1, step=9, path="/of node 1")


def test_members_that_are_ahead_do_not_hide_the_step_of_the_others():
    leader = Leader()
    for index, step in ((0, 10), (1, 10), (0, 20), (1, 20)):
        assert leader.save(index, step, f"/{step}") is None
    assert leader.save(2, 10, "/10") == Checkpoint(number=1, step=10, path="/10")
    assert leader.save(2, 20, "/20") == Checkpoint(number=2, step=20, path="/20")
    assert leader.state.saving == ()


def test_a_step_that_is_never_complete_is_given_up_for_the_next():
    leader = Leader()
    leader.save(0, 10, "/10")
    for index in range(2):
        assert leader.save(index, 20, "/20") is None
    assert leader.save(2, 20) == Checkpoint(number=1, step=20, path="/20")
    assert leader.state.saving == ()
    for step in range(30, 100):
        leader.save(0, step, "/")
    assert len(leader.state.saving) == 4


def test_without_a_path_nothing_can_be_resumed():
    leader = Leader()
    assert [leader.save(index, 5) for index in range(NODES)] == [None] * NODES
    assert (leader.state.checkpoint, leader.state.saving) == (None, ())


def test_reports_count_while_the_round_is_being_stopped_and_not_afterwards():
    leader = Leader()
    leader.save(0, 10, "/10")
    leader.save(1, 10, "/10")
    old = leader.state.round_number
    failure = make_failure(node=2, node_index=2, global_rank=4, round=old, time_s=1.0, exit_code=1)
    leader.feed(Reported(id="2", message=Failed(round_number=old, failures=(failure,))))
    assert not isinstance(leader.state.phase, RoundRunning)
    leader.feed(Reported(id="0", message=Stopped(round_number=old, port=1)))
    leader.feed(Reported(id="1", message=Stopped(round_number=old, port=1)))
    assert leader.save(2, 10, "/10") == Checkpoint(number=1, step=10, path="/10")
    leader.feed(Reported(id="2", message=Stopped(round_number=old, port=1)))
    leader.begin()
    assert leader.state.round_number > old
    assert leader.feed(Reported(id="0", message=Saved(round_number=old, step=11, path="/11"))) == []
    # A round that begins anew counts its own steps.
    assert [leader.save(index, 4, "/4") for index in range(NODES)][-1] == Checkpoint(number=2, step=4, path="/4")


def test_a_member_that_is_lost_before_it_has_saved_leaves_the_checkpoint_before():
    leader = Leader(min_nodes=2)
    before = [leader.save(index, 10, "/10") for index in range(NODES)][-1]
    leader.save(0, 20, "/20")
    leader.feed(MemberLost(id="2", reason="gone"))
    assert leader.save(1, 20, "/20") is None
    assert leader.state.checkpoint == before


def test_the_latest_that_any_member_knows_is_in_the_first_round():
    leader = Leader(known={1: Checkpoint(number=4, step=40, path="/40"), 2: Checkpoint(number=3, step=90, path="/90")})
    assert leader.state.checkpoint == Checkpoint(number=4, step=40, path="/40")
    assert [leader.save(index, 50, "/50") for index in range(NODES)][-1] == Checkpoint(number=5, step=50, path="/50")


def test_a_member_carries_it_to_its_next_leader():
    leader = Leader()
    checkpoint = [leader.save(index, 10, "/10") for index in range(NODES)][-1]
    known = MemberRecovery().with_record(leader.state.recovery.value)
    assert known.record.checkpoint == checkpoint
    facts = RoundFacts(
        recovery=RecoveryRecord(round_number=7),  # of a leader that does not know it
        successors=(),
        group_world_size=1,
        world_size=1,
        master_addr="h",
        master_port=1,
    )
    known = known.with_round(facts, ())
    assert (known.round_number, known.record.checkpoint) == (7, checkpoint)


def test_a_timer_changes_nothing():
    leader = Leader()
    leader.save(0, 10, "/10")
    before = leader.state.saving
    leader.feed(TimerFired(round_number=leader.state.round_number))
    assert leader.state.saving == before
