"""`muster log` with schedulers of the tests: whose files can be read, and whose cannot."""

import json
from types import SimpleNamespace

import pytest
from torchx.specs import AppState, Role
from torchx.specs.api import NONE

from muster._shared.control import ExitCode
from muster.cli import commands, operations
from muster.schedulers.adapter.scheduler import PluginScheduler
from muster.schedulers.errors import EngineError
from muster.schedulers.lines import TimedLine

pytestmark = pytest.mark.torchx

AGENT = ["-m", "muster.agent", "--nnodes", "2", "main.py"]
LINES = {
    ("t", 0): ["[t0|n0.r0]:zero\n", "[t1|n0.r1]:one\n"],
    ("t", 1): ["[t0|n1.r2]:two\n", "[t1|n1.r3]:three\n"],
    ("e", 0): ["plain\n"],
}


def write(*events):
    return b"".join(json.dumps({"time_s": 1.0, "node_index": 0, **each}).encode() + b"\n" for each in events)


class Apps:
    """One app of two roles; its nodes' files, by (index, name)."""

    backend = "one"
    find_run_dir = PluginScheduler.find_run_dir

    def __init__(self, files=None, error=NONE, state=AppState.RUNNING):
        self.files, self.requests = files or {}, []
        roles = [Role(name="t", image="", entrypoint="python3", args=AGENT, num_replicas=2)]
        roles.append(Role(name="e", image="", entrypoint="sh", args=["x"]))
        self.response = SimpleNamespace(roles=roles, state=state, structured_error_msg=error, msg="why")

    def describe_app(self, app_id):
        return None if app_id == "gone" else self.response

    def read_log(self, app_id, request):
        self.requests.append(request)
        return [line for line in LINES[request.role, request.index] if request.matches(line)]

    def read_run_file(self, app_id, role, index, name, limit_bytes):
        assert role == "t"
        if isinstance(found := self.files.get((index, name)), Exception):
            raise found
        return found

    def close(self):
        pass


START = {"what": "workers_started", "attempt": 0}
FILES = {
    (0, "events.jsonl"): write({**START, "ranks": [0, 1]}),
    (1, "events.jsonl"): write(
        {**START, "ranks": [2, 3], "node_index": 1},
        {"what": "worker_failed", "attempt": 0, "ranks": [3]},
        {**START, "ranks": [2, 3], "node_index": 1, "attempt": 1},
    ),
    (0, "node_0/attempt_0/0/stdout.log"): b"zero\n",
    (1, "node_1/attempt_0/1/stdout.log"): b"first try\n",
    (1, "node_1/attempt_0/1/stderr.log"): b"Traceback\nValueError: boom",
    (1, "node_1/attempt_1/1/stdout.log"): b"second try\n",
}


@pytest.fixture
def log(monkeypatch, capsys):
    def log(scheduler, *words):
        monkeypatch.setattr(operations, "create_scheduler", lambda name, session: scheduler)
        place = SimpleNamespace(scheduler="one", session="muster")
        monkeypatch.setattr(operations, "find_app", lambda word, env: SimpleNamespace(**vars(place), app_id=word))
        code = commands.main(["log", "a", *words] if words[:1] != ("gone",) else ["log", *words])
        out, err = capsys.readouterr()
        return code, out, err

    return log


def test_lines_of_all_replicas_come_in_the_order_of_their_times(log, monkeypatch):
    """A line without a time stays behind the one before it, and logs that have one time come in their order."""
    times = {
        ("t", 0): [(3.0, "zero\n"), (5.0, "zero fails\n"), (None, "[muster] lost\n")],
        ("t", 1): [(4.0, "one\n"), (4.5, "one fails first\n"), (5.0, "one ends\n"), (9.0, "late")],
        ("e", 0): [(None, "plain\n"), (3.5, "Warning: mind\n"), (3.5, "it\n")],
    }
    for key, lines in times.items():
        monkeypatch.setitem(LINES, key, [text if at is None else TimedLine(text, at) for at, text in lines])
    code, out, err = log(Apps())
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "e/0 plain",
        "t/0 zero",
        "e/0 Warning: mind",
        "e/0 it",
        "t/1 one",
        "t/1 one fails first",
        "t/0 zero fails",
        "t/0 [muster] lost",
        "t/1 one ends",
        "t/1 late",
    ]


def test_a_log_that_cannot_be_read_holds_up_no_other(log, monkeypatch, capsys):
    monkeypatch.setitem(LINES, ("t", 1), [TimedLine("one\n", 1.0), TimedLine("two\n", 2.0)])
    monkeypatch.delitem(LINES, ("t", 0))
    with pytest.raises(KeyError):
        log(Apps())
    assert capsys.readouterr().out == "e/0 plain\nt/1 one\nt/1 two\n"


def test_all_replicas_without_times_come_one_after_the_other(log):
    code, out, err = log(Apps())
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "t/0 [t0|n0.r0]:zero",
        "t/0 [t1|n0.r1]:one",
        "t/1 [t0|n1.r2]:two",
        "t/1 [t1|n1.r3]:three",
        "e/0 plain",
    ]


def test_a_role_a_node_and_a_pattern(log):
    scheduler = Apps()
    assert log(scheduler, "--role", "e", "--grep", "pl.in", "--stream", "stderr") == (0, "e/0 plain\n", "")
    assert (scheduler.requests[0].stream.value, scheduler.requests[0].follow) == ("stderr", False)
    assert log(Apps(), "--node", "1", "--role", "t", "--grep", "thr")[1] == "t/1 [t1|n1.r3]:three\n"


def test_a_rank_of_its_newest_attempt_or_of_another_one(log):
    assert log(Apps(FILES), "--role", "t", "--rank", "3") == (0, "second try\n", "")
    first = "first try\nTraceback\nValueError: boom\n"
    assert log(Apps(FILES), "--rank", "3", "--attempt", "0") == (0, first, "")
    assert log(Apps(FILES), "--rank", "3", "--attempt", "0", "--stream", "stderr", "--grep", "boom") == (
        0,
        "ValueError: boom\n",
        "",
    )


def test_all_ranks_of_an_attempt(log):
    assert log(Apps(FILES), "--attempt", "0")[1].splitlines() == [
        "[r0]:zero",
        "[r3]:first try",
        "[r3]:Traceback",
        "[r3]:ValueError: boom",
    ]


def test_the_root_cause_of_a_job_that_went_on(log):
    code, out, err = log(Apps(FILES), "--failed")
    assert (code, out) == (0, "first try\nTraceback\nValueError: boom\n")
    assert err == "muster: the root cause: rank 3, attempt 0\n"


@pytest.mark.parametrize("is_file", [True, False])
def test_the_root_cause_of_the_report(log, is_file):
    failure = {"node": 0, "node_index": 0, "host": "h", "local_rank": 0, "round": 1, "pid": 1, "time_s": 1.0}
    failures = [{**failure, "global_rank": 0, "attempt": 0}]
    report = {"run_id": "a", "reason": "why", "failures": failures}
    text = json.dumps({"message": {"message": "m"}, "report": report})
    files = {**FILES, (0, "report.json"): json.dumps(report).encode()} if is_file else FILES
    code, out, err = log(Apps(files, error=NONE if is_file else text), "--failed")
    assert (code, out, err) == (0, "zero\n", "muster: the root cause: rank 0, attempt 0\n")


def test_where_no_file_can_be_read_the_lines_come_from_the_nodes_output(log):
    code, out, err = log(Apps(), "--rank", "2")
    assert (code, out) == (0, "two\n")
    assert (
        err == "muster: the files of rank 2 are gone or out of reach; these are its lines in the output of its node\n"
    )
    assert log(Apps(), "--rank", "3", "-f", "--grep", "t")[1] == "t/1 three\n"


def test_a_rank_whose_node_has_no_records_here_yet_is_found_in_its_output(log):
    first = write({"what": "round_formed", "detail": {"world_size": 4}}, {**START, "ranks": [0, 1]})
    code, out, _ = log(Apps({(0, "events.jsonl"): first}), "--rank", "2")
    assert (code, out) == (0, "two\n")
    code, out, err = log(Apps({(0, "events.jsonl"): first}), "--rank", "9")
    assert (code, out, err) == (ExitCode.REFUSED, "", "muster: there is no rank 9; there are ranks 0-3\n")


def test_a_read_that_failed_is_a_line_with_its_reason(log):
    failed = EngineError("the engine does not answer")
    code, out, err = log(Apps({(0, "events.jsonl"): failed, (1, "events.jsonl"): failed}), "--rank", "2")
    assert (code, out) == (0, "two\n")
    assert err.splitlines() == [
        "muster: events.jsonl of node 0 cannot be read: the engine does not answer",
        "muster: the files of rank 2 are gone or out of reach; these are its lines in the output of its node",
    ]


@pytest.mark.parametrize(
    ("files", "words", "code", "line"),
    [
        (FILES, ["--rank", "9"], ExitCode.REFUSED, "there is no rank 9; there are ranks 0-3"),
        (FILES, ["--rank", "1", "--attempt", "7"], ExitCode.REFUSED, "there is no attempt 7; there are: 0, 1"),
        (
            {},
            ["--rank", "9"],
            ExitCode.REFUSED,
            "no line is marked as rank 9's, and it has no file: does its agent have --tee 3, as with the components?",
        ),
        (
            {},
            ["--attempt", "0", "--rank", "1"],
            ExitCode.REFUSED,
            "the files of attempt 0 cannot be read: they are not on this machine, and no node has them",
        ),
        ({}, ["--failed"], ExitCode.REFUSED, "no rank of a is known to have failed"),
        ({}, ["--role", "x"], ExitCode.USAGE, "a has no role 'x'; it has: t, e"),
        ({}, ["--role", "e", "--rank", "0"], ExitCode.USAGE, "e runs no agents of muster, which number ranks"),
        ({}, ["--node", "5"], ExitCode.USAGE, "a has nodes 0 to 1, not 5"),
        ({}, ["-f", "--attempt", "0"], ExitCode.USAGE, "-f with --attempt needs a --rank"),
        ({}, ["gone"], ExitCode.UNKNOWN, "one knows no app 'gone'"),
    ],
)
def test_what_cannot_be_read_is_one_line(log, files, words, code, line):
    got, out, err = log(Apps(files), *words)
    assert (got, out) == (code, "")
    assert err.splitlines()[-1] == f"muster: {line}"


def test_where_no_rank_has_failed_the_cause_of_the_jobs_end_is_said(log):
    """A killed agent, a node that was lost."""
    code, _, err = log(Apps(state=AppState.FAILED), "--failed")
    assert (code, err) == (
        ExitCode.REFUSED,
        "muster: no rank of a is known to have failed; it is FAILED: why\n",
    )


@pytest.mark.parametrize("words", [["--grep", "("], ["--rank", "-1"], ["--stream", "all"]])
def test_bad_values_are_refused(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        commands.main(["log", "a", *words])
    assert words[1] in capsys.readouterr().err
