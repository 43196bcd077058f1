"""Sees when files below a folder are written, and says whether their content is the same.

The kernel reports the first byte (inotify). For a file of torch.save the tensors count, not its bytes. The bytes also
hold how objects share their memory, which differs after a resume. The tensors need not be equal bit by bit. The first
step of DDP after a start adds gradients in another order than later ones, which shows from three ranks on.
"""

import contextlib
import ctypes
import hashlib
import math
import os
import shutil
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from muster._shared import processes
from muster.schedulers.supervision.file_watch import Watch

_IS_FOLDER = 0x40000000
_HEAD: Final = struct.Struct("iIII")
_RELATIVE: Final = 1e-5
"""Numbers that differ by less, in relation to their size, are equal. For a tensor, the size of its largest counts."""
_NOT_SAVES: Final = (".log", ".jsonl", ".csv", ".txt", ".pyc", ".html", ".out", ".err")
"""Ends of names that hold what is written at each step."""


class Saves(Watch):
    """The saves below one folder. Close it.

    Raises:
        OSError: the system has no inotify, or no instance is left.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        if not self.is_active:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        self._folders: dict[int, Path] = {}
        self._add_all(folder)

    def wait_written(self, limit_s: float) -> None:
        """Return when something was written that `look` has not seen, or after the limit."""
        processes.wait_readable(self._fd, limit_s)

    def look(self) -> bool:
        """Return whether something that may be a checkpoint has been written since the last look."""
        is_saved = False
        for folder, mask, name in self._read():
            if mask & _IS_FOLDER:
                self._add_all(folder / name)  # the next write or rename shows earlier content
                continue
            is_saved = is_saved or not (name.endswith(_NOT_SAVES) or "tfevents" in name or "__pycache__" in str(folder))
        return is_saved

    def _read(self) -> Iterator[tuple[Path, int, str]]:
        content = os.read(self._fd, 1 << 16) if processes.wait_readable(self._fd, 0.0) else b""
        at = 0
        while at < len(content):
            watch, mask, _, length = _HEAD.unpack_from(content, at)
            name = content[at + _HEAD.size : at + _HEAD.size + length].rstrip(b"\0").decode(errors="surrogateescape")
            at += _HEAD.size + length
            if watch in self._folders and name:
                yield self._folders[watch], mask, name

    def _add_all(self, folder: Path) -> None:
        folders = [folder]
        while folders:  # `rglob` has a limit of depth
            path = folders.pop()
            with contextlib.suppress(OSError):
                folders += [Path(each.path) for each in os.scandir(path) if each.is_dir(follow_symlinks=False)]
            self._folders[self._add(path)] = path


def list_files(folder: Path, patterns: Sequence[str]) -> list[str]:
    """List the files below a folder that match one of the patterns, by their names below it."""
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return sorted(str(path.relative_to(folder)) for path in found)


class Kept:
    """The compared files of the first run, so that those of later runs can be held against them."""

    def __init__(self, folder: Path) -> None:
        """Keep them in a folder, which must not exist."""
        self._folder = folder

    def read(self, work: Path, patterns: Sequence[str]) -> dict[str, str]:
        """Return a digest of each file below a run's folder that matches a pattern, by name.

        The digest of a file that is equal to that of the first run is the same. The first run's files are moved away.
        """
        found = {name: compute_digest(work / name) for name in list_files(work, patterns)}
        if not self._folder.exists():
            for name in found:
                (self._folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.move(work / name, self._folder / name)
            return found
        for name, digest in found.items():
            first = self._folder / name
            if first.is_file() and (other := compute_digest(first)) != digest and is_close(first, work / name):
                found[name] = other
        return found


def compute_digest(path: Path) -> str:
    """Compute what is equal for files with the same bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def is_close(one: Path, other: Path) -> bool:
    """Return whether two files of torch.save or safetensors hold the same, but for how numbers were rounded."""
    try:
        return _is_same(_load(one), _load(other))
    except Exception:  # noqa: BLE001  # not such a file, without torch, or what is no tensor and no plain value
        return False


def is_equal(one: float, other: float) -> bool:
    """Return whether two numbers are the same, but for how they were rounded."""
    return (math.isnan(one) and math.isnan(other)) or math.isclose(one, other, rel_tol=_RELATIVE, abs_tol=1e-12)


def _load(path: Path) -> Any:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    import torch

    return torch.load(path, map_location="cpu", weights_only=True)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return is_equal(one, other)
    return _is_same_tensor(one, other) if hasattr(one, "data_ptr") else bool(one == other)


def _is_same_tensor(one: Any, other: Any) -> bool:
    import torch

    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return bool(torch.equal(one, other))
    relative = max(_RELATIVE, torch.finfo(one.dtype).eps)
    one, other = one.double(), other.double()
    differ = ~((one == other) | (one.isnan() & other.isnan()))
    most = one[one.isfinite()].abs().amax() if differ.any() else 0.0
    return bool(((one - other)[differ].abs() <= relative * most).all())
