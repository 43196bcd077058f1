"""The command finds schedulers by TorchX's entry points: one of another package is asked by the seam's methods."""

import json
from importlib import metadata
from importlib.metadata import EntryPoint

import pytest

from muster._shared.contract import AskOutcome
from muster._shared.control import CommandExit, ControlError
from muster._shared.reports import Answer
from muster.cli import adapters
from muster.cli import prune as prune_module
from muster.cli.commands import main
from muster.schedulers.adapter.scheduler import Leftover, PluginScheduler
from muster.schedulers.errors import EngineError

ASKED = []


class ForeignScheduler(PluginScheduler):
    """As another package would write it."""

    def __init__(self, session_name):
        super().__init__("foreign", session_name)

    def add_options(self, opts):
        pass

    def _submit_dryrun(self, app, cfg):
        raise NotImplementedError

    def schedule(self, dryrun_info):
        raise NotImplementedError

    def describe_app(self, app_id):
        return None if app_id == "gone" else app_id

    def read_facts(self, app_id):
        raise NotImplementedError

    def list_apps(self, cfg):
        return []

    def read_log(self, app_id, request):
        return []

    def _cancel_existing(self, app_id):
        raise NotImplementedError

    def delete_app(self, app_id):
        ASKED.append(("delete", app_id))

    def ask_app(self, app_id, kind, limit_s):
        ASKED.append((kind.value, app_id))
        return Answer(outcome=AskOutcome.DONE, line="done")

    def find_leftovers(self):
        return [Leftover(name="foreign://a", what="a job", size_bytes=3, ended_s=1.0, remove=self.remove)]

    def remove(self):
        ASKED.append("removed")

    def close(self):
        ASKED.append("closed")


def create_foreign(session_name, **_):
    return ForeignScheduler(session_name)


class Other:
    def close(self):
        ASKED.append("closed")


def create_other(session_name, **_):
    return Other()


def create_missing(session_name, **_):
    raise ModuleNotFoundError("No module named 'ray'")


def create_broken(session_name, **_):
    raise AttributeError("'NoneType' object has no\nattribute 'host'")


def create_refused(session_name, **_):
    raise EngineError("no controller answers at foreign.example; start one")


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    names = ("foreign", "other", "missing", "broken", "refused")
    points = [EntryPoint(name, f"{__name__}:create_{name}", "torchx.schedulers") for name in names]
    points.append(EntryPoint("local_cwd", "muster_entry:local_cwd", "torchx.schedulers"))
    monkeypatch.setattr(metadata, "entry_points", lambda group: points if group == "torchx.schedulers" else [])
    ASKED.clear()


def test_a_scheduler_of_another_package_is_asked(capsys):
    for command in ("stop", "checkpoint", "pause", "resume", "stacks", "delete"):
        assert main([command, "foreign://torchx/job", "--json"]) == CommandExit.DONE, capsys.readouterr()
        assert json.loads(capsys.readouterr().out)["outcome"] == "done"
    asked = [each for each in ASKED if each != "closed"]
    names = ("reach", "stop", "checkpoint", "pause", "resume", "stacks", "delete")
    assert asked == [(name, "job") for name in names]
    assert main(["resize", "foreign://torchx/job", "3"]) == CommandExit.REFUSED
    assert capsys.readouterr().err.startswith("muster: foreign jobs ")
    assert main(["delete", "foreign://torchx/gone"]) == CommandExit.UNKNOWN


BROKEN = "scheduler 'broken' cannot be created: AttributeError: 'NoneType' object has no attribute 'host'"


@pytest.mark.parametrize(
    ("name", "line", "code"),
    [
        (
            "nothing",
            "there is no scheduler 'nothing'; there are: foreign, other, missing, broken, refused, local_cwd",
            CommandExit.USAGE,
        ),
        (
            "other",
            "muster cannot ask scheduler 'other', which is not made with muster.schedulers.adapter; use torchx for it",
            CommandExit.USAGE,
        ),
        ("missing", "scheduler 'missing' cannot be used here: No module named 'ray'", CommandExit.USAGE),
        ("broken", BROKEN, CommandExit.LOST),
        ("refused", "no controller answers at foreign.example; start one", CommandExit.LOST),
    ],
)
def test_a_scheduler_that_cannot_be_asked_is_one_line(name, line, code, capsys):
    assert main(["stop", f"{name}://torchx/job"]) == code
    assert capsys.readouterr() == ("", f"muster: {line}\n")


def test_one_that_is_not_made_with_the_adapter_is_closed_again():
    with pytest.raises(ControlError):
        adapters.create_scheduler("other")
    assert ASKED == ["closed"]


@pytest.mark.parametrize("points", [[], [EntryPoint("foreign", f"{__name__}:create_foreign", "torchx.schedulers")]])
def test_ours_are_found_without_installed_metadata(points, monkeypatch):
    """A checkout on PYTHONPATH, `python -m muster`."""
    monkeypatch.setattr(metadata, "entry_points", lambda group: points)
    scheduler = adapters.create_scheduler("local_cwd")
    scheduler.close()
    assert scheduler.backend == "local_cwd"
    with pytest.raises(ControlError, match="local_cwd, detached, local_docker, docker, kubernetes, "):
        adapters.create_scheduler("nothing")


@pytest.fixture
def prune(tmp_path, monkeypatch, capsys, caplog):
    """Run `muster prune` with an empty home; return its code, output and errors, and what it warns of."""
    for name in ("XDG_STATE_HOME", "TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(prune_module, "_find_unpacked_agents", list)

    def run():
        caplog.clear()
        code = main(["prune", "--yes"])
        captured = capsys.readouterr()
        return code, captured.out, captured.err, [each.getMessage() for each in caplog.records if each.levelno >= 30]

    return run


WARNED = [BROKEN, "refused: no controller answers at foreign.example; start one"]


def test_prune_removes_what_other_packages_left_before_it_closes_them(prune):
    """The schedulers were closed before `remove` was called, and one whose factory fails ended the command."""
    code, out, err, warned = prune()
    assert (code, err, warned) == (0, "", WARNED)
    assert out.startswith("foreign://a"), out
    assert ASKED == ["closed", "removed", "closed"]  # the first is `other`


def test_what_other_packages_raise_does_not_end_prune(prune, monkeypatch):
    def fail(self):
        raise KeyError("host")

    monkeypatch.setattr(ForeignScheduler, "remove", fail)
    monkeypatch.setattr(ForeignScheduler, "close", fail)
    code, _, err, warned = prune()
    assert (code, "KeyError: 'host'" in err) == (1, True)
    assert warned == [*WARNED, "foreign: KeyError: 'host'"]
    monkeypatch.setattr(ForeignScheduler, "find_leftovers", fail)
    monkeypatch.setattr(ForeignScheduler, "close", lambda self: None)
    assert prune() == (0, "nothing to remove\n", "", ["foreign: KeyError: 'host'", *WARNED])
