"""Systems other than Linux: one line instead of a supervisor that nobody can watch."""

import pytest

from muster._shared import processes
from muster.schedulers import docker, local
from muster.schedulers.errors import EngineError


@pytest.mark.parametrize(
    ("factory", "name"),
    [
        (docker.create_scheduler, "local_docker"),
        (docker.create_detached_scheduler, "docker"),
        (local.create_detached_scheduler, "detached"),
    ],
)
def test_what_needs_linux_says_so_in_one_line(monkeypatch, factory, name):
    monkeypatch.setattr(processes, "LINUX", False)
    with pytest.raises(EngineError, match=f"{name} needs Linux, ") as raised:
        factory("test")
    assert isinstance(raised.value, ModuleNotFoundError)  # what `torchx runopts` prints as a line
    assert "\n" not in str(raised.value)
