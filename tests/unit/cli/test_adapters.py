"""The command finds schedulers by TorchX's entry points: one of another package is asked by the seam's methods."""

import json
from importlib.metadata import EntryPoint

import pytest

from muster._shared.contract import AskOutcome
from muster._shared.control import ControlError, ExitCode
from muster._shared.reports import Answer
from muster.cli import adapters, leftovers
from muster.cli.commands import main
from muster.schedulers.adapter.scheduler import Leftover, PluginScheduler

pytestmark = pytest.mark.torchx

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
        return [Leftover(name="foreign://a", what="a job", size_bytes=3, ended_s=1.0, remove=lambda: None)]


def create_foreign(session_name, **_):
    return ForeignScheduler(session_name)


def create_other(session_name, **_):
    return object()


def create_missing(session_name, **_):
    raise ModuleNotFoundError("No module named 'ray'")


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    names = ("foreign", "other", "missing")
    points = [EntryPoint(name, f"{__name__}:create_{name}", "torchx.schedulers") for name in names]
    monkeypatch.setattr(adapters, "entry_points", lambda group: points if group == "torchx.schedulers" else [])
    ASKED.clear()


def test_a_scheduler_of_another_package_is_asked(capsys):
    for command in ("stop", "checkpoint", "pause", "resume", "stacks", "delete"):
        assert main([command, "foreign://torchx/job", "--json"]) == ExitCode.DONE, capsys.readouterr()
        assert json.loads(capsys.readouterr().out)["outcome"] == "done"
    assert [(name, "job") for name in ("stop", "checkpoint", "pause", "resume", "stacks", "delete")] == ASKED
    assert main(["resize", "foreign://torchx/job", "3"]) == ExitCode.REFUSED
    assert capsys.readouterr().err == "muster: foreign jobs cannot be resized\n"
    assert main(["delete", "foreign://torchx/gone"]) == ExitCode.UNKNOWN


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("nothing", "there is no scheduler 'nothing'; there are: foreign, other, missing"),
        ("other", "'other' is not made with muster.schedulers.adapter: it cannot be asked"),
        ("missing", "scheduler 'missing' cannot be used here: No module named 'ray'"),
    ],
)
def test_a_scheduler_that_cannot_be_asked_is_one_line(name, line):
    with pytest.raises(ControlError) as caught:
        adapters.create_scheduler(name, "muster")
    assert (str(caught.value), caught.value.exit_code) == (line, ExitCode.USAGE)


def test_prune_finds_what_other_packages_left(tmp_path):
    found = leftovers.find_leftovers({"XDG_STATE_HOME": str(tmp_path), "TMPDIR": str(tmp_path)}, ended_before_s=2.0)
    assert [each.name for each in found if each.name.startswith("foreign")] == ["foreign://a"]
