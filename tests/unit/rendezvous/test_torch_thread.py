"""The thread that owns one of torch's handlers: what it reads from the round's store, and says when that is gone."""

import json
from types import SimpleNamespace

import pytest
from doubles.torch_store import FakeStore

from muster.agent.config import RendezvousConfig
from muster.agent.rendezvous.interface import Notice
from muster.agent.rendezvous.torch_handlers.messages import Command, HandlerFormedRound, Order, ThreadFinding
from muster.agent.rendezvous.torch_handlers.thread import HandlerThread
from muster.agent.rendezvous.torch_handlers.watch import RoundWatch

FRAMES = "".join(f"frame #{number}: c10d::detail::TCPClient::sendRaw\n" for number in range(99))
CONFIG = RendezvousConfig(backend="c10d-torch", run_id="run", host="h", port=1, node_index=0, min_nodes=1, max_nodes=1)


class Owner:
    """Keeps what is found."""

    def __init__(self) -> None:
        self.found: list[ThreadFinding] = []

    def post_finding(self, finding: ThreadFinding) -> None:
        self.found.append(finding)


class LostStore:
    """Its host is gone: only a heartbeat's count was read before."""

    def add(self, _key: str, _number: int) -> int:
        return 0

    def set(self, _key: str, _value: str) -> None:
        raise RuntimeError(f"failed to send, got -1 bytes\nException raised from sendRaw:\n{FRAMES}")


def test_a_failure_that_the_other_nodes_cannot_be_told_is_one_short_line() -> None:
    owner = Owner()
    thread = HandlerThread(CONFIG, 1, "default", owner)
    thread._watch = RoundWatch(LostStore(), "nonce", rank=0, size=2, silence_s=15.0, now_s=float)
    thread._carry_out(Command(order=Order.FAIL, reason="rank 0 failed"))
    (notice,) = owner.found
    assert isinstance(notice, Notice)
    assert notice.text.startswith("cannot report the ")
    assert "\n" not in notice.text
    assert len(notice.text) == 500


def form_round(rank: int, store: FakeStore) -> list[ThreadFinding]:
    """What the thread of a node with one worker finds in a round of two nodes."""
    owner = Owner()
    thread = HandlerThread(CONFIG, 1, "trainer", owner)
    thread._silence_s = 15.0
    thread._handler = SimpleNamespace(
        next_rendezvous=lambda: SimpleNamespace(rank=rank, world_size=2, store=store, bootstrap_store_info=None),
        use_agent_store=True,
    )
    thread._carry_out(Command(order=Order.NEXT))
    thread.stop()
    return owner.found


def test_a_node_reads_its_place_from_the_layout_that_rank_0_has_written() -> None:
    """The layout is that of every version: agents of two versions may meet in one job."""
    sizes = {"offsets": [0, 5], "role_offsets": [0, 3], "role_sizes": [7, 4], "world_size": 9}
    written = json.dumps({"nodes": sizes, "addr": "host", "port": 2, "nonce": "n"})
    assert form_round(1, FakeStore({"muster/layout": written})) == [
        HandlerFormedRound(
            group_rank=1,
            group_world_size=2,
            rank_offset=5,
            world_size=9,
            role_rank_offset=3,
            role_world_size=4,
            master_addr="host",
            master_port=2,
            use_agent_store=False,
        )
    ]


@pytest.mark.parametrize(
    ("role", "role_offsets", "role_sizes"), [("trainer", [0, 1], [4, 4]), ("reader", [0, 0], [1, 3])]
)
def test_rank_0_writes_the_layout(role: str, role_offsets: list[int], role_sizes: list[int]) -> None:
    store = FakeStore({"muster/node/1": json.dumps([3, role])})
    (formed,) = form_round(0, store)
    layout = json.loads(store.values["muster/layout"])
    assert layout["nodes"] == {
        "offsets": [0, 1],
        "role_offsets": role_offsets,
        "role_sizes": role_sizes,
        "world_size": 4,
    }
    assert set(layout) == {"nodes", "addr", "port", "nonce"}
    assert isinstance(formed, HandlerFormedRound)
    assert (formed.master_port, formed.role_world_size) == (layout["port"], role_sizes[0])
