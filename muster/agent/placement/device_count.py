"""Counts the workers that `--nproc-per-node` means if it is a word.

Source: torch/distributed/run.py (`determine_local_world_size`) of torch 2.13.
"""

import sys
from collections.abc import Mapping

from muster._shared.contract import SIZE_LIMIT, describe_end, parse_digits
from muster._shared.processes import count_allowed_cores
from muster.agent.errors import UsageError

_LIMIT_S = 120.0
"""Importing torch from a cold network file system can take most of a minute, as measured."""

_COUNT_DEVICES = """
import sys
kind = sys.argv[1]
if sys.path and not sys.path[0]:
    del sys.path[0]  # the working directory, where a types.py of the user's may lie
try:
    import torch
except ImportError as error:
    if kind == "auto":
        print(-1)
        sys.exit(0)
    sys.exit(f"torch cannot be imported by {sys.executable} ({error})")
if kind == "auto":
    accelerator = getattr(torch, "accelerator", torch.cuda)
    print(accelerator.device_count() if accelerator.is_available() else -1)
else:
    name = {"gpu": "cuda"}.get(kind, kind)
    custom = torch._C._get_privateuse1_backend_name()
    if kind not in ("gpu", "xpu", custom):
        sys.exit(f"torch has no device of that name; it has gpu, xpu and {custom}")
    module = getattr(torch, name, None)
    if module is None or not module.is_available():
        name = {"gpu": "GPU"}.get(kind, kind)
        sys.exit(f"torch finds no {name} on this machine: use cpu or a number, as in -j 1xcpu")
    print(module.device_count())
"""


def count_workers(text: str, *, origin: str, env: Mapping[str, str], python: str = sys.executable) -> int:
    """Count the workers of this node.

    Args:
        text: a number, `cpu`, `gpu`, `xpu`, `auto`, or a device torch knows by name.
        origin: `--nproc-per-node` or its variable, for the error.
        env: the environment of the short-lived process that counts devices (CUDA_VISIBLE_DEVICES matters).
        python: the interpreter that has torch.

    Raises:
        UsageError: the number is out of bounds, there is no such device, or torch cannot be imported.
    """
    if text == "cpu":
        return count_allowed_cores()
    number = parse_digits(text)
    if number is None and text.isidentifier():
        number = _count_devices(text, origin=origin, env=env, python=python)
    if number is None or not 1 <= number <= SIZE_LIMIT:
        raise UsageError(f"{origin} {text!r}: must be 1 to {SIZE_LIMIT}, or auto, cpu, gpu, xpu, or a device's name")
    return number


def _count_devices(kind: str, *, origin: str, env: Mapping[str, str], python: str) -> int:
    # A separate process: the agent must not import torch or hold a CUDA context.
    import subprocess  # 5 ms

    command = [python, "-c", _COUNT_DEVICES, kind]
    try:
        done = subprocess.run(command, env=dict(env), capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{origin} {kind!r}: cannot count the devices: {error}") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"the counting process {describe_end(done.returncode)}"]
        if lines[-1].startswith("torch finds no "):
            raise UsageError(f"{origin} {kind!r}: {lines[-1]}")
        raise UsageError(f"{origin} {kind!r}: must be a number, auto, cpu, gpu, xpu, or a device's name ({lines[-1]})")
    number = int(done.stdout.split()[-1])
    return count_allowed_cores() if number < 0 else number
