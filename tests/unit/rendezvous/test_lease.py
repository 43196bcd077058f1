"""Until when the leader's own workers may run, for silence limits of any length."""

from collections.abc import Iterator

import pytest
from doubles.rendezvous_links import StandingClock

from muster.agent.config import RendezvousConfig
from muster.agent.rendezvous.consensus.members import ConsensusRules
from muster.agent.rendezvous.leader.connections import LeaderOptions
from muster.agent.rendezvous.leader.leader import Leader
from muster.agent.rendezvous.protocol.job_rules import build_job_rules
from muster.agent.runtime.loop import Loop


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop(StandingClock())
    yield made
    made.close()


@pytest.mark.parametrize(("silence_s", "lease_s"), [(0.3, 0.2), (1.0, 2 / 3), (3.0, 2.0), (5.0, 4.0)])
def test_it_ends_before_the_silence_limit_and_not_at_once(loop: Loop, silence_s: float, lease_s: float) -> None:
    rules = ConsensusRules(
        run_id="run",
        min_nodes=1,
        max_nodes=2,
        max_restarts=0,
        join_timeout_s=10.0,
        last_call_s=1.0,
        rejoin_wait_s=silence_s,
    )
    config = RendezvousConfig(backend="muster", run_id="run", host="h", port=1, node_index=0, min_nodes=1, max_nodes=2)
    options = LeaderOptions(
        rules=rules,
        job_rules=build_job_rules(config),
        silence_s=silence_s,
        takeover=False,
        local_addr=None,
        notify=print,
        own_id="a",
        listen_port=0,
    )
    leader = Leader(loop, None, options)
    assert leader.lease_until_s() == pytest.approx(200.0 + lease_s)
    leader.close()
