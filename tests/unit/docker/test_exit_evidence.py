"""Descriptions of why a container ended."""

import pytest
from docker_samples import build_facts

from muster.schedulers.docker.running_apps.exit_evidence import ended_by_engine, explain_state
from muster.schedulers.wording.reasons import Code, Reason


@pytest.mark.parametrize(
    ("message", "said"), [(None, ""), (b"", ""), (b"no leader\nin 600 s", "no leader in 600 s"), (b"{cut", "{cut")]
)
def test_agent_may_leave_a_sentence_or_nothing(message, said):
    assert explain_state(build_facts(), message) == ((Reason(code=Code.AGENT_SAID, text=said),) if said else ())


@pytest.mark.parametrize(
    ("code", "oom", "runs_agent", "engine"),
    [
        (143, False, True, True),
        (137, False, False, True),
        (137, True, False, False),
        (0, False, True, False),
        (1, False, True, False),
        (69, False, True, True),
        (69, False, False, False),
        (None, False, True, False),
    ],
)
def test_what_an_engine_that_stops_leaves(code, oom, runs_agent, engine):
    assert ended_by_engine(build_facts(exit_code=code, oom_killed=oom), runs_agent=runs_agent) is engine
