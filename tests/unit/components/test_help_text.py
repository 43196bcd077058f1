"""`muster run dist.ddp --help` and `--help-all`, and the order of what `torchx run dist.ddp --help` prints."""

import inspect
import re

import pytest

from muster.components import dist
from muster.components.help_text import COMMON, format_help

HELP_LINES = 40
COMPONENTS = [dist.ddp, dist.torchrun, dist.spmd]


def list_parameters(component) -> list[str]:
    """Those that have a flag: all but the arguments of the script."""
    return list(inspect.signature(component).parameters)[1:]


def list_flags(text: str) -> list[str]:
    return re.findall(r"^  --?(\w+)", text, re.MULTILINE)


@pytest.mark.parametrize("component", COMPONENTS)
def test_the_short_help_has_the_parameters_that_people_use(component, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = format_help(component, {}, shows_all=False).splitlines()
    assert len(lines) <= HELP_LINES
    assert list_flags("\n".join(lines)) == [name for name in COMMON if name in list_parameters(component)]
    assert f"muster run dist.{component.__name__} --help-all" in lines[-1]


@pytest.mark.parametrize("component", COMPONENTS)
def test_the_whole_help_has_every_parameter(component) -> None:
    text = format_help(component, {}, shows_all=True)
    assert sorted(list_flags(text)) == sorted(list_parameters(component))
    snapshots = text.partition("\nfeature snapshots:\n")[2].partition("\n\n")[0]
    assert list_flags(snapshots) == ["snapshot_memory", "snapshot_copies"]


@pytest.mark.parametrize("component", COMPONENTS)
def test_the_parameters_that_people_use_come_first_for_torchx(component) -> None:
    names = list_parameters(component)
    common = [name for name in COMMON if name in names]
    assert names[: len(common)] == common


def test_defaults_are_those_of_the_configuration_file() -> None:
    text = format_help(dist.ddp, {"j": "4x8"}, shows_all=False)
    assert "[4x8]" in text
    assert "[1x2]" not in text
