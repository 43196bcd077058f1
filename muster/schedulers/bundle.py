"""Packs the agent as one runnable zip, which travels with a job. `workspace.packing` packs the user's folder.

Deterministic: the same files give the same bytes. Standard library only; torchx is not needed.
"""

import ast
import functools
import hashlib
import io
import re
import threading
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from muster.schedulers import bundle_start

AGENT_BUNDLE_LIMIT_BYTES: Final = 480_000
"""Small enough for a Kubernetes ConfigMap (1 MiB) with other content, and for a Docker upload per node."""

_PYTHON_API: Final = (
    *("_shared/control.py", "_shared/ownership.py", "run.py"),
    *("agent/driven.py", "agent/adopted.py", "agent/control_socket.py"),
    *("agent/workers/function.py", "agent/workers/image.py"),
    *("agent/rendezvous/torch_handlers/caller.py", "agent/rendezvous/torch_handlers/plugin.py"),
)
"""For programs that start an agent, and for torchrun, which finds the plug-in by its entry point: they have muster
installed."""

_MARK: Final = "muster/_bundled.py"
"""Tells an unpacked bundle from an installed package (`workers.program`, `workers.environment`)."""

_START_NAME: Final = "muster_bundle_start"
"""`bundle_start` in the bundle: outside of the package, because it decides where that is imported from."""

_PARSING: Final = threading.Lock()
"""Programs submit from several threads, and CPython 3.11 fails with a SystemError when two of them parse at once.

Source: https://github.com/python/cpython/issues/106905.
"""

_COMMENT_LINE: Final = re.compile(r"^ *#.*$", re.MULTILINE)
_INDENTATION: Final = re.compile(r"^(?: {4})+", re.MULTILINE)

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

from {start} import find_import_folder

sys.path[0] = find_import_folder(sys.path[0], "{digest}", {total_bytes})

from muster.agent.__main__ import main

sys.exit(main())
"""

# In the zip, at the end of the package's own `__init__`. Where only PYTHONPATH reaches, the zip stands before installed
# packages: there its `muster` adds an installed one of ours to itself and gives way to a foreign one. The agent itself
# (the zip stands first) needs neither.
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
    if any(find("muster._shared", [other]) or find("muster._contract", [other]) for other in others):
        __path__.extend(others)
        return
    module = sys.modules["muster"] = module_from_spec(spec)
    spec.loader.exec_module(module)


_find_installed()
del _find_installed
"""


def build_agent_bundle() -> bytes:
    """Packs the agent and what it shares with the adapters.

    A program that submits many jobs has the work once: 0.4 s.

    Returns:
        A zip that runs as `python3 muster-agent.zip ARGS` on Python 3.10+ and refuses older versions in one line.
    """
    package = Path(__file__).resolve().parent.parent
    paths = {path.relative_to(package).as_posix(): path for path in package.glob("*.py")}
    for room in ("_shared", "agent", "snapshots"):
        paths |= {path.relative_to(package).as_posix(): path for path in (package / room).rglob("*.py")}
    paths |= {path.relative_to(package).as_posix(): path for path in (package / "agent").rglob("*.dist-info/*")}
    files = {f"muster/{name}": path.read_text() for name, path in paths.items() if name not in _PYTHON_API}
    return _pack(tuple(sorted(files.items())))


@functools.lru_cache(maxsize=1)
def _pack(files: tuple[tuple[str, str], ...]) -> bytes:
    """Return the bundle of these files, names and texts. The same files give the same bundle, made once."""
    entries = {name: strip_source(text) if name.endswith(".py") else text for name, text in files}
    entries["muster/__init__.py"] += _EXTENSION
    entries[_MARK] = ""
    digest = hashlib.sha256("\0".join(f"{name}\0{text}" for name, text in sorted(entries.items())).encode())
    total_bytes = sum(len(text.encode()) for text in entries.values())
    main = {"start": _START_NAME, "digest": digest.hexdigest()[:32], "total_bytes": str(total_bytes)}
    entries["__main__.py"] = _fill(_MAIN, main)
    entries[f"{_START_NAME}.py"] = strip_source(Path(bundle_start.__file__).read_text())
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as bundle:
        for name in sorted(entries):
            entry = zipfile.ZipInfo(name, date_time=_EPOCH)
            entry.external_attr = 0o644 << 16
            bundle.writestr(entry, entries[name], compress_type=zipfile.ZIP_DEFLATED, compresslevel=9)
    return buffer.getvalue()


def _fill(text: str, values: Mapping[str, str]) -> str:
    """Not by `str.format`: the text has other braces and percent signs."""
    for name, value in values.items():
        text = text.replace("{" + name + "}", value)
    return text


def strip_source(source: str) -> str:
    """Python source without its docstrings, most comments and the annotations of functions.

    That is less than two thirds of the bytes, and less to compile and to run.

    Line numbers stay the same, so that a traceback from a node fits the source. A comment goes where it has a line to
    itself, in a file without long strings; finding the others takes the tokenizer, which would make every submission a
    second slower. There one space indents, too: 2 % of the bundle.
    """
    lines = source.encode().splitlines(keepends=True)
    with _PARSING:
        tree = ast.parse(source)
    cuts = [*_list_docstrings(tree.body), *_list_annotations(tree, lines)]
    # From the end, so that the positions of earlier ones stay right.
    for cut in sorted(cuts, key=lambda cut: cut.begin, reverse=True):
        (first, start), (last, end) = cut.begin, cut.end
        head, tail = lines[first][:start], lines[last][end:]
        lines[first : last + 1] = [head + cut.filler + tail, *[b"\n"] * (last - first)]
    text = b"".join(lines).decode()
    if '"""' in text or "\\\n" in text:
        return text
    return _INDENTATION.sub(lambda found: " " * (len(found[0]) // 4), _COMMENT_LINE.sub("", text))


class _Cut(NamedTuple):
    """A part of a source; line and byte count from 0."""

    begin: tuple[int, int]
    end: tuple[int, int]
    filler: bytes = b""


def _list_docstrings(body: Iterable[ast.stmt]) -> Iterator[_Cut]:
    """Strings that are statements: docstrings, and strings that describe an attribute.

    In their place stands a statement that does nothing, in case the body has no other statement.
    """
    for node in body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield _Cut((node.lineno - 1, node.col_offset), _find_end(node), b"0")
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _list_docstrings(node.body)


def _list_annotations(tree: ast.AST, lines: list[bytes]) -> Iterator[_Cut]:
    """Those of functions, their arguments and local names: nothing reads them when the program runs.

    Those of a class are the fields of its records. A name without a value stays: it may be local for its annotation.
    """
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        every = node.args
        found = [*every.posonlyargs, *every.args, *every.kwonlyargs, every.vararg, every.kwarg]
        for argument in [each for each in found if each is not None and each.annotation is not None]:
            begin = (argument.lineno - 1, argument.col_offset + len(argument.arg.encode()))
            yield _Cut(begin, _find_end(argument))
        if node.returns is not None:
            line, column = node.returns.lineno - 1, node.returns.col_offset
            yield _Cut((line, lines[line].rindex(b"->", 0, column)), _find_end(node.returns))
        for each in node.body:
            yield from _list_local_annotations(each)


def _list_local_annotations(statement: ast.stmt) -> Iterator[_Cut]:
    """Not those in functions and classes inside of it."""
    if isinstance(statement, ast.AnnAssign) and statement.value is not None:
        yield _Cut(_find_end(statement.target), _find_end(statement.annotation))
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return
    for part in ast.iter_child_nodes(statement):
        inner = part.body if isinstance(part, (ast.ExceptHandler, ast.match_case)) else [part]
        for each in inner:
            if isinstance(each, ast.stmt):
                yield from _list_local_annotations(each)


def _find_end(node: ast.AST) -> tuple[int, int]:
    """Where a node ends; every statement and expression knows it."""
    return node.end_lineno - 1, node.end_col_offset  # type: ignore[attr-defined]
