"""Signals, kills, leftovers, and reports of failures."""

import contextlib
import json
import signal
from pathlib import Path

import pytest
from harness import wait_until
from launchers import Launcher


def test_sigterm_reaches_the_workers(launcher: Launcher) -> None:
    with launcher.start(["--nproc-per-node", "2"], ["conf_waits.py"]) as tree:
        tree.wait_for_line("waits", count=2)
        tree.send(signal.SIGTERM)
        outcome = tree.wait()
    assert sorted(line for line in outcome.stdout.splitlines() if "got" in line) == [
        "rank 0 got SIGTERM",
        "rank 1 got SIGTERM",
    ]
    # torchrun: 1, from its SignalException. muster's code names the signal, so that an adapter detects a preemption.
    assert outcome.exit_code == (143 if launcher.is_muster else 1), outcome.explain()
    assert outcome.leftovers == ()


def test_another_signal_is_handled_and_passed_on(launcher: Launcher) -> None:
    with launcher.start(["--signals-to-handle", "SIGUSR1"], ["conf_waits.py"]) as tree:
        tree.wait_for_line("waits")
        tree.send(signal.SIGUSR1)
        outcome = tree.wait()
    assert "rank 0 got SIGUSR1" in outcome.stdout, outcome.explain()
    assert outcome.exit_code == (128 + signal.SIGUSR1 if launcher.is_muster else 1), outcome.explain()
    assert outcome.leftovers == ()


@pytest.mark.parametrize("variable", [False, True])
def test_the_grace_after_a_signal_is_the_shutdown_timeout(
    launcher: Launcher, tmp_path: Path, *, variable: bool
) -> None:
    if variable and not launcher.is_muster:
        pytest.skip("one way is enough for torchrun")
    flags, env = (["--shutdown-timeout", "1"], {}) if not variable else ([], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"})
    with launcher.start(
        ["--nproc-per-node=2", *flags], ["conf_ignores.py", str(tmp_path / "mark"), "wait"], **env
    ) as tree:
        tree.wait_for_line("waits", count=2)
        tree.send(signal.SIGTERM)
        outcome = tree.wait(20)
    assert not outcome.timed_out, outcome.explain()
    assert outcome.leftovers == ()


@pytest.mark.fault(8, "the grace after a crash is 30 s, not --shutdown-timeout: ended after 33 s", recorded=True)
def test_the_grace_after_a_crash_is_the_shutdown_timeout(launcher: Launcher, tmp_path: Path) -> None:
    flags = ["--nproc-per-node", "2", "--shutdown-timeout", "1"]
    launcher.run(flags, ["conf_ignores.py", str(tmp_path / "mark")], timeout_s=20).check(1)


@pytest.mark.fault(7, "SIGKILL of the launcher leaves every worker and grandchild running")
def test_nothing_outlives_a_killed_launcher(launcher: Launcher) -> None:
    with launcher.start(["--nproc-per-node", "2"], ["conf_grandchild.py", "wait"]) as tree:
        tree.wait_for_line("waits", count=2)
        tree.send(signal.SIGKILL)
        tree.wait().check(-signal.SIGKILL)


@pytest.mark.fault(7, "grandchildren of a crashed worker survive")
def test_grandchildren_of_a_crashed_worker_do_not_survive(launcher: Launcher) -> None:
    launcher.run([], ["conf_grandchild.py", "crash"]).check(1)


@pytest.mark.fault(7, "grandchildren survive the end of the job")
def test_grandchildren_do_not_survive_the_end_of_the_job(launcher: Launcher) -> None:
    launcher.run([], ["conf_grandchild.py", "end"]).check()


@pytest.mark.fault(7, "a third SIGTERM aborts the clean-up: workers stay")
def test_repeated_signals_change_nothing(launcher: Launcher, tmp_path: Path) -> None:
    flags = ["--nproc-per-node", "2", "--shutdown-timeout", "2"]
    with launcher.start(flags, ["conf_ignores.py", str(tmp_path / "mark"), "wait"]) as tree:
        tree.wait_for_line("waits", count=2)
        for _ in range(3):
            with contextlib.suppress(ProcessLookupError):  # it is slow to send, and the job has ended
                tree.send(signal.SIGTERM)
            # Not all at once: equal pending signals are one.
            wait_until(lambda: not is_pending(tree.pid, signal.SIGTERM), what="the signal is taken")
        outcome = tree.wait(20)
    assert outcome.leftovers == (), outcome.explain()
    assert outcome.exit_code != 0


def is_pending(pid: int, signum: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return any(int(fields[name], 16) >> (signum - 1) & 1 for name in ("SigPnd", "ShdPnd"))


# -- reports ----------------------------------------------------------------------------------------------------------


def read_error(path: Path) -> dict[str, object]:
    document = json.loads(path.read_text())
    assert isinstance(document["message"], dict)
    return dict(document["message"])


@pytest.mark.torch
def test_a_recorded_error_is_reported_and_copied_to_the_launchers_own_file(launcher: Launcher, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    own = tmp_path / "own.json"
    flags = ["--nproc-per-node", "2", "--log-dir", "logs"]
    outcome = launcher.run(flags, ["conf_recorded.py"], timeout_s=120, TORCHELASTIC_ERROR_FILE=str(own)).check(1)
    [path] = tmp_path.glob("logs/*/attempt_0/0/error.json")
    message = read_error(path)
    assert "KeyError: 'recorded error'" in str(message["message"])
    extra = message["extraInfo"]
    assert isinstance(extra, dict)
    assert "recorded error" in str(extra["py_callstack"])
    assert int(str(extra["timestamp"])) > 0
    copied = read_error(own)
    assert "recorded error" in str(copied["message"])
    assert copied.get("errorCode") == 1
    assert "recorded error" in outcome.stderr


@pytest.mark.fault(14, "no error file unless the script is annotated with @record")
def test_an_error_needs_no_annotation(launcher: Launcher, tmp_path: Path) -> None:
    flags = ["--nproc-per-node", "2", "--log-dir", "logs"]
    launcher.run(flags, ["conf_raises.py", "1"]).check(1)
    [path] = tmp_path.glob("logs/*/attempt_0/1/error.json")
    message = read_error(path)
    assert "ValueError: the very error" in str(message["message"])
    extra = message["extraInfo"]
    assert isinstance(extra, dict)
    assert "in inner" in str(extra["py_callstack"])


@pytest.mark.fault(14, "the error file is <N/A>: the console names neither the exception nor its frames")
def test_the_console_shows_the_exception_once(launcher: Launcher) -> None:
    outcome = launcher.run(["--nproc-per-node", "2", "-r", "3"], ["conf_raises.py", "1"]).check(1)
    assert "ValueError: the very error" in outcome.stderr
    assert "inner" in outcome.stderr
    assert outcome.stderr.count("Traceback (most recent call last)") <= 1
