"""What the driver of processes passes to a replica."""

import os
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest

from muster._shared.contract import Env
from muster.schedulers.processes.driver import Launch, ProcessDriver
from muster.schedulers.supervision.app_folder import AppSpec
from muster.schedulers.supervision.driver import StartError
from muster.schedulers.supervision.state import ReplicaId, SupervisedRole


@pytest.mark.parametrize("runs_agent", [True, False])
def test_an_agent_is_told_how_often_it_was_started_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs_agent: bool
) -> None:
    launches: list[Launch] = []

    def refuse(launch: Launch, *_: int) -> int:
        launches.append(launch)
        raise OSError("no process is started here")

    monkeypatch.setattr("muster.schedulers.processes.driver.spawn", refuse)
    driver = build_driver(tmp_path, runs_agent=runs_agent)
    for others in ({}, {ReplicaId("r", 1): Mock()}):  # no incarnation for a node that comes back alone
        driver._running = others
        for start_number in (1, 2, 3):
            with pytest.raises(StartError):
                driver.start(ReplicaId("r", 0), start_number)
    driver.close(succeeded=True)
    told = [launch.env.get(Env.INCARNATION) for launch in launches]
    lines = [launch.env.get(Env.JOB_INCARNATION) for launch in launches]
    assert told == [None] * 4 + (["1", "2"] if runs_agent else [None] * 2)
    assert lines == [None, *(["2", "3"] if runs_agent else [None] * 2), *[None] * 3]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The signals that replicas get."""
    made: list[int] = []
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda _, number: made.append(number))
    return made


@pytest.mark.parametrize(("runs_agent", "signum"), [(True, signal.SIGINT), (False, signal.SIGTERM)])
def test_a_ctrl_c_reaches_agents_as_sigint(tmp_path: Path, sent: list[int], runs_agent: bool, signum: int) -> None:
    """A shell that gets SIGINT alone would wait for the end of its child."""
    driver, replica = build_driver(tmp_path, runs_agent=runs_agent), ReplicaId("r", 0)
    driver._running = {replica: Mock(pidfd=7, pid=os.getpid())}
    old = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        driver.stop(replica)
        driver.stop(replica, is_interrupt=True)
    finally:
        signal.signal(signal.SIGTERM, old)
    driver.close(succeeded=False)
    assert sent == [signal.SIGTERM, signal.SIGCONT, signum, signal.SIGCONT]


def test_an_agent_that_is_just_starting_gets_sigterm(tmp_path: Path, sent: list[int]) -> None:
    """Python's start lost SIGINT, and the job took the whole grace period to end."""
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "as in a Python that starts"
    driver, replica = build_driver(tmp_path, runs_agent=True), ReplicaId("r", 0)
    driver._running = {replica: Mock(pidfd=7, pid=os.getpid())}
    driver.stop(replica, is_interrupt=True)
    driver._running = {}
    driver.stop(replica, is_interrupt=True)
    driver.close(succeeded=False)
    assert sent == [signal.SIGTERM, signal.SIGCONT], "one that has ended gets nothing"


def test_a_log_that_cannot_be_written_is_a_start_that_failed(tmp_path: Path) -> None:
    """It ended the supervisor, each time that a command started it again."""
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "0").touch()
    driver = build_driver(tmp_path, runs_agent=False)
    with pytest.raises(StartError, match=rf"^{tmp_path}/r/0: File exists$"):
        driver.start(ReplicaId("r", 0), 2)
    driver.close(succeeded=False)


def build_driver(tmp_path: Path, *, runs_agent: bool) -> ProcessDriver:
    plan = {"command": ["true"], "env": {}, "cwd": str(tmp_path), "runs_agent": runs_agent}
    spec = AppSpec(
        app_id="app",
        scheduler="local_cwd",
        folder=str(tmp_path),
        driver="",
        roles=(SupervisedRole(name="r", replicas=2, runs_agent=runs_agent),),
        grace_s=1.0,
        details={"replicas": {"r": [plan, plan]}, "base_env": {}, "token": "secret"},
    )
    return ProcessDriver(spec=spec, event_queue=Mock(now_s=lambda: 0.0))
