"""What members and leader tell each other of snapshots does not grow with their number, nor does a decision's cost."""

from doubles.two_members import TwoMembers

from muster._shared.codec import encode_message
from muster._shared.records import replace
from muster.agent.features.snapshots.messages import (
    FEATURE,
    ORDERS,
    Generation,
    Holding,
    Holdings,
    SnapshotCopied,
    SnapshotKept,
    SnapshotSought,
    pack,
    unpack,
)
from muster.agent.rendezvous.consensus.actions import Send
from muster.agent.rendezvous.consensus.decisions import decide
from muster.agent.rendezvous.consensus.events import Joined, LeaseChecked
from muster.agent.rendezvous.consensus.members import MemberRecord
from muster.agent.rendezvous.consensus.parts import decide_part
from muster.agent.rendezvous.consensus.state import build_initial_state
from muster.agent.rendezvous.interface import PartOrder, PartReport
from muster.agent.rendezvous.report_messages import Stopped
from muster.agent.round import PartOffer
from muster.agent.runtime.persistent import PersistentSet

FEW, MANY = 16, 4096
RANKS = 8


class Job:
    """A leader of many nodes that all have a snapshot of an earlier round, each with a copy of its neighbour's."""

    def __init__(self, count):
        self.sizes = {}
        self.count = count
        rules = replace(TwoMembers("report").state.rules, min_nodes=count, max_nodes=count)
        self.state = build_initial_state(rules, 0.0, takeover=False)
        for index in range(count):
            names = {"id": str(index), "role": "r", "host": "h", "address": "10.0.0.1"}
            member = MemberRecord(index=index, nproc=RANKS, port=1, listen_port=1, **names)
            offers = self.list_offers(index) if index != 1 else ()  # a new node: it gets its part from another
            self.decide(Joined(member=replace(member, is_leader=index == 0, offers=offers)))
        self.decide(LeaseChecked(is_held=True))

    def list_offers(self, index):
        """Three of its own, and two copies."""
        made = []
        for step, (owner, is_copy) in enumerate([(index, False)] * 3 + [((index - 1) % self.count, True)] * 2, 10**9):
            generation = Generation(lineage=1 << 52, step=step if not is_copy else step - 2, size=self.count)
            of = {"generation": generation, "first_rank": owner * RANKS, "nproc": RANKS, "is_copy": is_copy}
            made.append(Holding(group_rank=owner, **of))
        return (PartOffer(feature=FEATURE, content=pack(Holdings(holdings=tuple(made)))),)

    def decide(self, event):
        self.state, actions = decide(self.state, event, 0.0)
        self.act(actions)

    def act(self, actions):
        for action in actions:
            if isinstance(action, Send) and action.ids:
                self.measure(action.message)

    def measure(self, message):
        name = type(message).__name__
        if isinstance(message, PartOrder):
            name = type(ORDERS.parse(message.content)).__name__
        self.sizes[name] = max(self.sizes.get(name, 0), len(encode_message(message, 1 << 20)))

    def tell(self, index, kind, **words):
        message = PartReport(round_number=self.state.round_number, feature=FEATURE, content=pack(kind(**words)))
        self.measure(message)
        self.state, actions = decide_part(self.state, str(index), message, 0.0)
        self.act(actions)

    def find_confirmed(self):
        return unpack(Generation, self.state.memories[0].content)

    def run(self):
        for index in range(self.count):
            self.tell(index, SnapshotKept, step=5 + (index == 1), advance=2)
        for index in range(self.count):
            self.tell(index, SnapshotKept, step=self.state.parts[FEATURE].mark, advance=2)
        key = self.find_confirmed().key
        for index in range(self.count):
            self.tell(index, SnapshotCopied, lineage=key[0], step=key[1])
        self.tell(0, SnapshotSought, rank=RANKS * self.count - 1)
        stopped = Stopped(round_number=self.state.round_number, offers=self.list_offers(self.count - 1))
        self.measure(stopped)
        return self.sizes


def test_no_message_grows_with_the_number_of_members():
    few, many = Job(FEW).run(), Job(MANY).run()
    assert few.keys() == many.keys()
    assert {"RoundStart", "RecoveryChanged", "KeepSnapshot", "CopySnapshot", "SnapshotFound", "Stopped"} <= few.keys()
    for name, size in few.items():
        # numbers are longer
        assert many[name] - size <= 40, f"{name}: {size} bytes of {FEW} members, {many[name]} of {MANY}"


def test_a_report_costs_the_leader_no_look_at_all_members(monkeypatch):
    job = Job(64)
    for index in range(64):
        job.tell(index, SnapshotKept, step=5, advance=1)
    looks = []
    contains = PersistentSet.__contains__
    monkeypatch.setattr(PersistentSet, "__contains__", lambda self, key: (looks.append(key), contains(self, key))[1])
    for index in range(64):
        job.tell(index, SnapshotCopied, lineage=job.find_confirmed().lineage, step=5)
    assert len(looks) <= 3 * 64
