"""What the thread that owns one of torch's handlers says when the round's store is gone."""

from muster.agent.config import RendezvousConfig
from muster.agent.rendezvous.torch_handlers.messages import Command, Order, ThreadFinding, ThreadNotice
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
    assert isinstance(notice, ThreadNotice)
    assert notice.text.startswith(
        "cannot report the failure to the other nodes: failed to send, got -1 bytes Exception"
    )
    assert "\n" not in notice.text
    assert len(notice.text) == 500
