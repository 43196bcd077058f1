"""The command line of a cold worker, and which variables a fork could not take over."""

import argparse
import io
import json
import os
import sys
import zipfile
from collections.abc import Callable
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import IO, Any, NoReturn
from zipimport import zipimporter

import pytest

from muster._shared.records import replace
from muster.agent.diagnosis.tracebacks import read_error_file
from muster.agent.workers import program
from muster.agent.workers.cold import build_command
from muster.agent.workers.spec import Program, ProgramKind, WorkerSpec
from muster.agent.workers.warm.fork_safety import find_early_difference, is_read_early

SPEC = WorkerSpec(
    local_rank=3,
    program=Program(kind=ProgramKind.MODULE, target="a.b", args=("-x=1", "")),
    env={"A": "1", "B": "\udcff"},
    stdout_fd=7,
    cpus=frozenset({3, 0}),
    command_prefix=("numactl",),
    error_file="/e=1",
    stack_file="/s",
)


@pytest.mark.parametrize(
    ("orig_argv", "flags"),
    [
        (["python", "-m", "muster.agent", "-X", "dev"], ["-u"]),
        (["python", "script.py", "-O"], ["-u"]),
        (["python", "-u", "-X", "dev", "-m", "x"], ["-u", "-X", "dev"]),
        (["python", "-sEum", "x"], ["-sEu"]),
        (["python", "-Ic", "pass"], ["-u", "-I"]),
        (["python", "-Xdev", "-Werror", "-W", "ignore", "x.py"], ["-u", "-Xdev", "-Werror", "-W", "ignore"]),
        (["python", "-BXdev", "x.py"], ["-u", "-B", "-Xdev"]),
        (["python", "-iOO", "x.py"], ["-u", "-OO"]),
        (["python", "-i", "-m", "x"], ["-u"]),
        (["python", "--check-hash-based-pycs", "always", "-m", "x"], ["-u", "--check-hash-based-pycs", "always"]),
        (["python", "-"], ["-u"]),
        (["python"], ["-u"]),
    ],
)
def test_workers_get_the_interpreters_flags(orig_argv: list[str], flags: list[str]) -> None:
    assert program.list_interpreter_flags(orig_argv) == flags


def test_cold_argv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "-E", "-m", "muster.agent"])
    entry = str(Path(program.__file__).with_name("entry.py"))
    told = ["error_file=/e=1", "stack_file=/s", "crash_file=", "module", "a.b", "-x=1", ""]
    command = [sys.executable, "-u", "-E", entry, "--muster-worker", *told]
    assert build_command(SPEC) == ["numactl", *command]


def test_what_a_cold_worker_is_told_is_what_it_reads() -> None:
    """It has no other way: a text that a later version adds to `WorkerSpec` travels, too."""
    told = program.parse_worker_args(program.build_worker_args(SPEC))
    assert (told.program.kind, told.program.target, told.program.args) == ("module", "a.b", ["-x=1", ""])
    texts = {name: text for name, text in vars(SPEC).items() if isinstance(text, str)}
    assert {name: text for name, text in vars(told).items() if name != "program"} == texts
    assert {"error_file", "stack_file", "crash_file"} <= set(texts)


def test_a_parked_worker_gets_the_whole_spec() -> None:
    arrived = WorkerSpec.from_json(SPEC.to_json().encode(), stdout_fd=11, stderr_fd=12)
    assert (arrived.stdout_fd, arrived.stderr_fd, arrived.cpus) == (11, 12, [0, 3])
    assert arrived.program.kind == ProgramKind.MODULE
    same = replace(arrived, stdout_fd=SPEC.stdout_fd, stderr_fd=SPEC.stderr_fd)
    assert json.loads(same.to_json()) == json.loads(SPEC.to_json())
    assert set(vars(arrived)) == set(vars(SPEC))


@pytest.mark.parametrize(
    ("name", "early"),
    [
        *[(name, True) for name in ("LD_PRELOAD", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")],
        *[(name, True) for name in ("MALLOC_ARENA_MAX", "PYTHONPATH", "TORCH_LOGS", "TORCHINDUCTOR_CACHE_DIR")],
        *[(name, True) for name in ("TMP", "ONEDNN_MAX_CPU_ISA", "TQDM_DISABLE", "FX_PATCH_GETITEM")],
        ("TMPL", False),
        *[(name, True) for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")],
        *[(name, False) for name in ("RANK", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "HOME", "TZ")],
        *[(name, False) for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCHELASTIC_RUN_ID")],
        ("PYTORCH_NVML_BASED_CUDA_CHECK", False),  # `import lightning` sets it
    ],
)
def test_which_variables_are_read_early(name: str, early: bool) -> None:
    assert is_read_early(name) is early


def test_the_first_early_difference() -> None:
    template = {"A": "1", "OMP_NUM_THREADS": "2", "TZ": "UTC"}
    assert find_early_difference(template, {"A": "2", "RANK": "0", "OMP_NUM_THREADS": "2", "TZ": "UTC"}) is None
    assert find_early_difference(template, {"OMP_NUM_THREADS": "3"}) == "OMP_NUM_THREADS"
    assert find_early_difference(template, {"OMP_NUM_THREADS": "3"}, without=("OMP_NUM_THREADS",)) is None
    assert find_early_difference(template, {**template, "LD_PRELOAD": "x.so"}) == "LD_PRELOAD"


class _Writes(io.RawIOBase):
    """What a terminal gets, write by write."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.seen.append(bytes(data))
        return len(data)


def test_a_traceback_is_one_write_for_ranks_that_share_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Writes()
    unbuffered: Any = terminal  # as python -u makes sys.stderr
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(unbuffered, encoding="utf-8", write_through=True))
    error = ValueError("the text")
    program._show_at_once(sys.__excepthook__, ValueError, error, None)
    assert terminal.seen == [b"ValueError: the text\n"]
    print("a", "b", file=sys.stderr)
    assert terminal.seen[1:] == [b"a", b" ", b"b", b"\n"], "unbuffered as before"
    program._show_at_once(lambda *_: print("mine", file=sys.stderr), ValueError, error, None)
    assert terminal.seen[5:] == [b"mine", b"\n"], "a hook of the program's own is left alone"


def test_frames_of_functions_that_call_the_users_are_left_out() -> None:
    ours: dict[str, Any] = {"muster_frames": True}
    exec("def call(function): function()", ours)

    def fail() -> None:
        raise ValueError

    with pytest.raises(ValueError) as caught:  # no text
        ours["call"](fail)
    after_test = caught.tb.tb_next
    assert after_test is not None
    shown = program.find_user_frames(after_test)
    assert shown.tb_frame.f_code is fail.__code__


def stop_of(call: Callable[[], object]) -> SystemExit:
    with pytest.raises(SystemExit) as caught:
        call()
    return caught.value


class Parser(argparse.ArgumentParser):
    """Many programs have one; jsonargparse's prints the message, and exits without one."""

    def error(self, message: str) -> NoReturn:
        self.print_usage()
        if message.startswith("unrecognized"):
            sys.exit(2)
        self.exit(2)


class FireExit(SystemExit):
    """As Fire's."""

    def __init__(self, trace: object) -> None:
        super().__init__(2)
        self.trace = trace


class Refusal(Exception):
    """As click's ClickException."""

    def format_message(self) -> str:
        return "No such option: --lrr"


class Odd(Exception):
    """Whatever shows it ends the program."""

    def format_message(self) -> str:
        sys.exit(5)

    __str__ = format_message


OWN, PLAIN = Parser(prog="main.py"), argparse.ArgumentParser(prog="main.py")
OWN.add_argument("--lr", type=float)
PLAIN.add_argument("--lr", type=float, required=True)
ELEMENT = SimpleNamespace(ErrorAsStr=lambda: "Could not consume arg: --no")
MISSING = "main.py: error: the following arguments are required: --lr"


def leave(error: BaseException, code: object = 3) -> None:
    try:
        raise error  # noqa: TRY301
    except BaseException:
        sys.exit(code)  # type: ignore[arg-type]


def leave_with_a_tracker() -> None:
    report = Path("/").exists
    try:
        int("x", base=99)
    except ValueError:
        sys.exit(bool(report()))


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda: OWN.parse_args(["--no"]), "error: unrecognized arguments: --no"),
        (lambda: OWN.parse_args(["--lr", "x"]), "error: argument --lr: invalid float value: 'x'"),
        (lambda: OWN.exit(2), ""),
        (lambda: leave_as(FireExit(SimpleNamespace(elements=[ELEMENT]))), "ERROR: Could not consume arg: --no"),
        (lambda: leave_as(FireExit("another's")), ""),
        (lambda: PLAIN.parse_args([]), MISSING),
        (lambda: PLAIN.parse_args(["--help"]), ""),
        (lambda: sys.exit(2), ""),
        (lambda: leave_as(SystemExit(2)), ""),
        (lambda: leave(Refusal(), 2), "Error: No such option: --lrr"),
        (lambda: leave(ValueError("no data\nin /data")), "sys.exit while it handled ValueError: no data"),
        (lambda: leave(ValueError()), "sys.exit while it handled ValueError"),
        (lambda: leave(ValueError("no data", {"of": "tyro"}), 2), "sys.exit while it handled ValueError: no data"),
        (lambda: leave(ValueError("fine"), 0), ""),
        (lambda: leave(KeyboardInterrupt(), 1), ""),
        (lambda: leave(Odd()), "sys.exit while it handled Odd"),
        (lambda: leave(stop_of(lambda: PLAIN.parse_args([]))), MISSING),
        (leave_with_a_tracker, "sys.exit while it handled ValueError: int() base must be >= 2 and <= 36, or 0"),
    ],
    ids=range(18),
)
def test_what_a_parser_or_the_program_says_at_its_exit_is_the_reason(call: Callable[[], object], why: str) -> None:
    """Also where stderr is not captured."""
    assert program.find_refusal(stop_of(call)) == why


def leave_as(error: BaseException) -> NoReturn:
    raise error


def test_what_argparse_refused_is_recorded_where_the_agent_does_not_read_stderr(tmp_path: Path) -> None:
    script, error_file = tmp_path / "main.py", tmp_path / "error.json"
    script.write_text("from argparse import ArgumentParser\nArgumentParser(prog='main.py').parse_args(['--no'])\n")

    def run(crash_file: str) -> None:
        mine = Program(kind=ProgramKind.SCRIPT, target=str(script))
        spec = WorkerSpec(local_rank=0, program=mine, env={}, error_file=str(error_file), crash_file=crash_file)
        with pytest.MonkeyPatch.context() as patch:
            for name in ("enable_faulthandler", "rename_process"):
                patch.setattr(program, name, lambda *_: None)
            patch.setattr(sys, "argv", sys.argv[:])
            patch.setattr(sys, "path", sys.path[:])
            patch.setattr(sys, "orig_argv", sys.orig_argv[:])
            patch.setitem(sys.modules, "__main__", sys.modules["__main__"])
            stop_of(lambda: program.run(spec, [sys.executable]))

    run("")
    assert not error_file.exists()  # the agent reads it on stderr
    run("crash")
    assert read_error_file(str(error_file)) == ("main.py: error: unrecognized arguments: --no", None)


KILLED = "DataLoader worker (pid 7)"


@pytest.mark.parametrize("fails", [1, 2])
def test_an_exception_is_recorded_although_a_signal_handler_raises(fails, tmp_path, monkeypatch, capsys) -> None:
    """torch's handler of SIGCHLD raises when a process of a loader was killed, the cause of the first exception too."""
    dump, calls = json.dump, []

    def dump_interrupted(data: object, file: IO[str]) -> None:
        calls.append(data)
        file.write("{")
        if len(calls) <= fails:
            raise RuntimeError(KILLED)
        file.seek(0)
        dump(data, file)

    monkeypatch.setattr(json, "dump", dump_interrupted)
    error_file = tmp_path / "error.json"
    program.write_error_file(EOFError(), None, str(error_file))
    assert len(calls) == 2
    assert os.listdir(tmp_path) == (["error.json"] if fails == 1 else [])
    if fails == 1:
        message = json.loads(error_file.read_text())["message"]["message"]
        assert message == f"EOFError; then RuntimeError: {KILLED}"
        assert capsys.readouterr().err == ""
    else:
        assert f"in {error_file}: RuntimeError" in capsys.readouterr().err


def test_an_exception_is_recorded_although_the_program_hides_what_writes_it(tmp_path, monkeypatch) -> None:
    """The report said that it "raised no Python exception"."""
    for name in ("json", "traceback", "types"):
        (tmp_path / f"{name}.py").touch()
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    hiding = [__import__(name) for name in ("json", "traceback", "types")]
    error_file = tmp_path / "error.json"
    program.write_error_file(EOFError("its own"), None, str(error_file))
    assert [sys.modules[module.__name__] for module in hiding] == hiding
    monkeypatch.undo()
    assert json.loads(error_file.read_text())["message"]["message"] == "EOFError: its own"


def test_a_torch_that_compares_the_address_of_the_agents_store_is_answered_by_its_port():
    """torch 2.15 does, and rank 0 tried to listen there when a script had set MASTER_ADDR=localhost."""
    module = ModuleType("torch.distributed.rendezvous")
    module._torchelastic_use_agent_store = lambda: True
    module._agent_store_serves = lambda hostname, port: (hostname, port) == ("localhost", 29500)
    module._create_c10d_store = lambda hostname, port: (hostname, port, module._agent_store_serves(hostname, port))
    program._hook_stores(module, "10.0.0.1", "29500")
    assert module._create_c10d_store("localhost", 29500) == ("10.0.0.1", 29500, True)
    assert module._create_c10d_store("localhost", 29501) == ("localhost", 29501, False)


def test_a_file_of_the_agent_is_run_from_the_zip_as_from_its_folder(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as file:
        file.write(program.__file__, "muster/agent/workers/program.py")
        file.write(program.__file__, "muster/agent/features/one/first.py")
    spec = zipimporter(str(tmp_path / "x.zip/muster/agent/workers")).find_spec("program")
    assert spec is not None
    assert spec.loader is not None
    packed = module_from_spec(spec)
    spec.loader.exec_module(packed)
    assert packed._load_own_file("features/one/first")["WORKER_FLAG"] == program.WORKER_FLAG
    assert program._load_own_file("workers/program")["WORKER_FLAG"] == program.WORKER_FLAG
