"""Chooses what the template imports before it forks, from the program's source, without running it.

On a held node the template imports before there is a program (`import_early`). It becomes the program's template only
if the program's own would have imported the same (`find_early_obstacle`).

It is used only in the template process, so that the agent need not load `ast` and parse.
"""

import ast
import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from muster._shared.records import record
from muster.agent.workers.warm.fork_safety import is_read_early

MAX_FILES = 40
"""Limit on the local modules that are searched. A preload that is not found only makes the start slower."""

BRING_TORCH = frozenset(
    ("accelerate", "composer", "deepspeed", "fairscale", "lightning", "peft", "pytorch_lightning", "timm", "torchaudio")
) | frozenset(("torchdata", "torchmetrics", "torchtext", "torchtitan", "torchvision", "transformers", "trl"))
"""Packages that import torch themselves."""

_COMPILER = "torch._dynamo"
"""torch imports this when the first optimizer or data-parallel model is made. It takes as long as torch itself."""
_OF_ITS_END = "tabulate"
"""The compiler's own exit handler imports this if it is installed. A library that is loaded so late (that of `wcwidth`,
which it imports) would keep every worker from ending early."""

_NEED_COMPILER = ("torch.optim", "torch.nn.parallel", "torch.distributed.fsdp", "torch.distributed.optim")
_COMPILED_NAMES = frozenset(("DistributedDataParallel", "FullyShardedDataParallel", "fully_shard"))
_COMPILED_ATTRIBUTES = frozenset((("torch", "optim"), ("nn", "parallel"), ("torch", "compile")))


@record
class Preload:
    """Modules to import, in order, and a notice for the console."""

    modules: tuple[str, ...]
    notice: str = ""
    files: tuple[str, ...] = ()
    """The program, the packages that contain it, and the modules beside it that it imports; empty without "auto"."""


@record
class EarlyImports:
    """What a template has imported before it had a program."""

    modules: tuple[str, ...]
    stamps: dict[str, int]
    """The time when something was last installed or removed, by folder."""
    duration_s: float
    warnings: tuple[Any, ...]
    """Warnings to show with the program's own filters, see `import_sites.show_warnings`."""


def import_early(requested: str) -> EarlyImports:
    """Import what nearly every program imports: torch, and what `--preload` names. Skip what is not installed."""
    import warnings

    stamps, shown, began_s = _read_stamps(), list[Any](), time.monotonic()
    shows = warnings._showwarnmsg_impl  # type: ignore[attr-defined]  # noqa: SLF001
    warnings._showwarnmsg_impl = shown.append  # type: ignore[attr-defined]  # noqa: SLF001
    names = ("torch" if name == "auto" else name for name in map(str.strip, requested.split(",")) if name)
    try:
        modules = tuple(name for name in names if _import_installed(name))
    finally:
        warnings._showwarnmsg_impl = shows  # type: ignore[attr-defined]  # noqa: SLF001
    duration_s = round(time.monotonic() - began_s, 3)
    return EarlyImports(modules=modules, stamps=stamps, duration_s=duration_s, warnings=tuple(shown))


def _import_installed(name: str) -> bool:
    """Import a module; return False if it is not installed."""
    try:
        __import__(name)
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):
            return False
        raise
    return True


def find_early_obstacle(early: EarlyImports, modules: Iterable[str]) -> str | None:
    """Return why a template that has imported early cannot serve a program that imports `modules`; None if it can."""
    more = sorted({*early.modules}.difference(modules))
    if more:
        return f"the program does not import {more[0]}"
    changed = find_changed(early)
    return None if changed is None else f"packages in {changed} have changed"


def find_changed(early: EarlyImports) -> str | None:
    """Return a folder of packages that has changed since; None: none has."""
    stamps = _read_stamps()
    return next((path for path in stamps if early.stamps.get(path) != stamps[path]), None)


def _read_stamps() -> dict[str, int]:
    packages = (path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages"))
    return {path: os.stat(path).st_mtime_ns for path in packages if os.path.isdir(path)}


class _Findings:
    def __init__(self) -> None:
        self.files: list[str] = []
        self.torch_modules: list[str] = []
        self.early_variable = ""
        """The first variable that the program sets itself and that is read at import, with its place."""
        self.needs_compiler = False
        """Whether the program uses an optimizer, a data-parallel model or torch.compile."""


def choose_modules(requested: str, *, kind: str, target: str) -> Preload:
    """Choose the modules for `--preload`.

    Args:
        requested: module names separated by commas. "auto" means torch and those of its modules that the program
            imports, if it imports any.
        kind: value of a `spec.ProgramKind`.
        target: script path or module name; `sys.path` is already the program's.
    """
    names = [name.strip() for name in requested.split(",") if name.strip()]
    if "auto" not in names:
        return Preload(modules=tuple(names))
    named = [name for name in names if name != "auto"]
    findings = _search_program(find_source(kind, target))
    if findings.torch_modules and findings.early_variable and "torch" not in named:
        notice = f"torch is not preloaded: {findings.early_variable}, which torch reads when it is imported"
        return Preload(modules=tuple(named), notice=notice)
    compiler = _list_compiler() if findings.torch_modules and findings.needs_compiler else []
    modules = tuple(dict.fromkeys([*findings.torch_modules, *compiler, *named]))
    return Preload(modules=modules, files=tuple(findings.files))


def _list_compiler() -> list[str]:
    """Return the modules, except those that share their name with a file of the program."""
    own, others = sys.path[:1], sys.path[1:]
    is_installed = find_module(_OF_ITS_END, own) is None and find_module(_OF_ITS_END, others) is not None
    return [_COMPILER, _OF_ITS_END] if is_installed else [_COMPILER]


def brings_torch(modules: Iterable[str]) -> bool:
    """Return whether the import of one of these modules imports torch."""
    return any(name.partition(".")[0] in BRING_TORCH | {"torch"} for name in modules)


def find_source(kind: str, target: str) -> str | None:
    """Find the file with the program's first line; None if there is none."""
    if kind == "module":
        return find_module(target, sys.path)
    if os.path.isdir(target):
        target = os.path.join(target, "__main__.py")
    return target if os.path.isfile(target) else None


def find_module(name: str, folders: list[str]) -> str | None:
    """Find the source file of a module without importing its parent packages, as importlib's finder would."""
    parts = name.split(".")
    for folder in folders:
        stem = os.path.join(folder or os.getcwd(), *parts)
        for candidate in (f"{stem}.py", os.path.join(stem, "__main__.py"), os.path.join(stem, "__init__.py")):
            if os.path.isfile(candidate):
                return candidate
    return None


def _search_program(path: str | None) -> _Findings:
    """Search all files that `_walk_files` finds."""
    findings = _Findings()
    for current, tree in _walk_files(path):
        findings.files.append(current)
        variable = next(_list_early_variables(tree), "")
        if variable and not findings.early_variable:
            findings.early_variable = f"{os.path.basename(current)} sets {variable}"
        findings.needs_compiler = findings.needs_compiler or any(map(_needs_compiler, _walk_executed(tree)))
        for name in _list_imports(tree):
            root = name.partition(".")[0]
            if root in BRING_TORCH | {"torch"} and find_module(root, sys.path[:1]) is None:  # a torch.py is another one
                findings.torch_modules += ["torch", *([name] if root == "torch" else [])]
    return findings


def _walk_files(path: str | None) -> Iterator[tuple[str, ast.Module]]:
    todo = [path] if path else []
    seen: set[str] = set()
    while todo and len(seen) < MAX_FILES:
        current = os.path.abspath(todo.pop(0))
        if current in seen:
            continue
        seen.add(current)
        tree = parse(current)
        if tree is not None:
            yield current, tree
            todo += [*_list_packages(current), *_list_local_files(tree, current)]


def _list_packages(path: str) -> Iterator[str]:
    """Return the `__init__.py` of every package that a file beside the program lies in: they run before the file."""
    root = os.path.abspath(sys.path[0] if sys.path else "")
    folder = os.path.dirname(path)
    while folder.startswith(f"{root}{os.sep}"):
        candidate = os.path.join(folder, "__init__.py")
        if os.path.isfile(candidate):
            yield candidate
        folder = os.path.dirname(folder)


def _list_local_files(tree: ast.Module, path: str) -> Iterator[str]:
    """Return the files beside the program that a file imports, including by `from . import x`."""
    for node in _walk_executed(tree):
        if isinstance(node, ast.Import):
            found = [find_module(alias.name, sys.path[:1]) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            folders = [_find_parent(path, node.level)] if node.level else sys.path[:1]
            stem = [node.module] if node.module else []
            names = [".".join([*stem, alias.name]) for alias in node.names]
            found = [find_module(name, folders) for name in (*stem, *names)]
        else:
            continue
        yield from (each for each in found if each is not None)


def _find_parent(path: str, level: int) -> str:
    """Find the folder in which a relative import of this level begins."""
    for _ in range(level):
        path = os.path.dirname(path)
    return path


def parse(path: str) -> ast.Module | None:
    """Parse a file; None if it cannot be read or parsed."""
    try:
        with open(path, "rb") as file:
            return ast.parse(file.read())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None  # reported by the worker


def _list_imports(tree: ast.Module) -> Iterator[str]:
    """Return the names of the modules imported anywhere, except those for type checkers only."""
    for node in _walk_executed(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def _walk_executed(tree: ast.AST) -> Iterator[ast.AST]:
    todo = [tree]
    while todo:
        node = todo.pop()
        yield node
        children = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.If) and is_type_checking(node.test):
            children = list(node.orelse)
        todo += reversed(children)


def _needs_compiler(node: ast.AST) -> bool:
    """Return True for an import or a use of something that makes torch import its compiler."""
    if isinstance(node, ast.Import):
        return any(alias.name.startswith(_NEED_COMPILER) for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        names = (f"{node.module}.{alias.name}" for alias in node.names)
        return any(name.startswith(_NEED_COMPILER) or name.rpartition(".")[2] in _COMPILED_NAMES for name in names)
    if not isinstance(node, ast.Attribute):
        return False
    owner = getattr(node.value, "id", getattr(node.value, "attr", ""))
    return node.attr in _COMPILED_NAMES or (owner, node.attr) in _COMPILED_ATTRIBUTES


def is_type_checking(test: ast.expr) -> bool:
    """Return True for `TYPE_CHECKING` and `typing.TYPE_CHECKING`."""
    name = test.attr if isinstance(test, ast.Attribute) else test.id if isinstance(test, ast.Name) else ""
    return name == "TYPE_CHECKING"


def _list_early_variables(tree: ast.Module) -> Iterator[str]:
    """Return the variables that the program sets in its own environment and that modules read when they are imported.

    If it sets variables whose names are not written there (a loop, a dict), every such name in the file counts.
    """
    computes = False
    names = _list_environ_names(tree)
    for node in ast.walk(tree):
        for key in _list_keys(node, names):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield from [key.value] if is_read_early(key.value) else []
            else:
                computes = True
    if computes:
        texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
        written = (text for text in texts if isinstance(text, str) and text.isidentifier() and text.isupper())
        keywords = (node.arg or "" for node in ast.walk(tree) if isinstance(node, ast.keyword))
        yield from filter(is_read_early, (*written, *filter(str.isupper, keywords)))


def _list_environ_names(tree: ast.Module) -> set[str]:
    """Return the names of `os.environ` in this file: by `from os import environ as NAME` and `NAME = os.environ`."""
    names = {"environ"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            names |= {alias.asname for alias in node.names if alias.name == "environ" and alias.asname}
        elif isinstance(node, ast.Assign) and _is_environ(node.value, names):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def _list_keys(node: ast.AST, names: set[str]) -> Iterator[ast.expr]:
    """Return the keys of `os.environ["X"] = ...`, `setdefault`, `update`, `|=` and `os.putenv`.

    Return the whole expression if it has no keys.
    """
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Subscript) and _is_environ(target.value, names):
                yield target.slice
            elif isinstance(node, ast.AugAssign) and _is_environ(target, names):
                yield from _list_dict_keys(node.value)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if (node.func.attr == "setdefault" and _is_environ(node.func.value, names)) or node.func.attr == "putenv":
            yield from node.args[:1]
        elif node.func.attr == "update" and _is_environ(node.func.value, names):
            for keyword in node.keywords:
                yield ast.Constant(value=keyword.arg) if keyword.arg else keyword.value
            for argument in node.args:
                yield from _list_dict_keys(argument)


def _list_dict_keys(node: ast.expr) -> Iterator[ast.expr]:
    """Return the keys of a dict display. Return the expression itself for anything else, and for what `**` adds."""
    if isinstance(node, ast.Dict):
        yield from (key or value for key, value in zip(node.keys, node.values, strict=True))
    else:
        yield node


def _is_environ(node: ast.expr, names: set[str]) -> bool:
    return (
        node.attr == "environ" if isinstance(node, ast.Attribute) else isinstance(node, ast.Name) and node.id in names
    )
