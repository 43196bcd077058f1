"""What an error that ends the agent becomes: a line and an exit code."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from muster._shared.contract import Env
from muster.agent import launch
from muster.agent.cli.arguments import parse_args
from muster.agent.node.supervisor import Supervisor


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
        ImportError(f"zlib.so: cannot open shared object file: {os.strerror(errno.EMFILE)}"),
    ],
)
def test_no_descriptor_left_is_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> int:
        raise error

    monkeypatch.setattr(launch, "_run", fail)
    assert launch.run_agent([], {}, None) == 1  # type: ignore[arg-type]
    assert capfd.readouterr().err == "muster: the agent cannot continue: Too many open files\n"


def test_another_import_error_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise ImportError("cannot import name 'x'")

    monkeypatch.setattr(launch, "_run", fail)
    with pytest.raises(ImportError, match="cannot import name"):
        launch.run_agent([], {}, None)  # type: ignore[arg-type]


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
        (
            {Env.ADAPTER: "docker", Env.INCARNATION: "1"},
            1,
            f"incarnation 2 of this node starts, {BEGUN}",
        ),
    ],
)
def test_an_incarnation_after_the_first_is_marked(environ: dict[str, str], index: int, line: str) -> None:
    words = ["--nnodes", "2", "--node-rank", str(index), "--rdzv-endpoint", "h:1", "--rdzv-backend", "c10d", "train.py"]
    config = parse_args(words, environ)
    assert launch.describe_incarnation(config, environ, BEGUN_S) == line


def test_what_was_lost_with_drained_pods_is_said_unless_the_folder_is_kept(tmp_path: Path) -> None:
    for drained in ({}, {Env.DRAINED_PODS: ""}, {Env.DRAINED_PODS: "0"}):
        assert launch.describe_loss(str(tmp_path), drained) == ""
    assert launch.describe_loss(str(tmp_path), {Env.DRAINED_PODS: "1"}).startswith("the job begins anew: ")
    (tmp_path / "events.jsonl").touch()
    assert launch.describe_loss(str(tmp_path), {Env.DRAINED_PODS: "1"}) == ""


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "Too many open files"), ImportError("Too many open files")])
def test_workers_that_run_are_not_ended_because_nothing_can_be_loaded_ahead(error: Exception) -> None:
    def fail() -> None:
        raise error

    parts = SimpleNamespace(_open_control=fail, _read_evidence=fail, _begin_telemetry=fail)
    Supervisor._load_evidence(parts)  # type: ignore[arg-type]


def test_evidence_is_loaded_although_nothing_can_be_asked() -> None:
    def fail() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    loaded: list[bool] = []
    evidence = SimpleNamespace(skip_kernel_log=lambda: loaded.append(True))
    parts = SimpleNamespace(_open_control=fail, _read_evidence=lambda: evidence, _begin_telemetry=fail)
    Supervisor._load_evidence(parts)  # type: ignore[arg-type]
    assert loaded == [True]
