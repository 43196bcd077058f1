"""Where the program imports a module first, and which warnings filters it has set by then: read from its source.

The template imports before the program's first line has run. Its imports warn as the program's own would when each is
made in the place of the program's: the same filters in force, the same file and line to blame. Filters that cannot be
told from the source (a category that is not a builtin, a call under a condition) silence the import: a line that a
cold worker would not show is worse than one that is missing.

Only used in the template process.
"""

import ast
import builtins
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from muster.agent.workers.warm.preload import BRING_TORCH, MOST_FILES, find_module, find_source, is_type_checking, parse

_SETTERS: Final = frozenset(("filterwarnings", "simplefilter"))
_CHANGERS: Final = _SETTERS | {"resetwarnings", "captureWarnings", "showwarning", "formatwarning", "filters"}
"""Names that, wherever they stand, may change what is shown of a warning."""


@dataclass(frozen=True, kw_only=True)
class FilterCall:
    """One `warnings.filterwarnings(...)` or `warnings.simplefilter(...)` whose arguments are known."""

    name: str
    args: tuple[Any, ...] = ()
    keywords: tuple[tuple[str, Any], ...] = ()


Filters = tuple[FilterCall, ...] | None
"""In the order of the calls; None when the source does not tell."""


@dataclass(frozen=True, kw_only=True)
class ImportSite:
    """How the program imports one module."""

    filters: Filters
    path: str = ""
    """File that imports it; "" when the program does not name it."""
    lineno: int = 0
    module: str = "__main__"
    """`__name__` in that file."""


class ImportSites:
    """What the source of one program tells about its imports."""

    def __init__(self, kind: str, target: str) -> None:
        """Read the program and the modules beside it that it imports; see `preload.choose_modules`."""
        self._places: dict[str, ImportSite] = {}
        self._filters: Filters = ()
        self._seen: set[str] = set()
        self._own: dict[str, str] = {}
        """Modules and packages that lie beside the program and are imported: name -> file."""
        self._later: list[tuple[list[ast.stmt], str, str]] = []
        path = find_source(kind, target)
        if path is not None:
            self._follow(os.path.join(os.getcwd(), path), "__main__")
        while self._later:  # functions: called, if at all, when their modules are complete
            self._take_all(*self._later.pop(0))

    def find(self, name: str) -> ImportSite:
        """The place of a module; one that the program does not name is imported after all that it does name."""
        return self._places.get(name) or ImportSite(filters=self._filters)

    def find_hidden(self) -> str | None:
        """A file that the program imports, and that a fork of this process would not: its name is another module's.

        A fresh process finds first what lies beside the program, a types.py say; here the standard library's is loaded.
        """
        for name, path in self._own.items():
            if name != "muster" and name not in sys.builtin_module_names and name in sys.modules:
                return path
        return None

    def _follow(self, path: str, module: str) -> None:
        if path in self._seen or len(self._seen) >= MOST_FILES:
            return
        self._seen.add(path)
        tree = parse(path)
        if tree is not None:
            self._take_all(tree.body, path, module)

    def _take_all(self, statements: Iterable[ast.stmt], path: str, module: str) -> None:
        for statement in statements:
            self._take(statement, path, module)

    def _take(self, node: ast.stmt, path: str, module: str) -> None:
        """One statement, in the order of execution as far as that can be told."""
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for name in _list_names(node):
                self._note_import(name, ImportSite(filters=self._filters, path=path, lineno=node.lineno, module=module))
        elif isinstance(node, ast.Expr) and _called_name(node.value) in _SETTERS:
            self._add_filter(node.value)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            self._doubt(node)
            self._later.append((node.body, path, module))
        elif isinstance(node, ast.With):
            self._take_with(node, path, module)
        elif isinstance(node, ast.ClassDef) or (isinstance(node, ast.If) and _is_main_test(node.test)):
            self._take_all(node.body, path, module)
        elif isinstance(node, ast.Try):
            self._take_all([*node.body, *node.orelse], path, module)
            self._take_branch((statement for one in node.handlers for statement in one.body), path, module)
            self._take_all(node.finalbody, path, module)
        elif isinstance(node, (ast.If, ast.For, ast.While)):
            skips = isinstance(node, ast.If) and is_type_checking(node.test)
            self._take_branch([*([] if skips else node.body), *node.orelse], path, module)
        else:
            self._doubt(node)

    def _take_branch(self, statements: Iterable[ast.stmt], path: str, module: str) -> None:
        """Statements that may be executed or not."""
        for statement in statements:
            self._doubt(statement)
            self._take(statement, path, module)

    def _take_with(self, node: ast.With, path: str, module: str) -> None:
        before = self._filters
        if not _is_filter_scope(node):
            for item in node.items:
                self._doubt(item.context_expr)
        self._take_all(node.body, path, module)
        if _is_filter_scope(node):
            self._filters = before

    def _note_import(self, name: str, place: ImportSite) -> None:
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            prefix = ".".join(parts[:count])
            self._places.setdefault(prefix, place)
            local = find_module(prefix, sys.path[:1])
            if local is not None:
                if count == 1:
                    self._own.setdefault(prefix, local)
                self._follow(local, prefix)
        if parts[0] in BRING_TORCH:  # and may set filters of its own before it does
            self._places.setdefault("torch", ImportSite(filters=None))

    def _add_filter(self, node: ast.expr) -> None:
        call = _read_call(node)
        self._filters = None if call is None or self._filters is None else (*self._filters, call)

    def _doubt(self, node: ast.AST) -> None:
        if _may_change_filters(node):
            self._filters = None


# -- reading ----------------------------------------------------------------------------------------------------------


def _list_names(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif node.module and not node.level:
        yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


def _called_name(node: ast.AST) -> str:
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _is_filter_scope(node: ast.With) -> bool:
    """`with warnings.catch_warnings():`, which takes back at its end what is set in it."""
    call = node.items[0].context_expr
    if len(node.items) != 1 or _called_name(call) != "catch_warnings" or not isinstance(call, ast.Call):
        return False
    return not call.args and not call.keywords


def _is_main_test(test: ast.expr) -> bool:
    return isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and test.left.id == "__name__"


def _may_change_filters(node: ast.AST) -> bool:
    """True when something in it may outlast it; what is done in a scope of its own does not."""
    if isinstance(node, ast.With) and _is_filter_scope(node):
        return False
    if isinstance(node, ast.Attribute) and node.attr == "filters":
        return isinstance(node.value, ast.Name) and node.value.id == "warnings"
    if isinstance(node, ast.Attribute) and node.attr in _CHANGERS:
        return True
    if isinstance(node, ast.Name) and node.id in _CHANGERS - {"filters"}:
        return True
    if _called_name(node) == "catch_warnings":
        return True
    return any(_may_change_filters(child) for child in ast.iter_child_nodes(node))


def _read_call(node: ast.expr) -> FilterCall | None:
    if not isinstance(node, ast.Call):
        return None
    values = [_read_value(value) for value in (*node.args, *(keyword.value for keyword in node.keywords))]
    names = [keyword.arg for keyword in node.keywords]
    if None in values or None in names:
        return None
    count = len(node.args)
    keywords = tuple(zip([str(name) for name in names], values[count:], strict=True))
    return FilterCall(name=_called_name(node), args=tuple(values[:count]), keywords=keywords)


def _read_value(node: ast.expr) -> str | int | type[Warning] | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, int)):
        return node.value
    named = getattr(builtins, node.id, None) if isinstance(node, ast.Name) else None
    return named if isinstance(named, type) and issubclass(named, Warning) else None


# -- importing --------------------------------------------------------------------------------------------------------


def import_in_place(name: str, place: ImportSite) -> None:
    """Import a module so that it warns as if the program did it; raises what the import raises."""
    with _silence() if place.filters is None else _apply(place.filters):
        statement = ast.Import(names=[ast.alias(name=name)])
        tree = ast.fix_missing_locations(ast.Module(body=[statement], type_ignores=[]))
        ast.increment_lineno(tree, max(place.lineno - 1, 0))
        code = compile(tree, place.path or "<preload>", "exec", dont_inherit=True)
        exec(code, {"__name__": place.module, "__file__": place.path})  # noqa: S102  # one import, made above


@contextmanager
def _apply(filters: tuple[FilterCall, ...]) -> Iterator[None]:
    """Have filters in force; afterwards they are gone, and those that the import has set stay."""
    import warnings

    before = list(warnings.filters)
    for call in filters:
        getattr(warnings, call.name)(*call.args, **dict(call.keywords))
    added = [item for item in warnings.filters if item not in before]
    try:
        yield
    finally:
        kept = [item for item in warnings.filters if item not in added]
        if len(kept) < len(warnings.filters):
            warnings.filters[:] = kept  # type: ignore[index]
            warnings._filters_mutated()  # type: ignore[attr-defined]  # noqa: SLF001


@contextmanager
def _silence() -> Iterator[None]:
    """Show nothing, and let code that catches warnings or looks at filters see all that it would."""
    import warnings

    def show_nothing(_: object) -> None:
        """In place of the function that prints."""

    shows = warnings._showwarnmsg_impl  # type: ignore[attr-defined]  # noqa: SLF001
    warnings._showwarnmsg_impl = show_nothing  # type: ignore[attr-defined]  # noqa: SLF001
    try:
        yield
    finally:
        warnings._showwarnmsg_impl = shows  # type: ignore[attr-defined]  # noqa: SLF001
