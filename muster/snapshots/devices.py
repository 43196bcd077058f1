"""Copies from devices into a slot.

They are enqueued on a side stream and run while the script's next step computes. No tensor may change before its copy
is done, and only the script knows what it changes next. What an optimizer has (its parameters and its state) changes in
its `step`: a hook before each step makes the script's stream wait for the copies. Everything else, such as buffers and
averages of weights, is copied on the script's own stream, in order with all that the script does.

If an optimizer's tensors change otherwise, their version counters show it. Then that save is left out, and the later
ones are enqueued on the script's own stream. So are all saves before which the optimizer has not called the hook since
the previous one. A step that is captured in a CUDA graph does not call it at a replay. After such a step, too, all is
copied on the script's own stream.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any


class _Side:
    """Copies that were enqueued on a side stream, of one device."""

    def __init__(self, device: Any, event: Any, sources: Sequence[Any]) -> None:
        self.device = device
        self.event = event
        self._versions = [(source, source._version) for source in sources]  # noqa: SLF001  # public in all but name
        self.is_ordered = False
        """The next step waits for them."""
        self.is_torn = False
        """Tensors have changed before anything waited for their copies."""

    def check(self) -> None:
        """Look whether tensors have changed since."""
        self.is_torn = self.is_torn or any(one._version != version for one, version in self._versions)  # noqa: SLF001


class DeviceCopies:
    """The copies of one process. Those of one save are done before those of the next begin."""

    def __init__(self) -> None:
        """Ask torch to report each step of any optimizer."""
        import torch
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self._lock = threading.Lock()
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._has_stepped = False
        self._is_trusted = True
        self._streams: dict[Any, Any] = {}
        self._sides: list[_Side] = []
        disable: Any = torch.compiler.disable  # a compiled step calls it each time
        register_optimizer_step_pre_hook(disable(self._before_step))

    def start(self, targets: Sequence[Any], sources: Sequence[Any]) -> Callable[[], bool]:
        """Enqueue the copies.

        Returns:
            A function that waits until all are done. It returns False if a tensor has changed: then what was copied is
                useless.
        """
        guarded = self._list_guarded() if self._is_trusted and self._has_stepped else set()
        self._has_stepped = False
        devices: dict[Any, tuple[list[Any], list[Any]]] = {}
        for target, source in zip(targets, sources, strict=True):
            if source.is_cpu:
                target.copy_(source)
            else:
                pairs = devices.setdefault(source.device, ([], []))
                pairs[source.data_ptr() in guarded].append((target, source))
        events = [self._start_on(device, *pairs) for device, pairs in devices.items()]

        def wait() -> bool:
            for event in events:
                event.synchronize()
            with self._lock:
                sides, self._sides = self._sides, []
                for side in sides:
                    if not side.is_ordered:
                        side.check()
            self._is_trusted = self._is_trusted and not any(side.is_torn for side in sides)
            return not any(side.is_torn for side in sides)

        return wait

    def _start_on(self, device: Any, in_order: Sequence[Any], beside: Sequence[Any]) -> Any:
        """Enqueue the copies from one device, and an event behind all of them."""
        import torch

        module = getattr(torch, device.type)
        with module.device(device):
            current = module.current_stream()
            for target, source in in_order:
                target.copy_(source, non_blocking=True)
            if not beside:
                return current.record_event()
            stream = self._streams[device] = self._streams.get(device) or module.Stream()
            stream.wait_stream(current)
            with module.stream(stream):
                for target, source in beside:
                    target.copy_(source, non_blocking=True)
                    source.record_stream(stream)  # keeps its memory from reuse before
            event = stream.record_event()
        with self._lock:
            self._sides.append(_Side(device, event, [source for _, source in beside]))
        return event

    def _list_guarded(self) -> set[int]:
        """Return the addresses of the tensors that change in an optimizer's step alone."""
        found: set[int] = set()
        for optimizer in self._optimizers:
            values = [one for group in optimizer.param_groups for one in group["params"]]
            for state in optimizer.state.values():
                values += state.values()
            local = (one.to_local() if hasattr(one, "device_mesh") else one for one in values)
            found.update(one.data_ptr() for one in local if hasattr(one, "data_ptr"))
        return found

    def _before_step(self, optimizer: Any, _args: object, _kwargs: object) -> None:
        self._optimizers.add(optimizer)
        self._has_stepped = True
        import torch

        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self._is_trusted = False
        with self._lock:
            for side in self._sides:
                if side.is_ordered:
                    continue
                side.check()
                side.is_ordered = True
                if self._is_trusted:
                    getattr(torch, side.device.type).current_stream(side.device).wait_event(side.event)
                else:
                    side.is_torn = True  # no waiting while a graph is captured


class Pin:
    """Memory that CUDA may write to without a copy of its own in between. `release` releases it."""

    def __init__(self, memory: Any) -> None:
        """Pin a tensor of bytes. Where CUDA refuses, copies are slower and correct."""
        import torch

        self._memory = memory
        self.is_pinned = False
        if torch.cuda.is_available():
            result = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
            self.is_pinned = int(result) == 0

    def release(self) -> None:
        """Unpin the memory, before it is unmapped."""
        import torch

        if self.is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
            self.is_pinned = False
