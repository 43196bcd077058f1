"""What a program that has started a job gets when the agent itself has gone."""

import json
import signal
from collections.abc import Iterable
from pathlib import Path

import pytest
from doubles.samples import make_failure

from muster._shared.reports import Report
from muster.elastic.failures import build_child_failed_error, raise_for_outcome
from muster.elastic.jobs.errors import AgentLost
from muster.elastic.jobs.job import Outcome


@pytest.mark.parametrize(
    ("code", "ended"),
    [(137, "was ended by SIGKILL"), (168, "was ended by signal 40"), (255, "exited with code 255")],
)
def test_an_agent_that_has_ended_otherwise_is_lost(code: int, ended: str) -> None:
    with pytest.raises(AgentLost, match=f"the agent {ended}; "):
        raise_for_outcome(Outcome(code=code), name="train")


@pytest.mark.torch
def test_a_job_whose_ranks_have_stopped_at_one_step_is_no_lost_agent() -> None:
    """Another node got the signal, or a person asked: the agent of this node exits as after SIGTERM."""
    records = ({"what": "job_ended", "detail": {"succeeded": True, "drained": True}},)
    api = pytest.importorskip("torch.distributed.elastic.multiprocessing.api")
    with pytest.raises(api.SignalException) as stopped:
        raise_for_outcome(Outcome(code=143, records=records), name="train")
    assert stopped.value.sigval == signal.SIGTERM


def build_failed(ranks: Iterable[int], tmp_path: Path) -> Outcome:
    """Rank 2 raises something else than the others."""
    failures = []
    for rank in ranks:
        traceback = f"Traceback (most recent call last):\n  in step\nValueError: {'other' if rank == 2 else 'same'}"
        extra = {"py_callstack": traceback, "timestamp": f"{rank}"}
        file = tmp_path / f"{rank}.json"
        file.write_text(json.dumps({"message": {"message": "ValueError", "extraInfo": extra}}))
        failures.append(make_failure(global_rank=rank, local_rank=rank, exit_code=1, error_file=str(file)))
    report = Report(run_id="r", reason="why", attempt=0, max_restarts=0, failures=tuple(failures))
    return Outcome(code=1, report=report, ranks=range(8))


@pytest.mark.torch
def test_the_text_of_different_failures_is_that_of_torch(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    error = build_child_failed_error(build_failed((2, 3), tmp_path), "train")
    assert str(error) == error.format_msg()
