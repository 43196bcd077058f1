"""How many workers `--nproc-per-node` means, and how many cores they share.

Source: torch/distributed/run.py (`determine_local_world_size`) and torch/_utils.py (`cpu_count`) of torch 2.13.
"""

import os
import sys
from collections.abc import Callable, Mapping

from muster.agent.errors import UsageError

_LIMIT_S = 120.0
"""Importing torch from a cold network file system can take most of a minute (seen)."""

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
        sys.exit("torch finds no such device on this machine")
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
        UsageError: less than 1, no such device, or torch cannot be imported.
    """
    if text == "cpu":
        return count_allowed_cores()
    try:
        number = int(text)
    except ValueError:
        number = _count_devices(text, origin=origin, env=env, python=python)
    if number < 1:
        raise UsageError(f"{origin} {text!r}: must be at least 1, or auto, cpu, gpu, xpu, or a device's name")
    return number


def _count_devices(kind: str, *, origin: str, env: Mapping[str, str], python: str) -> int:
    # A separate process: the agent must not import torch, nor hold a CUDA context until the job ends.
    import subprocess  # 5 ms: only for a count

    command = [python, "-c", _COUNT_DEVICES, kind]
    try:
        done = subprocess.run(command, env=dict(env), capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{origin} {kind!r}: cannot count the devices: {error}") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"the counting process ended with {done.returncode}"]
        raise UsageError(f"{origin} {kind!r}: {lines[-1]}; must be a number, auto, cpu, gpu, xpu, or a device's name")
    number = int(done.stdout.split()[-1])
    return count_allowed_cores() if number < 0 else number


def count_allowed_cores() -> int:
    """Count the cores this process may run on, as torchrun does for `cpu`."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def count_usable_cores(
    *, cgroup: str | os.PathLike[str] = "/sys/fs/cgroup", count_allowed: Callable[[], int] = count_allowed_cores
) -> int:
    """Count the cores the workers can use together: those allowed, or fewer where a cgroup limits CPU time (a pod).

    Reads cpu.max of cgroup v2 and the CFS quota of v1, as a container sees them at the mount's root.
    """
    allowed = count_allowed()
    quota = _read_quota(os.fspath(cgroup))
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def _read_quota(cgroup: str) -> float | None:
    words = _read_words(f"{cgroup}/cpu.max")
    if not words:
        words = _read_words(f"{cgroup}/cpu/cpu.cfs_quota_us") + _read_words(f"{cgroup}/cpu/cpu.cfs_period_us")
    try:
        quota, period = words
        cores = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None  # "max", or nothing to read
    return cores if cores > 0 else None  # v1 has -1 for no limit


def _read_words(path: str) -> list[str]:
    try:
        with open(path, encoding="ascii") as file:
            return file.read().split()
    except OSError:
        return []
