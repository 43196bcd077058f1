"""`muster log` with schedulers of the tests: whose files can be read, and whose cannot."""

import json
from types import SimpleNamespace

import pytest
from doubles import samples
from torchx.specs import AppState, Role

from muster._shared.contract import FORMAT
from muster._shared.control import CommandExit
from muster._shared.job_view import JobStatus
from muster.cli import commands, operations
from muster.schedulers.adapter.properties import Properties
from muster.schedulers.adapter.scheduler import PluginScheduler
from muster.schedulers.errors import EngineError
from muster.schedulers.failure_report import parse_report
from muster.schedulers.lines import TimedLine
from muster.schedulers.wording.reasons import JobFacts

AGENT = ["-m", "muster.agent", "--nnodes", "2", "main.py"]
LINES = {
    ("t", 0): ["[t0|n0.r0]:zero\n", "[t1|n0.r1]:one\n"],
    ("t", 1): ["[t0|n1.r2]:two\n", "[t1|n1.r3]:three\n"],
    ("e", 0): ["plain\n"],
}


def write(*events):
    usual = {"format": FORMAT, "time_s": 1.0, "monotonic_s": 1.0, "node_index": 0, "round": 1, "attempt": 0}
    return b"".join(json.dumps({**usual, **each}).encode() + b"\n" for each in events)


PODS = Properties(node_word="pod", loses_files=True)


class Apps:
    """One app of two roles; its nodes' files, by (index, name)."""

    backend = "one"
    properties = Properties()
    find_run_dir = PluginScheduler.find_run_dir
    describe_unknown = PluginScheduler.describe_unknown

    def __init__(self, files=None, report=None, state=AppState.RUNNING, flags=(), world_size=0, lines=LINES):
        self.files, self.requests, self.lines = files or {}, [], lines
        self.jobs = {"t": JobFacts(status=JobStatus(world_size=world_size))}
        roles = [Role(name="t", image="", entrypoint="python3", args=[*AGENT[:-1], *flags, "main.py"], num_replicas=2)]
        roles.append(Role(name="e", image="", entrypoint="sh", args=["x"]))
        self.reports = {} if report is None else {"t": parse_report(json.dumps(report))}
        self.response = SimpleNamespace(roles=roles, roles_statuses=[], state=state, msg="why")

    def describe_app(self, app_id):
        return None if app_id == "gone" else self.response

    def read_facts(self, app_id):
        return SimpleNamespace(jobs=self.jobs, reports=self.reports)

    def read_log(self, app_id, request):
        self.requests.append(request)
        return [line for line in self.lines[request.role, request.index] if request.matches(line)]

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
        monkeypatch.setattr(operations, "create_scheduler", lambda name: scheduler)
        place = SimpleNamespace(scheduler="one")
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


NO_LINES = {key: [] for key in LINES}


@pytest.mark.parametrize(
    ("state", "line"),
    [
        (AppState.PENDING, "no node of a runs, it is PENDING: why"),
        (AppState.SUBMITTED, "no node of a runs, it is SUBMITTED: why"),
        (AppState.CANCELLED, "there is no line to print; a is CANCELLED: why"),
        (AppState.FAILED, "there is no line to print; a is FAILED: why"),
    ],
)
def test_a_job_without_a_line_says_why(log, state, line):
    assert log(Apps(lines=NO_LINES, state=state)) == (CommandExit.REFUSED, "", f"muster: {line}\n")
    assert log(Apps(state=state))[::2] == (0, "")


@pytest.mark.parametrize("state", [AppState.RUNNING, AppState.SUCCEEDED])
def test_a_job_that_is_quiet_has_nothing_to_explain(log, state):
    assert log(Apps(lines=NO_LINES, state=state)) == (0, "", "")


def test_lines_that_were_left_out_are_no_missing_ones(log):
    scheduler = Apps(lines=NO_LINES, state=AppState.FAILED)
    assert log(scheduler, "--grep", "x") == log(scheduler, "--stream", "stderr") == (0, "", "")


def test_a_job_that_waits_says_so_before_its_lines_are_followed(log):
    code, out, err = log(Apps(state=AppState.PENDING), "-f", "--role", "e")
    assert (code, out, err.endswith("PENDING: why\n")) == (0, "e/0 plain\n", True)
    assert log(Apps(lines=NO_LINES, state=AppState.PENDING), "--rank", "0") == (CommandExit.REFUSED, "", err)


def test_the_lines_of_a_spare_are_shown(log):
    """Slurm's spares are more replicas than the role was submitted with."""
    scheduler = Apps(lines={**LINES, ("t", 2): ["[t2|n2]:waits\n"]})
    replicas = [SimpleNamespace(id=index, role="t") for index in range(3)]
    scheduler.response.roles_statuses = [SimpleNamespace(role="t", replicas=replicas)]
    assert log(scheduler)[1].splitlines()[4:] == ["t/2 [t2|n2]:waits", "e/0 plain"]
    assert log(scheduler, "--role", "t", "--node", "2") == (0, "t/2 [t2|n2]:waits\n", "")


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
    assert "rank 3, attempt 0" in err


def test_a_rank_that_printed_nothing_is_said_to_have(log):
    empty = {
        name: b"" if isinstance(name[1], str) and name[1].endswith(".log") else text for name, text in FILES.items()
    }
    code, out, err = log(Apps(empty), "--failed")
    assert (code, out) == (0, "")
    assert "rank 3 printed" in err.splitlines()[1]
    failure = {"node": 0, "node_index": 1, "host": "h", "local_rank": 1, "round": 1, "pid": 1, "time_s": 1.0}
    failures = [{**failure, "global_rank": 3, "attempt": 0, "signal": 9}]
    report = {
        "format": FORMAT,
        "run_id": "a",
        "reason": "rank 3 on node 1 (h) was ended by SIGKILL",
        "failures": failures,
    }
    err = log(Apps({**empty, (0, "report.json"): json.dumps(report).encode()}), "--failed")[2]
    assert err.splitlines()[-1].startswith("muster: rank 3 printed ")


@pytest.mark.parametrize("is_file", [True, False])
def test_the_root_cause_of_the_report(log, is_file):
    failure = {"node": 0, "node_index": 0, "host": "h", "local_rank": 0, "round": 1, "pid": 1, "time_s": 1.0}
    failures = [{**failure, "global_rank": 0, "attempt": 0}]
    report = {"format": FORMAT, "run_id": "a", "reason": "why", "failures": failures}
    files = {**FILES, (0, "report.json"): json.dumps(report).encode()} if is_file else FILES
    code, out, err = log(Apps(files, None if is_file else report), "--failed")
    assert (code, out, "rank 0, attempt 0" in err) == (0, "zero\n", True)


def test_where_no_file_can_be_read_the_lines_come_from_the_nodes_output(log):
    code, out, err = log(Apps(), "--rank", "2")
    assert (code, out) == (0, "two\n")
    assert "files of rank 2" in err
    assert log(Apps(), "--rank", "3", "-f", "--grep", "t")[1] == "t/1 three\n"


def test_a_rank_whose_node_has_no_records_here_yet_is_found_in_its_output(log):
    first = write({"what": "round_formed", "detail": {"world_size": 4}}, {**START, "ranks": [0, 1]})
    code, out, _ = log(Apps({(0, "events.jsonl"): first}), "--rank", "2")
    assert (code, out) == (0, "two\n")
    code, out, err = log(Apps({(0, "events.jsonl"): first}), "--rank", "9")
    assert (code, out, "ranks 0-3" in err) == (CommandExit.REFUSED, "", True)


def test_a_read_that_failed_is_a_line_with_its_reason(log):
    failed = EngineError("the engine does not answer")
    code, out, err = log(Apps({(0, "events.jsonl"): failed, (1, "events.jsonl"): failed}), "--rank", "2")
    assert (code, out) == (0, "two\n")
    why, whence = err.splitlines()
    assert ("events.jsonl of node 0" in why, str(failed) in why, "files of rank 2" in whence) == (True, True, True)


@pytest.mark.parametrize(
    ("files", "words", "code", "line"),
    [
        (FILES, ["--rank", "9"], CommandExit.REFUSED, "there is no rank 9; there are ranks 0-3"),
        (FILES, ["--rank", "1", "--attempt", "7"], CommandExit.REFUSED, "there is no attempt 7; there are: 0, 1"),
        (
            {},
            ["--rank", "9"],
            CommandExit.REFUSED,
            "the files and lines of rank 9 are gone with the node, or out of reach",
        ),
        (
            {},
            ["--attempt", "0", "--rank", "1"],
            CommandExit.REFUSED,
            "the files and lines of rank 1 are gone with the node, or out of reach",
        ),
        ({}, ["--failed"], CommandExit.REFUSED, "no rank of a is known to have failed"),
        ({}, ["--role", "x"], CommandExit.USAGE, "a has no role 'x'; it has: t, e"),
        ({}, ["--role", "e", "--rank", "0"], CommandExit.USAGE, "a has no role 'e' that runs agents"),
        ({}, ["--node", "5"], CommandExit.USAGE, "a has nodes 0 to 1, not 5"),
        ({}, ["-f", "--attempt", "0"], CommandExit.USAGE, "-f with --attempt needs a --rank"),
        ({}, ["gone"], CommandExit.UNKNOWN, "one has no job 'gone': it may have been deleted, or "),
    ],
)
def test_what_cannot_be_read_is_one_line(log, files, words, code, line):
    got, out, err = log(Apps(files), *words)
    assert (got, out) == (code, "")
    assert err.splitlines()[-1].startswith(f"muster: {line}")


GONE = {("t", 0): ["JOB FAILED  a: why\n", "[muster] failed after 3 s\n"], ("t", 1): ["[muster] t/1 has no log\n"]}
"""Output of a Kubernetes job: the cluster has deleted the pod of rank 1, and rank 0 has written nothing."""
FAILURE = {**samples.FAILURE, "global_rank": 1, "exit_code": 1}
TEE = ["--nproc-per-node", "1", "--tee", "3"]


def build_report(**failure):
    return {"format": FORMAT, "run_id": "a", "reason": "why", "failures": [{**FAILURE, **failure}]}


TRACEBACK = "Traceback (most recent call last):\n  main.py\nValueError: boom"
KNOWN = {"traceback": TRACEBACK, "exception": "ValueError: boom"}
REPORTED = "the job's report has these lines of the rank"


@pytest.mark.parametrize(
    ("failure", "printed"),
    [
        ({**KNOWN, "stderr_tail": ["loads", *(f"[rank1]: {line}" for line in TRACEBACK.splitlines())]}, "whole"),
        ({**KNOWN, "stderr_tail": ["loads"]}, f"loads\n{TRACEBACK}\n"),
        (KNOWN, f"{TRACEBACK}\n"),
        ({"exception": "KeyError: 'lr'", "stderr_tail": ["loads"]}, "loads\nKeyError: 'lr'\n"),
        ({"signal": "SIGSEGV", "exit_code": None, "stderr_tail": ["core \x1b[2J"]}, None),
    ],
)
@pytest.mark.parametrize("words", [["--failed"], ["--rank", "1"], ["--rank", "1", "--attempt", "0"]])
def test_what_the_report_knows_of_a_rank_whose_output_is_gone(log, failure, printed, words):
    """It printed no line, and blamed --tee 3."""
    scheduler = Apps(report=build_report(**failure), state=AppState.FAILED, flags=TEE, lines=GONE)
    scheduler.properties = PODS
    code, out, err = log(scheduler, "--role", "t", *words)
    assert code == 0, err
    whole = "loads\n" + "".join(f"[rank1]: {line}\n" for line in TRACEBACK.splitlines())
    if printed is not None:
        assert out == (whole if printed == "whole" else printed)
    assert "\x1b" not in out, "a script must not write to the terminal's own state"
    why = "the files and lines of rank 1 are gone with the pod, or out of reach"
    assert err.splitlines()[-1] == f"muster: {why}; {REPORTED}"
    assert log(scheduler, "--role", "t", *words, "--grep", "nothing")[1] == ""


def test_the_report_of_a_file_and_agents_without_tee(log):
    report = {"format": FORMAT, "run_id": "a", "reason": "why", "failures": [{**FAILURE, **KNOWN}]}
    scheduler = Apps({(0, "report.json"): json.dumps(report).encode()}, state=AppState.FAILED, lines=GONE)
    code, out, err = log(scheduler, "--failed")
    assert (code, out) == (0, f"{TRACEBACK}\n")
    gone = "the files and lines of rank 1 are gone with the node, or out of reach"
    assert err.splitlines()[-1] == f"muster: {gone}; {REPORTED}"


@pytest.mark.parametrize("state", [AppState.FAILED, AppState.SUCCEEDED, AppState.RUNNING])
def test_why_nothing_is_known_of_a_rank(log, state):
    code, out, err = log(Apps(report=build_report(), state=state, flags=TEE, lines=GONE), "--rank", "1")
    gone = "the files and lines of rank 1 are gone with the node, or out of reach"
    assert (code, out, err.startswith(f"muster: {gone}; {REST}")) == (CommandExit.REFUSED, "", True)


def test_the_ranks_that_there_are_where_no_records_can_be_read(log):
    code, out, err = log(Apps(world_size=4, lines=GONE), "--role", "t", "--rank", "7")
    assert (code, out, "ranks 0-3" in err) == (CommandExit.REFUSED, "", True)


REST = "`muster log a` prints "


def test_where_no_rank_has_failed_the_cause_of_the_jobs_end_is_said(log):
    """A killed agent, a node that was lost."""
    code, _, err = log(Apps(state=AppState.FAILED), "--failed")
    assert (code, f"it is FAILED: why; {REST}" in err) == (CommandExit.REFUSED, True)


def test_what_is_known_of_a_hang_whose_pod_is_gone(log):
    """It said only that there is no line any more."""
    hang = {"exit_code": None, "hung": True, "reason": "did not enter all_reduce #22", "cause": "hang"}
    scheduler = Apps(report=build_report(**hang), state=AppState.FAILED, flags=TEE, lines=GONE)
    scheduler.properties = PODS
    code, out, err = log(scheduler, "--failed", "--role", "t")
    assert (code, out) == (CommandExit.REFUSED, "")
    assert "why; cause: hang; " in err
    assert "`--env MUSTER_LOG_DIR=FOLDER`" in err
    assert err.splitlines()[-1].startswith("muster: the files and lines of rank 1 are gone with the pod")


NOTHING = {key: [f"[muster] {key[0]}/{key[1]} has no log: its pod is gone\n"] for key in LINES}


@pytest.mark.parametrize("folder", ["", "/ckpt/logs"])
def test_if_all_pods_are_gone_the_line_says_what_is_known_and_how_to_keep_logs(log, folder):
    scheduler = Apps(state=AppState.FAILED, flags=TEE, lines=NOTHING)
    scheduler.properties = PODS
    scheduler.response.roles[0].env = {"MUSTER_LOG_DIR": folder} if folder else {}
    code, out, err = log(scheduler, "--failed")
    assert (code, out) == (CommandExit.REFUSED, "")
    keeps = f"{folder} (MUSTER_LOG_DIR)" if folder else "`--env MUSTER_LOG_DIR=FOLDER`"
    assert f"it is FAILED: why; {REST}" in err
    assert keeps in err
    err = log(scheduler, "--attempt", "0")[2]
    assert ("lines of attempt 0" in err, keeps in err) == (True, True)


@pytest.mark.parametrize("state", [AppState.PENDING, AppState.RUNNING])
def test_where_no_rank_has_failed_yet_the_state_is_said(log, state):
    code, out, err = log(Apps(state=state), "--failed")
    assert (code, out, err.endswith(f"it is {state.name}\n")) == (CommandExit.REFUSED, "", True)
