"""What forbids a fork of the program."""

import sys
from types import ModuleType

import pytest

from muster.agent.errors import UsageError
from muster.elastic.fork import hazards
from muster.elastic.fork.hazards import check_hazards


class Torch(ModuleType):
    """A torch with devices; those of `initialised` are in use."""

    def __init__(self, *initialised: str) -> None:
        super().__init__("torch")
        for name in ("cuda", "xpu"):
            device = ModuleType(f"torch.{name}")
            device.is_initialized = lambda name=name: name in initialised  # type: ignore[attr-defined]
            setattr(self, name, device)


@pytest.mark.parametrize(("module", "name"), [("cuda", "CUDA"), ("xpu", "XPU")])
def test_a_device_in_use(module: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", Torch(module))
    with pytest.raises(UsageError) as raised:
        check_hazards()
    line = str(raised.value)
    assert f"fork': {name} is initialised" in line, line
    assert line.endswith("or use start_method='spawn'"), line
    assert "\n" not in line


def test_devices_that_are_not_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setitem(sys.modules, "torch", Torch())
    check_hazards()
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))  # one that was built without them
    check_hazards()
    monkeypatch.delitem(sys.modules, "torch")
    check_hazards()


def test_thread_pools_that_cannot_be_ended_are_said_once(monkeypatch, capsys) -> None:
    monkeypatch.setattr(hazards, "end_thread_pools", lambda: False)
    assert hazards.prepare_call(int, (), {}, 4).torch_threads == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("muster: torch's thread ")
    assert printed.err.count("\n") == 1
    monkeypatch.setattr(hazards, "end_thread_pools", lambda: True)
    assert hazards.prepare_call(int, (), {}, 4).torch_threads is None
    assert capsys.readouterr().err == ""


def test_another_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UsageError, match=r"^start_method='fork' .* darwin; .* 'spawn'$"):
        check_hazards()
