"""Requests of runs on holds of other adapters, and which hold a name means."""

import json
from pathlib import Path
from typing import Any

import pytest
from torchx.specs import AppState

import muster
from muster.components.dist import ddp
from muster.schedulers.errors import EngineError, OptionError, SchedulerError
from muster.schedulers.held import holds
from muster.schedulers.held.remote import HeldOptions, RemoteRequest, build_remote_request, check_remote

LOST = "its supervisor was lost"
HOLD = holds.RemoteHold(
    scheduler="local_docker",
    app_id="hold-x",
    role="hold",
    nodes=2,
    processes=1,
    version=muster.__version__,
    shares_folders=False,
    lock_path=Path("/tmp/lock"),
)


def build(options: dict[str, Any] | None = None, **app: Any) -> RemoteRequest:
    made = ddp(script="main.py", **{"j": "2x1", "env": {"MY_API_KEY": "secret", "WORD": "one"}, **app})
    known = {"log_dir": None, "auto_set_cuda_visible_devices": None, "env": {}, "detach": True, "grace_s": None}
    return build_remote_request(
        made,
        HeldOptions(**{**known, "app": None, **(options or {})}),  # type: ignore[arg-type]
        name="main-x",
        folder="/state/main-x",
        token="a-token",
        cwd="/work",
        environ={"HOME": "/root", "MUSTER_RDZV_PORT": "1"},
        draws_bars=False,
    )


def test_a_run_has_its_own_arguments_and_variables_and_the_holds_addresses() -> None:
    request = build()
    plan = request.spec.details["replicas"]["main"][1]
    command, env = plan["command"], plan["env"]
    assert command[-1] == "main.py"
    assert command[command.index("--node-rank") + 1] == "1"
    assert env["WORD"] == "one"
    assert env["MUSTER_LOG_DIR"] == "{muster-hold}/runs/main-x/log"
    assert "TORCHX_RANK0_HOST" not in env, "the hold's node knows it"
    assert "PYTHONUNBUFFERED" not in env, "it is read only at start"
    assert request.spec.details["environment"] == {"HOME": "/root"}


def test_a_dry_run_prints_no_secret() -> None:
    shown = str(build())
    assert "secret" not in json.dumps(json.loads(shown)["replicas"]["main"][0]["env"])
    assert "a-token" not in shown


@pytest.mark.parametrize(("name", "value"), [("prepend_cwd", True), ("auto_set_cuda_visible_devices", False)])
def test_options_of_this_machine_are_refused(name: str, value: bool) -> None:
    with pytest.raises(OptionError, match=f"^{name} is for holds"):
        build({name: value})


def test_what_cannot_be_the_holds_is_refused() -> None:
    request = build()
    with pytest.raises(SchedulerError, match=r"by muster 0\.0, "):
        check_remote(request, holds.RemoteHold(**{**vars(HOLD), "version": "0.0"}))
    check_remote(request, HOLD)


class Scheduler:
    """One that knows some apps by their states."""

    states: dict[str, AppState]

    def __init__(self, name: str) -> None:
        self.backend = name

    def describe_app(self, app_id: str) -> Any:
        app = ddp(script="main.py", j="2x1")
        app.roles[0].args[2:2] = ["--muster-hold", "0:60"]
        state = self.states.get(app_id)
        return None if state is None else type("Response", (), {"state": state, "roles": app.roles, "msg": LOST})

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(holds, "load_scheduler", Scheduler)
    return tmp_path


def test_a_hold_is_found_by_its_handle_its_name_or_because_it_is_the_only_one(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = {"hold-a": AppState.RUNNING, "team:hold-b": AppState.RUNNING, "hold-c": AppState.SUCCEEDED}
    monkeypatch.setattr(Scheduler, "states", states, raising=False)
    holds.add_hold(state_dir, "ssh", "hold-a")
    holds.add_hold(state_dir, "slurm", "hold-c")
    assert holds.is_remote(state_dir, None)
    assert holds.choose_hold(state_dir, None).handle == "ssh://hold-a", "the other has ended"
    assert holds.list_entries(state_dir) == [("hold-a", "ssh")], "and is forgotten"
    states["hold-a"] = AppState.UNKNOWN
    with pytest.raises(SchedulerError, match="nothing is held"):
        holds.choose_hold(state_dir, None)
    assert holds.list_entries(state_dir) == [("hold-a", "ssh")], "it may be continued"
    with pytest.raises(EngineError, match=r"^ssh://hold-a: .* lost"):
        holds.choose_hold(state_dir, "ssh://hold-a")
    states["hold-a"] = AppState.RUNNING
    assert holds.choose_hold(state_dir, "kubernetes://torchx/team:hold-b").nodes == 2, "another machine's"
    holds.add_hold(state_dir, "kubernetes", "team:hold-b")
    with pytest.raises(SchedulerError, match=r"2 holds here; .*: ssh://hold-a, kubernetes://"):
        holds.choose_hold(state_dir, None)
    assert holds.choose_hold(state_dir, "hold-b").handle == "kubernetes://team:hold-b"
    with pytest.raises(SchedulerError, match="'hold' may be"):
        holds.choose_hold(state_dir, "hold")


def test_no_hold_is_on_this_machine_until_one_is_elsewhere(state_dir: Path) -> None:
    assert not holds.is_remote(state_dir, None)
    assert not holds.is_remote(state_dir, "local_cwd://hold-x")
    assert holds.is_remote(state_dir, "docker://torchx/hold-x")
    with pytest.raises(SchedulerError, match="nothing is held"):
        holds.choose_hold(state_dir, None)
