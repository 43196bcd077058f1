"""Packs what travels with a job: the agent as one runnable zip, the user's folder as one tar.gz.

Both are deterministic (the same files give the same bytes), so that adapters can name them by their hash.
Standard library only; torchx is not needed.
"""

import ast
import fnmatch
import gzip
import io
import os
import posixpath
import stat
import tarfile
import threading
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

AGENT_BUNDLE_LIMIT_BYTES: Final = 200_000
"""Small enough for a Kubernetes ConfigMap (1 MiB) with other content, and for a Docker upload per node."""

_PARSING: Final = threading.Lock()
"""Programs submit from several threads, and CPython 3.11 fails with a SystemError when two of them parse at once.

Source: https://github.com/python/cpython/issues/106905.
"""

IGNORE_FILE: Final = ".torchxignore"

_EPOCH: Final = (1980, 1, 1, 0, 0, 0)  # the oldest date a zip can hold

# Must compile on any Python that may be called `python3` (or `python`) in an image, 2.7 included: no f-strings, no
# annotations. An old Python gets one line, not a SyntaxError from deep inside the package.
_MAIN: Final = """\
import sys

if sys.version_info < (3, 10):
    sys.stderr.write(
        "muster-agent: needs Python 3.10 or newer, but %s is Python %d.%d\\n"
        % (sys.executable, sys.version_info[0], sys.version_info[1])
    )
    sys.exit(2)

import os

# The path may be relative; the agent may change its directory before a later import.
sys.path[0] = os.path.abspath(sys.path[0])

from muster.agent.__main__ import main

sys.exit(main())
"""


class BundleError(ValueError):
    """A file of the workspace cannot be packed; the message names it and says why."""


def build_agent_bundle() -> bytes:
    """Packs the agent and what it shares with the adapters.

    Returns:
        A zip that runs as `python3 muster-agent.zip ARGS` on Python 3.10+ and refuses older versions in one line.
    """
    package = Path(__file__).resolve().parent.parent
    sources = [*package.glob("*.py"), *(package / "agent").rglob("*.py")]
    entries = {f"muster/{path.relative_to(package).as_posix()}": strip_source(path.read_text()) for path in sources}
    entries["__main__.py"] = _MAIN
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as bundle:
        for name in sorted(entries):
            entry = zipfile.ZipInfo(name, date_time=_EPOCH)
            entry.external_attr = 0o644 << 16
            bundle.writestr(entry, entries[name], compress_type=zipfile.ZIP_DEFLATED, compresslevel=9)
    return buffer.getvalue()


def strip_source(source: str) -> str:
    """Python source without its docstrings: two thirds of the bytes, and less to compile on every node.

    Line numbers stay the same, so that a traceback from a node fits the source. Comments stay too: finding them takes
    the tokenizer, which would make every submission a second slower.
    """
    lines = source.encode().splitlines(keepends=True)
    with _PARSING:
        tree = ast.parse(source)
    # From the end, so that the positions of earlier docstrings stay right.
    for node in sorted(_list_docstrings(tree.body), key=lambda node: node.lineno, reverse=True):
        first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        head, tail = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
        # A statement that does nothing, in case the body has no other statement.
        lines[first : last + 1] = [head + b"0" + tail, *[b"\n"] * (last - first)]
    return b"".join(lines).decode()


def _list_docstrings(body: Iterable[ast.stmt]) -> Iterator[ast.Expr]:
    """Strings that are statements: docstrings, and strings that describe an attribute."""
    for node in body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _list_docstrings(node.body)


def build_workspace_bundle(path: str) -> bytes:
    """Packs a folder without what its `.torchxignore` names.

    Symbolic links stay links. Permission bits and modification times are kept (Python trusts a stale `.pyc` when size
    and time agree, so times must not be changed), owners are not. Sockets, pipes and devices are left out.

    Args:
        path: the folder; must exist.

    Returns:
        A tar.gz whose names are relative to `path`. The same tree gives the same bytes.

    Raises:
        BundleError: the folder does not exist or something in it cannot be read.
    """
    root = Path(path)
    if not root.is_dir():
        raise BundleError(f"workspace {path!r} is not a folder")
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", filename="", mtime=0, compresslevel=6) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as bundle,
    ):
        for relative in walk_workspace(root):
            _add(bundle, root, relative)
    return buffer.getvalue()


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
            # Read whole: a file that grows meanwhile (a log) must not break the archive.
            content = source.read_bytes()
            entry.size = len(content)
            bundle.addfile(entry, io.BytesIO(content))
    except OSError as error:
        raise BundleError(f"cannot pack {str(source)!r}: {error.strerror}; name it in {IGNORE_FILE}") from error


def walk_workspace(root: Path) -> Iterator[str]:
    """Yields the paths in a folder that travel: relative, slash-separated, sorted, each folder before its content.

    The rules are TorchX's: one shell pattern per line, `#` begins a comment, `!` includes again, the last match
    decides; an ignored folder is not entered; inside a folder that a `!` kept, only later lines count.

    Raises:
        BundleError: a folder or the ignore file cannot be read.

    Source: torchx/workspace/api.py, walk_workspace.
    """
    yield from _walk(root, "", _read_patterns(root / IGNORE_FILE))


def _walk(root: Path, folder: str, patterns: Sequence[str]) -> Iterator[str]:
    try:
        entries = sorted(os.scandir(root / folder), key=lambda entry: entry.name)
    except OSError as error:
        raise BundleError(f"cannot read folder {str(root / folder)!r}: {error.strerror}") from error
    for entry in entries:
        relative = posixpath.join(folder, entry.name)
        index, ignored = _match(relative, patterns)
        if ignored:
            continue
        yield relative
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(root, relative, patterns[index + 1 :])


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
    if relative == "Dockerfile.torchx":  # TorchX never ignores it
        return last, ignored
    for index, pattern in enumerate(patterns):
        keeps = pattern.startswith("!")
        if fnmatch.fnmatch(relative, pattern[1:] if keeps else pattern):
            last, ignored = index, not keeps
    return last, ignored
