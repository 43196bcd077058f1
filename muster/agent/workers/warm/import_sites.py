"""Finds in the source where the program first imports a module, and which warnings filters it has set by then.

The template imports before the program's first line has run. Each import runs with the same filters and names the same
file and line, so that it warns as the program's own would. If the filters cannot be read from the source (a category
that is not a builtin, a call under a condition), the import shows no warnings. A line that a cold worker would not show
is worse than one that is missing.

It is used only in the template process.
"""

import ast
import builtins
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from muster._shared.records import record
from muster.agent.workers.warm.preload import BRING_TORCH, MAX_FILES, find_module, find_source, is_type_checking, parse

_SETTERS: Final = frozenset(("filterwarnings", "simplefilter"))
_FILTER_NAMES: Final = _SETTERS | {"resetwarnings", "captureWarnings", "showwarning", "formatwarning", "filters"}
"""Names that, wherever they are used, may change which warnings are shown and how."""


@record
class FilterCall:
    """One `warnings.filterwarnings(...)` or `warnings.simplefilter(...)` whose arguments are known."""

    name: str
    args: tuple[object, ...] = ()
    keywords: tuple[tuple[str, object], ...] = ()


Filters = tuple[FilterCall, ...] | None
"""In the order of the calls; None if the source does not determine them."""


@record
class ImportSite:
    """The place where the program imports one module, and the filters set by then."""

    filters: Filters
    path: str = ""
    """The file that imports it; "" if the program does not name it."""
    lineno: int = 0
    module: str = "__main__"
    """`__name__` in that file."""


class ImportSites:
    """The imports of one program, read from its source."""

    def __init__(self, kind: str, target: str) -> None:
        """Read the program and the modules beside it that it imports; see `preload.choose_modules`."""
        self._sites: dict[str, ImportSite] = {}
        self._filters: Filters = ()
        self._seen: set[str] = set()
        self._own: dict[str, str] = {}
        """Modules and packages beside the program that it imports: name -> file."""
        self._function_bodies: list[tuple[list[ast.stmt], str, str]] = []
        path = find_source(kind, target)
        if path is not None:
            self._read_module(os.path.join(os.getcwd(), path), "__main__")
        while self._function_bodies:  # run after their modules, if at all
            self._read_statements(*self._function_bodies.pop(0))

    def find(self, name: str) -> ImportSite:
        """Return the site of a module; one that the program does not name is imported after all those it names."""
        return self._sites.get(name) or ImportSite(filters=self._filters)

    def find_hidden(self) -> str | None:
        """Return a file that the program imports but a fork of this process would not, because of its name.

        A fresh process first finds what lies beside the program, such as a types.py. Here the standard library's module
        of that name is already loaded.
        """
        for name, path in self._own.items():
            if name != "muster" and name not in sys.builtin_module_names and name in sys.modules:
                return path
        return None

    def _read_module(self, path: str, module: str) -> None:
        if path in self._seen or len(self._seen) >= MAX_FILES:
            return
        self._seen.add(path)
        tree = parse(path)
        if tree is not None:
            self._read_statements(tree.body, path, module)

    def _read_statements(self, statements: Iterable[ast.stmt], path: str, module: str) -> None:
        for statement in statements:
            self._read_statement(statement, path, module)

    def _read_statement(self, node: ast.stmt, path: str, module: str) -> None:
        """Read one statement, in the order of execution as far as the source determines it."""
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for name in _list_names(node):  # one module may set the next one's filters
                site = ImportSite(filters=self._filters, path=path, lineno=node.lineno, module=module)
                self._record_import(name, site)
        elif isinstance(node, ast.Expr) and _called_name(node.value) in _SETTERS:
            self._add_filter(node.value)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            self._check_filters(node)
            self._function_bodies.append((node.body, path, module))
        elif isinstance(node, ast.With):
            self._read_with(node, path, module)
        elif isinstance(node, ast.ClassDef) or (isinstance(node, ast.If) and _is_main_test(node.test)):
            self._read_statements(node.body, path, module)
        elif isinstance(node, ast.Try):
            self._read_statements([*node.body, *node.orelse], path, module)
            self._read_branch((statement for one in node.handlers for statement in one.body), path, module)
            self._read_statements(node.finalbody, path, module)
        elif isinstance(node, (ast.If, ast.For, ast.While)):
            skips = isinstance(node, ast.If) and is_type_checking(node.test)
            self._read_branch([*([] if skips else node.body), *node.orelse], path, module)
        else:
            self._check_filters(node)

    def _read_branch(self, statements: Iterable[ast.stmt], path: str, module: str) -> None:
        """Read statements that may or may not run."""
        for statement in statements:
            self._check_filters(statement)
            self._read_statement(statement, path, module)

    def _read_with(self, node: ast.With, path: str, module: str) -> None:
        before = self._filters
        if not _is_filter_scope(node):
            for item in node.items:
                self._check_filters(item.context_expr)
        self._read_statements(node.body, path, module)
        if _is_filter_scope(node):
            self._filters = before

    def _record_import(self, name: str, site: ImportSite) -> None:
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            prefix = ".".join(parts[:count])
            self._sites.setdefault(prefix, site)
            local = find_module(prefix, sys.path[:1])
            if local is not None:
                if count == 1:
                    self._own.setdefault(prefix, local)
                self._read_module(local, prefix)
        if parts[0] in BRING_TORCH:  # may set filters before
            self._sites.setdefault("torch", ImportSite(filters=None))

    def _add_filter(self, node: ast.expr) -> None:
        call = _read_call(node)
        self._filters = None if call is None or self._filters is None else (*self._filters, call)

    def _check_filters(self, node: ast.AST) -> None:
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
    """Return whether the statement is `with warnings.catch_warnings():`, which restores the filters at its end."""
    call = node.items[0].context_expr
    if len(node.items) != 1 or _called_name(call) != "catch_warnings" or not isinstance(call, ast.Call):
        return False
    return not call.args and not call.keywords


def _is_main_test(test: ast.expr) -> bool:
    return isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and test.left.id == "__name__"


def _may_change_filters(node: ast.AST) -> bool:
    """Return whether the statement may change filters for longer than a filter scope."""
    todo = [node]  # no recursion, for deep expressions
    while todo:
        node = todo.pop()
        if isinstance(node, ast.With) and _is_filter_scope(node):
            continue
        if isinstance(node, ast.Attribute) and node.attr == "filters":
            if isinstance(node.value, ast.Name) and node.value.id == "warnings":
                return True
            continue
        if isinstance(node, ast.Attribute) and node.attr in _FILTER_NAMES:
            return True
        if isinstance(node, ast.Name) and node.id in _FILTER_NAMES - {"filters"}:
            return True
        if _called_name(node) == "catch_warnings":
            return True
        todo += ast.iter_child_nodes(node)
    return False


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


def import_at_site(name: str, site: ImportSite) -> None:
    """Import a module with the warnings of the program's own import, and raise what the import raises."""
    with _hide_warnings() if site.filters is None else _apply_filters(site.filters):
        statement = ast.Import(names=[ast.alias(name=name)])
        tree = ast.fix_missing_locations(ast.Module(body=[statement], type_ignores=[]))
        ast.increment_lineno(tree, max(site.lineno - 1, 0))
        code = compile(tree, site.path or "<preload>", "exec", dont_inherit=True)
        exec(code, {"__name__": site.module, "__file__": site.path})  # noqa: S102  # one import, made above


def show_warnings(shown: Iterable[Any], site: ImportSite) -> None:
    """Show the warnings of an early import as the program's own import would have."""
    import warnings

    for each in () if site.filters is None else shown:
        with _apply_filters(site.filters or ()):
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)


@contextmanager
def _apply_filters(filters: tuple[FilterCall, ...]) -> Iterator[None]:
    """Set filters for the import; then remove them, and keep those that the import has set."""
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
def _hide_warnings() -> Iterator[None]:
    """Show no warnings; code that catches warnings or reads filters still sees what it would otherwise."""
    import warnings

    def show_nothing(_: object) -> None:
        """Replace the function that prints."""

    shows = warnings._showwarnmsg_impl  # type: ignore[attr-defined]  # noqa: SLF001
    warnings._showwarnmsg_impl = show_nothing  # type: ignore[attr-defined]  # noqa: SLF001
    try:
        yield
    finally:
        warnings._showwarnmsg_impl = shows  # type: ignore[attr-defined]  # noqa: SLF001
