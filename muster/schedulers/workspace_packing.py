"""Packs the user's folder, the workspace, as one tar.gz.

Deterministic: the same files give the same bytes, so that adapters can name it by its hash. Standard library only.

What travels is decided by `.torchxignore`, by TorchX's rules, and by `LEFT_OUT`: names that hold history or credentials
stay here unless a line of `.torchxignore` such as `!.env` sends them.
"""

import fnmatch
import gzip
import hashlib
import io
import logging
import os
import posixpath
import shutil
import stat
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

IGNORE_FILE: Final = ".torchxignore"
DOCKERFILE: Final = "Dockerfile.torchx"

LEFT_OUT: Final = (
    *(".git", ".env", ".env.*", "!.env.example", "!.env.sample", "!.env.template", ".netrc", "id_*", "*.pem"),
    *(".git-credentials", ".npmrc", ".pypirc", ".pgpass"),
    *(".aws/credentials", ".kube/config", ".docker/config.json"),
)
"""Names, at any depth, that do not travel by default. The last pattern that matches decides, as in `.torchxignore`.

`id_*` means the keys of SSH (`id_rsa`, `id_ed25519`, `id_rsa.pub`): with any other suffix (`id_map.json`) a name
travels, and so does a folder. A pattern with a slash names a file and the folder it is in.
"""

_NAMED_LIMIT: Final = 5
"""Names in the line about what was left out."""

_SHOWN_LINKS: Final = 5

logger = logging.getLogger(__name__)


class BundleError(ValueError):
    """A file of the workspace cannot be packed; the message names it and says why."""


def build_workspace_bundle(path: str) -> bytes:
    """Packs a folder in memory; see `write_workspace_bundle`."""
    buffer = io.BytesIO()
    write_workspace_bundle(path, buffer)
    return buffer.getvalue()


def write_workspace_bundle(path: str, out: BinaryIO) -> str:
    """Packs a folder without what its `.torchxignore` names, piece by piece: its size does not matter.

    Symbolic links stay links, but a relative one that leaves the folder would point to something else on the node, and
    an engine refuses it: it is left out, and a warning names it. Permission bits and modification times are kept
    (Python trusts a stale `.pyc` when size and time agree, so times must not be changed), owners are not. Sockets,
    pipes and devices are left out.

    Args:
        path: the folder; must exist.
        out: gets a tar.gz whose names are relative to `path`. The same tree gives the same bytes.

    Returns:
        The SHA-256 of what was written, in hexadecimal digits.

    Raises:
        BundleError: the folder does not exist or something in it cannot be read.
    """
    root = Path(path)
    if not root.is_dir():
        raise BundleError(f"workspace {path!r} is not a folder")
    left_out: list[str] = []
    hashed = _HashedFile(out)
    with (
        gzip.GzipFile(fileobj=hashed, mode="wb", filename="", mtime=0, compresslevel=6) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as bundle,
    ):
        for relative in walk_workspace(root):
            if leaves_workspace(root, relative):
                left_out.append(f"{relative} -> {os.readlink(root / relative)}")
            else:
                _add(bundle, root, relative)
    if left_out:
        shown = ", ".join(left_out[:_SHOWN_LINKS]) + (", ..." if len(left_out) > _SHOWN_LINKS else "")
        text = "workspace %s: %d symbolic links that leave it are not carried (%s); copy their targets or mount them"
        logger.warning(text, path, len(left_out), shown)
    return hashed.hexdigest()


def leaves_workspace(root: Path, relative: str) -> bool:
    """Whether a file is a relative symbolic link to something outside the folder. Absolute ones stay as they are."""
    source = root / relative
    if not source.is_symlink():
        return False
    target = os.readlink(source)
    if posixpath.isabs(target):
        return False
    return posixpath.normpath(posixpath.join(posixpath.dirname(relative), target)).split("/")[0] == ".."


class _HashedFile(io.RawIOBase):
    """Passes on what is written to it, and computes its hash."""

    def __init__(self, out: BinaryIO) -> None:
        super().__init__()
        self._out = out
        self._hash = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._hash.update(data)
        return self._out.write(data)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def copy_workspace(path: str, into: str) -> None:
    """Copies what travels of a folder, for tools that pack a whole folder themselves.

    Raises:
        BundleError: see `build_workspace_bundle`.
    """
    for relative in walk_workspace(Path(path)):
        source, target = Path(path) / relative, Path(into) / relative
        try:
            status = source.lstat()
            if stat.S_ISLNK(status.st_mode):
                target.symlink_to(os.readlink(source))
            elif stat.S_ISDIR(status.st_mode):
                target.mkdir()
            elif stat.S_ISREG(status.st_mode):
                shutil.copy2(source, target)
        except OSError as error:
            raise BundleError(f"cannot copy {str(source)!r}: {error.strerror}; name it in {IGNORE_FILE}") from error


def _add(bundle: tarfile.TarFile, root: Path, relative: str) -> None:
    source = root / relative
    try:
        status = source.lstat()
        entry = tarfile.TarInfo(relative)
        entry.mode = stat.S_IMODE(status.st_mode) & 0o777
        entry.mtime = int(status.st_mtime)
        if stat.S_ISLNK(status.st_mode):
            entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, os.readlink(source), 0o777
            bundle.addfile(entry)
        elif stat.S_ISDIR(status.st_mode):
            entry.type = tarfile.DIRTYPE
            bundle.addfile(entry)
        elif stat.S_ISREG(status.st_mode):
            with open(source, "rb") as content:
                # A file that grows meanwhile (a log) is cut at this size, so that it does not break the archive.
                entry.size = os.fstat(content.fileno()).st_size
                bundle.addfile(entry, content)
    except OSError as error:
        why = error.strerror or f"it became shorter meanwhile ({error})"
        raise BundleError(f"cannot pack {str(source)!r}: {why}; name it in {IGNORE_FILE}") from error


def walk_workspace(root: Path) -> Iterator[str]:
    """Yields the paths in a folder that travel: relative, slash-separated, sorted, each folder before its content.

    The rules are TorchX's: one shell pattern per line, `#` begins a comment, `!` includes again, the last match
    decides; an ignored folder is not entered; inside a folder that a `!` kept, only later lines count. `LEFT_OUT`
    counts where no line matches.

    Raises:
        BundleError: a folder or the ignore file cannot be read.

    Source: torchx/workspace/api.py, walk_workspace.
    """
    return (relative for relative, travels in _walk(root, "", _read_patterns(root / IGNORE_FILE)) if travels)


def describe_left_out(path: str) -> str:
    """One line for the user that names what does not travel because of `LEFT_OUT`; "" if there is nothing.

    Raises:
        BundleError: see `walk_workspace`.
    """
    root = Path(path)
    names = [relative for relative, travels in _walk(root, "", _read_patterns(root / IGNORE_FILE)) if not travels]
    if not names:
        return ""
    more = f" and {len(names) - _NAMED_LIMIT} more" if len(names) > _NAMED_LIMIT else ""
    listed = ", ".join(names[:_NAMED_LIMIT]) + more
    return f"not sent with the workspace: {listed}; the line !{names[0]} in {IGNORE_FILE} would send {names[0]}"


def _walk(root: Path, folder: str, patterns: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Yields (path, whether it travels) of what the patterns do not ignore."""
    try:
        entries = sorted(os.scandir(root / folder), key=lambda entry: entry.name)
    except OSError as error:
        raise BundleError(f"cannot read folder {str(root / folder)!r}: {error.strerror}") from error
    for entry in entries:
        relative = posixpath.join(folder, entry.name)
        index, ignored = _match(relative, patterns)
        if ignored:
            continue
        is_folder = entry.is_dir(follow_symlinks=False)
        travels = index >= 0 or not _is_left_out(relative, is_folder=is_folder)
        yield relative, travels
        if is_folder and travels:
            yield from _walk(root, relative, patterns[index + 1 :])


def _is_left_out(relative: str, *, is_folder: bool) -> bool:
    *_, folder, name = ["", *relative.split("/")]
    _, left_out = _match(name, LEFT_OUT)
    if name.startswith("id_") or name.endswith(".pem"):
        return left_out and not is_folder and Path(name).suffix in ("", ".pub", ".pem")
    return left_out or f"{folder}/{name}" in LEFT_OUT


def _read_patterns(path: Path) -> list[str]:
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BundleError(f"cannot read {str(path)!r}: {error.strerror}") from error
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return [line for line in lines if line not in ("", ".")]


def _match(relative: str, patterns: Sequence[str]) -> tuple[int, bool]:
    """The index of the last pattern that matches (-1: none) and whether that pattern ignores."""
    last, ignored = -1, False
    if relative == DOCKERFILE:  # TorchX never ignores it
        return last, ignored
    for index, pattern in enumerate(patterns):
        keeps = pattern.startswith("!")
        if fnmatch.fnmatch(relative, pattern[1:] if keeps else pattern):
            last, ignored = index, not keeps
    return last, ignored
