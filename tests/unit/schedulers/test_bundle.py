import ast
import gc
import io
import os
import pathlib
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest
from torchx.specs import Resource, Role

from muster._shared.contract import AGENT_BUNDLE_NAME
from muster.schedulers import bundle
from muster.schedulers.agent_command import build_agent_args, is_agent_role

TRIMMED = ("typing", "collections", "muster")


def find_first_imports(tree: ast.Module) -> Iterator[str]:
    """The modules of muster that are imported when this one is, by their dotted names, and what else may be one."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("muster"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("muster"):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


class Reduced(ast.NodeTransformer):
    """A program without what a bundle leaves out. Names of types are imported or not: see `find_missing`."""

    def __init__(self) -> None:
        self.places = ["module"]

    def visit_Module(self, node):
        return self.visit_body(node)

    def visit_FunctionDef(self, node):
        node.returns = None
        return self.visit_inside(node, "function")

    def visit_ClassDef(self, node):
        return self.visit_inside(node, "class")

    def visit_inside(self, node, place):
        self.places.append(place)
        self.visit_body(node)
        self.places.pop()
        return node

    def visit_body(self, node):
        self.generic_visit(node)
        rest = [
            each for each in node.body if not isinstance(each, ast.Expr) or not isinstance(each.value, ast.Constant)
        ]
        node.body = rest or [ast.Expr(ast.Constant(0))]
        return node

    def visit_If(self, node):
        self.generic_visit(node)
        is_for_types = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        return None if is_for_types and self.places == ["module"] and not node.orelse else node

    def visit_ImportFrom(self, node):
        return None if is_trimmed(node) and self.places == ["module"] else node

    def visit_arg(self, node):
        node.annotation = None
        return node

    def visit_AnnAssign(self, node):
        self.generic_visit(node)
        if self.places[-1] == "class" or node.value is None:
            return node
        return ast.copy_location(ast.Assign(targets=[node.target], value=node.value), node)


def dump_reduced(source):
    return ast.dump(Reduced().visit(ast.parse(source)))


def find_missing(source, stripped):
    """Names that the source imports, and the stripped one uses but does not import."""
    imported, left = (
        {name.asname or name.name for node in ast.parse(text).body if is_trimmed(node) for name in node.names}
        for text in (source, stripped)
    )
    used = {node.id for node in ast.walk(ast.parse(stripped)) if isinstance(node, ast.Name)}
    texts = [node.value for node in ast.walk(ast.parse(stripped)) if isinstance(node, ast.Constant)]
    used |= {word for text in texts if isinstance(text, str) for word in re.findall(r"\w+", text)}
    return (imported - left) & used


def is_trimmed(node):
    return isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in TRIMMED


class TestAgentBundle:
    def test_is_small_and_the_same_every_time(self):
        first = bundle.build_agent_bundle()
        assert bundle.build_agent_bundle() is first, "made once per program"
        bundle._pack.cache_clear()
        assert bundle.build_agent_bundle() == first
        assert len(first) < bundle.AGENT_BUNDLE_LIMIT_BYTES

    @pytest.mark.parametrize("damage", [None, "cut", "other", "empty"])
    def test_it_is_kept_for_the_next_program(self, tmp_path, monkeypatch, damage):
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        made = []
        monkeypatch.setattr(bundle, "_make", lambda files: made.append(1) or b"zip of %d" % len(files))
        build = bundle._pack.__wrapped__
        first = build((("a.py", "1"),))
        [kept] = tmp_path.glob("muster-*/*")
        content = kept.read_bytes()
        kept.write_bytes({None: content, "cut": content[:-1], "other": b"x" * len(content), "empty": b""}[damage])
        assert build((("a.py", "1"),)) == first
        assert len(made) == (1 if damage is None else 2)
        assert build((("a.py", "2"),)) == first, "by now of another source"
        assert build((("a.py", "2"),)) == first
        assert len(made) == (2 if damage is None else 3)
        assert list(tmp_path.glob("muster-*/*")) == [kept]

    @pytest.mark.long
    def test_stripped_source_is_the_same_program_on_the_same_lines(self):
        package = pathlib.Path(bundle.__file__).parents[1]
        rooms = [package / name for name in ("agent", "_shared", "integrations", "snapshots")]
        for path in [*package.glob("*.py"), *(path for room in rooms for path in room.rglob("*.py"))]:
            source = path.read_text()
            stripped = bundle.strip_source(source)
            assert len(stripped.splitlines()) == len(source.splitlines()), path
            assert dump_reduced(stripped) == dump_reduced(source), path
            assert not find_missing(source, stripped), path

    @pytest.mark.parametrize(
        ("source", "expected"),
        [
            ('"""doc"""\nx = 1  # why\n', "\nx = 1\n"),
            ('def f():\n    """one\n    two"""\n', "def f():\n 0\n\n"),
            ('def f():\n    """one\n    two"""  # why\n    a()\n', "def f():\n\n\n a()\n"),
            ('class C:\n    a: int\n    """one\n\n    ü"""; b = 2\n', "class C:\n a: int\n 0; b = 2\n\n\n"),
            ("# why\nif a:\n    # how\n    b()\n", "\nif a:\n\n b()\n"),
            ('x = """\n# none\n    ü"""  # why\n', 'x = """\n# none\n    ü"""\n'),
            ("x = '''\n# \"\"\" none\n'''\n", "x = '''\n# \"\"\" none\n'''\n"),
            ('x = "\\\n# none"\n', 'x = "\\\n# none"\n'),
            ('x = (\n    "# \\""  # "one"\n    # two\n    \'"#\'\n)\n', 'x = (\n "# \\""\n\n \'"#\'\n)\n'),
            ('x = f"#{a[\'#\']}" + rb"\\"#" + 1  # why\n', 'x = f"#{a[\'#\']}" + rb"\\"#" + 1\n'),
            ('def f(): "ü"; return 1\n', "def f(): 0; return 1\n"),
            ("def f(a: int, *b: str, ü: 'C' = 1, **d: D) -> E: return 1\n", "def f(a, *b, ü = 1, **d): return 1\n"),
            (
                "def f(\n    a: (\n        int  # why\n    ),\n) -> dict[\n    str, int\n]:\n    b()\n",
                "def f(\n a,\n\n\n):\n\n\n b()\n",
            ),
            ("def f():\n    a: int = 1\n    b: str\n    c.d: E = {}\n", "def f():\n a = 1\n b: str\n c.d = {}\n"),
            (
                "class C:\n    a: int = 1\n    def b(self) -> None: d: E = 1\n",
                "class C:\n a: int = 1\n def b(self): d = 1\n",
            ),
            ("def f():\n    class C:\n        a: int = 1\n", "def f():\n class C:\n  a: int = 1\n"),
            (
                "def f():\n    try:\n        g()\n    except E:\n        def h() -> C: a()\n",
                "def f():\n try:\n  g()\n except E:\n  def h(): a()\n",
            ),
            (
                "from typing import TYPE_CHECKING, Final\nif TYPE_CHECKING:  # why\n    import a\nB: Final = 1\n",
                "\n\n\nB = 1\n",
            ),
            (
                "from collections.abc import (\n    Mapping,\n    Set,\n)\nclass C:\n    a: 'Mapping[int, str]'\n",
                "from collections.abc import Mapping\n\n\n\nclass C:\n a: 'Mapping[int, str]'\n",
            ),
            ("if TYPE_CHECKING:\n    import a\nelse:\n    b()\n", "if TYPE_CHECKING:\n import a\nelse:\n b()\n"),
        ],
    )
    def test_what_is_stripped(self, source, expected):
        assert bundle.strip_source(source) == expected
        compile(expected, "stripped", "exec")

    def test_threads_may_build_it_at_the_same_time(self):
        """The interpreter changes threads inside `ast.parse` only when a collection there runs Python code."""

        class Yields:
            def __init__(self):
                self.itself = self

            def __del__(self):
                os.sched_yield()

        def strip(_):
            _ = [Yields() for _ in range(20)]
            return bundle.strip_source(source)

        source = pathlib.Path(bundle.__file__).read_text()
        thresholds = gc.get_threshold()
        gc.set_threshold(50)
        try:
            with ThreadPoolExecutor(8) as pool:
                stripped = set(pool.map(strip, range(40)))
        finally:
            gc.set_threshold(*thresholds)
        assert len(stripped) == 1

    def test_holds_the_agent_and_no_adapter(self):
        with zipfile.ZipFile(io.BytesIO(bundle.build_agent_bundle())) as archive:
            names = archive.namelist()
        assert {
            "__main__.py",
            "muster/__init__.py",
            "muster/_shared/contract.py",
            "muster/agent/runtime/loop.py",
            "muster/integrations/huggingface.py",
            "muster/snapshots/saving.py",
        } <= set(names)
        assert not [name for name in names if "schedulers" in name or "components" in name or "__pycache__" in name]

    def test_what_a_module_imports_at_its_start_is_in_it(self):
        """What is left out is for programs that have muster installed: a module imports that where it needs it."""
        installed = pathlib.Path(bundle.__file__).parents[2]
        with zipfile.ZipFile(io.BytesIO(bundle.build_agent_bundle())) as archive:
            sources = {name: archive.read(name).decode() for name in archive.namelist() if name.endswith(".py")}
        lacking = set()
        for name, source in sources.items():
            for imported in find_first_imports(ast.parse(source)):
                path = imported.replace(".", "/")
                files = {f"{path}.py", f"{path}/__init__.py"}
                if any((installed / file).is_file() for file in files) and not files & sources.keys():
                    lacking.add(f"{name} imports {imported}")
        assert lacking == set()

    def test_its_digest_is_that_of_the_content(self):
        """A node unpacks a bundle to a folder of this name, which may be there already."""
        packed = [bundle._make((("muster/__init__.py", f"a = {number}\n"),)) for number in (1, 2)]
        first, second = (zipfile.ZipFile(io.BytesIO(each)).read("__main__.py") for each in packed)
        assert first != second

    def test_main_compiles_on_an_old_python_and_refuses_it_in_one_line(self):
        with zipfile.ZipFile(io.BytesIO(bundle.build_agent_bundle())) as archive:
            source = archive.read("__main__.py").decode()
        # What Python 2.7 and 3.5 cannot parse.
        for later in (r"\bf['\"]", "->", ":=", "nonlocal"):  # a digest may end with f
            assert re.search(later, source) is None
        program = "import sys; sys.version_info = (3, 6, 8)\n" + source
        run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert run.returncode == 2
        assert run.stderr.splitlines() == [
            f"muster-agent: needs Python 3.10 or newer, but {sys.executable} is Python 3.6"
        ]


class TestEntrypoint:
    @pytest.mark.parametrize("python", ["python", "python3", "python3.11", "/opt/venv/bin/python3"])
    def test_recognises_the_agent(self, python):
        assert is_agent_role(SimpleNamespace(entrypoint=python, args=["-m", "muster.agent", "--nnodes", "1"]))

    @pytest.mark.parametrize(
        ("entrypoint", "args"),
        [
            ("python3", ["-m", "muster.agents"]),
            ("python3", ["-m", "torch.distributed.run"]),
            ("python3", ["main.py", "-m", "muster.agent"]),
            ("python3-config", ["-m", "muster.agent"]),
            ("sh", ["-m", "muster.agent"]),
            ("python3", []),
        ],
    )
    def test_recognises_nothing_else_as_the_agent(self, entrypoint, args):
        assert not is_agent_role(SimpleNamespace(entrypoint=entrypoint, args=args))

    def test_rewrites_without_touching_the_role(self):
        role = Role(
            name="r",
            image="",
            entrypoint="python3",
            args=["-m", "muster.agent", "--nnodes", "2"],
            resource=Resource(cpu=1, gpu=0, memMB=1),
        )
        assert is_agent_role(role)
        assert build_agent_args(role.args, "/muster") == [f"/muster/{AGENT_BUNDLE_NAME}", "--nnodes", "2"]
        assert role.args[0] == "-m"


def test_it_has_the_modules_that_torch_finds_by_our_entry_points():
    """Where muster is installed beside it, torch warns of an entry point whose module is not there."""
    names = zipfile.ZipFile(io.BytesIO(bundle.build_agent_bundle())).namelist()
    points = [each for each in entry_points(group="torchrun.handlers") if each.module.startswith("muster.")]
    assert points
    assert [each.module for each in points if f"{each.module.replace('.', '/')}.py" not in names] == []
