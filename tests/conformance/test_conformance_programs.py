"""Ways to name the program, and the launcher's exit code after its end."""

import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from launchers import PROGRAMS, Launcher, read_facts


def test_a_module(launcher: Launcher) -> None:
    outcome = launcher.run(["-m"], ["conf_module", "--x"], PYTHONPATH=str(PROGRAMS)).check()
    assert "module __main__ ['--x']" in outcome.stdout


@pytest.mark.parametrize("flags", [[], ["--use-env"]])
def test_the_deprecated_launch(launcher: Launcher, flags: list[str]) -> None:
    module = "muster.launch" if launcher.is_muster else "torch.distributed.launch"
    older = replace(launcher, command=(sys.executable, "-m", module))
    outcome = older.run([*flags, "--nproc-per-node=2"], ["conf_facts.py", "a"]).check()
    assert "FutureWarning" in outcome.stderr, outcome.explain()
    for rank, facts in enumerate(read_facts(outcome.stdout)):
        assert facts["argv"][1:] == [*([] if flags else [f"--local-rank={rank}"]), "a"]


def test_an_executable(launcher: Launcher) -> None:
    outcome = launcher.run(
        ["--no_python", "--nproc-per-node=2"], ["/bin/sh", "-c", "echo r$RANK a${local_rank}"]
    ).check()
    assert sorted(line[-5:] for line in outcome.stdout.splitlines()) == ["r0 a0", "r1 a1"]


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_run_path(launcher: Launcher, method: str) -> None:
    if method == "fork" and not launcher.is_muster:
        pytest.skip("one way is enough for torchrun")
    outcome = launcher.run(["--run-path", "--start-method", method], ["conf_facts.py", "a", "${local_rank}"]).check()
    [facts] = read_facts(outcome.stdout)
    assert facts["name"] == "__main__"
    assert facts["argv"] == [str(PROGRAMS / "conf_facts.py"), "a", "0"]


def test_a_module_without_python_is_refused(launcher: Launcher) -> None:
    outcome = launcher.run(["-m", "--no-python"], ["conf_module"]).check(2 if launcher.is_muster else 1)
    assert "--module" in outcome.stderr


def test_another_interpreter(launcher: Launcher, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho interpreter "$@"\n')
    python.chmod(0o755)
    outcome = launcher.run([], ["conf_facts.py", "x"], PYTHON_EXEC=str(python)).check()
    assert f"interpreter -u {PROGRAMS}/conf_facts.py x" in outcome.stdout


def test_wrong_usage_exits_2(launcher: Launcher) -> None:
    outcome = launcher.run(["--no-such-flag"], ["conf_facts.py"]).check(2)
    assert "--no-such-flag" in outcome.stderr
    if launcher.is_muster:
        assert outcome.stderr.count("\n") == 1


@pytest.mark.parametrize("code", [3, -signal.SIGSEGV])
def test_one_failed_worker_fails_the_job_and_ends_the_others(launcher: Launcher, code: int) -> None:
    outcome = launcher.run(["--nproc-per-node", "2"], ["conf_exits.py", str(code), "1"]).check(1)
    output = outcome.stderr + outcome.stdout
    assert ("SIGSEGV" in output) if code < 0 else ("exitcode  : 3" in output or "exited with code 3" in output), (
        outcome.explain()
    )


def test_a_missing_program(launcher: Launcher) -> None:
    outcome = launcher.run([], ["/no/such/script"]).check(2 if launcher.is_muster else 1)
    # muster starts nothing: one line and the exit code of a usage error. torchrun's worker fails.
    outcome = launcher.run(["--no-python"], ["/no/such/program"]).check(1)
    assert "/no/such/program" in outcome.stderr


def test_restarts_until_it_works(launcher: Launcher) -> None:
    outcome = launcher.run(["--max-restarts", "2", "--nproc-per-node", "2"], ["conf_restarts.py", "2"]).check()
    attempts = [line.split()[-4:] for line in outcome.stdout.splitlines() if "attempt" in line]
    assert [words[1] for words in attempts] == ["0", "1", "2"]


def test_the_job_fails_when_no_restarts_are_left(launcher: Launcher) -> None:
    outcome = launcher.run(["--max-restarts", "1"], ["conf_restarts.py", "9"]).check(1)
    attempts = [line.split()[-3] for line in outcome.stdout.splitlines() if "attempt" in line]
    assert attempts == ["0", "1"]


@pytest.mark.fault(1, "every attempt has the same MASTER_PORT, and with it the store's stale keys")
def test_an_attempt_has_a_fresh_address(launcher: Launcher) -> None:
    outcome = launcher.run(["--max-restarts", "1", "--nproc-per-node", "2"], ["conf_restarts.py", "1"]).check()
    ports = [line.split()[-2] for line in outcome.stdout.splitlines() if "attempt" in line]
    assert len(set(ports)) == 2, ports


@pytest.mark.torch
@pytest.mark.fault(1, "attempt 1 often fails on keys of attempt 0's store", recorded=True)
def test_a_gloo_group_survives_the_crash_of_one(launcher: Launcher) -> None:
    pytest.importorskip("torch")
    outcome = launcher.run(
        ["--max-restarts", "1", "--nproc-per-node", "2"], ["conf_allreduce.py", "crash"], timeout_s=120
    ).check()
    assert sorted(line[-22:] for line in outcome.stdout.splitlines() if "attempt 1" in line) == [
        "rank 0 sum 3 attempt 1",
        "rank 1 sum 3 attempt 1",
    ]
