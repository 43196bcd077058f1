"""What the command lines of the components and of the agent say about the same thing is the same."""

import inspect

import pytest

from muster.agent.features import FLAG_OWNERS
from muster.components import dist
from muster.components.flags import FLAGS


def test_a_parameter_belongs_to_the_feature_of_its_flag() -> None:
    assert {flag.name.replace("_", "-"): flag.feature for flag in FLAGS if flag.feature} == dict(FLAG_OWNERS)


@pytest.mark.parametrize("component", [dist.ddp, dist.spmd, dist.torchrun])
def test_help_can_be_formatted(component) -> None:
    """TorchX gives the docstrings to argparse, which expands percent signs."""
    assert "%" not in (inspect.getdoc(component) or "")
