"""What runs in a node of an app, by an `srun` that runs it here: the Python of `muster exec`, and what asks agents."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torchx.specs import AppState

from muster._shared.contract import AskKind
from muster._shared.control import ControlError
from muster.schedulers.slurm import create_scheduler
from muster.schedulers.supervision.state import ReplicaId

LOST = """\
#!/bin/sh
echo "$@" >> "$(dirname "$0")/words"
case "$*" in *--nodelist=n1\\ *) echo 'srun: error: Application launch failed' >&2; exit 233;; esac
echo '{"format": 1, "outcome": "done", "line": "it is here"}'
"""
SRUN = """\
#!/bin/sh
echo "$@" > "$(dirname "$0")/words"
while [ "${1#-}" != "$1" ]; do shift; done
exec "$@"
"""


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What `srun` was called with."""
    srun = tmp_path / "srun"
    srun.write_text(SRUN)
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path / "words"


@pytest.fixture
def scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its app has node 1 on host n2 only."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made = create_scheduler("test")
    running = {ReplicaId("trainer", 1): "n2"}
    plans = {"trainer": [{"command": [sys.executable, "-m", "muster.agent"]}] * 2}
    app = SimpleNamespace(
        entry=SimpleNamespace(job_id="7"),
        find_running=lambda role: running,
        spec=SimpleNamespace(details={"replicas": plans}),
        nodes={},
    )
    monkeypatch.setattr(made, "_open_app", lambda app_id: app)
    yield made
    made.close()


def test_a_command_runs_on_the_host_of_the_node(scheduler: Any, words: Path) -> None:
    pipe = scheduler.open_in_node("app", "trainer", 1, ["-c", "print('done')"])
    with open(pipe.stdout, "rb", closefd=False) as output:
        assert output.read() == b"done\n"
    assert pipe.end() == ""
    told = words.read_text().split()
    assert "--overlap" in told
    assert any(word.endswith("n2") for word in told), told
    assert any(word.endswith("7") for word in told), told


def test_a_node_that_does_not_run_is_one_line(scheduler: Any) -> None:
    with pytest.raises(ControlError, match="node 0 of trainer"):
        scheduler.open_in_node("app", "trainer", 0, [])


ANSWER_OF_NO_OTHER = [("n2", "it is here"), ("n1", "trainer/0 cannot be asked: srun: error: Application launch failed")]


@pytest.mark.parametrize(("second", "line"), ANSWER_OF_NO_OTHER)
def test_where_srun_does_not_reach_a_node_another_one_is_asked(
    scheduler: Any, words: Path, second: str, line: str
) -> None:
    """Slurm notices a lost node late, and its record says for ever that it runs."""
    words.with_name("srun").write_text(LOST)
    nodes = {ReplicaId("trainer", index): node for index, node in enumerate(["n1", second])}
    plan = {"command": ["python3", "-m", "muster.agent"], "env": {}}
    details = {"token": "secret", "replicas": {"trainer": [plan, plan]}}
    role = SimpleNamespace(name="trainer", runs_agent=True)
    app = SimpleNamespace(
        state=AppState.RUNNING,
        entry=SimpleNamespace(job_id="7"),
        find_running=lambda role: nodes,
        spec=SimpleNamespace(app_id="app", roles=[role], details=details),
    )
    scheduler._open_app = lambda app_id: app
    answer = scheduler.ask_app("app", AskKind.STACKS, 30.0)
    assert answer.line == line
    assert len(words.read_text().splitlines()) == 2
