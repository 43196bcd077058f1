"""Which checkpoint all ranks have saved, as the leader counts it, and who learns of it."""

import pytest
from doubles.leader_history import Leader, member, rules

from muster._shared.records import replace
from muster.agent.rendezvous.consensus.actions import RecoveryChanged, RoundFacts
from muster.agent.rendezvous.consensus.events import Reported, RoundAcknowledged
from muster.agent.rendezvous.consensus.recovery import RecoveryRecord
from muster.agent.rendezvous.consensus.state import RoundRunning
from muster.agent.rendezvous.interface import Saved
from muster.agent.rendezvous.member.state import MemberRecovery
from muster.agent.round import Checkpoint

NODES = 3


class Job(Leader):
    """A leader of three nodes; the round runs."""

    def __init__(self, *, known: dict[int, Checkpoint] | None = None, min_nodes: int = NODES) -> None:
        super().__init__(rules(min_nodes, NODES, max_restarts=3))
        for index in range(NODES):
            recovery = RecoveryRecord(checkpoint=(known or {}).get(index))
            self.join(member(index, nproc=2, recovery=recovery))
        self.begin()

    def begin(self) -> None:
        for each in self.state.assignments:
            self.feed(Reported(id=each, message=RoundAcknowledged(round_number=self.state.round_number)))
        assert isinstance(self.state.phase, RoundRunning)

    def save(self, index: int, step: int, path: str = "") -> Checkpoint | None:
        """The checkpoint that all members are told of, if this report completes one."""
        saved = Reported(id=f"m{index}", message=Saved(round_number=self.state.round_number, step=step, path=path))
        completed = [each for each in self.feed(saved) if isinstance(each, RecoveryChanged)]
        assert len(completed) <= 1
        if not completed:
            return None
        assert set(completed[0].ids) == set(self.state.members)
        checkpoint: Checkpoint | None = completed[0].recovery.value.checkpoint
        assert checkpoint == self.state.checkpoint
        return checkpoint


def test_the_last_report_completes_it_and_the_lowest_rank_names_the_path():
    leader = Job()
    assert leader.save(2, 9, "/of node 2") is None
    assert leader.save(1, 9, "/of node 1") is None
    assert leader.save(1, 9, "/of node 1") is None  # once more
    assert leader.save(0, 9) == Checkpoint(number=1, step=9, path="/of node 1")


def test_members_that_are_ahead_do_not_hide_the_step_of_the_others():
    leader = Job()
    for index, step in ((0, 10), (1, 10), (0, 20), (1, 20)):
        assert leader.save(index, step, f"/{step}") is None
    assert leader.save(2, 10, "/10") == Checkpoint(number=1, step=10, path="/10")
    assert leader.save(2, 20, "/20") == Checkpoint(number=2, step=20, path="/20")
    assert leader.state.saving == ()


def test_a_step_that_is_never_complete_is_given_up_for_the_next():
    leader = Job()
    leader.save(0, 10, "/10")
    for index in range(2):
        assert leader.save(index, 20, "/20") is None
    assert leader.save(2, 20) == Checkpoint(number=1, step=20, path="/20")
    assert leader.state.saving == ()
    for step in range(30, 100):
        leader.save(0, step, "/")
    assert len(leader.state.saving) == 4


def test_without_a_path_nothing_can_be_resumed():
    leader = Job()
    assert [leader.save(index, 5) for index in range(NODES)] == [None] * NODES
    assert (leader.state.checkpoint, leader.state.saving) == (None, ())


def test_reports_count_while_the_round_is_being_stopped_and_not_afterwards():
    leader = Job()
    leader.save(0, 10, "/10")
    leader.save(1, 10, "/10")
    old = leader.state.round_number
    leader.fail(2)
    assert not isinstance(leader.state.phase, RoundRunning)
    leader.stop_all(0, 1)
    assert leader.save(2, 10, "/10") == Checkpoint(number=1, step=10, path="/10")
    leader.stop_all(2)
    leader.begin()
    assert leader.state.round_number > old
    assert leader.feed(Reported(id="m0", message=Saved(round_number=old, step=11, path="/11"))) == []
    # A round that begins anew counts its own steps.
    assert [leader.save(index, 4, "/4") for index in range(NODES)][-1] == Checkpoint(number=2, step=4, path="/4")


def test_a_member_that_is_lost_before_it_has_saved_leaves_the_checkpoint_before():
    leader = Job(min_nodes=2)
    before = [leader.save(index, 10, "/10") for index in range(NODES)][-1]
    leader.save(0, 20, "/20")
    leader.lose(2)
    assert leader.save(1, 20, "/20") is None
    assert leader.state.checkpoint == before


@pytest.mark.parametrize("is_known", [True, False])
def test_a_lost_member_brings_what_it_saved_in_the_last_round(is_known):
    leader = Job()
    number, recovery = leader.state.round_number, leader.state.recovery.value
    for index in range(2):
        assert leader.save(index, 10, "/10") is None
    leader.lose(2)
    leader.stop_all(0, 1)
    known = recovery if is_known else RecoveryRecord()  # then its round may be another leader's of this number
    saved = Saved(round_number=number, step=10, path="/10")
    leader.join(replace(member(2, nproc=2, recovery=known, ranks=(2,) * is_known), saved=saved))
    leader.wait(1.0)
    leader.begin()
    checkpoint = Checkpoint(number=1, step=10, path="/10") if is_known else None
    assert (leader.state.round_number, leader.state.checkpoint) == (number + 1, checkpoint)


def test_the_latest_that_any_member_knows_is_in_the_first_round():
    leader = Job(known={1: Checkpoint(number=4, step=40, path="/40"), 2: Checkpoint(number=3, step=90, path="/90")})
    assert leader.state.checkpoint == Checkpoint(number=4, step=40, path="/40")
    assert [leader.save(index, 50, "/50") for index in range(NODES)][-1] == Checkpoint(number=5, step=50, path="/50")


def test_a_member_carries_it_to_its_next_leader():
    leader = Job()
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
    leader = Job()
    leader.save(0, 10, "/10")
    before = leader.state.saving
    leader.wait(0.0)
    assert leader.state.saving == before
