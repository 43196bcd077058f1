"""Packs the agent as one runnable zip, which travels with a job. `workspace.packing` packs the user's folder.

It is deterministic: the same files give the same bytes. It uses the standard library only, and does not need torchx.
"""

import ast
import collections
import functools
import hashlib
import io
import os
import re
import sys
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from string import Template
from typing import Any, Final

from muster.schedulers import bundle_start

AGENT_BUNDLE_LIMIT_BYTES: Final = 503_000
"""Small enough for a Kubernetes ConfigMap (1 MiB) with other content, and for a Docker upload per node."""

_PYTHON_API: Final = (
    *("__main__.py", "_shared/control.py", "_shared/ownership.py", "run.py"),
    *("agent/hold/client.py", "agent/driven.py", "agent/adopted.py", "agent/control_socket.py"),
    *("agent/workers/function.py", "agent/workers/image.py"),
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

_PARTS: Final = ("body", "orelse", "finalbody", "handlers", "cases")
"""The fields of a statement that have statements."""

_TYPES: Final = ("from typing", "from collections", "from muster")
"""Begins imports that may be for type checkers only."""

_KEPT_NAME: Final = "bundle"
"""The bundle of the last submission, after a digest of its content and of all it is made of."""

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

from $start import find_import_folder

sys.path[0] = find_import_folder(sys.path[0], "$digest", $total_bytes)

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
    for room in ("_shared", "agent", "snapshots"):
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
    main = {"start": _START_NAME, "digest": digest.hexdigest()[:32], "total_bytes": total_bytes}
    entries["__main__.py"] = Template(_MAIN).substitute(main)
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

    That is less than three fifths of the bytes, and less to compile and to run. Statements stay on their lines, so that
    a traceback from a node fits the source.
    """
    with _PARSING:
        tree = _strip(ast.parse(source))
        text = ast.unparse(tree)
        made = ast.parse(text)
    rows = {new.lineno: old.lineno for old, new in zip(_list_statements(tree), _list_statements(made), strict=True)}
    words = collections.Counter(re.findall(r"\w+", text))
    lines: list[str] = []
    for row, line in enumerate(text.split("\n"), 1):
        inner = line.lstrip(" ")
        kept = _drop_unused_names(line, words) if line.startswith(_TYPES) else inner
        if kept:
            lines += [""] * (rows.get(row, 0) - 1 - len(lines))
            lines.append(" " * ((len(line) - len(inner)) // 4) + kept)
    return "\n".join(lines) + "\n"


def _strip(node: Any, *, is_field: bool = False) -> Any:
    """Return what is left of a statement, or of a part that has statements. None: nothing.

    Strings that are statements go, and what is imported for type checkers, what protocols declare, and annotations.
    Those of a class (`is_field`) stay: they are the fields of its records. So do those of names without a value, which
    may be local for that reason.
    """
    match node:
        case ast.Expr(value=ast.Constant(value=str())) | ast.If(test=ast.Name(id="TYPE_CHECKING"), orelse=[]):
            return None
        case ast.AnnAssign(target=target, value=value) if value is not None and not is_field:
            return ast.copy_location(ast.Assign(targets=[target], value=value), node)
        case ast.ClassDef(bases=[*_, ast.Name(id="Protocol")]):
            node.body = []
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            every, node.returns = node.args, None
            for each in [*every.posonlyargs, *every.args, *every.kwonlyargs, every.vararg, every.kwarg]:
                if each is not None:
                    each.annotation = None
    for name in _PARTS:
        parts = [_strip(each, is_field=isinstance(node, ast.ClassDef)) for each in getattr(node, name, ())]
        if name in node._fields:
            setattr(node, name, [each for each in parts if each is not None])
    if getattr(node, "body", None) == [] and not isinstance(node, ast.Module):
        node.body = [ast.Pass(lineno=node.lineno)]
    return node


def _list_statements(node: ast.AST) -> Iterator[Any]:
    """Return all with their lines, also those inside others."""
    for part in ast.iter_child_nodes(node):
        if isinstance(part, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            yield from () if isinstance(part, ast.match_case) else (part,)
            yield from _list_statements(part)


def _drop_unused_names(line: str, words: Mapping[str, int]) -> str:
    """Drop the names that an import gives and nothing uses, once the rest is stripped."""
    head, _, names = line.partition(" import ")
    used = [name for name in names.split(", ") if " as " in name or words[name] > 1]
    return f"{head} import {', '.join(used)}" if used else ""
