"""Every option and every reader of files gets bad input: it ends in one line, within time and memory, or in a value.

Seeded, so that a failure can be repeated. Another seed: `MUSTER_FUZZ_SEED=7`.
"""

import argparse
import inspect
import json
import os
import random
import resource
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torchx.runner import config
from torchx.specs.api import InvalidRunConfigException
from torchx.specs.finder import ComponentValidationException

from muster._shared.control import ControlError
from muster.agent import checkpoint_file
from muster.agent.cli.arguments import parse_args
from muster.agent.cli.flag_table import list_flags
from muster.agent.errors import MusterError
from muster.agent.placement import device_count
from muster.cli import commands, run_command
from muster.cli.adapters import create_scheduler
from muster.cli.history import sources
from muster.components import environment
from muster.components.environment import parse_env
from muster.schedulers.failure_report import RecordReader, find_trouble, read_error_file
from muster.schedulers.local import holds
from muster.schedulers.processes import agent_files
from muster.schedulers.runner import config_file
from muster.schedulers.ssh.options import SshOptions, find_hosts
from muster.schedulers.supervision.app_folder import AppFolder, StateError
from muster.schedulers.wording.words import word_all
from muster.schedulers.workspace.packing import BundleError, describe_left_out

SEED = int(os.environ.get("MUSTER_FUZZ_SEED", "0"))
VALUES = (
    *("", " ", "0", "-1", "1.5", "9" * 400, "9" * 5000, "1e400", "nan", "-inf", "٣", "1_0", "²", "0x10", "+3"),
    *("\udcff", "a\x1b[2J", "a\nb", "a\0b", "'", '"', "${", "%(x)s", "%", ",", ",,=", "=", "a=", "=b", ":", ";"),
    *("[", "{", "../../x", "/" * 5000, "a" * 300, "a" * 100_000, "1:2:3", "[::1", "a:b:c", "65536", "1x2x3"),
    *("(" * 2000, "*" * 2000),
)
MEMORY_BYTES = 1 << 30
LIMIT_S = 30


class HangError(BaseException):
    """What the product does not catch."""


@contextmanager
def limits() -> Iterator[None]:
    """Turn a hang into an error, and too much memory into `MemoryError`."""

    def fail(*_: object) -> None:
        raise HangError(f"it takes more than {LIMIT_S} s")

    before, handler = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGALRM, fail)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, before[1]))
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def check(act: Callable[[], object], refusals: tuple[type[BaseException], ...], what: str) -> None:
    """Let it end in a value, or be refused in one line."""
    try:
        with limits():
            act()
    except refusals as error:
        if not isinstance(error, SystemExit) and ("\n" in str(error) or not str(error)):
            raise AssertionError(f"{what[:200]}: {str(error)[:200]!r} is not one line") from error
    except BaseException as error:
        raise AssertionError(f"{what[:200]}: {type(error).__name__}: {str(error)[:200]}") from error


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(config, "DEFAULT_CONFIG_DIRS", [str(tmp_path)])
    (tmp_path / "main.py").touch()


def choose(name: str, count: int) -> list[str]:
    return random.Random(f"{SEED} {name}").sample(VALUES, count)


def test_flags_and_variables_of_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_count, "_count_devices", lambda *_args, **_more: 1)
    for flag in list_flags():
        for value in choose(flag.name, 5):
            words = [f"--{flag.name}"] if flag.is_switch else [f"--{flag.name}={value}"]
            check(lambda words=words: parse_args([*words, "main.py"], {}), (MusterError,), repr(words))
            if flag.has_variable and "\0" not in value:
                env = {flag.variable: value}
                check(lambda env=env: parse_args(["main.py"], env), (MusterError,), repr(env))


def test_arguments_of_components() -> None:
    refusals = (ControlError, SystemExit)
    for function in ("ddp",):
        for name in inspect.signature(run_command.find_function(f"dist.{function}")).parameters:
            for value in choose(f"{function} {name}", 1):
                words = [*(("--m", "a") if name not in ("m", "script") else ()), f"--{name}={value}"]
                check(lambda words=words: run_command.build_app(f"dist.{function}", words), refusals, f"{words!r}")  # noqa: B023


@pytest.mark.parametrize("name", ["local_cwd", "docker", "kubernetes", "slurm", "ssh"])
def test_options_of_schedulers(name: str) -> None:
    refusals = (ComponentValidationException, InvalidRunConfigException)
    app = run_command.build_app("dist.ddp", ["--script", "main.py"])
    scheduler = create_scheduler(name)
    needed = {"hosts": "a"} if name == "ssh" else {}
    for option, _ in scheduler.run_opts():
        for value in choose(f"{name} {option}", 1 if name == "kubernetes" else 2):
            cfg = {**needed, option: value}
            check(lambda cfg=cfg: str(scheduler.submit_dryrun(app, cfg)), refusals, f"{name} {option}={value!r}")


def test_options_of_commands(capsys: pytest.CaptureFixture[str]) -> None:
    parser = commands.build_parser()
    for words in list_command_lines(parser):
        check(lambda words=words: commands.parse(parser, words), (SystemExit,), repr(words))
        capsys.readouterr()


def list_command_lines(parser: argparse.ArgumentParser) -> Iterator[list[str]]:
    for name, command in commands.list_parsers(parser).items():
        for action in command._actions:
            for value in choose(f"{name} {action.dest}", 4):
                yield [name, f"{action.option_strings[-1]}={value}"] if action.option_strings else [name, value]


# -- readers of files -------------------------------------------------------------------------------------------------

EVENT = {
    "format": 1, "time_s": 1.0, "monotonic_s": 1.0, "agent": "a", "node": 0, "node_index": 0, "round": 1, "attempt": 0,
    "what": "round_formed", "ranks": [0, 1], "duration_s": 1.0, "detail": {"nodes": 1, "text": "x", "restarts_left": 1},
}  # fmt: skip
RECORD = {
    "format": 1, "app": {
        "phase": "running", "outcome": None, "reasons": [{"code": "given_up", "facts": {"replicas": ["main/1"]}}],
        "retries": {"main": 1}, "restarting": [], "grace_number": 0, "lingering": 0, "lingering_role": "",
        "is_draining": False, "sizes": {"main": 1}, "leaving": ["main/1"], "over": [], "resizes": 0,
        "replicas": {"main/0": {"status": "running", "starts": 1, "exit_code": None}},
    },
    "machine": {"host": "h", "boot_id": "b", "machine_id": "m", "pid_namespace": "n"},
    "supervisor": {"pid": 1, "start_ticks": "1"}, "submitted_s": 1.0, "ended_s": None,
    "handles": {"main/0": {"pid": 1, "host": "x"}}, "hosts": {"main/1": "y"},
}  # fmt: skip
REPORT = {"format": 1, "reason": "x", "failures": [{"global_rank": 0, "exception": "E"}], "suspected": []}
STATUS = {"format": 1, "step": 1, "total": 9, "round": 1, "state": "running", "started_s": 1.0, "nodes": []}
ERROR = {"message": {"message": "x", "extraInfo": {"py_callstack": "y", "timestamp": "1"}}}
CHECKPOINT = {"number": 1, "step": 3, "path": "/x"}


def read_app(path: Path) -> None:
    folder = AppFolder(path.parent.parent)
    if folder.state_dir.name == path.parent.name:
        record = folder.read_record()
        assert record is None or record.find_hosts() is not None


def read_job(log_dir: Path) -> object:
    return RecordReader(partial(agent_files.read_records, log_dir)).job


def check_config(_: Path) -> None:
    config_file.check_files()


def read_folder(path: Path) -> None:
    sources.load(str(path.parent))
    word_all(find_trouble(path.read_bytes()[:100_000] if path.stat().st_size < 1 << 20 else b""))


READERS: Mapping[str, tuple[object, Callable[[Path], object], tuple[type[BaseException], ...]]] = {
    ".muster/state.json": (RECORD, read_app, (StateError,)),
    ".muster/spec.json": (RECORD, lambda path: AppFolder(path.parent.parent).read_spec(), (StateError,)),
    ".muster/stop.request": ("cancel", lambda path: AppFolder(path.parent.parent).read_request(), (OSError,)),
    "run/events.jsonl": (EVENT, read_folder, (ControlError,)),
    "run/error.json": (ERROR, read_error_file, ()),
    "run/checkpoint.json": (CHECKPOINT, lambda path: checkpoint_file.find(str(path.parent), ""), (MusterError,)),
    "run/report.json": (REPORT, lambda path: agent_files.read_report(path.parent.parent), ()),
    "run/status.json": (STATUS, lambda path: read_job(path.parent.parent), ()),
    ".torchxconfig": ("[cli:run]\nworkspace = x\n[local_cwd]\nlog_dir = /x\n", check_config, (ControlError,)),
    ".torchxignore": ("a*\n!b/**/c\n[a-z]\n", lambda path: describe_left_out(str(path.parent)), (BundleError,)),
    "env.txt": ("A=1\nB=2\n# c\n", lambda path: parse_env(None, str(path), {}), (ValueError,)),
    "hosts": ("a slots=3\nb:4\n[::1]:2\n", lambda path: find_hosts(SshOptions(hostfile=str(path))), (ValueError,)),
    "hold/hold.json": ({"state": "ready", "pid": 1}, lambda path: holds.read_state(str(path.parent)), ()),
}  # fmt: skip


DAMAGES = (b"\0", b"\xff", b"[", b"{", b'"', b"-", b"", b"null", b"1" + b"0" * 400, b"NaN", b"-1e999", b"%(x)s")
WRONG = (None, -1, 10**400, 1e308, "x" * 9, "\ud800", [], {}, [[1]], True)


def damage(good: bytes, chance: random.Random) -> bytes:
    """Change bytes, cut, repeat, or replace a number or a text by another value."""
    content = bytearray(good)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(content) + 1)
        content[at : at + chance.choice((0, 1, 1, 5))] = chance.choice(DAMAGES)
    return bytes(content[: chance.randrange(len(content) + 1)]) if chance.random() < 0.1 else bytes(content)


def list_wrong(good: Any, chance: random.Random) -> Iterator[bytes]:
    """Return the file's JSON with one value of another type."""
    if not isinstance(good, dict):
        return
    for name in good:
        yield json.dumps({**good, name: chance.choice(WRONG)}).encode()


@pytest.mark.parametrize("name", READERS)
def test_readers_of_files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_PIPE_LIMIT_S", 0.01)
    good, read, refusals = READERS[name]
    chance = random.Random(f"{SEED} {name}")
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    text = (good if isinstance(good, str) else json.dumps(good) + "\n").encode()
    contents = [text, b"", b"[" * 100_000, b"\xff" * 9, text * 2000, *list_wrong(good, chance)]
    for content in [*contents, *(damage(text, chance) for _ in range(20))]:
        path.write_bytes(content)
        check(lambda: read(path), refusals, f"{name}: {content[:400]!r}")
    os.truncate(path, 20 << 30)
    check(lambda: read(path), refusals, f"{name}: 20 GB")
    for make in (os.mkfifo, os.mkdir, lambda each: os.symlink("/dev/zero", each)):
        path.unlink()
        make(path)
        check(lambda: read(path), refusals, f"{name}: {make}")
        if path.is_dir():
            path.rmdir()
            path.touch()
