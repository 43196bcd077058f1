"""DDP's buckets: those of the first step as those of all others, so that a restart sums gradients in the same order.

DDP sums the gradients of one bucket together. It puts them into first buckets when a model is wrapped, and into final
ones after the first backward, in the order in which that backward has made them. Without this module the first step
after each restart has the first buckets, where a job without a restart has the final ones. From three ranks on the sums
then differ in their last bits.
"""

import contextlib
import random
import sys
from collections.abc import Callable, Iterator

import torch
from torch.nn.parallel import DistributedDataParallel

_BACKWARDS = 2
"""With `static_graph` the first one sums nothing."""


def rebuild(model: DistributedDataParallel, compute_loss: Callable[[], torch.Tensor]) -> None:
    """See `muster.snapshots.rebuild_buckets`."""
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(f"rebuild_buckets: {type(model).__name__} is not a DistributedDataParallel")
    if any(parameter.grad is not None for parameter in model.parameters()):
        raise ValueError("rebuild_buckets: the model has gradients already; call it before the first backward")
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    with _keep_random_states(model):
        for _ in range(_BACKWARDS):
            (compute_loss() * 0).backward()
    for parameter in model.parameters():
        parameter.grad = None
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)


@contextlib.contextmanager
def _keep_random_states(model: DistributedDataParallel) -> Iterator[None]:
    """Give all generators that a model may use the state back that they have now."""
    numpy = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), None if numpy is None else numpy.random.get_state()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))  # the CPU's
        for device in {parameter.device for parameter in model.parameters()}:
            if device.type != "cpu":
                stack.enter_context(torch.random.fork_rng(devices=[device], device_type=device.type))
        yield
    random.setstate(python_state)
    if numpy is not None:
        numpy.random.set_state(numpy_state)
