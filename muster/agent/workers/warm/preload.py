"""Chooses what the template imports before it forks, from the program's source, without running it.

Only used in the template process: the agent does not pay for `ast` and the parsing.
"""

import ast
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

from muster.agent.workers.warm.fork_safety import is_read_early

MAX_FILES = 40
"""Limit on the local modules that are searched; a preload that is not found only makes the start slower."""

BRING_TORCH = frozenset(
    ("accelerate", "composer", "deepspeed", "fairscale", "lightning", "peft", "pytorch_lightning", "timm", "torchaudio")
) | frozenset(("torchdata", "torchmetrics", "torchtext", "torchtitan", "torchvision", "transformers", "trl"))
"""Packages that import torch themselves."""

_COMPILER = "torch._dynamo"
"""torch imports it when the first optimizer or data-parallel model is made; it takes as long as torch itself."""

_NEED_COMPILER = ("torch.optim", "torch.nn.parallel", "torch.distributed.fsdp", "torch.distributed.optim")
_COMPILED_NAMES = frozenset(("DistributedDataParallel", "FullyShardedDataParallel", "fully_shard"))
_COMPILED_ATTRIBUTES = frozenset((("torch", "optim"), ("nn", "parallel"), ("torch", "compile")))


@dataclass(frozen=True, kw_only=True)
class Preload:
    """Modules to import, in order, and a notice for the console."""

    modules: tuple[str, ...]
    notice: str = ""


@dataclass
class _Findings:
    torch_modules: list[str] = field(default_factory=list)
    early_variable: str = ""
    """The first variable that the program sets itself and that is read at import, and where."""
    needs_compiler: bool = False
    """It uses an optimizer, a data-parallel model or torch.compile."""


def choose_modules(requested: str, *, kind: str, target: str) -> Preload:
    """Choose the modules for `--preload`.

    Args:
        requested: module names separated by commas; "auto" means torch and those of its modules that the program
            imports, when it imports any.
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
    compiler = [_COMPILER] if findings.torch_modules and findings.needs_compiler else []
    return Preload(modules=tuple(dict.fromkeys([*findings.torch_modules, *compiler, *named])))


def find_source(kind: str, target: str) -> str | None:
    """Find the file with the program's first line; None when there is none."""
    if kind == "module":
        return find_module(target, sys.path)
    if os.path.isdir(target):
        target = os.path.join(target, "__main__.py")
    return target if os.path.isfile(target) else None


def find_module(name: str, folders: list[str]) -> str | None:
    """Find the source file of a module; importlib's finder would import its parent packages."""
    parts = name.split(".")
    for folder in folders:
        stem = os.path.join(folder or os.getcwd(), *parts)
        for candidate in (f"{stem}.py", os.path.join(stem, "__main__.py"), os.path.join(stem, "__init__.py")):
            if os.path.isfile(candidate):
                return candidate
    return None


def _search_program(path: str | None) -> _Findings:
    """Search the program and the modules beside it that it imports."""
    findings = _Findings()
    todo = [path] if path else []
    seen: set[str] = set()
    while todo and len(seen) < MAX_FILES:
        current = todo.pop(0)
        if current in seen:
            continue
        seen.add(current)
        tree = parse(current)
        if tree is None:
            continue
        variable = next(_list_early_variables(tree), "")
        if variable and not findings.early_variable:
            findings.early_variable = f"{os.path.basename(current)} sets {variable}"
        findings.needs_compiler = findings.needs_compiler or any(map(_needs_compiler, _walk_executed(tree)))
        for name in _list_imports(tree):
            root = name.partition(".")[0]
            if root == "torch" or root in BRING_TORCH:
                findings.torch_modules += ["torch", *([name] if root == "torch" else [])]
            elif (local := find_module(name, sys.path[:1])) is not None:
                todo.append(local)
    return findings


def parse(path: str) -> ast.Module | None:
    """Parse a file; None when it cannot be read or parsed."""
    try:
        with open(path, "rb") as file:
            return ast.parse(file.read())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None  # the worker will report what is wrong with it


def _list_imports(tree: ast.Module) -> Iterator[str]:
    """Names of the modules imported anywhere, except for type checkers only."""
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
    """True for an import or a use of something that makes torch import its compiler."""
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
    """True for `TYPE_CHECKING` and `typing.TYPE_CHECKING`."""
    name = test.attr if isinstance(test, ast.Attribute) else test.id if isinstance(test, ast.Name) else ""
    return name == "TYPE_CHECKING"


def _list_early_variables(tree: ast.Module) -> Iterator[str]:
    """Variables that the program sets in its own environment and that modules read when they are imported."""
    for node in ast.walk(tree):
        yield from (name for name in _list_set_variables(node) if is_read_early(name))


def _list_set_variables(node: ast.AST) -> Iterator[str]:
    """Keys of `os.environ["X"] = ...`, `os.environ.setdefault`, `os.environ.update` and `os.putenv`."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Subscript) and _is_environ(target.value):
                yield from _list_texts([target.slice])
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if (node.func.attr == "setdefault" and _is_environ(node.func.value)) or node.func.attr == "putenv":
            yield from _list_texts(node.args[:1])
        elif node.func.attr == "update" and _is_environ(node.func.value):
            yield from (keyword.arg for keyword in node.keywords if keyword.arg)
            for argument in node.args:
                if isinstance(argument, ast.Dict):
                    yield from _list_texts(key for key in argument.keys if key is not None)


def _is_environ(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name == "environ"


def _list_texts(nodes: "Iterator[ast.expr] | list[ast.expr]") -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
