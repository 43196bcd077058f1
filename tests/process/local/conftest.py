"""local_cwd, through TorchX's interface."""

from collections.abc import Iterator

import pytest

from muster.schedulers.adapter import PluginScheduler
from muster.schedulers.local import create_scheduler


@pytest.fixture
def scheduler(state_home: None) -> Iterator[PluginScheduler]:
    made = create_scheduler("torchx")
    yield made
    made.close()
