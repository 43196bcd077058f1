"""Reads the versions of what the workers will load, without importing any of it. It may block."""

import os
import re
import sys
from collections.abc import Sequence
from typing import Final

_VERSION_LINE: Final = re.compile(r"^(__version__|cuda|hip)\b[^=\n]*= *'([^'\n]+)'", re.MULTILINE)
"""A line of torch/version.py."""
_NCCL: Final = re.compile(r"nvidia_nccl_cu\d+-(.+)\.dist-info")
_NAMES: Final = {"__version__": "torch", "cuda": "CUDA", "hip": "HIP"}


def read_versions(paths: Sequence[str] | None = None) -> tuple[tuple[str, str], ...]:
    """Name and version of Python, torch, its CUDA or HIP, and NCCL, as far as they are found.

    Args:
        paths: where modules are imported from. None: `sys.path`.
    """
    found = [("Python", sys.version.split()[0])]
    for path in sys.path if paths is None else paths:
        folder = path or os.getcwd()
        try:
            with open(os.path.join(folder, "torch", "version.py"), encoding="utf-8") as file:
                text = file.read(4096)
        except (OSError, ValueError):
            continue
        found += [(_NAMES[name], version) for name, version in _VERSION_LINE.findall(text)]
        found += _read_nccl(folder) if any(name == "CUDA" for name, _ in found) else []
        break
    return tuple(found)


def _read_nccl(folder: str) -> list[tuple[str, str]]:
    """Read the version of the NCCL that is installed beside torch. One that torch was built with has torch's."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return [("NCCL", match[1]) for name in names if (match := _NCCL.fullmatch(name))][:1]
