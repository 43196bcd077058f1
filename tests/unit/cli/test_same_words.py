"""What the command lines of the components and of the agent say about the same thing is the same."""

import inspect

import pytest

from muster.agent.cli.flag_table import list_flags
from muster.components import dist


@pytest.mark.parametrize("component", [dist.ddp, dist.spmd, dist.torchrun])
def test_the_hang_timeout(component) -> None:
    flag = next(flag.text for flag in list_flags() if flag.name == "hang-timeout")
    meaning = flag[0].lower() + flag[1:].rstrip(".")
    assert f"hang_timeout: {meaning}" in " ".join((inspect.getdoc(component) or "").split())


@pytest.mark.parametrize("component", [dist.ddp, dist.spmd, dist.torchrun])
def test_help_can_be_formatted(component) -> None:
    """TorchX gives the docstrings to argparse, which expands percent signs."""
    assert "%" not in (inspect.getdoc(component) or "")
