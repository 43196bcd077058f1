"""Copies on a side stream, with a stand-in for a device: streams run when they like, but for what waits for an event.

No GPU is needed, and none has run this: it checks the order that is asked for, not that CUDA keeps it.
"""

import collections
import contextlib
import importlib
import random
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from muster.snapshots import devices
from muster.snapshots.devices import DeviceCopies

pytestmark = pytest.mark.torch
OPTIMIZER = importlib.import_module("torch.optim.optimizer")


class Name(NamedTuple):
    type: str = "standin"
    index: int = 0


class Event:
    def __init__(self, device: "Device") -> None:
        self.device, self.is_done = device, False

    def synchronize(self) -> None:
        while not self.is_done:
            self.device.run_one()


class Stream:
    """A queue: each entry says whether it may begin, and what it does."""

    def __init__(self, device: "Device") -> None:
        self.device = device
        self.queue: collections.deque[tuple[Any, Any]] = collections.deque()
        device.streams.append(self)

    def put(self, act: Any) -> None:
        self.queue.append((lambda: True, act))

    def record_event(self) -> Event:
        event = Event(self.device)
        self.put(lambda: setattr(event, "is_done", True))
        return event

    def wait_event(self, event: Event) -> None:
        self.queue.append((lambda: event.is_done, lambda: None))

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())


class Device:
    """Stands for `torch.cuda`."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.streams: list[Stream] = []
        self.current = Stream(self)

    def Stream(self) -> Stream:  # noqa: N802  # as torch names it
        return Stream(self)

    def current_stream(self, _device: Any = None) -> Stream:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Any:
        before, self.current = self.current, stream
        yield
        self.current = before

    def device(self, _device: Any) -> Any:
        return contextlib.nullcontext()

    def run_one(self) -> None:
        ready = [stream for stream in self.streams if stream.queue and stream.queue[0][0]()]
        self.draw.choice(ready).queue.popleft()[1]()


class Tensor:
    """Two halves, so that a copy can be torn."""

    is_cpu, device = False, Name()

    def __init__(self, owner: Device) -> None:
        self.owner, self.halves, self._version = owner, [0, 0], 0
        self.recorded: list[Stream] = []

    def data_ptr(self) -> int:
        return id(self)

    def record_stream(self, stream: Stream) -> None:
        self.recorded.append(stream)

    def copy_(self, source: "Tensor", *, non_blocking: bool) -> None:
        assert non_blocking
        for half in (0, 1):
            self.owner.current.put(lambda half=half: self.halves.__setitem__(half, source.halves[half]))

    def change(self, value: int) -> None:
        self._version += 1
        for half in (0, 1):
            self.owner.current.put(lambda half=half: self.halves.__setitem__(half, value))


class Optimizer:
    def __init__(self, hook: Any, params: list[Tensor], moments: list[Tensor]) -> None:
        self.hook, self.tensors = hook, params + moments
        self.param_groups = [{"params": params}]
        self.state = {number: {"m": moment, "step": 1} for number, moment in enumerate(moments)}

    def step(self, value: int) -> None:
        self.hook(self, (), {})
        for tensor in self.tensors:
            tensor.change(value)


class Job:
    """A script with one optimizer, a buffer that changes in the forward pass, and a save at each step."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.draw = random.Random(seed)
        self.device = Device(self.draw)
        hooks: list[Any] = []
        monkeypatch.setattr(torch, "standin", self.device, raising=False)
        monkeypatch.setattr(OPTIMIZER, "register_optimizer_step_pre_hook", hooks.append)
        self.copies = DeviceCopies()
        (hook,) = hooks
        tensors = [Tensor(self.device) for _ in range(4)]
        self.buffer, self.param = tensors[0], tensors[1]
        self.optimizer = Optimizer(hook, tensors[1:3], tensors[3:])
        self.sources = tensors
        self.targets = [Tensor(self.device) for _ in tensors]
        self.value = 0

    def train(self) -> None:
        self.value += 1
        self.buffer.change(self.value)
        self.run_some()
        self.optimizer.step(self.value)

    def run_some(self) -> None:
        for _ in range(self.draw.randrange(8)):
            if any(stream.queue and stream.queue[0][0]() for stream in self.device.streams):
                self.device.run_one()

    def save(self) -> tuple[int, Any]:
        return self.value, self.copies.start(self.targets, self.sources)

    def check(self, saved: tuple[int, Any]) -> bool:
        is_whole: bool = saved[1]()
        if is_whole:
            assert [target.halves for target in self.targets] == [[saved[0]] * 2] * 4
        return is_whole

    @property
    def uses_side_stream(self) -> bool:
        return len(self.device.streams) > 1


@pytest.mark.parametrize("seed", range(20))
def test_what_is_saved_is_the_state_of_its_step(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(seed, monkeypatch)
    for _ in range(6):
        job.train()
        saved = job.save()
        job.run_some()
        if job.draw.random() < 0.8:  # else the next save comes before the next step
            job.train()
            job.run_some()
        assert job.check(saved)
    assert job.uses_side_stream
    assert job.optimizer.tensors[0].recorded
    assert not job.buffer.recorded, "a buffer changes in the forward pass: it is copied in order"


def test_the_script_waits_for_no_copy_until_it_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(1, monkeypatch)
    job.train()
    job.check(job.save())
    job.train()
    job.save()
    script = job.device.streams[0]
    while script.queue:
        script.queue.popleft()[1]()
    assert job.device.streams[1].queue, "the copies are on the way"
    job.optimizer.step(9)
    assert not script.queue[0][0](), "the step waits for them"


def test_a_tensor_that_changes_without_a_step_is_noticed_and_from_then_on_all_is_in_order(monkeypatch) -> None:
    job = Job(2, monkeypatch)
    for _ in range(2):
        job.train()
        saved = job.save()
        assert job.check(saved)
    job.train()
    saved = job.save()
    job.param.change(77)
    assert not job.check(saved)
    for _ in range(3):
        job.train()
        saved = job.save()
        job.param.change(job.value + 100)
        assert job.check(saved)


def test_a_change_before_the_next_step_is_noticed_by_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(3, monkeypatch)
    job.train()
    job.check(job.save())
    job.train()
    saved = job.save()
    job.param.change(77)
    job.train()
    assert not job.check(saved)


def test_a_script_whose_optimizer_does_not_tell_of_its_steps_is_copied_in_order(monkeypatch) -> None:
    job = Job(4, monkeypatch)
    job.train()
    job.check(job.save())
    beside = len(job.param.recorded)
    for value in (50, 51):
        for tensor in job.sources:
            tensor.change(value)
        job.value = value
        saved = job.save()
        for tensor in job.sources:
            tensor.change(-1)
        assert job.check(saved)
    assert len(job.param.recorded) == beside


def test_after_a_step_was_captured_all_is_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(5, monkeypatch)
    for _ in range(2):
        job.train()
        assert job.check(job.save())
    job.train()
    saved = job.save()
    cuda = SimpleNamespace(is_available=lambda: True, is_current_stream_capturing=lambda: True)
    monkeypatch.setattr(torch, "cuda", cuda)
    job.train()
    assert not job.check(saved), "nothing could wait for it"
    assert not job.copies._is_trusted
    job.train()
    assert job.check(job.save())


def test_torch_calls_the_hook_before_each_step_of_any_optimizer() -> None:
    """Without a stand-in: what the rest of this file takes for granted."""
    copies = DeviceCopies()
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=0.1)
    param.grad = torch.ones(2)
    before = param._version
    optimizer.step()
    assert copies._has_stepped
    assert copies._list_guarded() == {param.data_ptr()}
    assert param.detach()._version > before
    assert devices._Side(Name(), None, [param.detach()]).is_torn is False
    OPTIMIZER._global_optimizer_pre_hooks.clear()
