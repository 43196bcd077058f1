"""What the file system refuses or has lost is one line of the command, with the file or the folder."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from docker_samples import build_facts

from muster.schedulers.docker import create_scheduler
from muster.schedulers.docker.engine import ContainerFacts
from muster.schedulers.docker.running_apps import orphaned_apps
from muster.schedulers.docker.running_apps.creation import PackedWorkspaces
from muster.schedulers.docker.sdk import EngineUnavailable
from muster.schedulers.docker.spec import Label
from muster.schedulers.errors import EngineError, describe_os_error
from muster.schedulers.supervision.app_folder import AppFolder, AppSpec
from muster.schedulers.supervision.registry import AppRegistry


def make_error(code: int, *name: str) -> OSError:
    return OSError(code, os.strerror(code), *name)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (make_error(errno.ENOSPC), "/folder: No space left on device"),
        (make_error(errno.ENOSPC, "/file"), "/file: No space left on device"),
        (make_error(errno.EACCES, "/file"), "/file: Permission denied"),
        (make_error(errno.EMFILE), "Too many open files"),
    ],
)
def test_an_error_names_the_file_or_the_full_folder(error, line):
    assert describe_os_error(error, "/folder") == line


def test_a_full_disk_under_a_packed_workspace_is_one_line(monkeypatch, tmp_path):
    def fail(*_):
        raise make_error(errno.ENOSPC)

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(PackedWorkspaces, "pack", fail)
    scheduler = create_scheduler("torchx")
    try:
        with pytest.raises(EngineError, match=rf"^{tmp_path}/muster: No space left on device$"):
            scheduler.build_workspace_and_update_role(None, f"file://{tmp_path}", {})
    finally:
        scheduler.close()


def test_a_mark_of_a_submission_is_whole_before_it_has_its_name(monkeypatch, tmp_path):
    """A command that was killed in between left an empty one, which nothing removed."""

    def kill(*_):
        raise KeyboardInterrupt

    address = {"DOCKER_HOST": "unix:///x"}
    with monkeypatch.context() as patched:
        patched.setattr(orphaned_apps.json, "dump", kill)
        with pytest.raises(KeyboardInterrupt):
            orphaned_apps.mark_submission(tmp_path, "app", address).__enter__()
    assert orphaned_apps.list_submitting(tmp_path) == set()
    with orphaned_apps.mark_submission(tmp_path, "app", address) as mark:
        assert orphaned_apps.find_killed(tmp_path) == []
        with pytest.raises(FileExistsError):
            orphaned_apps.mark_submission(tmp_path, "app", address).__enter__()
    [killed] = orphaned_apps.find_killed(tmp_path)
    assert (killed.path, killed.address, [*tmp_path.iterdir()]) == (mark, address, [mark.parent])


def test_of_a_replica_that_was_started_again_the_newest_container_counts():
    """`torchx list` said FAILED of an app whose state folder is gone, and `torchx status` SUCCEEDED."""

    def make(incarnation: int, exit_code: int) -> ContainerFacts:
        labels = {Label.ROLE: "w", Label.REPLICA: "0", Label.INCARNATION: str(incarnation)}
        return build_facts(exit_code=exit_code, labels=labels)

    assert orphaned_apps.find_app_state([make(0, 1), make(1, 0)]).name == "SUCCEEDED"
    assert orphaned_apps.find_app_state([make(0, 0), make(1, 1)]).name == "FAILED"


def test_a_damaged_app_and_one_that_is_just_deleted_hide_no_other(monkeypatch, tmp_path):
    def fail(_engine):
        raise EngineUnavailable("no engine")

    def iterate(registry: AppRegistry) -> Iterator[str]:
        return iter(("damaged", "deleted", "new"))

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(orphaned_apps, "list_apps", fail)
    monkeypatch.setattr(AppRegistry, "__iter__", iterate)
    for name in ("damaged", "new"):
        spec = AppSpec(app_id=name, scheduler="docker", folder=str(tmp_path / name), driver="d", roles=(), grace_s=1.0)
        AppFolder(spec.folder).create(spec)
        AppRegistry(tmp_path / "muster", "docker").add(name, Path(spec.folder))
    AppFolder(tmp_path / "damaged").state_file.write_text("{}")
    scheduler = create_scheduler("torchx")
    try:
        found = {app.app_id: app.state.name for app in scheduler.list()}
    finally:
        scheduler.close()
    assert found == {"damaged": "UNKNOWN", "new": "SUBMITTED"}
