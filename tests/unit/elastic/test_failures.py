"""What a program that has started a job gets when the agent itself has gone."""

import signal

import pytest

from muster.elastic.failures import raise_for_outcome
from muster.elastic.jobs.errors import AgentLost
from muster.elastic.jobs.job import Outcome


@pytest.mark.parametrize(("code", "ended"), [(137, "SIGKILL"), (168, "signal 40"), (255, "signal 127")])
def test_an_agent_that_was_ended_by_a_signal_is_lost(code: int, ended: str) -> None:
    with pytest.raises(AgentLost, match=f"the agent was ended by {ended}; no process of the job is left"):
        raise_for_outcome(Outcome(code=code), name="train")


@pytest.mark.torch
def test_a_job_whose_ranks_have_stopped_at_one_step_is_no_lost_agent() -> None:
    """Another node got the signal, or a person asked: the agent of this node exits as after SIGTERM."""
    records = ({"what": "job_ended", "detail": {"succeeded": True, "drained": True}},)
    api = pytest.importorskip("torch.distributed.elastic.multiprocessing.api")
    with pytest.raises(api.SignalException) as stopped:
        raise_for_outcome(Outcome(code=143, records=records), name="train")
    assert stopped.value.sigval == signal.SIGTERM
