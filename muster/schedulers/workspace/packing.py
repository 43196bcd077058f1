"""Packs the user's folder, the workspace, as one tar.

A cluster gets it compressed. For an engine, compression would cost only time. It is deterministic: the same files give
the same bytes, so that adapters can name it by its hash. Standard library only.

What travels is decided by `.torchxignore`, by git's rules, and by `LEFT_OUT`: names that hold history or credentials
stay here unless a line of `.torchxignore` such as `!.env` sends them. One with a wildcard in its last part (`!*`) sends
only other files, because such a line is not written for the sake of credentials.
"""

import fnmatch
import gzip
import hashlib
import io
import os
import posixpath
import shutil
import stat
import tarfile
from collections.abc import Callable, Collection, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO, Final

from muster._shared.foreign_files import read_whole
from muster.schedulers.workspace.ignore_rules import IgnoreRule, find_rule, parse_rules

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

_PIECE_BYTES: Final = 1 << 20
_NAMED_LIMIT: Final = 5
"""Names in a line about what was left out."""


class BundleError(ValueError):
    """A file of the workspace cannot be packed. The message names it and says why."""


def build_workspace_bundle(path: str) -> bytes:
    """Pack a folder in memory as a tar.gz. See `write_workspace_bundle`."""
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", filename="", mtime=0, compresslevel=6) as out:
        write_workspace_bundle(path, out)
    return packed.getvalue()


def write_workspace_bundle(path: str, out: BinaryIO | gzip.GzipFile) -> str:
    """Pack a folder as a tar without what its `.torchxignore` names, piece by piece: its size does not matter.

    Symbolic links stay links. A relative one that leaves the folder would point to something else on the node, and an
    engine refuses it: it is left out. An absolute one into the folder becomes relative. `describe_left_out` names the
    first and all other absolute ones. Permission bits and modification times are kept (Python trusts a stale `.pyc`
    when size and time agree, so times must not be changed), owners are not. Sockets, pipes and devices are left out.

    Args:
        path: the folder, which must exist.
        out: gets a tar whose names are relative to `path`. The same tree gives the same bytes.

    Returns:
        The SHA-256 of what was written, in hexadecimal digits.

    Raises:
        BundleError: the folder does not exist or something in it cannot be read.
    """
    hashed = _HashedFile(out)
    with tarfile.open(fileobj=hashed, mode="w", format=tarfile.PAX_FORMAT) as bundle:

        def add(source: Path, entry: tarfile.TarInfo) -> None:
            if not entry.isreg():
                bundle.addfile(entry)
                return
            with open(source, "rb") as content:
                # Growing files are cut, or break the archive.
                entry.size = os.fstat(content.fileno()).st_size
                bundle.addfile(entry, content)

        _visit("pack", path, add)
    return hashed.hexdigest()


def _visit(
    verb: str, path: str, handle: Callable[[Path, tarfile.TarInfo], None], without: Collection[str] = ()
) -> None:
    """Handle each file, folder and link of a folder that travels.

    Args:
        verb: what is done with them, for errors.
        path: the folder.
        handle: gets each path, and its entry of a tar, which does not have the size.
        without: see `walk_workspace`.

    Raises:
        BundleError: the folder does not exist, or something in it cannot be read.
    """
    root = Path(path)
    if not root.is_dir():
        raise BundleError(f"workspace {path!r} is not a folder")
    for relative in walk_workspace(root, without):
        source = root / relative
        try:
            entry = _build_entry(root, relative)
            if entry is not None:
                handle(source, entry)
        except OSError as error:
            why = error.strerror or f"it became shorter while it was read ({error})"
            raise BundleError(f"cannot {verb} {str(source)!r}: {why}; name it in {IGNORE_FILE}") from error


def _build_entry(root: Path, relative: str) -> tarfile.TarInfo | None:
    """Return an entry without its size. None: a socket, a pipe or a device, or a link that leaves the folder."""
    status = (root / relative).lstat()
    entry = tarfile.TarInfo(relative)
    entry.mode, entry.mtime = stat.S_IMODE(status.st_mode) & 0o777, int(status.st_mtime)
    if stat.S_ISLNK(status.st_mode):
        entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, _read_link(root, relative), 0o777
        return None if _leaves_workspace(relative, entry.linkname) else entry
    if stat.S_ISDIR(status.st_mode):
        entry.type = tarfile.DIRTYPE
        return entry
    return entry if stat.S_ISREG(status.st_mode) else None


def _read_link(root: Path, relative: str) -> str:
    """Return the target of a symbolic link as it travels. A target in the folder itself is relative."""
    target = os.readlink(root / relative)
    if not posixpath.isabs(target):
        return target
    for base in (os.path.abspath(root), os.path.realpath(root)):
        if Path(posixpath.normpath(target)).is_relative_to(base):
            return posixpath.relpath(target, posixpath.join(base, posixpath.dirname(relative)))
    return target


def _leaves_workspace(relative: str, target: str) -> bool:
    """Return whether a symbolic link with this target leads out of the folder by a relative path."""
    if posixpath.isabs(target):
        return False
    return posixpath.normpath(posixpath.join(posixpath.dirname(relative), target)).split("/")[0] == ".."


class _HashedFile(io.RawIOBase):
    """Passes on what is written to it, and computes its hash."""

    def __init__(self, out: BinaryIO | gzip.GzipFile) -> None:
        super().__init__()
        self._out = out
        self._hash = hashlib.sha256()
        self._size_bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._hash.update(data)
        self._size_bytes += len(data)
        return self._out.write(data)

    def tell(self) -> int:
        return self._size_bytes

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def copy_workspace(path: str, into: str, without: Collection[str] = ()) -> None:
    """Copy the files of a folder that travel with a job, for tools that pack a whole folder themselves.

    Args:
        path: the folder.
        into: an empty folder.
        without: paths in it that are not copied. See `walk_workspace`.

    Raises:
        BundleError: see `build_workspace_bundle`.
    """

    def copy(source: Path, entry: tarfile.TarInfo) -> None:
        target = Path(into) / entry.name
        if entry.issym():
            target.symlink_to(entry.linkname)
        elif entry.isdir():
            target.mkdir()
        else:
            shutil.copy2(source, target)

    _visit("copy", path, copy, without)


def list_workspace(path: str) -> list[dict[str, Any]]:
    """List what travels of a folder, by content: for each name its kind, and what `write_workspace_bundle` keeps of it.

    Args:
        path: the folder, which must exist.

    Returns:
        Each entry has `name` and `kind`: a `folder` with its `mode`, a `link` with its `target`, or a `file` with
        `mode`, `time_s`, `size`, and the SHA-256 of its first `size` bytes, `digest`. A folder comes before what is in
        it.

    Raises:
        BundleError: see `build_workspace_bundle`.
    """
    entries: list[dict[str, Any]] = []

    def add(source: Path, entry: tarfile.TarInfo) -> None:
        known: dict[str, Any] = {"name": entry.name, "mode": entry.mode}
        if entry.issym():
            known = {"name": entry.name, "kind": "link", "target": entry.linkname}
        elif entry.isdir():
            known["kind"] = "folder"
        else:
            hashed, size = hashlib.sha256(), 0
            with open(source, "rb") as content:
                left = os.fstat(content.fileno()).st_size  # what travels of a growing file
                while left and (piece := content.read(min(left, _PIECE_BYTES))):
                    hashed.update(piece)
                    left, size = left - len(piece), size + len(piece)
            known |= {"kind": "file", "time_s": entry.mtime, "digest": hashed.hexdigest(), "size": size}
        entries.append(known)

    _visit("read", path, add)
    return entries


def walk_workspace(root: Path, without: Collection[str] = ()) -> Iterator[str]:
    """Yield the paths in a folder that travel: relative, slash-separated, sorted, each folder before its content.

    See `ignore_rules`. A folder that is left out is not entered. `LEFT_OUT` counts where no line names the path itself.

    Args:
        root: the folder.
        without: relative paths that do not travel, with all below them.

    Raises:
        BundleError: a folder or the ignore file cannot be read.
    """
    found = _walk(root, _read_rules(root), frozenset(without))
    return (relative for relative, fate in found if fate is _Fate.SENT)


def describe_left_out(path: str) -> list[str]:
    """Return lines for the user about what does not travel, credentials that do, and links that may dangle.

    Raises:
        BundleError: see `walk_workspace`.
    """
    root = Path(path)
    found: dict[_Fate, list[str]] = {fate: [] for fate in _Fate}
    for relative, fate in _walk(root, _read_rules(root)):
        found[fate].append(relative)
    lines = []
    if kept := found[_Fate.KEPT_HERE]:
        hint = f"the line !{kept[0]} in {IGNORE_FILE} would send {kept[0]}"
        lines.append(f"not sent with the workspace: {_join_names(kept)}; {hint}")
    if ignored := found[_Fate.IGNORED]:
        lines.append(f"not sent with the workspace, by {IGNORE_FILE}: {_join_names(ignored)}")
    if named := [name for name in found[_Fate.SENT] if _is_left_out(name, is_folder=_is_folder(root / name))]:
        lines.append(f"sent with the workspace, by {IGNORE_FILE}, though it may hold credentials: {_join_names(named)}")
    targets = {name: _read_link(root, name) for name in found[_Fate.SENT] if (root / name).is_symlink()}
    if leaving := [f"{name} -> {target}" for name, target in targets.items() if _leaves_workspace(name, target)]:
        what = _count_links(leaving, "leads", "lead")
        lines.append(
            f"not sent with the workspace: {what} out of it ({_join_names(leaving)}); copy or mount the target"
        )
    if absolute := [f"{name} -> {target}" for name, target in targets.items() if posixpath.isabs(target)]:
        what = _count_links(absolute, "has an absolute target", "have absolute targets")
        lines.append(f"workspace: {what} ({_join_names(absolute)}), which must exist on the nodes; copy or mount it")
    return lines


def explain_unsent(path: str, relative: str) -> str:
    """Say why a path in a folder does not travel. "": it does, or it does not exist.

    Raises:
        BundleError: the ignore file cannot be read.
    """
    root = Path(path)
    rules, names = _read_rules(root), relative.split("/")
    for each in (posixpath.join(*names[:count]) for count in range(1, len(names) + 1)):
        fate = _decide(each, rules, is_folder=_is_folder(root / each))
        if fate is _Fate.IGNORED:
            return f"{IGNORE_FILE} leaves {each} out"
        if fate is _Fate.KEPT_HERE:
            return f"muster leaves {each} out by default, and the line !{each} in {IGNORE_FILE} sends it"
        if (root / each).is_symlink() and _leaves_workspace(each, _read_link(root, each)):
            return f"the symbolic link {each} leads out of it"
    return ""


def _count_links(links: Sequence[str], one: str, several: str) -> str:
    return f"1 symbolic link {one}" if len(links) == 1 else f"{len(links)} symbolic links {several}"


def _join_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED_LIMIT} more" if len(names) > _NAMED_LIMIT else ""
    return ", ".join(names[:_NAMED_LIMIT]) + more


class _Fate(Enum):
    """What becomes of a path of the workspace."""

    SENT = "sent"
    IGNORED = "ignored"
    """By a line of `.torchxignore`."""
    KEPT_HERE = "kept here"
    """By `LEFT_OUT`."""


def _walk(root: Path, rules: Sequence[IgnoreRule], without: Collection[str] = ()) -> Iterator[tuple[str, _Fate]]:
    levels = [_list_folder(root, "")]
    while levels:  # no recursion: it has a limit
        entry = next(levels[-1], None)
        if entry is None:
            levels.pop()
            continue
        relative, is_folder = entry
        if relative in without:
            continue
        fate = _decide(relative, rules, is_folder=is_folder)
        yield relative, fate
        if is_folder and fate is _Fate.SENT:
            levels.append(_list_folder(root, relative))


def _list_folder(root: Path, folder: str) -> Iterator[tuple[str, bool]]:
    """Return the paths in a folder, sorted, and which are folders."""
    try:
        with os.scandir(root / folder) as found:
            entries = sorted((each.name, each.is_dir(follow_symlinks=False)) for each in found)
    except OSError as error:
        raise BundleError(f"cannot read folder {str(root / folder)!r}: {error.strerror}") from error
    return ((posixpath.join(folder, name), is_folder) for name, is_folder in entries)


def _decide(relative: str, rules: Sequence[IgnoreRule], *, is_folder: bool) -> _Fate:
    rule = find_rule(rules, relative, is_folder=is_folder)
    if relative == DOCKERFILE:  # TorchX never ignores it
        return _Fate.SENT
    if rule is not None and not rule.keeps:
        return _Fate.IGNORED
    if not _is_left_out(relative, is_folder=is_folder):
        return _Fate.SENT
    narrow = [each for each in rules if not (each.keeps and each.is_broad)]
    rule = find_rule(narrow, relative, is_folder=is_folder)
    return _Fate.SENT if rule is not None and rule.keeps else _Fate.KEPT_HERE


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_left_out(relative: str, *, is_folder: bool) -> bool:
    *_, folder, name = ["", *relative.split("/")]
    left_out = False
    for pattern in LEFT_OUT:
        if fnmatch.fnmatchcase(name, pattern.removeprefix("!")):
            left_out = not pattern.startswith("!")
    if name.startswith("id_") or name.endswith(".pem"):
        return left_out and not is_folder and Path(name).suffix in ("", ".pub", ".pem")
    return left_out or f"{folder}/{name}" in LEFT_OUT


def _read_rules(root: Path) -> list[IgnoreRule]:
    path = root / IGNORE_FILE
    try:
        return parse_rules(read_whole(path).decode("utf-8-sig", errors="replace"))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BundleError(f"cannot read {str(path)!r}: {error.strerror}") from error
