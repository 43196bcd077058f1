"""What all adapters read: lines, times, and the agent's words about a failure."""

import json
import os
import time
from datetime import datetime, timedelta
from functools import partial

import pytest
from doubles import samples
from hypothesis import given
from hypothesis import strategies as st

from muster._shared.contract import FORMAT
from muster._shared.control import parse_answer
from muster._shared.reports import Report
from muster.agent.diagnosis.report_files import build_termination_message, write_report
from muster.schedulers.docker.sdk import one_line
from muster.schedulers.failure_report import (
    RecordReader,
    describe_report,
    explain_report,
    find_root_cause,
    find_trouble,
    find_usage_line,
    parse_attempt,
    parse_report,
    parse_status,
    read_error_file,
)
from muster.schedulers.kubernetes.running_apps.status import _build_torch_error
from muster.schedulers.lines import LineSplitter
from muster.schedulers.processes.agent_files import read_records, read_report
from muster.schedulers.timestamps import parse_seconds, parse_timestamp
from muster.schedulers.wording.job_line import describe_status
from muster.schedulers.wording.reasons import Code, JobFacts, Reason
from muster.schedulers.wording.words import word_all


@given(pieces=st.lists(st.text(alphabet="aé\r\n", max_size=4).map(str.encode)), cut=st.integers(0, 20))
def test_lines_do_not_depend_on_the_pieces(pieces, cut):
    text = b"".join(pieces)
    splitter = LineSplitter()
    lines = [line for piece in (text[:cut], *[text[cut:][i : i + 3] for i in range(0, len(text), 3)])
             for line in splitter.feed(piece)]  # fmt: skip
    rest = splitter.take_rest()
    assert lines == [line + b"\n" for line in text.split(b"\n")[:-1]]
    assert rest == text.split(b"\n")[-1]
    assert splitter.take_rest() == b""


def test_a_rest_can_be_looked_at():
    splitter = LineSplitter()
    assert not splitter.has_rest()
    assert splitter.feed(b"a\nb") == [b"a\n"]
    assert (splitter.has_rest(), splitter.has_carriage_return()) == (True, False)
    splitter.feed(b"\r")
    assert splitter.has_carriage_return()
    assert splitter.take_rest() == b"b\r"
    assert not splitter.has_rest()


def test_a_line_of_any_length_takes_limited_memory():
    splitter, piece = LineSplitter(), b"x" * (1 << 20)
    found = [line for _ in range(40) for line in splitter.feed(piece)] + splitter.feed(b"\n")
    assert b"".join(found) == piece * 40 + b"\n"
    assert max(map(len, found)) <= 17 << 20


def test_times():
    assert parse_seconds("1970-01-01T00:00:01.5Z") == 1.5
    assert parse_seconds("1970-01-01T01:00:00.123456789+01:00") == pytest.approx(0.123456)
    assert parse_timestamp("1970-01-01T00:00:01.000000001Z") == (1, 1)
    assert parse_timestamp("1970-01-01T00:00:01Z") == (1, 0)


@pytest.mark.parametrize(
    "text", ["", "yesterday", "2026-01-01T00:00:00", "2026-01-01 00:00:00Z", "2026-13-01T00:00:00Z"]
)  # fmt: skip
def test_what_is_no_time(text):
    with pytest.raises(ValueError):
        parse_timestamp(text)


@pytest.mark.parametrize("text", ["", "no round", "[]", "1", "{}", '{"other": 1}', "{", b"\xff"])
def test_what_is_no_report(text):
    assert parse_report(text) is None


def test_what_an_agent_says_about_its_command_line():
    errors = b"uster: cut off\nmuster: no such script: x.py (in /app)\nfrom a library\nmuster"
    assert find_usage_line(errors) == (Reason(code=Code.AGENT_SAID, text="no such script: x.py (in /app)"),)
    assert find_usage_line(b"Traceback\n") == find_usage_line(b"") == ()


FAILURE = {
    **samples.FAILURE,
    "exit_code": 1,
    "signal": None,
    "reason": "",
    "exception": "E: t",
    "traceback": "T",
    "stderr_tail": ["a"],
    "age_s": 0.0,
    "error_file": None,
    "log_path": None,
    "oom": None,
    "stopped_by_us": False,
    "collateral": False,
}


def read(**report):
    found = parse_report(json.dumps({"run_id": "r", "attempt": 0, "max_restarts": 0, "format": FORMAT, **report}))
    assert found is not None
    return found


def test_the_root_cause_is_named_once():
    failures = [FAILURE | {"exception": "late", "collateral": True}, FAILURE | {"exception": "ValueError: x"}]
    report = read(reason="rank 1\n failed", failures=failures)
    assert find_root_cause(report).exception == "ValueError: x"
    assert explain_report(report).exception == "ValueError: x"
    assert describe_report(read(reason="rank 1: ValueError: x", failures=failures)) == "rank 1: ValueError: x"
    assert describe_report(read(reason="")) == ""


@pytest.mark.parametrize("failures", [["odd"], 1, None])
def test_failures_that_are_malformed_are_left_out(failures):
    assert find_root_cause(read(reason="why", failures=failures)) is None


def test_a_field_that_is_malformed_is_left_out():
    wrong = FAILURE | {"exit_code": "one", "stderr_tail": ["a", 7], "traceback": "x" * 70_000, "oom": {}, "new": 1}
    root = find_root_cause(read(reason="why", failures=[wrong, FAILURE]))
    assert (root.exit_code, root.stderr_tail, root.oom, root.exception) == (None, ("a",), None, "E: t")
    assert len(root.traceback) == 65536
    assert root.traceback.startswith("...x")


def test_a_message_with_room_for_the_reason_only_is_a_report():
    assert describe_report(parse_report('{"run_id": "r", "reason": "why", "format": 1}')) == "why"


def test_what_an_agent_writes_is_read_back(tmp_path):
    """The file, and the last words of a container."""
    failures = (
        samples.make_failure(exception="E: t", exit_code=1),
        samples.make_failure(collateral=True, signal="SIGTERM"),
    )
    report = Report(run_id="r", reason="rank 0 failed", attempt=1, max_restarts=3, failures=failures)
    write_report(report, str(tmp_path / "report.json"))
    assert parse_report((tmp_path / "report.json").read_bytes()) == report
    assert parse_report(build_termination_message(report)) == report


def write_records(*events):
    return b"".join(
        json.dumps({"what": what, "time_s": 1_800_000_000.0 + place, "detail": {"text": text}}).encode() + b"\n"
        for place, (what, text) in enumerate(events)
    )


HANG = (("hang_named", "the job hangs: no step for 60 s"), ("notice", "other"), ("hang_named", "rank 1 sleeps"))
TOLD = Reason(code=Code.HANGS, text="the job hangs: no step for 60 s; rank 1 sleeps", at_s=1_800_000_000.0)


def test_a_hang_that_goes_on():
    assert find_trouble(b'cut off"}\n' + write_records(*HANG, ("workers_idle", "")) + b'{"what"') == (TOLD,)
    assert find_trouble(b"") == ()


def test_a_job_that_forms_a_new_round():
    """The message of a job was empty while one of its agents joined again."""

    def broken(kind, reason):
        return json.dumps({"what": "round_broken", "time_s": 1.0, "detail": {"kind": kind, "reason": reason}}).encode()

    lost = broken("membership", "node 1 was\nlost")
    assert find_trouble(lost) == (Reason(code=Code.NEW_ROUND, text="node 1 was lost"),)
    assert find_trouble(lost + b"\n" + write_records(("round_formed", ""))) == ()
    assert find_trouble(lost + b"\n" + broken("final", "rank 1 exited")) == ()
    assert find_trouble(b'{"what": "round_broken", "time_s": 1.0, "detail": [1]}') == ()


PROGRESS = {
    "format": FORMAT,
    "state": "running",
    "step": 812,
    "total": 1000,
    "rate": 7.9,
    "values": {"loss": 0.25, "lr": "nan"},
}


def describe(**changes):
    found = parse_status(json.dumps({**PROGRESS, **changes}).encode() + b"\n")
    return "" if found is None else describe_status(found)


def test_how_far_a_job_is():
    assert describe() == "step 812 of 1000, 7.9 a second, loss 0.25, lr nan"
    assert describe(total=None, rate=0.0, values={}) == "step 812"
    assert describe(step=None, optimizer_steps=8, values={}) == "step 8 (by optimizer), 7.9 a second"
    at = datetime.now().astimezone() - timedelta(minutes=10)
    paused = {"state": "paused", "paused_since_s": at.timestamp(), "rate": 0.0, "step": 214, "values": {}}
    assert describe(**paused) == f"paused at step 214 since {at:%H:%M}"
    assert describe(**{**paused, "paused_since_s": 0.0}).partition(" since ")[2].startswith("19")
    assert find_trouble(write_records(*HANG)) == (TOLD,)


@pytest.mark.parametrize(
    "changes",
    [{"step": "x"}, {"step": -1}, {"step": None}, {"step": True}],
)
def test_a_status_that_tells_nothing(changes):
    assert describe(**changes) == ""


def test_a_status_that_lies_breaks_nothing():
    """A worker may write anything into its page; the file may be cut off."""
    assert describe(rate=float("nan"), total=-3, values=[1]) == "step 812"
    assert describe(state="paused", paused_since_s=1e300, values={}) == "paused at step 812 since ?"
    assert describe(values={"\x1b[2J": "x" * 99}).startswith("step 812 of 1000, 7.9 a second, \\x1b[2J xxx")
    assert parse_status(b'{"what": "x", "time_s": 1, "attempt": 0, "step": 5}') is None, "it is a record"
    assert parse_status(b"") is parse_status(b'{"format": 1') is parse_status(b"[1]") is None


def list_texts(*events):
    return [each.text for each in find_trouble(write_records(*events))]


def test_a_job_that_stands_still():
    """Each line takes the place of the last one, and that of a hang the place of both."""
    still = [("stood_still", f"the job stands still, for {for_s} s now") for for_s in (50, 100)]
    assert ["still, for 100 s" in each for each in list_texts(*still)] == [True]
    assert list_texts(*still, *HANG) == [TOLD.text]
    assert list_texts(*still, ("moved_again", "")) == []


@pytest.mark.parametrize(
    "end", ["hang_ended", "round_broken", "round_formed", "workers_stopped", "fenced", "job_ended"]
)
def test_a_hang_that_is_over(end):
    assert list_texts(*HANG, (end, "")) == []
    assert list_texts(("hang_named", "before"), (end, ""), *HANG) == [TOLD.text]


@pytest.mark.parametrize(
    "record",
    [
        b"[]",
        b"1",
        b'{"what": "hang_named"}',
        b'{"what": 1, "time_s": "x"}',
        *(
            b'{"what": "hang_named", "attempt": 1e999, "time_s": %s}' % time
            for time in (b"1e999", b"NaN", b"1e18", b"-1e15")
        ),
    ],
)
def test_damaged_records(record):
    """`torchx status` ended with a traceback."""
    assert find_trouble(record + b"\n") == ()
    assert parse_attempt(record + b"\n") == 0


def test_error_files(tmp_path):
    file = tmp_path / "error.json"
    assert read_error_file(file) is None
    file.write_text('{\n "a": 1}')
    assert read_error_file(file) == '{"a": 1}'
    file.write_text("{")
    assert read_error_file(file) is None


DEEP = "[" * 1_000_000
NESTED = json.loads("[" * 200 + "]" * 200)
WRONG = [NESTED, [], {}, "x", 7, -1, 1e999, None, "\ud800", "9" * 5000]
"""Values of a wrong type or size, for any field."""


@pytest.mark.parametrize("value", WRONG, ids=range(len(WRONG)))
def test_what_a_container_wrote_itself_ends_no_command(tmp_path, value):
    """`torchx list` reads the files of all apps: one of them must not hide the others."""
    record = {"time_s": 1.0, "what": "hang_named", "attempt": 1, "detail": {"text": "waits"}}
    for name in record:
        line = json.dumps({**record, name: value}).encode()
        assert isinstance(word_all(find_trouble(line)), str)
        assert 0 <= parse_attempt(line) <= 1_000_000
    for name in FAILURE:
        for reason in ("why", value):
            report = parse_report(
                json.dumps({"format": FORMAT, "reason": reason, "failures": [{**FAILURE, name: value}]})
            )
            if report is None:
                assert reason != "why" or value == NESTED, "it is no report, or nested too deeply"
                continue
            error = json.loads(_build_torch_error(report))
            assert isinstance(error["message"]["message"], str)
            int(error["message"]["extraInfo"]["timestamp"])  # TorchX does
    path = tmp_path / "error.json"
    path.write_text(json.dumps(value))
    found = read_error_file(path)
    assert found is None or isinstance(json.loads(found), dict)


def test_what_commands_quote_shows_escape_sequences():
    evil = "\x1b]52;c;eA==\x07\x1b[2J"
    shown = r"\x1b]52;c;eA==\x07\x1b[2J"
    record = {"time_s": 1.0, "what": "hang_named", "detail": {"text": evil}}
    assert find_trouble(json.dumps(record).encode()) == (Reason(code=Code.HANGS, text=shown, at_s=1.0),)
    assert describe_report(read(reason=f"rank 0: {evil}")) == f"rank 0: {shown}"
    assert find_usage_line(f"muster: no script {evil}\n".encode())[0].text == f"no script {shown}"
    assert one_line(evil) == shown


def test_files_that_are_too_deep_are_as_files_that_are_missing(tmp_path):
    path = tmp_path / "error.json"
    path.write_text(DEEP)
    assert read_error_file(path) is None
    assert parse_report(DEEP) is None
    assert parse_attempt(DEEP.encode()) == 0
    assert find_trouble(DEEP.encode()) == ()
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_answer(DEEP)


def test_pipes_in_the_place_of_files_hold_nothing_up(tmp_path):
    (tmp_path / "job").mkdir()
    for name in ("events.jsonl", "report.json", "error.json"):
        os.mkfifo(tmp_path / "job" / name)
    assert read_report(tmp_path) is None
    reader = RecordReader(partial(read_records, tmp_path))
    assert (reader.restarts, reader.job) == (0, JobFacts())
    assert read_error_file(tmp_path / "job/error.json") is None


def test_of_two_runs_that_are_written_at_the_same_time_the_one_that_has_begun_last_counts(tmp_path):
    """A script that starts a job of its own: the statuses of both took turns, with each write."""
    for name, started_s in (("outer", 1.0), ("inner", 9.0)):
        (tmp_path / name).mkdir()
        status = {"format": FORMAT, "run_id": name, "started_s": started_s}
        (tmp_path / name / "status.json").write_text(json.dumps(status))

    def read(inner_s, outer_s):
        for name, age_s in (("inner", inner_s), ("outer", outer_s)):
            os.utime(tmp_path / name / "status.json", (time.time() - age_s,) * 2)
        return RecordReader(partial(read_records, tmp_path)).job.status.run_id

    assert [read(0.0, 4.0), read(1.0, 0.0)] == ["inner", "inner"]
    assert read(60.0, 0.0) == "outer", "the inner one has ended"
    (tmp_path / "inner" / "status.json").write_text("no status")
    assert read(0.0, 1.0) == "outer"


def test_records_are_read_once_from_any_source():
    asked = []
    status = {"format": FORMAT, "step": 3, "total": 9}

    def read(names):
        asked.append(tuple(names))
        return b'{"attempt": 1}\n{"attempt": 2}\n', json.dumps(status).encode()

    readers = {"main": RecordReader(read), "eval": RecordReader(lambda names: [b""] * len(names))}
    assert (readers["main"].restarts, readers["eval"].restarts) == (2, 0)
    assert (readers["main"].job.attempt, readers["main"].job.status.step) == (2, 3)
    assert readers["eval"].job == JobFacts()
    assert asked == [("events.jsonl", "status.json")]
