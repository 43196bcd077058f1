"""What other components import of TorchX's module `dist`, and that TorchX takes none of it for a component."""

from typing import Any

import pytest
import torchx.components.dist as theirs
from torchx.specs import finder

from muster.components import dist as ours


@pytest.mark.torchx
@pytest.mark.parametrize("j", ["4", "2x4", "1:2x4", "2:2x1"])
def test_parse_nnodes_is_torchxs(j: str) -> None:
    assert ours.parse_nnodes(j) == theirs.parse_nnodes(j)


@pytest.mark.parametrize("j", ["x", "2x", "2xgpu", "0", "4:2x8", ""])
def test_parse_nnodes_refuses_what_is_no_number_of_processes(j: str) -> None:
    with pytest.raises(ValueError, match="for example: -j"):
        ours.parse_nnodes(j)


@pytest.mark.torchx
@pytest.mark.parametrize("names", [("a/train.py", None), (None, "pkg.train"), ("train.py", "pkg.other"), ("", "m")])
def test_get_role_name_is_torchxs(names: tuple[str | None, str | None]) -> None:
    assert ours.get_role_name(*names) == theirs.get_role_name(*names)
    assert ours.get_role_name(script=names[0], m=names[1]) == theirs.get_role_name(script=names[0], m=names[1])


@pytest.mark.parametrize("names", [(None, None), ("", "")])
def test_get_role_name_needs_a_program(names: Any) -> None:
    for function in (ours.get_role_name, theirs.get_role_name):
        with pytest.raises(ValueError, match=r"--script and -m|compute role_name"):
            function(*names)


@pytest.mark.torchx
def test_torchx_finds_components_only() -> None:
    found = finder.ModuleComponentsFinder(ours, "dist")._get_components_from_module
    components = found(ours) if found.__code__.co_argcount == 2 else found(ours, None)
    assert [each.name for each in components] == ["dist.ddp", "dist.spmd", "dist.torchrun"]
    assert [each.validation_errors for each in components] == [[], [], []]
