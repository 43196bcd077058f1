"""Descriptions of why a container ended."""

import pytest
from docker_samples import build_facts
from doubles.samples import write_report

from muster.schedulers.docker.running_apps.exit_evidence import ended_by_engine, explain_state
from muster.schedulers.failure_report import explain_start_failure
from muster.schedulers.wording.reasons import Code, Reason


def test_report_names_the_root_cause():
    failures = [{"collateral": True, "exception": "no"}, {"collateral": False, "exception": "ValueError: x\ny"}]
    report = write_report("workers failed", *failures).encode()
    [reason] = explain_state(build_facts(), report)
    assert (reason.code, reason.text, reason.exception) == (Code.JOB_FAILED, "workers failed", "ValueError: x y")


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


def test_a_missing_interpreter_has_its_own_code():
    said = 'runc: exec: "python3": executable file not found in $PATH: unknown'
    assert explain_start_failure(said, "img", "python3", runs_agent=True) == Reason(
        code=Code.IMAGE_LACKS_COMMAND, image="img", program="python3", is_agent=True
    )
    other = Reason(code=Code.COULD_NOT_START, text="no space left")
    assert explain_start_failure("no space\nleft", "img", "sh", runs_agent=False) == other
