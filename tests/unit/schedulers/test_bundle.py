import ast
import gc
import io
import os
import pathlib
import stat
import subprocess
import sys
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torchx.specs import Resource, Role

from muster._contract import AGENT_BUNDLE_NAME
from muster.agent.errors import EnvironmentFault
from muster.agent.workspace import unpack_workspace
from muster.schedulers import bundle
from muster.schedulers.agent_command import is_agent_command, is_agent_role, rewrite_agent_args


def make_tree(root, names):
    for name in names:
        path = root / name
        if name.endswith("/"):
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
    return root


def dump_without_docstrings(source):
    class Placeholder(ast.NodeTransformer):
        def visit_Expr(self, node):
            return ast.Expr(ast.Constant(0)) if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    return ast.dump(Placeholder().visit(ast.parse(source)))


def names_of(packed):
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as archive:
        return archive.getnames()


class TestAgentBundle:
    def test_is_small_and_the_same_every_time(self):
        first, second = bundle.build_agent_bundle(), bundle.build_agent_bundle()
        assert first == second
        assert len(first) < bundle.AGENT_BUNDLE_LIMIT_BYTES

    def test_stripped_source_is_the_same_program_on_the_same_lines(self):
        package = pathlib.Path(bundle.__file__).parents[1]
        for path in [*package.glob("*.py"), *(package / "agent").rglob("*.py")]:
            source = path.read_text()
            stripped = bundle.strip_source(source)
            assert len(stripped.splitlines()) == len(source.splitlines()), path
            assert dump_without_docstrings(stripped) == dump_without_docstrings(source), path

    @pytest.mark.parametrize(
        ("source", "expected"),
        [
            ('"""doc"""\nx = 1  # why\n', "0\nx = 1  # why\n"),
            ('def f():\n    """one\n    two"""\n', "def f():\n    0\n\n"),
            ('class C:\n    a: int\n    """one\n\n    ü"""; b = 2\n', "class C:\n    a: int\n    0; b = 2\n\n\n"),
            ('x = """\n# none\n"""\n', 'x = """\n# none\n"""\n'),
            ('def f(): "ü"; return 1\n', "def f(): 0; return 1\n"),
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
            for _ in range(20):
                Yields()
            return bundle.strip_source(source)

        source = pathlib.Path(bundle.__file__).read_text()
        thresholds = gc.get_threshold()
        gc.set_threshold(50)
        try:
            with ThreadPoolExecutor(8) as pool:
                stripped = set(
                    pool.map(lambda _: [Yields() for _ in range(20)] and bundle.strip_source(source), range(500))
                )
        finally:
            gc.set_threshold(*thresholds)
        assert len(stripped) == 1

    def test_holds_the_agent_and_no_adapter(self):
        with zipfile.ZipFile(io.BytesIO(bundle.build_agent_bundle())) as archive:
            names = archive.namelist()
        assert {"__main__.py", "muster/__init__.py", "muster/_contract.py", "muster/agent/runtime/loop.py"} <= set(
            names
        )
        assert not [name for name in names if "schedulers" in name or "components" in name or "__pycache__" in name]

    def test_main_compiles_on_an_old_python(self):
        with zipfile.ZipFile(io.BytesIO(bundle.build_agent_bundle())) as archive:
            source = archive.read("__main__.py").decode()
        compile(source, "__main__.py", "exec", dont_inherit=True)
        # What Python 2.7 and 3.5 cannot parse.
        for later in ("f'", 'f"', "->", ":=", "nonlocal"):
            assert later not in source

    def test_main_refuses_an_old_python_in_one_line(self, tmp_path):
        with zipfile.ZipFile(io.BytesIO(bundle.build_agent_bundle())) as archive:
            source = archive.read("__main__.py").decode()
        program = "import sys; sys.version_info = (3, 6, 8)\n" + source
        run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert run.returncode == 2
        assert run.stderr.splitlines() == [
            f"muster-agent: needs Python 3.10 or newer, but {sys.executable} is Python 3.6"
        ]


class TestWorkspaceBundle:
    def test_same_tree_same_bytes(self, tmp_path):
        make_tree(tmp_path, ["b", "a/x", "a/y", "c/"])
        packed = bundle.build_workspace_bundle(str(tmp_path))
        assert packed == bundle.build_workspace_bundle(str(tmp_path))
        assert names_of(packed) == ["a", "a/x", "a/y", "b", "c"]

    def test_links_modes_and_times_are_kept(self, tmp_path):
        source = make_tree(tmp_path / "source", ["run.sh", "data/x"])
        (source / "run.sh").chmod(0o750)
        os.utime(source / "run.sh", (1_600_000_000, 1_600_000_000))
        (source / "link").symlink_to("data")
        (source / "outside").symlink_to("/somewhere/else")
        packed = tmp_path / "workspace.tar.gz"
        packed.write_bytes(bundle.build_workspace_bundle(str(source)))

        unpack_workspace(str(packed), str(tmp_path / "there"))

        there = tmp_path / "there"
        assert stat.S_IMODE((there / "run.sh").stat().st_mode) == 0o750
        assert (there / "run.sh").stat().st_mtime == 1_600_000_000
        assert os.readlink(there / "link") == "data"
        assert os.readlink(there / "outside") == "/somewhere/else"
        assert (there / "link" / "x").read_text() == "data/x"

    def test_ignores_what_torchxignore_names(self, tmp_path):
        make_tree(tmp_path, ["keep.py", "drop.log", "logs/a", "logs/b.txt", "deep/logs/c"])
        (tmp_path / ".torchxignore").write_text("# comment\n*.log\nlogs\n  \n")
        names = names_of(bundle.build_workspace_bundle(str(tmp_path)))
        assert names == [".torchxignore", "deep", "deep/logs", "deep/logs/c", "keep.py"]

    patterns = st.sampled_from(
        ["*", "a", "a*", "*/a", "a/*", "!a", "!a/b", "b", "!*", "*b*", "!b", "a/b", "Dockerfile.torchx", "#x", "."]
    )
    tree = st.lists(
        st.lists(st.sampled_from(["a", "b", "ab", "c"]), min_size=1, max_size=3).map("/".join), min_size=1, max_size=8
    )

    @given(lines=st.lists(patterns, max_size=5), names=tree)
    @settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_ignores_as_torchx_does(self, tmp_path_factory, lines, names):
        fsspec = pytest.importorskip("fsspec")
        from torchx.workspace.api import walk_workspace

        root = tmp_path_factory.mktemp("tree")
        for name in names:
            (root / name).parent.mkdir(parents=True, exist_ok=True) if not any(
                (root / parent).is_file() for parent in _parents(name)
            ) else None
            if (root / name).parent.is_dir() and not (root / name).exists():
                (root / name).write_text("")
        (root / "Dockerfile.torchx").write_text("")
        (root / ".torchxignore").write_text("\n".join(lines))

        expected = {
            os.path.relpath(os.path.join(folder, name), root)
            for folder, _, files in walk_workspace(fsspec.filesystem("file"), str(root))
            for name in files
        }
        ours = {name for name in bundle.walk_workspace(root) if (root / name).is_file()}
        assert ours == expected

    def test_names_a_missing_folder(self, tmp_path):
        with pytest.raises(bundle.BundleError, match=r"workspace '.*nowhere' is not a folder"):
            bundle.build_workspace_bundle(str(tmp_path / "nowhere"))

    def test_names_what_cannot_be_read(self, tmp_path, monkeypatch):
        make_tree(tmp_path, ["secret"])

        def refuse(path):
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(bundle.Path, "read_bytes", refuse)
        with pytest.raises(bundle.BundleError, match=r"cannot pack '.*secret': Permission denied; name it in \.torchx"):
            bundle.build_workspace_bundle(str(tmp_path))

    def test_leaves_out_pipes(self, tmp_path):
        os.mkfifo(tmp_path / "pipe")
        assert names_of(bundle.build_workspace_bundle(str(tmp_path))) == []


def _parents(name):
    parts = name.split("/")[:-1]
    return ["/".join(parts[: n + 1]) for n in range(len(parts))]


def make_archive(path, entries):
    with tarfile.open(path, "w:gz") as archive:
        for name, kind, value in entries:
            entry = tarfile.TarInfo(name)
            entry.type, content = kind, b""
            if kind == tarfile.REGTYPE:
                content, entry.size = value, len(value)
            elif value:
                entry.linkname = value
            archive.addfile(entry, io.BytesIO(content))
    return str(path)


class TestUnpacking:
    @pytest.mark.parametrize("name", ["../out", "/out", "a/../../out", "."])
    def test_refuses_names_outside(self, tmp_path, name):
        packed = make_archive(tmp_path / "w.tar.gz", [(name, tarfile.REGTYPE, b"x")])
        with pytest.raises(EnvironmentFault, match="outside the folder"):
            unpack_workspace(packed, str(tmp_path / "into"))
        assert not (tmp_path / "out").exists()

    def test_writes_through_no_link_of_the_archive(self, tmp_path):
        outside = tmp_path / "outside"
        outside.mkdir()
        entries = [("door", tarfile.SYMTYPE, str(outside)), ("door/x", tarfile.REGTYPE, b"x")]
        packed = make_archive(tmp_path / "w.tar.gz", entries)
        with pytest.raises(EnvironmentFault, match="door"):
            unpack_workspace(packed, str(tmp_path / "into"))
        assert list(outside.iterdir()) == []

    def test_writes_through_no_link_that_was_there(self, tmp_path):
        outside, into = tmp_path / "outside", tmp_path / "into"
        outside.mkdir()
        into.mkdir()
        (into / "door").symlink_to(outside)
        packed = make_archive(tmp_path / "w.tar.gz", [("door/x", tarfile.REGTYPE, b"x")])
        unpack_workspace(packed, str(into))
        assert list(outside.iterdir()) == []
        assert (into / "door" / "x").read_bytes() == b"x"

    def test_refuses_devices(self, tmp_path):
        packed = make_archive(tmp_path / "w.tar.gz", [("null", tarfile.CHRTYPE, "")])
        with pytest.raises(EnvironmentFault, match="neither a file"):
            unpack_workspace(packed, str(tmp_path / "into"))

    def test_replaces_files_and_keeps_others(self, tmp_path):
        into = make_tree(tmp_path / "into", ["old", "same"])
        packed = make_archive(tmp_path / "w.tar.gz", [("same", tarfile.REGTYPE, b"new")])
        unpack_workspace(packed, str(into))
        assert (into / "same").read_bytes() == b"new"
        assert (into / "old").read_text() == "old"

    def test_names_a_damaged_archive(self, tmp_path):
        (tmp_path / "w.tar.gz").write_bytes(b"no archive")
        with pytest.raises(EnvironmentFault, match=r"cannot unpack the workspace '.*w\.tar\.gz'"):
            unpack_workspace(str(tmp_path / "w.tar.gz"), str(tmp_path / "into"))


class TestEntrypoint:
    @pytest.mark.parametrize("python", ["python", "python3", "python3.11", "/opt/venv/bin/python3"])
    def test_recognises_the_agent(self, python):
        assert is_agent_command(python, ["-m", "muster.agent", "--nnodes", "1"])

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
        assert not is_agent_command(entrypoint, args)

    def test_rewrites_without_touching_the_role(self):
        role = Role(
            name="r",
            image="",
            entrypoint="python3",
            args=["-m", "muster.agent", "--nnodes", "2"],
            resource=Resource(cpu=1, gpu=0, memMB=1),
        )
        assert is_agent_role(role)
        assert rewrite_agent_args(role.args, "/muster") == [f"/muster/{AGENT_BUNDLE_NAME}", "--nnodes", "2"]
        assert role.args[0] == "-m"
