"""Each test has a home of its own."""

import pytest


@pytest.fixture(autouse=True)
def _own_home(state_home):
    pass
