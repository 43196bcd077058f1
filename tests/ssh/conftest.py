"""The hosts that all tests of ssh share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import skip_or_fail
from sshd_world import SshWorld, find_reason

from muster.schedulers.ssh import create_scheduler


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshWorld]:
    """Four hosts, in a folder whose name has a space and quotes."""
    reason = find_reason()
    if reason is not None:
        skip_or_fail("ssh", reason)
    made = SshWorld(tmp_path_factory.mktemp("ssh") / "the 'hosts'")
    yield made
    made.close()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """The folder for run folders on the hosts, which are one machine."""
    folder = tmp_path / "it's on the host"
    folder.mkdir()
    return folder


@pytest.fixture
def scheduler(tmp_path, monkeypatch):
    """Made as TorchX does; its apps are deleted."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made = create_scheduler("test")
    yield made
    for each in made.list({}):
        made.delete(each.app_id)
    made.close()
