"""Which way imports point: the three rooms of the package never import one another.

Read from the source, so that an import inside a function counts too.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import muster

PACKAGE = Path(muster.__file__).parent
ROOMS = ("agent", "components", "schedulers")
LAZY = {"docker", "kubernetes", "torch", "urllib3"}


@dataclass(frozen=True, kw_only=True)
class Import:
    """One imported module, and where."""

    path: str
    line: int
    module: str
    at_import: bool
    """Runs when the importing module is imported."""

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]

    @property
    def place(self) -> str:
        """The room, or the shared modules beside `_contract` ("")."""
        first, slash, _ = self.path.partition("/")
        return first if slash else ""

    def __str__(self) -> str:
        return f"muster/{self.path}:{self.line} imports {self.module}"


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imported_modules(node: ast.AST, path: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    package = ["muster", *path.split("/")[:-1]]
    base = ".".join(package[: len(package) - node.level + 1]) + "." if node.level else ""
    origin = (base + (node.module or "")).strip(".")
    # `from muster import agent` names a module in its second half
    return [f"{origin}.{alias.name}" for alias in node.names]


def walk(node: ast.AST, path: str, at_import: bool) -> Iterator[Import]:
    for module in imported_modules(node, path):
        yield Import(path=path, line=node.lineno, module=module, at_import=at_import)  # type: ignore[attr-defined]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or is_type_checking(node):
        at_import = False
    for child in ast.iter_child_nodes(node):
        yield from walk(child, path, at_import)


def all_imports() -> list[Import]:
    found: list[Import] = []
    for file in sorted(PACKAGE.rglob("*.py")):
        path = file.relative_to(PACKAGE).as_posix()
        found += walk(ast.parse(file.read_text(), str(file)), path, at_import=True)
    return found


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    return all_imports()


def is_for_torch(path: str) -> bool:
    """The agent's modules that wrap what torch has are called torch_*.py; nobody else pays for them."""
    return path.startswith("agent/") and path.rpartition("/")[2].startswith("torch_")


def offenders(wrong: Iterator[Import]) -> list[str]:
    return [str(found) for found in wrong]


def test_the_scan_sees_imports_at_all(imports: list[Import]) -> None:
    assert any(found.module == "muster._contract.AGENT_MODULE" for found in imports)
    assert {found.place for found in imports} >= {"agent", "components"}


def test_no_room_imports_another(imports: list[Import]) -> None:
    def crosses(found: Import) -> bool:
        target = found.module.split(".")[1:2]
        return found.top == "muster" and target[0] in ROOMS and target[0] != found.place

    assert offenders(found for found in imports if found.module != "muster" and crosses(found)) == []


def test_the_agent_and_the_shared_modules_are_standard_library_only(imports: list[Import]) -> None:
    allowed = set(sys.stdlib_module_names) | {"muster"}

    def torch_is_allowed(found: Import) -> bool:
        return found.top == "torch" and (found.path.startswith("agent/workers/") or is_for_torch(found.path))

    def is_for_types(found: Import) -> bool:
        """Under TYPE_CHECKING: never run."""
        return found.module.startswith("typing_extensions.") and not found.at_import

    places = {"agent", ""}
    foreign = (found for found in imports if found.place in places and found.top not in allowed)
    assert offenders(found for found in foreign if not torch_is_allowed(found) and not is_for_types(found)) == []


def test_components_know_torchx_and_nothing_heavier(imports: list[Import]) -> None:
    allowed = set(sys.stdlib_module_names) | {"muster", "torchx"}
    assert offenders(found for found in imports if found.place == "components" and found.top not in allowed) == []


def test_client_libraries_are_imported_when_first_needed(imports: list[Import]) -> None:
    assert offenders(found for found in imports if found.place == "schedulers" and found.top == "torch") == []
    eager = (found for found in imports if found.at_import and found.top in LAZY and found.place == "schedulers")
    assert offenders(eager) == []


def test_the_agents_ordinary_path_imports_no_asyncio_and_no_torch(imports: list[Import]) -> None:
    def is_heavy(found: Import) -> bool:
        names_wrapper = any(word.startswith("torch_") for word in found.module.split(".")) and found.top == "muster"
        return names_wrapper or found.top in {"asyncio", "torch", "numpy"}

    ordinary = (found for found in imports if found.place in {"agent", ""} and not is_for_torch(found.path))
    assert offenders(found for found in ordinary if found.at_import and is_heavy(found)) == []
