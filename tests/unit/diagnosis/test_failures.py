"""What a worker died of: error files of all kinds, what Python prints, and what is a start-up error."""

import errno
import json
import os
import re
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
from doubles.samples import make_round

from muster._shared.causes import name_class
from muster._shared.contract import describe_end, describe_exit_code
from muster._shared.records import replace
from muster._shared.reports import Failure, OomEvidence, Report
from muster.agent.diagnosis.failures import FailedWorker, FailureBuilder, read_crash, read_files
from muster.agent.diagnosis.kernel_log import KernelLine, KernelLog
from muster.agent.diagnosis.report_files import build_torch_error
from muster.agent.diagnosis.report_text import format_report
from muster.agent.diagnosis.root_cause import describe_failure
from muster.agent.diagnosis.tracebacks import (
    find_place,
    has_printed,
    read_error_file,
    read_stderr,
    remove_traceback,
    trim_traceback,
)
from muster.agent.logs import WorkerStreams
from muster.agent.round import Checkpoint, PartMemory
from muster.agent.runtime.loop import SystemClock
from muster.agent.workers.pool import LiveWorker, WorkerEnd
from muster.agent.workers.status_page import SlotStatus
from muster.elastic.failures import format_worker_failure

ROUND = make_round(number=3, attempt=1, group_rank=1, group_world_size=2, rank_offset=4, world_size=8, node_index=5)
TRACEBACK = 'Traceback (most recent call last):\n  File "m.py", line 1, in <module>\n    x\nNameError: name'


class FakeOomWatch:
    """In place of `OomWatch`."""

    def __init__(self, evidence: OomEvidence | None) -> None:
        self.evidence = evidence
        self.counts_kills = True

    def reset(self) -> None: ...

    def check(self) -> OomEvidence | None:
        return self.evidence


class FixedClock(SystemClock):
    def now_s(self) -> float:
        return 100.0

    def wall_s(self) -> float:
        return 5000.0


def make_streams(error_file: str | None = None, stack_file: str | None = None) -> WorkerStreams:
    return WorkerStreams(
        stdout_fd=None, stderr_fd=None, error_file=error_file, stack_file=stack_file, stdout_log="/o", stderr_log="/e"
    )


@pytest.fixture
def error_file(tmp_path: Path) -> Path:
    return tmp_path / "error.json"


def write_error(path: Path, message: str, **more: str) -> WorkerStreams:
    """The streams of a worker that has recorded this exception."""
    path.write_text(json.dumps({"message": {"message": message, **({"extraInfo": more} if more else {})}}))
    return make_streams(str(path))


class FakeKernelLog:
    """It has one line, of some time."""

    def __init__(self, at_s: float, line: KernelLine) -> None:
        self.at_s, self.line = at_s, line

    def read(self, since_s: float) -> tuple[KernelLine, ...]:
        return (self.line,) if self.at_s >= since_s else ()


def make_failure(
    *,
    code: int | None = 1,
    run_time_s: float = 1.0,
    signalled_s: float | None = None,
    oom: OomEvidence | None = None,
    counts_kills: bool = True,
    kernel: tuple[float, KernelLine] | None = None,
    **changes: Any,
) -> Failure:
    """Build the failure of local rank 2, whose process ended half a second ago; `code` None: there was none."""
    worker = LiveWorker(round_number=3, local_rank=2, pid=9, started_s=99.5 - run_time_s)
    end = None if code is None else WorkerEnd(worker=worker, code=code, ended_s=99.5, signalled_s=signalled_s)
    watch = FakeOomWatch(oom)
    watch.counts_kills = counts_kills
    log = KernelLog("/none") if kernel is None else FakeKernelLog(*kernel)
    builder = FailureBuilder(host="h", clock=FixedClock(), oom=watch, kernel=log)  # type: ignore[arg-type]
    failed = FailedWorker(**{"round": ROUND, "local_rank": 2, "end": end, **changes})
    return builder.build(failed, read_files(failed))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            {"message": {"message": "E: t", "extraInfo": {"py_callstack": "stack\n", "timestamp": "12"}}},
            ("E: t", "stack"),
        ),
        ({"message": {"message": "E: t", "extraInfo": {"timestamp": "12"}}}, ("E: t", None)),
        ({"message": {"message": "E: t"}}, ("E: t", None)),
        ({"message": {"message": "MemoryError: "}}, ("MemoryError", None)),
        ({"message": "plain text"}, ("plain text", None)),
        ({"message": 5}, None),
        ([], None),
        ("", None),
    ],
)
def test_error_files(error_file: Path, content: object, expected: object) -> None:
    error_file.write_text(json.dumps(content))
    assert read_error_file(str(error_file)) == expected


def test_files_that_are_not_error_files(tmp_path: Path) -> None:
    half = tmp_path / "half.json"
    half.write_text('{"message": {"mess')
    assert read_error_file(str(half)) is None
    assert read_error_file(str(tmp_path / "missing.json")) is None
    assert read_error_file(None) is None


def test_pythons_own_output_about_its_end() -> None:
    assert read_stderr(f"noise\n{TRACEBACK}\n") == ("NameError: name", TRACEBACK)
    chained = f"{TRACEBACK}\n\nDuring handling ...:\n\n{TRACEBACK.replace('NameError', 'KeyError')}\nmore noise\n"
    assert read_stderr(chained) == ("KeyError: name", TRACEBACK.replace("NameError", "KeyError"))
    fatal = 'Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n  File "m.py"\n'
    own = '  File "/x/muster-agent.zip/muster/agent/workers/program.py", line 5 in run\n'
    assert read_stderr("noise\n" + fatal + own) == ("Fatal Python error: Segmentation fault", fatal.rstrip())
    torch = "".join(f"[rank2]: {line}\n" for line in TRACEBACK.splitlines())
    assert read_stderr(f"noise\n{torch}[rank2]:[W] more\n") == ("NameError: name", TRACEBACK)
    assert read_stderr("nothing of the kind\n") is None
    assert read_stderr("Traceback (most recent call last):\n  cut") is None


GROUP = """\
  + Exception Group Traceback (most recent call last):
  |   File "train.py", line 9, in <module>
  |     asyncio.run(main())
  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)
  +-+---------------- 1 ----------------
    | Exception Group Traceback (most recent call last):
    |   File "train.py", line 7, in main
    |     async with asyncio.TaskGroup() as group:
    | ExceptionGroup: unhandled errors in a TaskGroup (2 sub-exceptions)
    +-+---------------- 1 ----------------
      | Traceback (most recent call last):
      |   File "train.py", line 3, in save
      |     raise OSError(28, "No space left on device")
      | OSError: [Errno 28] No space left on device
      |\x20
      | During handling of the above exception, another exception occurred:
      |\x20
      | Traceback (most recent call last):
      |   File "train.py", line 5, in save
      |     raise RuntimeError("cannot save")
      | RuntimeError: cannot save
      +---------------- 2 ----------------
      | ValueError: another
      +------------------------------------
"""


def test_the_first_exception_of_a_group_is_the_failures(error_file: Path) -> None:
    text = "ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)"
    streams = write_error(error_file, text, py_callstack=GROUP)
    for where in ({"streams": streams}, {"stderr_text": f"noise\n{GROUP}noise\n"}):
        failure = make_failure(**where)
        assert failure.exception == "RuntimeError: cannot save"
        assert find_place(failure.traceback or "") == ("train.py, line 5", "save")
    assert make_failure(streams=streams).cause == "disk"
    left = remove_traceback(GROUP.splitlines(), failure.exception, failure.traceback)
    assert "RuntimeError: cannot save" not in "\n".join(left)


def test_an_exception_of_cpp_that_nothing_has_caught_is_named() -> None:
    """The report said "Fatal Python error: Aborted", and no more."""
    fatal = 'Fatal Python error: Aborted\n\nThread 0x1 (most recent call first):\n  File "m.py", line 3 in step'
    thrown = (
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  [enforce fail] 12 vs 4.\n"
    )
    exception = "Fatal Python error: Aborted (gloo::EnforceNotMet: [enforce fail] 12 vs 4.)"
    assert read_stderr(f"noise\n{thrown}{fatal}\n") == (exception, fatal)
    assert has_printed([*thrown.splitlines(), *fatal.splitlines()], exception, fatal)
    other = fatal.replace("Aborted", "Segmentation fault")
    assert read_stderr(f"{thrown}{other}\n") == ("Fatal Python error: Segmentation fault", other)
    assert make_failure(code=-6, stderr_text=f"{thrown}{fatal}\n").cause == "crash"


def test_the_report_of_an_abort_whose_stderr_is_not_read_says_where_the_message_is() -> None:
    """It said "Fatal Python error: Aborted"; what had aborted it was further up on the console only."""
    aborted = make_failure(code=-6)
    assert "with --tee 2 this report quotes it" in aborted.advice
    assert make_failure(code=-6, stderr_tail=("terminate called",)).advice == ""
    assert "with --tee 2 this report quotes it" in make_failure(code=-11).advice  # @record takes faulthandler's output
    assert make_failure(code=-11, stderr_text="Fatal Python error: Segmentation fault\n\nCurrent thread").advice == ""


def test_the_log_to_read_is_the_one_with_text() -> None:
    assert make_failure(streams=make_streams()).log_path == "/o"  # pytest writes failures to stdout
    assert make_failure(streams=make_streams(), stderr_text="x").log_path == "/e"


@pytest.mark.parametrize("has_reader", [True, False])
def test_a_console_without_a_reader_is_no_fault_of_the_network(has_reader: bool) -> None:
    """`muster-agent train.py | head -1` used all restarts."""
    read, write = os.pipe()
    kept = os.dup(1)
    os.dup2(write, 1)
    if not has_reader:
        os.close(read)
    try:
        failure = make_failure(stderr_text=TRACEBACK.replace("NameError", "BrokenPipeError"), streams=make_streams())
    finally:
        os.dup2(kept, 1)
        for fd in (kept, write, *[read] * has_reader):
            os.close(fd)
    assert (failure.cause, failure.early) == (("network", False) if has_reader else ("usage", True))


def test_long_tracebacks_keep_the_frames_that_matter() -> None:
    frames = [f'  File "m.py", line {n}' for n in range(500)]
    raised = trim_traceback("\n".join(["Traceback (most recent call last):", *frames, "E: x"])).splitlines()
    assert raised[0].startswith("Traceback")
    assert raised[-2:] == [frames[-1], "E: x"]
    fatal = trim_traceback("\n".join(["Fatal Python error: Aborted", *frames])).splitlines()
    assert fatal[:2] == ["Fatal Python error: Aborted", frames[0]]
    assert len(raised) < 70
    assert len(fatal) < 70


def test_a_failure_has_its_rank_and_its_end() -> None:
    failure = make_failure(code=-signal.SIGSEGV, stderr_text=TRACEBACK)
    assert (failure.node, failure.node_index, failure.global_rank, failure.round, failure.attempt) == (1, 5, 6, 3, 1)
    assert (failure.exit_code, failure.signal, failure.pid) == (None, "SIGSEGV", 9)
    assert failure.exception == "NameError: name"
    assert not failure.collateral
    assert make_failure(signalled_s=99.0).collateral


def test_an_end_has_the_same_words_everywhere() -> None:
    """On the console, in the report, in the status and in the exceptions of the Python API."""
    assert (describe_end(3), describe_end(-9), describe_end(-45, plural=True)) == (
        "exited with code 3",
        "was ended by SIGKILL",
        "were ended by signal 45",
    )
    codes = {
        0: "exited with code 0",
        128: "exited with code 128",
        137: "was ended by SIGKILL",
        193: "exited with code 193",
    }
    assert {code: describe_exit_code(code) for code in codes} == codes
    for failure, words in (
        (make_failure(code=3), "exited with code 3"),
        (make_failure(code=-9), "was ended by SIGKILL"),
        (make_failure(code=None), "did not start"),
        (make_failure(code=None, reason="cannot run x"), "cannot run x"),
    ):
        report = Report(run_id="r", reason="", attempt=0, max_restarts=0, failures=(failure,))
        assert failure.describe_end() == words
        assert describe_failure(failure) == f"rank 6 on node 1 (h) {words}"
        assert words in format_report(report)
        assert format_worker_failure(failure) == f"rank 6 (local rank 2 on h): {words}"
    assert describe_exit_code(137) == "was ended by SIGKILL"


def early(**changes: Any) -> bool:
    return make_failure(**changes).early


@pytest.mark.parametrize(
    "changes",
    [
        {"stderr_text": TRACEBACK.replace("NameError: name", "ModuleNotFoundError: No module named 'x'")},
        {"stderr_text": "Traceback (most recent call last):\n  File\nImportError: cannot import"},
        {"code": 2, "stderr_tail": ("/usr/bin/python: can't open file '/x.py': [Errno 2] No such file",)},
        {"code": 1, "stderr_tail": ("/usr/bin/python: No module named nothing",)},
        {
            "code": 1,
            "stderr_tail": (
                "/opt/pypy3: Error while finding module specification for 'x' (ImportError: No module named 'x')",
            ),
        },
        {
            "code": 2,
            "stderr_tail": ("usage: train.py [-h] --lr LR", "train.py: error: the following are required: --lr"),
        },
        {"code": 127},
        {"code": 2},
        {"code": None, "reason": "cannot run x", "spawn_errno": errno.ENOENT},
        {"code": None, "reason": "cannot run x", "spawn_errno": errno.EACCES},
    ],
)
def test_start_up_errors(changes: dict[str, Any]) -> None:
    assert early(**changes)
    if "spawn_errno" not in changes:  # else there was no process
        assert not early(**changes, run_time_s=3600.0)
        assert not early(**changes, signalled_s=99.0)


@pytest.mark.parametrize("changes", [{"code": 1}, {"code": None, "hung_pid": 9}, {"code": -9}])
@pytest.mark.parametrize(
    "line",
    [
        "/env/torch/functional_tensor.py:284: UserWarning: Failed to initialize NumPy: No module named 'numpy'",
        "loader: No module named 'apex', falls back to its own kernels",
    ],
)
def test_a_warning_of_a_library_is_not_the_reason(line: str, changes: dict[str, Any]) -> None:
    """Only the interpreter's own lines are."""
    failure = make_failure(**changes, stderr_tail=(line, "  cpu = _conversion_method_template()"))
    assert failure.exception is None
    assert not failure.early


@pytest.mark.parametrize(
    "line", ["train.py: error: argument --lr: invalid float value: 'x'", "Error: No such option: --lr"]
)
def test_wrong_arguments_of_the_program_are_the_reason(line: str) -> None:
    """argparse and click exit with 2 and raise nothing that could be recorded."""
    usage = "usage: train.py [-h] --lr LR"
    assert make_failure(code=2, stderr_tail=(usage, line)).exception == line
    assert make_failure(code=3, stderr_tail=(usage, line)).exception is None
    assert make_failure(code=2, stderr_tail=(line, "bye")).exception is None


@pytest.mark.parametrize(
    "changes",
    [
        {"stderr_text": TRACEBACK.replace("NameError: name", "RuntimeError: connection refused")},
        {"code": 1},
        {"code": 2, "stderr_tail": ("the device is busy",)},
        {"code": 1, "stderr_tail": ("train.py: error: no connection",)},
        {"code": -11},
        {"code": None, "reason": "no CPU time used"},
        {"code": None, "reason": "cannot fork a worker", "spawn_errno": errno.EAGAIN},
        {"code": None, "reason": "hung: No such file or directory"},
    ],
)
def test_other_ends_may_be_retried(changes: dict[str, Any]) -> None:
    assert not early(**changes)


def test_a_failure_combines_all_evidence() -> None:
    slot = SlotStatus(7, 3, 9, "", None, None, 5, (None,) * 3, (True,) * 3, (0,) * 3)
    failure = make_failure(
        stderr_text=TRACEBACK.replace("NameError: name", "RuntimeError: Connection reset by peer"),
        stderr_tail=("last line",),
        streams=make_streams(),
        slot=slot,
        values={"loss": 0.25},
        ended_ranks=(5,),
    )
    assert (failure.age_s, failure.time_s, failure.pid) == (0.5, 4999.5, 9)
    assert failure.exception == "RuntimeError: Connection reset by peer"
    assert failure.stderr_tail == ("last line",)
    assert failure.log_path == "/e"
    assert (failure.step, failure.total_steps, failure.optimizer_steps) == (3, 9, None)
    assert failure.values == (("loss", "0.25"),)
    assert failure.ended_ranks == (5,)
    counted = make_failure(slot=slot._replace(step=None))
    assert (counted.step, counted.optimizer_steps) == (None, 5)
    saved = replace(ROUND, checkpoint=Checkpoint(number=1, step=29, path="/c"))
    assert make_failure(slot=slot, round=saved).saved_step is None, "its own steps are known"
    assert make_failure(slot=slot._replace(step=None), round=saved).saved_step is None
    unstepped = slot._replace(step=None, optimizer_steps=None)
    assert make_failure(slot=unstepped, round=saved).saved_step == 29
    newer = replace(saved, memories=(PartMemory(feature="x", content="{}", step=31),))
    assert make_failure(slot=unstepped, round=newer).saved_step == 31
    unstarted = make_failure(code=None, reason="cannot start x")
    assert (unstarted.exit_code, unstarted.signal, unstarted.pid, unstarted.reason) == (None, None, 0, "cannot start x")
    hung = make_failure(code=None, hung_pid=8, reason="used no CPU time")
    assert (hung.hung, hung.pid, hung.exit_code, hung.signal, hung.age_s) == (True, 8, None, None, 0.0)


def test_memory_evidence_is_kept_only_where_it_explains_the_end() -> None:
    sure, guess = OomEvidence(certain=True), OomEvidence(certain=False)
    assert make_failure(oom=sure, code=-9).oom == sure
    assert make_failure(oom=sure).oom == sure  # a child of the worker was killed, and the worker failed
    assert make_failure(oom=guess, code=-9).oom == guess
    assert make_failure(oom=guess).oom is None
    assert make_failure(oom=sure, code=-9, signalled_s=99.0).oom is None
    assert make_failure(oom=sure, code=None).oom is None


def test_a_sigkill_that_the_kernel_does_not_explain_says_what_was_ruled_out() -> None:
    """The report said "cause: unknown", and no more."""
    killed = make_failure(code=-9)
    assert (killed.cause, killed.evidence) == ("unknown", "a process sent SIGKILL: this cgroup counts no OOM kill")
    assert make_failure(code=-9, counts_kills=False).evidence == ""
    lately = KernelLine(cause="host-oom", text="kernel: ...", pid=77)
    for counts_kills in (True, False):
        found = make_failure(code=-9, counts_kills=counts_kills, kernel=(98.0, lately), run_time_s=0.1)
        assert "killed process 77 for want of memory (OOM)" in found.evidence
    assert "77" not in make_failure(code=-9, kernel=(30.0, lately)).evidence
    assert make_failure(code=-9, oom=OomEvidence(certain=False)).evidence == ""
    assert killed.advice == (
        "find what has sent SIGKILL: another person or program (`kill -9`), a limit of the scheduler or of the "
        "container, or the kernel for want of memory (`dmesg -T` on that host), for a limit above this cgroup"
    ), "what was ruled out came first"
    uncounted = make_failure(code=-9, counts_kills=False).advice
    assert uncounted.startswith(
        "find what has sent SIGKILL: the kernel for want of memory (`dmesg -T` on that host), a"
    )
    assert "  next      : find what has sent SIGKILL: " in format_report(
        Report(run_id="r", reason="why", failures=(killed,)), columns=500
    )
    assert make_failure(code=-9, oom=OomEvidence(certain=True)).advice == ""
    assert make_failure(code=-9, signalled_s=99.0).advice == ""


def test_an_exit_code_without_an_exception_is_named_with_what_to_search_for() -> None:
    """The report said "cause: unknown", and had no next step."""
    failure = make_failure(code=7)
    assert (failure.cause, failure.evidence) == ("unknown", "it ended with exit code 7 and raised no Python exception")
    assert failure.advice == "look at its last lines, and search the script and its libraries for exit(7)"
    assert make_failure(code=7, stderr_text=TRACEBACK).advice == ""
    assert make_failure(code=7, signalled_s=99.0).advice == ""


def test_memory_that_a_limit_of_the_process_may_have_denied_names_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `ulimit -v`, the report said "out of memory of the host", which had enough."""
    text = f"{TRACEBACK.rpartition(chr(10))[0]}\nMemoryError: cannot allocate"
    assert "ulimit" not in make_failure(stderr_text=text).evidence
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (2 << 30, -1))
    assert make_failure(stderr_text=text).evidence == "limit of the process: ulimit -v 2.0 GiB"
    assert "ulimit" not in make_failure(stderr_text=text, oom=OomEvidence(certain=True)).evidence
    shared = text.replace("MemoryError: cannot allocate", "RuntimeError: unable to write to file </torch_1>")
    assert "ulimit" not in make_failure(stderr_text=shared).evidence
    assert name_class(make_failure(stderr_text=text).cause) == "out of main memory", "of no host: a limit may deny it"


FREE = r"\(\d+(\.\d GiB| MiB) free\)"


@pytest.mark.parametrize(
    ("message", "what"),
    [
        ("OSError: [Errno 28] No space left on device: '{tmp}/new/check.pt'", "{tmp}/new/check.pt"),
        ("OSError: [Errno 122] Disk quota exceeded: 'check.pt'", "check.pt"),
    ],
)
def test_the_report_of_a_full_disk_names_the_path_and_the_free_space(tmp_path, error_file, message, what) -> None:
    """It named neither, and no next step."""
    failure = make_failure(streams=write_error(error_file, message.replace("{tmp}", str(tmp_path))))
    assert failure.cause == "disk"
    start, _, rest = failure.advice.partition(": remove files, or write elsewhere; `df -h` and `dmesg -T` ")
    assert re.fullmatch(f"{re.escape(what.replace('{tmp}', str(tmp_path)))} {FREE}", start), failure.advice
    assert rest == "on that host show more"


def test_the_report_of_a_full_disk_without_a_path_names_the_line_that_wrote(error_file: Path) -> None:
    """It named the log folder, which had space."""
    text = "RuntimeError: PytorchStreamWriter failed writing"
    stack = f'Traceback:\n  File "/w/train.py", line 31, in save\n    torch.save(x, f)\n{text}\n'
    for more, where in (({"py_callstack": stack}, " (/w/train.py, line 31)"), ({}, "")):
        assert make_failure(streams=write_error(error_file, text, **more)).advice == (
            f"the message names no path: remove files where the program writes{where}, or write elsewhere; "
            "`df -h` and `dmesg -T` on that host show more"
        )


def test_the_free_space_of_a_disk_that_may_hang_or_has_an_io_error_is_not_asked_for(error_file: Path) -> None:
    text = f"{TRACEBACK.rpartition(chr(10))[0]}\nOSError: [Errno 28] No space left on device: '/x/y'"
    assert make_failure(stderr_text=text).advice.startswith("/x/y: remove files, or write elsewhere; ")
    streams = write_error(error_file, f"OSError: [Errno 5] Input/output error: '{error_file.parent}/x'")
    assert make_failure(streams=streams).advice.startswith(f"{error_file.parent}/x: remove files, or write elsewhere; ")


def test_a_failure_is_dated_by_its_exception_not_by_the_end_of_its_process(error_file: Path) -> None:
    """It takes up to a second to end; a victim may end first, and muster's signal may end it in between."""
    streams = write_error(error_file, "ValueError: bad")
    os.utime(error_file, (4998.0, 4998.0))  # 2 s ago, as 98.0 on the monotonic clock
    own = make_failure(streams=streams, run_time_s=9.5)
    assert (own.age_s, own.time_s, own.stopped_by_us) == (2.0, 4998.0, False)
    raised_first = make_failure(code=-15, signalled_s=98.5, streams=streams, run_time_s=9.5)
    assert (raised_first.age_s, raised_first.collateral) == (2.0, False)
    raised_later = make_failure(code=-15, signalled_s=97.0, streams=streams, run_time_s=9.5)
    assert (raised_later.age_s, raised_later.collateral) == (0.5, True)
    os.utime(error_file, (1.0, 1.0))  # the clock was set: not before the worker's start
    assert make_failure(streams=streams, run_time_s=9.5).age_s == 10.0


def test_an_exit_code_is_that_of_the_call_of_sys_exit_though_a_signal_has_ended_the_worker(tmp_path: Path) -> None:
    note = tmp_path / "error.json.exit"
    note.write_text("77")
    os.utime(note, (4998.0, 4998.0))
    streams = make_streams(str(tmp_path / "error.json"))
    first = make_failure(code=-15, signalled_s=98.5, streams=streams, run_time_s=9.5)
    assert (first.age_s, first.exit_code, first.signal, first.stopped_by_us) == (2.0, 77, None, False)
    later = make_failure(code=-15, signalled_s=97.0, streams=streams, run_time_s=9.5)
    assert (later.exit_code, later.signal, later.collateral) == (None, "SIGTERM", True)
    of_its_own = make_failure(code=77, streams=streams, run_time_s=9.5)
    assert (of_its_own.age_s, of_its_own.exit_code) == (2.0, 77)
    crashed = make_failure(code=-11, streams=streams, run_time_s=9.5)
    assert (crashed.exit_code, crashed.signal) == (None, "SIGSEGV")
    note.write_text("torn")
    assert make_failure(code=-15, signalled_s=98.5, streams=streams, run_time_s=9.5).signal == "SIGTERM"


def test_the_crash_of_a_worker_whose_stderr_is_not_captured(tmp_path: Path) -> None:
    stack_file = tmp_path / "stacks.txt"
    crash = "Fatal Python error: Segmentation fault"
    stack_file.write_text(f"--- stacks of process 1\n{crash}\n--- stacks of process 2\n")
    streams = make_streams(stack_file=str(stack_file))
    assert read_stderr(read_crash(streams)) is None  # that of an earlier process
    with stack_file.open("a") as file:
        file.write(f"{crash}\n\nCurrent thread\n")
    assert read_stderr(read_crash(streams)) == (crash, f"{crash}\n\nCurrent thread")
    assert read_crash(None) == ""


MALFORMED = [
    "[" * 1_000_000,
    '{"message": ' * 200 + "1" + "}" * 200,
    json.dumps({"message": {"message": json.loads("[" * 60 + "]" * 60)}}),
    "5",
    "9" * 5000,
    "null",
    '"\\ud800"',
    json.dumps({"message": {"message": "E: t", "extraInfo": {"py_callstack": 5}}}),
    json.dumps({"message": {"message": "E: t", "extraInfo": {"py_callstack": ["a"]}}}),
    json.dumps({"message": {"message": {"a": 1}, "extraInfo": 7}}),
    json.dumps({"message": {"message": "\ud800", "extraInfo": {"py_callstack": "\ud800", "timestamp": []}}}),
]
"""What a worker may write itself."""


@pytest.mark.parametrize("text", MALFORMED, ids=range(len(MALFORMED)))
def test_an_error_file_of_any_content_gives_a_failure_that_can_be_written(error_file: Path, text: str) -> None:
    error_file.write_text(text)
    failure = make_failure(streams=make_streams(str(error_file)))
    assert failure.exception is None or isinstance(failure.exception, str)
    json.dumps(build_torch_error(failure))


@pytest.mark.parametrize("name", ["error.json", "stacks.txt"])
def test_a_pipe_in_a_files_place_holds_nothing_up(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    assert read_error_file(str(tmp_path / name)) is None
    assert read_crash(make_streams(stack_file=str(tmp_path / name))) == ""
