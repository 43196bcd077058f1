"""Detects changes by a program that a fresh process would see at its imports but a fork of the template does not.

The template imports torch, and what torch needs, before the program's first line. Two kinds of change come too late for
that. One is a variable that modules read when they are imported, set before the program's own `import torch`. The other
is a folder inserted into `sys.path` that holds another module of an imported name. Changes that the source shows are
found before: then torch is not preloaded (`preload`), or workers start cold (`find_inserted`). `LateChanges` detects
the rest in the worker, and prints one line on its stderr.
"""

import ast
import os
import pathlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import BuiltinFunctionType, FrameType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Final

from muster.agent.workers.warm.fork_safety import is_read_at_import
from muster.agent.workers.warm.preload import parse

if TYPE_CHECKING:
    from _typeshed import StrOrBytesPath

_NODES: Final = (
    *(ast.Expression, ast.Name, ast.Load, ast.Attribute, ast.Constant, ast.Call, ast.Subscript, ast.BinOp, ast.Div),
    *(ast.Add, ast.JoinedStr, ast.FormattedValue),
)
_CALLED: Final = frozenset(
    ("str", "Path", "join", "dirname", "abspath", "realpath", "normpath", "expanduser", "getcwd", "fspath")
) | frozenset(("resolve", "absolute", "joinpath", "cwd", "as_posix", "with_name"))
"""Functions and methods of paths that only compute."""


def find_shadowed(folders: Iterable[str], modules: Mapping[str, ModuleType]) -> str | None:
    """Return a file in these folders that an import would find in place of an imported module, or None."""
    for folder in folders:
        for name in _list_names(folder, modules):
            own, loaded = _find_file(folder, name), getattr(modules[name], "__file__", None)
            if own is not None and loaded is not None and os.path.realpath(own) != os.path.realpath(loaded):
                return own
    return None


def _list_names(folder: str, modules: Mapping[str, ModuleType]) -> list[str]:
    try:
        found = {name.removesuffix(".py") for name in os.listdir(folder or os.curdir)}
    except OSError:
        return []
    return sorted((found & modules.keys()) - {"__main__", "muster"})


def _find_file(folder: str, name: str) -> str | None:
    for candidate in (os.path.join(folder, name, "__init__.py"), os.path.join(folder, f"{name}.py")):
        if os.path.isfile(candidate):
            return candidate
    return None


# -- before -----------------------------------------------------------------------------------------------------------


def find_inserted(files: Iterable[str]) -> str | None:
    """Return a file that the program would import in place of a loaded module, as far as the source shows it.

    Args:
        files: the program's, see `preload.Preload`.
    """
    return find_shadowed((folder for path in files for folder in _list_folders(path)), sys.modules)


def _list_folders(path: str) -> Iterator[str]:
    """Return the folders that this file inserts into `sys.path`."""
    with open(path, "rb") as file:
        tree = parse(path) if b"sys.path.insert" in file.read() else None
    values: dict[str, object] = {"os": os, "pathlib": pathlib, "Path": pathlib.Path, "str": str, "__file__": path}
    for node in () if tree is None else ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            values.setdefault(node.targets[0].id, _evaluate(node.value, values))
        elif isinstance(node, ast.Call) and _is_insertion(node):
            value = _evaluate(node.args[1], values)
            if isinstance(value, str):
                yield value


def _is_insertion(node: ast.Call) -> bool:
    """Return whether the node is `sys.path.insert(index, folder)`."""
    return len(node.args) == 2 and ast.unparse(node.func) == "sys.path.insert"


def _evaluate(node: ast.expr, values: dict[str, object]) -> object:
    """Return the value of an expression that only puts paths together; None for any other."""
    for part in ast.walk(node):
        if not isinstance(part, _NODES) or (isinstance(part, ast.Name) and part.id not in values):
            return None
        if isinstance(part, ast.Call) and ast.unparse(part.func).rpartition(".")[2] not in _CALLED:
            return None
    try:
        return eval(compile(ast.Expression(body=node), "<path>", "eval"), {"__builtins__": {}}, values)  # noqa: S307
    except Exception:  # noqa: BLE001  # whatever it is, the program meets it itself
        return None


# -- after ------------------------------------------------------------------------------------------------------------


class LateChanges:
    """Watches one worker from its release to its end. Reports each kind of change once."""

    def __init__(self, modules: Mapping[str, ModuleType], *, reports: bool) -> None:
        """Begin in the worker, before the program begins.

        Args:
            modules: what is imported.
            reports: whether to print lines; False on all ranks but one.
        """
        self._reports = reports
        self._modules = modules
        self._path = tuple(sys.path)
        self._pid = os.getpid()
        self._has_said = False
        self._putenv = os.putenv
        if "torch" in sys.modules:
            os.putenv = self._set_variable  # also used by `os.environ`

    def _set_variable(self, key: "StrOrBytesPath", value: "StrOrBytesPath") -> None:
        self._putenv(key, value)
        name = os.fsdecode(key)
        if self._has_said or not is_read_at_import(name) or os.environ.get(name) == os.fsdecode(value):
            return
        if not self._has_imported_torch(sys._getframe(1)):  # noqa: SLF001  # who sets it
            self._has_said = True
            self._say(f"sets {name}, which torch reads when it is imported, but the warm start has already imported it")

    def _has_imported_torch(self, frame: FrameType | None) -> bool:
        """Return whether the program has imported torch itself.

        Then no fresh process would read the variable any more.
        """
        scopes = [
            module.__dict__
            for name, module in list(sys.modules.items())
            if isinstance(module, ModuleType) and (name == "__main__" or self._modules.get(name) is not module)
        ]
        while frame is not None:
            scopes.append(frame.f_locals)
            frame = frame.f_back
        return any(_is_of_torch(value) for scope in scopes for value in list(scope.values()))

    def check_path(self) -> None:
        """Look at `sys.path` after the program has run."""
        if os.getpid() != self._pid or tuple(sys.path) == self._path:
            return
        first = next((at for at, folder in enumerate(sys.path) if folder in self._path), len(sys.path))
        folders = [folder for folder in sys.path[:first] if isinstance(folder, str)]  # the only type that counts
        shadowed = find_shadowed(folders, self._modules)
        if shadowed is not None:
            why = "but the warm start has already imported another module of that name"
            self._say(f"inserts the folder of {shadowed} into sys.path, {why}")

    def _say(self, what: str) -> None:
        if not self._reports:
            return
        line = f"muster: the program {what}: --start cold runs it as python does\n"
        try:
            os.write(2, line.encode(errors="replace"))
        except OSError:
            return  # its stderr is not read


def _is_of_torch(value: object) -> bool:
    """Return True for torch, its modules, classes and functions.

    No attribute of anything else is read, because reading may have effects.
    """
    kind = type(value)
    if issubclass(kind, ModuleType):
        name = object.__getattribute__(value, "__dict__").get("__name__")
    elif kind in (type, FunctionType, BuiltinFunctionType):
        name = getattr(value, "__module__", None)
    else:
        return False
    return isinstance(name, str) and name.partition(".")[0] == "torch"
