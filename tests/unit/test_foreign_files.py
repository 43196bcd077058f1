"""Files that anything may have written are read within limits, and what they hold is shown without its orders."""

import ast
import inspect
import json
import logging
import os
import re
import resource
import sys
import tracemalloc
from pathlib import Path

import pytest
from torchx.specs import AppDef, AppState, Role
from torchx.specs.api import ReplicaStatus

import muster
from muster._shared.contract import print_line
from muster._shared.control import CommandExit, ControlError
from muster._shared.folders import remove_folder
from muster._shared.foreign_files import parse_json, read_regular, read_whole, walk_files
from muster.cli.commands import main
from muster.schedulers.adapter.status import build_status
from muster.schedulers.errors import EngineError, SchedulerError
from muster.schedulers.wording.facts import AppFacts


def test_a_small_file_takes_little_memory_whatever_the_limit_is(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(b"x" * 5000)
    tracemalloc.start()
    content = read_regular(str(path), 256 << 20)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert content == b"x" * 5000
    assert peak_bytes < 8 << 20


def test_a_large_one_is_read_to_its_limit_and_from_its_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    content = os.urandom(3 << 20)
    path.write_bytes(content)
    assert read_regular(str(path), 64 << 20) == content
    assert read_regular(str(path), (2 << 20) + 7) == content[: (2 << 20) + 7]
    assert read_regular(str(path), 64 << 20, -10) == content[-10:]
    assert read_regular(str(path), 0) == b""


def test_a_named_pipe_is_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="a regular file"):
        read_regular(str(tmp_path / "pipe"), 10)
    with pytest.raises(OSError, match="written and closed"):
        read_whole(tmp_path / "pipe", pipe_limit_s=0.01)


def test_a_file_that_is_read_as_a_whole_has_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"1234")
    assert read_whole(path, 4) == b"1234"
    with pytest.raises(OSError, match="larger than 3 bytes"):
        read_whole(path, 3)
    for device in ("/dev/zero", tmp_path):
        with pytest.raises(OSError):  # the system's words
            read_whole(device)


def test_a_number_that_no_float_can_hold_is_refused() -> None:
    assert parse_json("[1e300, 123456789012345678901234567890]") == [1e300, 123456789012345678901234567890]
    with pytest.raises(ValueError, match="too large"):
        parse_json('{"resizes": 1' + "0" * 400 + "}")


READ_OTHERWISE = {
    "the reader itself": "_shared/foreign_files",
    "files of the system": "agent/features/export/endpoint",
    "files of the kernel, descriptors and pipes of our own": "_shared/debugger _shared/preflight "
    "_shared/processes _shared/snapshot_file agent/control/address agent/placement/affinity "
    "agent/features/preflight/node_facts agent/features/preflight/measure agent/workers/memory "
    "cli/rehearse/journal cli/rehearse/watch "
    "elastic/fork/worker elastic/jobs/results schedulers/node_program/pipe schedulers/processes/driver "
    "schedulers/supervision/client "
    "schedulers/supervision/machine schedulers/supervision/app_folder",
    "sources and pages of a package": "_shared/programs agent/hold/facts "
    "cli/history/page cli/rehearse/page schedulers/bundle schedulers/kubernetes/schema "
    "schedulers/adapter/__init__ schedulers/node_program/session schedulers/slurm/request",
    "the program that is run": "agent/workers/program agent/workers/warm/fork_safety agent/workers/warm/late_changes "
    "agent/workers/warm/preload",
    "tokens that a cluster mounts": "agent/placement/segments agent/features/job_object/sink "
    "agent/features/train_job/sink schedulers/kubernetes/api/connection",
    "it checks more of the file": "agent/checkpoint_file agent/rendezvous/shared_token agent/diagnosis/stacks",
    "read piece by piece, or written as well": "cli/rehearse/saves schedulers/node_program/link "
    "schedulers/workspace/packing",
    "a program that runs elsewhere": "schedulers/node_program/agents schedulers/node_program/run_files",
    "what a submission has just written": "schedulers/docker/running_apps/creation",
    "no file of this machine": "schedulers/kubernetes/running_apps/logs",
    "for tests": "testing/shell",
}
MODE = re.compile("[rwxabt+]{1,3}")


def list_calls(path: Path, *words: str) -> list[ast.Call]:
    """Return the calls of a module, if it has one of the words."""
    text = path.read_text()
    nodes = ast.walk(ast.parse(text)) if any(word in text for word in words) else ()
    return [node for node in nodes if isinstance(node, ast.Call)]


def read_directly(path: Path) -> bool:
    """Return whether a module of the product reads a file that it has opened itself."""
    for call in list_calls(path, "open(", "read_text(", "read_bytes("):
        name, given = ast.unparse(call.func), [node.value for node in call.args[:2] if isinstance(node, ast.Constant)]
        modes = [text for text in given if isinstance(text, str) and MODE.fullmatch(text)]
        is_method = name.endswith(".open") and bool(modes) and name not in ("os.open", "tarfile.open")
        is_read = (name == "open" or is_method) and not set("".join(modes)) & set("wxa")
        is_read = is_read or name.rpartition(".")[2] in ("read_text", "read_bytes")
        if is_read and not re.search("/(proc|sys)/", ast.unparse(call)):
            return True
    return False


def test_all_else_that_reads_a_file_does_it_by_the_one_reader() -> None:
    root = Path(muster.__file__).parent
    found = {str(path.relative_to(root).with_suffix("")) for path in root.rglob("*.py") if read_directly(path)}
    assert found == list_there(root, READ_OTHERWISE)


def list_there(root: Path, listed: dict[str, str]) -> set[str]:
    """Return the listed modules, without those of features that are removed."""
    names = set(" ".join(listed.values()).split())
    return {each for each in names if "/features/" not in each or (root / f"{each}.py").exists()}


# -- what is printed --------------------------------------------------------------------------------------------------

PRINT_OTHERWISE = {
    "lines of the job, as they came": "cli/log_command",
    "each of its texts is cleaned": "cli/rehearse/command cli/top/command cli/doctor/command "
    "schedulers/runner/live_lines",
    "JSON, and what `repr` has made": "cli/run_command cli/history/commands agent/control/client",
    "numbers and words of our own": "data run _shared/guard agent/ask agent/cli/arguments cli/hold_command "
    "cli/commands/completion agent/features/preflight/measure elastic/jobs/job elastic/jobs/file_timers "
    "schedulers/slurm/node",
    "a worker's own words": "_shared/debugger agent/workers/program elastic/fork/worker snapshots/content worker",
    "for tests": "testing/shell",
}
CLEAN = re.compile("show_controls|json.dumps|dump_json")


def prints_directly(path: Path) -> bool:
    """Return whether a module of the product prints what is no constant, and neither cleans it nor makes it JSON."""
    for call in list_calls(path, "print(", "stderr.write(", "stdout.write("):
        is_print = ast.unparse(call.func) in ("print", "sys.stderr.write", "sys.stdout.write")
        is_fixed = all(isinstance(each, ast.Constant) for each in call.args)
        if is_print and not is_fixed and not CLEAN.search(ast.unparse(call)):
            return True
    return False


def test_all_else_that_prints_does_it_by_the_one_function() -> None:
    root = Path(muster.__file__).parent
    found = {str(path.relative_to(root).with_suffix("")) for path in root.rglob("*.py") if prints_directly(path)}
    assert found == list_there(root, PRINT_OTHERWISE)


def test_the_one_function_shows_what_a_terminal_would_obey(capsys: pytest.CaptureFixture[str]) -> None:
    print_line("\x1b[2J\x1b[31mred\x1b[0m \u202e\x9b1m a\udcffb\r", sys.stdout)
    assert capsys.readouterr().out == r"\x1b[2Jred \u202e\x9b1m a\udcffb\r" + "\n"


def test_a_warning_that_quotes_a_file_has_no_escape_sequences(monkeypatch, capsys) -> None:
    """TorchX's about .torchxconfig."""
    monkeypatch.setattr(logging.root, "handlers", [])
    main(["completion", "apps"])
    capsys.readouterr()
    [handler] = logging.root.handlers
    assert handler.format(logging.makeLogRecord({"msg": "`a\x1b[2J = 1`"})) == r"muster: `a\x1b[2J = 1`"


def test_neither_an_error_nor_a_status_has_escape_sequences() -> None:
    for error in (EngineError("a\x1b[2J"), SchedulerError("a\x1b[2J"), ControlError("a\x1b[2J", CommandExit.REFUSED)):
        assert str(error) == r"a\x1b[2J"
    error = json.dumps({"message": {"message": "\x1b[2J", "extraInfo": {"py_callstack": "a\n\x1b[31mb"}}})
    replicas = [
        ReplicaStatus(id=0, role="main", state=AppState.FAILED, hostname="", structured_error_msg=text)
        for text in (error, "\x1bc")
    ]
    app = AppDef("app", [Role("main", image="")])
    status = build_status(AppFacts(app_id="app", app=app, state=AppState.FAILED, replicas=replicas, error=error))
    texts = [status.structured_error_msg, *(each.structured_error_msg for each in status.roles_statuses[0].replicas)]
    cleaned = {"message": {"message": r"\x1b[2J", "extraInfo": {"py_callstack": "a\nb"}}}
    assert [json.loads(text) for text in texts[:2]] == [cleaned, cleaned]
    assert texts[2] == r"\x1bc"


@pytest.mark.parametrize("ignores_errors", [False, True])
def test_a_folder_of_any_depth_is_walked_and_removed(tmp_path: Path, ignores_errors: bool) -> None:
    levels = 200
    bottom = tmp_path / "a" / "/".join("d" * levels)
    bottom.mkdir(parents=True)
    (bottom / "file").touch()
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 100)
    try:
        assert [each.name for each in walk_files(tmp_path)] == ["file"]
        remove_folder(tmp_path / "a", ignores_errors=ignores_errors)
    finally:
        sys.setrecursionlimit(before)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("ignores_errors", [False, True])
def test_a_folder_with_more_levels_than_descriptors_is_removed(tmp_path: Path, ignores_errors: bool) -> None:
    (tmp_path / "a" / "/".join("d" * 200)).mkdir(parents=True)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 100, limits[1]))
    try:
        remove_folder(tmp_path / "a", ignores_errors=ignores_errors)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert not (tmp_path / "a").exists()


REMOVE_OTHERWISE = {
    "the one function": "_shared/folders",
    "before its modules are found": "schedulers/bundle_start",
    "three files of its own, also when the program ends": "integrations/huggingface",
}


def test_all_else_that_removes_a_folder_does_it_by_the_one_function() -> None:
    root = Path(muster.__file__).parent
    words = re.compile(r"shutil\.rmtree|\bTemporaryDirectory\b|os\.removedirs")
    found = {
        str(path.relative_to(root).with_suffix("")) for path in root.rglob("*.py") if words.search(path.read_text())
    }
    assert found == set(REMOVE_OTHERWISE.values())
