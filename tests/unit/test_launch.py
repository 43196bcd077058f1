"""What an error that ends the agent becomes: a line and an exit code."""

import errno
import logging
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from muster._shared.contract import Env
from muster._shared.transitions import drop
from muster.agent import launch
from muster.agent.cli.arguments import parse_args
from muster.agent.node.state import Ended
from muster.agent.node.supervisor import Supervisor
from muster.agent.runtime.loop import Loop


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
        ImportError(f"zlib.so: cannot open shared object file: {os.strerror(errno.EMFILE)}"),
    ],
)
def test_no_descriptor_left_is_one_line(error, monkeypatch, capfd) -> None:
    def fail(*_: object) -> int:
        raise error

    monkeypatch.setattr(launch, "_run", fail)
    assert launch.run_agent([], {}, None) == 1  # type: ignore[arg-type]
    assert "agent cannot continue: " in capfd.readouterr().err


def test_another_import_error_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise ImportError("cannot import name 'x'")

    monkeypatch.setattr(launch, "_run", fail)
    with pytest.raises(ImportError, match="cannot import name"):
        launch.run_agent([], {}, None)  # type: ignore[arg-type]


def test_debug_records_are_lines_of_the_agent() -> None:
    logger, lines = logging.getLogger("muster"), list[str]()
    launch.print_debug_records(SimpleNamespace(print_line=lines.append))  # type: ignore[arg-type]
    try:
        assert drop("state", Ended, "late") == ("state", ())
    finally:
        logger.removeHandler(logger.handlers[-1])
        logger.setLevel(logging.NOTSET)
    assert lines == ["Ended does not accept 'late'"]


BEGUN_S, BEGUN = 1_800_000_000.0, "2027-01-15 08:00:00 UTC"
SECOND = f"incarnation 2 of this job starts, {BEGUN}"
SLURM = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}
BY_SLURM = {**SLURM, Env.ADAPTER: "slurm", Env.JOB_INCARNATION: "2 Slurm sent SIGTERM"}


@pytest.mark.parametrize(
    ("environ", "index", "line"),
    [
        ({}, 0, ""),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "0"}, 0, ""),
        (SLURM, 0, f"incarnation 3 of this job starts, {BEGUN} (Slurm job 7)"),
        (SLURM, 1, ""),
        ({**SLURM, Env.ADAPTER: "slurm"}, 0, ""),  # an agent that was started again
        ({**SLURM, Env.ADAPTER: "local_cwd"}, 0, ""),  # within somebody else's job
        (BY_SLURM, 0, f"{SECOND} (Slurm job 7); the previous incarnation ended: Slurm sent SIGTERM"),
        (BY_SLURM, 1, ""),
        ({Env.ADAPTER: "docker", Env.INCARNATION: "1"}, 1, f"incarnation 2 of this node starts, {BEGUN}"),
    ],
)
def test_an_incarnation_after_the_first_is_marked(environ: dict[str, str], index: int, line: str) -> None:
    words = ["--nnodes", "2", "--node-rank", str(index), "--rdzv-endpoint", "h:1", "--rdzv-backend", "c10d", "train.py"]
    config = parse_args(words, environ)
    assert " starts, ".join(launch.find_incarnation(config, environ, BEGUN_S) or ()) == line


def test_what_was_lost_with_drained_pods_is_said_unless_the_folder_is_kept(tmp_path: Path) -> None:
    for drained in ({}, {Env.DRAINED_PODS: ""}, {Env.DRAINED_PODS: "0"}):
        assert launch.describe_loss(str(tmp_path), drained) == ""
    assert launch.describe_loss(str(tmp_path), {Env.DRAINED_PODS: "1"}).startswith("the job begins ")
    (tmp_path / "events.jsonl").touch()
    assert launch.describe_loss(str(tmp_path), {Env.DRAINED_PODS: "1"}) == ""


class Loaded(SimpleNamespace):
    """An agent that loads ahead what a failure needs. Each part is recorded with the turn of the loop, or raises."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__(_loop=Loop(), _code=None, turn=0, parts=[])
        self.error = error
        self._open_control, self._begin_telemetry = partial(self._load, "control"), partial(self._load, "telemetry")
        self._read_evidence = lambda: SimpleNamespace(skip_kernel_log=partial(self._record, "evidence"))
        for name in ("_after_turns", "_load_part", "_load_diagnosis"):
            setattr(self, name, partial(getattr(Supervisor, name), self))

    def _load(self, part: str) -> None:
        if self.error is not None:
            raise self.error
        self._record(part)

    def _record(self, part: str) -> None:
        self.parts.append((self.turn, part))

    def load(self, turns: int = 4) -> list[tuple[int, str]]:
        """Return the parts that were loaded in these turns, with the turn of each."""
        Supervisor._load_evidence(self)  # type: ignore[arg-type]
        for self.turn in range(1, turns + 1):
            self._loop.turn(0.0)
        self._loop.close()
        return self.parts


def test_parts_are_loaded_in_turns_of_their_own_for_heartbeats_to_come_between() -> None:
    """On a busy machine each may take a second. All in one turn, they took half of a lease."""
    assert Loaded().load() == [(1, "control"), (2, "evidence"), (3, "telemetry")]


def test_nothing_is_loaded_ahead_once_the_agent_ends() -> None:
    parts = Loaded()
    parts._code = 0
    assert parts.load() == []


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "Too many open files"), ImportError("Too many open files")])
def test_workers_that_run_are_not_ended_because_nothing_can_be_loaded_ahead(error: Exception) -> None:
    """Evidence is loaded although nothing can be asked."""
    assert Loaded(error).load() == [(2, "evidence")]
