"""The last line of a job."""

import pytest
from doubles.samples import make_round

from muster._shared.reports import format_duration, format_size
from muster.agent.cli.arguments import parse_args
from muster.agent.node.actions import Finish
from muster.agent.node.outcome import describe_logs, prints_last_line
from muster.agent.rendezvous.interface import JobEnded
from muster.agent.runtime.event_log import RunTimes


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.44, "0.4 s"), (12.4, "12 s"), (185.0, "3 min 5 s"), (7800.0, "2 h 10 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_sizes() -> None:
    assert format_size(14 << 20) == "14 MiB"
    assert format_size(3 << 29) == "1.5 GiB"
    assert format_size(4 << 30, 2) == "4.00 GiB"


def test_what_restarts_cost() -> None:
    times = RunTimes()
    story = [("agent_started", 1.0), ("workers_started", 2.0), ("round_broken", 5.0), ("fenced", 5.5)]
    for what, now_s in [*story, ("workers_started", 7.0), ("round_broken", 9.0), ("agent_ended", 10.0)]:
        times.add(what, now_s)
    assert (times.duration_s, times.restarts, times.without_workers_s) == (9.0, 1, 2.0)


@pytest.mark.parametrize(("fails", "restarts"), [(False, 0), (True, 1)])
def test_a_change_of_size_is_no_restart(fails: bool, restarts: int) -> None:
    times = RunTimes()
    times.add("workers_started", 1.0)
    times.add("round_broken", 2.0, is_resize=True)
    if fails:
        times.add("round_broken", 2.1)
    times.add("workers_started", 3.0)
    assert (times.restarts, times.without_workers_s) == (restarts, float(restarts))


@pytest.mark.parametrize(
    ("flags", "environ", "succeeded", "text"),
    [
        ("--log-dir /l", {}, True, "logs: /run"),
        ("--tee 3", {}, True, "logs: /run"),
        ("", {}, True, "no log files (--log-dir and --tee 3 keep them)"),  # the temporary folder is removed
        ("", {}, False, "logs: /run"),  # it has the report
        ("--tee 3", {"MUSTER_ADAPTER": "a", "MUSTER_APP_ID": "a-1", "MUSTER_LOGS_HERE": "1"}, True, "logs: /run"),
        (
            "--tee 3",
            {"MUSTER_ADAPTER": "local_docker", "MUSTER_APP_ID": "a-1"},
            True,
            "logs: torchx log local_docker://torchx/a-1",
        ),
        (
            "",
            {"MUSTER_ADAPTER": "a", "MUSTER_APP_ID": "a-1", "TORCHX_JOB_ID": "kubernetes://torchx/ns:a-1"},
            False,
            "logs: torchx log kubernetes://torchx/ns:a-1",
        ),
    ],
)
def test_where_the_logs_are(flags: str, environ: dict[str, str], succeeded: bool, text: str) -> None:
    config = parse_args([*flags.split(), "main.py"], environ)
    assert describe_logs(config, "/run", succeeded=succeeded) == text


@pytest.mark.parametrize(
    ("is_leader", "group_rank", "is_printed"),
    [(None, 0, True), (None, 1, False), (True, 0, True), (False, 0, False), (True, 1, True)],
)
def test_the_node_that_leads_prints_the_last_line(is_leader: bool | None, group_rank: int, is_printed: bool) -> None:
    """Node 0 that has come again knows of the job what happened since."""
    config = parse_args(["main.py"], {})
    finish = Finish(code=0, ended=JobEnded(succeeded=True, is_leader=is_leader))
    assert prints_last_line(finish, config, make_round(2, group_rank=group_rank)) is is_printed


def test_a_folder_that_could_not_be_made_is_not_recommended() -> None:
    config = parse_args(["--log-dir", "/l", "--tee", "3", "main.py"], {})
    assert describe_logs(config, None, succeeded=False) == "no log files"
