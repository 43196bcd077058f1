"""Links, a network and a clock in memory, to test one leader, member or server: what it receives and sends."""

import json
from collections.abc import Callable
from typing import Any

from muster._shared.codec import encode_message
from muster.agent.config import RendezvousConfig
from muster.agent.rendezvous.consensus.members import build_rules
from muster.agent.rendezvous.consensus.recovery import RecoveryRecord
from muster.agent.rendezvous.leader.connections import LeaderOptions
from muster.agent.rendezvous.leader.leader import Leader
from muster.agent.rendezvous.member.member import Member
from muster.agent.rendezvous.protocol.framing import FRAME_LIMIT_BYTES, Frame
from muster.agent.rendezvous.protocol.job_rules import JobRules, build_job_rules
from muster.agent.rendezvous.protocol.messages import Join, Message
from muster.agent.runtime.loop import Loop


def make_config(**changes: Any) -> RendezvousConfig:
    """That of node 0 of up to three nodes, of which one is enough."""
    values = {"backend": "muster", "run_id": "run", "host": "h", "port": 29400, "node_index": 0}
    return RendezvousConfig(**{**values, "min_nodes": 1, "max_nodes": 3, "max_restarts": 2, **changes})


def make_leader(loop: Loop, config: RendezvousConfig, notify: Callable[..., None] = print) -> Leader:
    options = LeaderOptions(
        rules=build_rules(config),
        job_rules=build_job_rules(config),
        silence_s=config.silence_s,
        takeover=False,
        notify=notify,
        own_id="m0",
        listen_port=5000,
    )
    return Leader(loop, FakeNetwork(), options)  # type: ignore[arg-type]


def make_member(
    config: RendezvousConfig, loop: Loop, network: "FakeNetwork", name: str, post: Callable[[Any], None], nproc: int = 1
) -> Member:
    return Member(
        config,
        nproc=nproc,
        role="default",
        loop=loop,
        post=post,
        lease=None,
        node_name=name,
        network=network,  # type: ignore[arg-type]
        reserve=FakeHandle,
        member_id=name.replace("h", "m"),
    )


def encode_and_decode(message: Message) -> Any:
    """What arrives of a message: JSON, not read yet."""
    return json.loads(encode_message(message, FRAME_LIMIT_BYTES))


def make_join(rules: JobRules, **changes: Any) -> Join:
    """What node 1 of "run" sends to its leader."""
    values: dict[str, Any] = {"run_id": "run", "id": "m1", "index": 1, "nproc": 1, "role": "default", "host": "h1"}
    values |= {"port": 1, "listen_port": 2, "local_addr": None, "recovery": RecoveryRecord(), "group_ranks": ()}
    return Join(rules=rules, **{**values, **changes})


class StandingClock:
    """Time that passes only when the test changes `passed_s`."""

    def __init__(self) -> None:
        self.passed_s = 0.0

    def now_s(self) -> float:
        return 100.0 + self.passed_s

    def boottime_s(self) -> float:
        return 200.0 + self.passed_s


class FakeLink:
    """One end of a connection whose other end is the test."""

    def __init__(self, peer_host: str = "10.0.0.9") -> None:
        self.owner: Any = None
        self.local_host, self.peer_host, self.silent_host = "10.0.0.1", peer_host, ""
        self.is_proved = True
        self.is_busy = False
        self.sent: list[Message] = []
        self.closed = False

    def send(self, message: Message) -> None:
        if not self.closed:
            self.sent.append(message)
            encode_and_decode(message)  # it can be sent

    def trust(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    def deliver(self, message: Message | Frame) -> None:
        """As the network: nothing arrives on a closed link."""
        if not self.closed:
            self.owner.on_message(self, message if isinstance(message, dict) else encode_and_decode(message))

    def kinds(self) -> list[type]:
        return [type(message) for message in self.sent]


class FakeHandle:
    """A listener, a dial, a probe, or a reserved port."""

    def __init__(self, port: int = 4001) -> None:
        self.port = port

    def close(self) -> None:
        pass


class FakeNetwork:
    """Records its calls: `dials` are (host, port, on_open), `listeners` what is called with a new link at `hosts`."""

    def __init__(self) -> None:
        self.dials: list[tuple[str, int, Callable[[FakeLink], None]]] = []
        self.listeners: list[Callable[[FakeLink, Any], None]] = []
        self.hosts: list[str | None] = []

    def connect(self, host: str, port: int, on_open: Any, on_failed: Any, timeout_s: float) -> FakeHandle:
        self.dials.append((host, port, on_open))
        return FakeHandle()

    def listen(self, host: str | None, port: int, on_link: Any, on_refused: Any = None) -> FakeHandle:
        self.listeners.append(on_link)
        self.hosts.append(host)
        return FakeHandle(port or 4001)

    def reserve(self) -> FakeHandle:
        return FakeHandle()

    def probe(self, host: str, port: int, on_result: Callable[[bool], None]) -> FakeHandle:
        return FakeHandle()

    def check_local(self, host: str, on_result: Callable[[bool], None]) -> None:
        on_result(False)

    def close(self) -> None:
        pass
