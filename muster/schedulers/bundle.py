"""Packs the agent as one runnable zip, which travels with a job. `workspace.packing` packs the user's folder.

It is deterministic: the same files give the same bytes. It uses the standard library only, and does not need torchx.
"""

import ast
import bisect
import collections
import functools
import hashlib
import io
import itertools
import os
import re
import sys
import threading
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from muster.schedulers import bundle_start

AGENT_BUNDLE_LIMIT_BYTES: Final = 511_000
"""Small enough for a Kubernetes ConfigMap (1 MiB) with other content, and for a Docker upload per node."""

_PYTHON_API: Final = (
    *("__main__.py", "_shared/control.py", "_shared/ownership.py", "launch.py", "run.py"),
    *("agent/hold/client.py", "agent/driven.py", "agent/control_socket.py", "agent/workers/image.py"),
    "agent/rendezvous/torch_handlers/caller.py",
)
"""For programs that start an agent: they have muster installed."""

_MARK: Final = "muster/_bundled.py"
"""Tells an unpacked bundle from an installed package (`workers.program`, `workers.environment`)."""

_START_NAME: Final = "muster_bundle_start"
"""`bundle_start` in the bundle: outside of the package, because it decides where that is imported from."""

_PARSING: Final = threading.Lock()
"""Programs submit from several threads, and CPython 3.11 fails with a SystemError when two of them parse at once.

Source: https://github.com/python/cpython/issues/106905.
"""

_STRING_OR_COMMENT: Final = re.compile(
    rb'"""(?:\\.|[^\\])*?"""|\'\'\'(?:\\.|[^\\])*?\'\'\'|"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|#[^\n]*', re.DOTALL
)

_KEPT_NAME: Final = "bundle"
"""The bundle of the last submission, after a digest of its content and of all it is made of."""

_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef

_EPOCH: Final = (1980, 1, 1, 0, 0, 0)  # the oldest date of a zip

# Any image's Python compiles it, 2.7 included: no f-strings, no annotations, no SyntaxError.
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

from {start} import find_import_folder

sys.path[0] = find_import_folder(sys.path[0], "{digest}", {total_bytes})

from muster.agent.__main__ import main

sys.exit(main())
"""

# Appended to the package's `__init__` in the zip. Where the zip precedes installed packages, its `muster` adds one of
# ours to itself and yields to a foreign one. The agent needs neither.
_EXTENSION: Final = """

def _find_installed() -> None:
    import sys

    root = __path__[0][: -len("/muster")]
    if sys.path[:1] == [root]:
        return
    machinery = sys.modules["_frozen_importlib_external"]
    spec = machinery.PathFinder.find_spec("muster", [entry for entry in sys.path if entry != root])
    if spec is None or spec.loader is None:
        return
    from importlib.util import module_from_spec

    others = list(spec.submodule_search_locations or ())
    find = machinery.PathFinder.find_spec
    if any(find("muster._shared", [other]) for other in others):
        __path__.extend(others)
        return
    module = sys.modules["muster"] = module_from_spec(spec)
    spec.loader.exec_module(module)


_find_installed()
del _find_installed
"""


def build_agent_bundle() -> bytes:
    """Pack the agent and what it shares with the adapters.

    That is 2 s of work. The result is kept in the folder of unpacked agents, see `bundle_start`.

    Returns:
        A zip that runs as `python3 muster-agent.zip ARGS` on Python 3.10+ and refuses older versions in one line.
    """
    package = Path(__file__).resolve().parent.parent
    paths = {path.relative_to(package).as_posix(): path for path in package.glob("*.py")}
    for room in ("_shared", "agent", "integrations", "snapshots"):
        paths |= {path.relative_to(package).as_posix(): path for path in (package / room).rglob("*.py")}
    paths |= {path.relative_to(package).as_posix(): path for path in (package / "agent").rglob("*.dist-info/*")}
    files = {f"muster/{name}": path.read_text() for name, path in paths.items() if name not in _PYTHON_API}
    return _pack(tuple(sorted(files.items())))


@functools.lru_cache(maxsize=1)
def _pack(files: tuple[tuple[str, str], ...]) -> bytes:
    """Return the bundle of these files, names and texts. The same files give the same bundle, made once."""
    key = hashlib.sha256(repr((sys.version, files)).encode())
    for module in (__file__, bundle_start.__file__):
        key.update(Path(module).read_bytes())
    base = next(bundle_start.find_bases(makes=True), None)
    if base is None:
        return _make(files)
    path = Path(base, _KEPT_NAME)
    with suppress(OSError):
        content = path.read_bytes()
        if content[:32] == hashlib.sha256(key.digest() + content[32:]).digest():
            return content[32:]
    bundle = _make(files)
    temporary = Path(f"{path}-{os.getpid()}-{threading.get_ident()}")
    with suppress(OSError):
        try:
            temporary.write_bytes(hashlib.sha256(key.digest() + bundle).digest() + bundle)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    return bundle


def _make(files: tuple[tuple[str, str], ...]) -> bytes:
    entries = {name: strip_source(text) if name.endswith(".py") else text for name, text in files}
    entries["muster/__init__.py"] += _EXTENSION
    entries[_MARK] = ""
    digest = hashlib.sha256("\0".join(f"{name}\0{text}" for name, text in sorted(entries.items())).encode())
    total_bytes = sum(len(text.encode()) for text in entries.values())
    # Not by `str.format`: the text has other braces.
    main = _MAIN.replace("{start}", _START_NAME).replace("{digest}", digest.hexdigest()[:32])
    entries["__main__.py"] = main.replace("{total_bytes}", str(total_bytes))
    entries[f"{_START_NAME}.py"] = strip_source(Path(bundle_start.__file__).read_text())
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as bundle:
        for name in sorted(entries):
            entry = zipfile.ZipInfo(name, date_time=_EPOCH)
            entry.external_attr = 0o644 << 16
            bundle.writestr(entry, entries[name], compress_type=zipfile.ZIP_DEFLATED, compresslevel=9)
    return buffer.getvalue()


def strip_source(source: str) -> str:
    """Strip Python source of docstrings, comments, what only type checkers read, and most of the indentation.

    That is less than three fifths of the bytes, and less to compile and to run. Line numbers stay the same, so that a
    traceback from a node fits the source.
    """
    text = source.encode()
    lines = text.splitlines(keepends=True)
    with _PARSING:
        tree = ast.parse(source)
    comments, kept_rows = _list_comments(text, lines)
    cuts = [*_list_docstrings(tree.body, lines), *_list_type_only(tree.body), *comments]
    cuts += [cut for function in _list_functions(tree.body) for cut in _list_annotations(function, lines)]
    _apply(cuts, lines)
    _apply(_list_unused_imports(tree.body, lines), lines)
    return b"".join(each if row in kept_rows else _dedent(each) for row, each in enumerate(lines)).decode()


class _Cut(NamedTuple):
    """A part of a source. Line and byte count from 0."""

    begin: tuple[int, int]
    end: tuple[int, int]
    filler: bytes = b""


def _apply(cuts: Iterable[_Cut], lines: list[bytes]) -> None:
    """Cut these parts out of the lines. One inside another has no effect."""
    outer: list[_Cut] = []
    for cut in sorted(cuts):
        if not outer or cut.begin >= outer[-1].end:
            outer.append(cut)
    for cut in reversed(outer):  # earlier positions stay right
        (first, start), (last, end) = cut.begin, cut.end
        head, tail = lines[first][:start], lines[last][end:]
        lines[first : last + 1] = [head + cut.filler + tail, *[b"\n"] * (last - first)]


def _dedent(line: bytes) -> bytes:
    """Return one space for four, none before nothing."""
    text = line.lstrip(b" ")
    return b" " * ((len(line) - len(text)) // 4) + text if text.strip() else b"\n"


def _list_comments(text: bytes, lines: list[bytes]) -> tuple[list[_Cut], set[int]]:
    """List comments, each with the spaces before it.

    Lines of long strings are left alone: their spaces are part of them.

    By a pattern: the tokenizer would make every submission a second slower. It recognises a quote inside a string of
    the other quote. The same quote inside an f-string's braces needs Python 3.12.
    """
    begins = [0, *itertools.accumulate(map(len, lines))]
    comments: list[_Cut] = []
    rows: set[int] = set()
    for found in _STRING_OR_COMMENT.finditer(text):
        row = bisect.bisect_right(begins, found.start()) - 1
        if text[found.start()] == ord("#"):
            begin, end = found.start() - begins[row], found.end() - begins[row]
            comments.append(_Cut((row, len(lines[row][:begin].rstrip())), (row, end)))
        else:
            rows.update(range(row + 1, row + 1 + found[0].count(b"\n")))
    return comments, rows


def _list_functions(body: Iterable[ast.AST]) -> Iterator[_Function]:
    """Return all, also those inside others."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node
        if isinstance(node, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            yield from _list_functions(ast.iter_child_nodes(node))


def _list_docstrings(body: list[ast.stmt], lines: list[bytes]) -> Iterator[_Cut]:
    """List strings that are statements: docstrings, and strings that describe an attribute.

    Where the body has no other statement, or another one on the line, a statement takes the place that does nothing.
    """
    is_needed = all(_is_text(node) for node in body)
    for node in body:
        if _is_text(node):
            (first, start), (last, end), _ = span = _find_span(node)
            is_alone = not lines[first][:start].strip() and lines[last][end:].strip()[:1] in (b"", b"#")
            yield span._replace(filler=b"0" if is_needed or not is_alone else b"")
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _list_docstrings(node.body, lines)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _list_type_only(body: list[ast.stmt]) -> Iterator[_Cut]:
    """List what a module imports for type checkers, and annotations of names with a value."""
    for node in body:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            if not node.orelse:
                yield _find_span(node)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield _Cut(_find_span(node.target).end, _find_span(node.annotation).end)


def _list_unused_imports(body: list[ast.stmt], lines: list[bytes]) -> Iterator[_Cut]:
    """Return what is imported of `typing` and of our own modules and nothing names any more, once the rest is cut."""
    words = collections.Counter(re.findall(rb"\w+", b"".join(lines)))
    for node in body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in (
            "typing",
            "collections",
            "muster",
        ):
            used = [each.name for each in node.names if words[each.name.encode()] > 1 or each.asname]
            if len(used) < len(node.names):
                text = f"from {node.module} import {', '.join(used)}" if used else ""
                yield _find_span(node)._replace(filler=text.encode())


def _list_annotations(function: _Function, lines: list[bytes]) -> Iterator[_Cut]:
    """Return those of a function, its arguments and local names: nothing reads them when the program runs.

    Those of a class are the fields of its records. A name without a value stays: it may be local for its annotation.
    """
    every = function.args
    found = [*every.posonlyargs, *every.args, *every.kwonlyargs, every.vararg, every.kwarg]
    for argument in [each for each in found if each is not None and each.annotation is not None]:
        (row, column), end, _ = _find_span(argument)
        yield _Cut((row, column + len(argument.arg.encode())), end)
    if function.returns is not None:
        (row, column), end, _ = _find_span(function.returns)
        yield _Cut((row, lines[row].rindex(b" ->", 0, column)), end)
    for each in function.body:
        yield from _list_local_annotations(each)


def _list_local_annotations(statement: ast.stmt) -> Iterator[_Cut]:
    """List annotations, but not those in functions and classes inside of it."""
    if isinstance(statement, ast.AnnAssign) and statement.value is not None:
        yield _Cut(_find_span(statement.target).end, _find_span(statement.annotation).end)
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return
    for part in ast.iter_child_nodes(statement):
        inner = part.body if isinstance(part, (ast.ExceptHandler, ast.match_case)) else [part]
        for each in inner:
            if isinstance(each, ast.stmt):
                yield from _list_local_annotations(each)


def _find_span(node: ast.stmt | ast.expr | ast.arg) -> _Cut:
    """Return where a node stands."""
    return _Cut((node.lineno - 1, node.col_offset), (node.end_lineno - 1, node.end_col_offset))  # type: ignore[operator,arg-type]
