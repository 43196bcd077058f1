"""Descriptions of why a container ended."""

import pytest
from docker_samples import build_facts
from doubles.samples import write_report

from muster.schedulers.docker.live.exit_reason import describe_start_failure, describe_state, ended_by_engine


def test_out_of_memory_names_the_limit():
    said = describe_state(build_facts(oom_killed=True, memory_bytes=64 << 20), None)
    assert said == "OOMKilled: out of memory, limit 64 MiB"


def test_report_names_the_root_cause():
    failures = [{"collateral": True, "exception": "no"}, {"collateral": False, "exception": "ValueError: x\ny"}]
    report = write_report("workers failed", *failures).encode()
    assert describe_state(build_facts(), report) == "workers failed: ValueError: x y"


@pytest.mark.parametrize(
    ("message", "said"), [(None, ""), (b"", ""), (b"no leader\nin 600 s", "no leader in 600 s"), (b"{cut", "{cut")]
)
def test_agent_may_leave_a_sentence_or_nothing(message, said):
    assert describe_state(build_facts(), message) == said


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


def test_missing_interpreter_has_its_own_text():
    said = 'runc: exec: "python3": executable file not found in $PATH: unknown'
    assert describe_start_failure(said, "img", "python3", runs_agent=True) == (
        "could not be started: image 'img' has no 'python3'; muster's agent needs Python 3.10 or newer in the image"
    )
    assert (
        describe_start_failure("no space\nleft", "img", "sh", runs_agent=False) == "could not be started: no space left"
    )
