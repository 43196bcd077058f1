import hashlib
import inspect
import io
import os
import stat
import sys
import tarfile
import tracemalloc

import pytest

from muster.agent.errors import EnvironmentFault
from muster.agent.workspace_unpacking import unpack_workspace
from muster.schedulers.workspace import packing as workspace_packing


def make_tree(root, names):
    for name in names:
        path = root / name
        if name.endswith("/"):
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
    return root


def names_of(packed):
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as archive:
        return archive.getnames()


class TestWorkspaceBundle:
    def test_same_tree_same_bytes(self, tmp_path):
        make_tree(tmp_path, ["b", "a/x", "a/y", "c/"])
        packed = workspace_packing.build_workspace_bundle(str(tmp_path))
        assert packed == workspace_packing.build_workspace_bundle(str(tmp_path))
        assert names_of(packed) == ["a", "a/x", "a/y", "b", "c"]

    def test_links_modes_and_times_are_kept(self, tmp_path):
        source = make_tree(tmp_path / "source", ["run.sh", "data/x"])
        (source / "run.sh").chmod(0o750)
        os.utime(source / "run.sh", (1_600_000_000, 1_600_000_000))
        (source / "link").symlink_to("data")
        (source / "outside").symlink_to("/somewhere/else")
        packed = tmp_path / "workspace.tar.gz"
        packed.write_bytes(workspace_packing.build_workspace_bundle(str(source)))

        unpack_workspace(str(packed), str(tmp_path / "there"))

        there = tmp_path / "there"
        assert stat.S_IMODE((there / "run.sh").stat().st_mode) == 0o750
        assert (there / "run.sh").stat().st_mtime == 1_600_000_000
        assert os.readlink(there / "link") == "data"
        assert os.readlink(there / "outside") == "/somewhere/else"
        assert (there / "link" / "x").read_text() == "data/x"

    def test_ignores_what_torchxignore_names(self, tmp_path):
        make_tree(tmp_path, ["keep.py", "drop.log", "logs/a", "logs/b.txt", "deep/logs/c"])
        (tmp_path / ".torchxignore").write_text("# comment\n*.log\n/logs/\n  \n")
        names = names_of(workspace_packing.build_workspace_bundle(str(tmp_path)))
        assert names == [".torchxignore", "deep", "deep/logs", "deep/logs/c", "keep.py"]

    def test_the_dockerfile_always_travels(self, tmp_path):
        make_tree(tmp_path, ["Dockerfile.torchx", "x"])
        (tmp_path / ".torchxignore").write_text("*\n")
        assert names_of(workspace_packing.build_workspace_bundle(str(tmp_path))) == ["Dockerfile.torchx"]

    def test_names_a_missing_folder(self, tmp_path):
        with pytest.raises(workspace_packing.BundleError, match=r"workspace '.*nowhere' "):
            workspace_packing.build_workspace_bundle(str(tmp_path / "nowhere"))

    def test_names_what_cannot_be_read(self, tmp_path, monkeypatch):
        make_tree(tmp_path, ["secret"])

        def refuse(path, *_):
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(workspace_packing, "open", refuse, raising=False)
        with pytest.raises(workspace_packing.BundleError, match=r"'.*secret': Permission denied; .* \.torchx"):
            workspace_packing.build_workspace_bundle(str(tmp_path))

    @pytest.mark.parametrize(
        ("name", "target", "carried"),
        [
            ("link", "../outside", False),
            ("deep/link", "../../outside", False),
            ("deep/link", "../inside", True),
            ("link", "deep/../../outside", False),
            ("link", "..", False),
            ("link", "..inside", True),
            ("link", "/absolute", True),
        ],
    )
    def test_links_that_leave_the_folder_are_left_out_and_named(self, tmp_path, name, target, carried):
        make_tree(tmp_path, ["deep/", "inside"])
        (tmp_path / name).symlink_to(target)
        assert (name in names_of(workspace_packing.build_workspace_bundle(str(tmp_path)))) is carried
        said = workspace_packing.describe_left_out(str(tmp_path))
        assert any("leads out of" in each and f"({name} -> {target})" in each for each in said) is not carried

    def test_absolute_links_are_named(self, tmp_path):
        """They arrived dangling without a word."""
        for index in range(7):
            (tmp_path / f"data{index}").symlink_to("/mnt/data")
        names = ", ".join(f"data{index} -> /mnt/data" for index in range(5))
        line = f"workspace: 7 symbolic links have absolute targets ({names} and 2 more), which must exist on the nodes"
        assert [f"{line}; copy" in each for each in workspace_packing.describe_left_out(str(tmp_path))] == [True]
        assert len(names_of(workspace_packing.build_workspace_bundle(str(tmp_path)))) == 7

    @pytest.mark.parametrize("through", ["real", "there"])
    def test_an_absolute_link_into_the_folder_becomes_relative(self, tmp_path, through):
        source = make_tree(tmp_path / "real", ["data/x", "deep/"])
        (tmp_path / "there").symlink_to("real")
        (source / "deep" / "link").symlink_to(tmp_path / through / "data" / "x")
        (tmp_path / "copy").mkdir()
        folder = str(tmp_path / through)
        with tarfile.open(fileobj=io.BytesIO(workspace_packing.build_workspace_bundle(folder))) as archive:
            assert archive.getmember("deep/link").linkname == "../data/x"
        workspace_packing.copy_workspace(folder, str(tmp_path / "copy"))
        assert (tmp_path / "copy" / "deep" / "link").read_text() == "data/x"
        assert workspace_packing.describe_left_out(folder) == []

    def test_a_file_that_becomes_shorter_is_named(self, tmp_path, monkeypatch):
        make_tree(tmp_path, ["log"])
        size = os.fstat

        def read_earlier(fd):
            status = size(fd)
            return os.stat_result((*status[:6], status.st_size + 1, *status[7:10]))

        monkeypatch.setattr(workspace_packing.os, "fstat", read_earlier)
        with pytest.raises(workspace_packing.BundleError, match=": it became shorter"):
            workspace_packing.build_workspace_bundle(str(tmp_path))

    def test_a_large_folder_is_never_in_memory(self, tmp_path):
        """And the hash is that of the file."""
        source = tmp_path / "source"
        source.mkdir()
        with open(source / "weights", "wb") as file:
            file.writelines(os.urandom(1 << 20) for _ in range(48))
        tracemalloc.start()
        with open(tmp_path / "packed", "wb") as out:
            digest = workspace_packing.write_workspace_bundle(str(source), out)
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak_bytes < 8 << 20
        assert digest == hashlib.sha256((tmp_path / "packed").read_bytes()).hexdigest()

    def test_leaves_out_pipes(self, tmp_path):
        os.mkfifo(tmp_path / "pipe")
        assert names_of(workspace_packing.build_workspace_bundle(str(tmp_path))) == []


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
        with pytest.raises(EnvironmentFault, match=r"workspace '.*w\.tar\.gz'"):
            unpack_workspace(str(tmp_path / "w.tar.gz"), str(tmp_path / "into"))


class TestLeftOut:
    NAMES = (
        *(".git/config", ".env", ".env.local", ".env.example", ".env.sample", ".env.template", ".netrc", "id_rsa"),
        *("id_ed25519", "id_ed25519.pub", "id_map.json", "id_rsa.pem", "key.pem", "deep/.env", "sub/.git", "id_/x"),
        *("environment.env", "main.py", ".git-credentials", ".npmrc", ".pypirc", ".pgpass", "x.pem/y"),
        *(".aws/credentials", ".aws/region", "home/.kube/config", ".docker/config.json", "config.json", "credentials"),
    )

    def test_history_and_credentials_stay_here(self, tmp_path):
        make_tree(tmp_path, self.NAMES)
        assert names_of(workspace_packing.build_workspace_bundle(str(tmp_path))) == [
            ".aws", ".aws/region", ".docker", ".env.example", ".env.sample", ".env.template", "config.json",
            "credentials", "deep", "environment.env", "home", "home/.kube", "id_", "id_/x", "id_map.json", "main.py",
            "sub", "x.pem", "x.pem/y",
        ]  # fmt: skip

    def test_one_line_names_them_and_how_to_send_one(self, tmp_path):
        assert workspace_packing.describe_left_out(str(tmp_path)) == []
        make_tree(tmp_path, self.NAMES)
        names = ".aws/credentials, .docker/config.json, .env, .env.local, .git and 13 more"
        hint = "the line !.aws/credentials in .torchxignore would send .aws/credentials"
        assert workspace_packing.describe_left_out(str(tmp_path)) == [f"not sent with the workspace: {names}; {hint}"]

    def test_a_line_sends_one(self, tmp_path):
        make_tree(tmp_path, [".env", ".netrc", "deep/.env", ".git/config"])
        (tmp_path / ".torchxignore").write_text("!.env\n!deep/.env\n!.git\n")
        names = names_of(workspace_packing.build_workspace_bundle(str(tmp_path)))
        assert names == [".env", ".git", ".git/config", ".torchxignore", "deep", "deep/.env"]
        left_out, sent = workspace_packing.describe_left_out(str(tmp_path))
        assert "with the workspace: .netrc; " in left_out
        names = ".env, .git, deep/.env"
        assert sent == f"sent with the workspace, by .torchxignore, though it may hold credentials: {names}"

    @pytest.mark.parametrize("lines", ["*.bak\n!*", "*\n!*/\n!*.json\n!main.py\n!keys/**", "!.env*\n![.]git\n!**"])
    def test_a_broad_line_sends_none(self, tmp_path, lines):
        """They went without a word."""
        make_tree(tmp_path, [".git/config", ".env.local", "keys/id_rsa", ".aws/credentials", "main.py"])
        make_tree(tmp_path, [".docker/config.json"])
        (tmp_path / ".torchxignore").write_text(f"{lines}\n!.torchxignore\n")
        names = names_of(workspace_packing.build_workspace_bundle(str(tmp_path)))
        assert names == [".aws", ".docker", ".torchxignore", "keys", "main.py"]
        assert ".git" in workspace_packing.describe_left_out(str(tmp_path))[0]
        with open(tmp_path / ".torchxignore", "a") as file:
            file.write("!keys/id_rsa\n!keys/*\n")
        assert "keys/id_rsa" in names_of(workspace_packing.build_workspace_bundle(str(tmp_path)))

    def test_a_byte_order_mark_is_no_part_of_the_first_line(self, tmp_path):
        make_tree(tmp_path, ["data", "main.py"])
        (tmp_path / ".torchxignore").write_bytes(b"\xef\xbb\xbfdata\r\n")
        assert names_of(workspace_packing.build_workspace_bundle(str(tmp_path))) == [".torchxignore", "main.py"]

    def test_what_the_user_ignores_is_named(self, tmp_path):
        make_tree(tmp_path, [".git/config", "build/x", "deep/build/x", "main.py"])
        (tmp_path / ".torchxignore").write_text(".git\nbuild/\n")
        [line] = workspace_packing.describe_left_out(str(tmp_path))
        assert line.endswith(": .git, build, deep/build")

    def test_a_copy_has_the_same(self, tmp_path):
        source = make_tree(tmp_path / "source", self.NAMES)
        (source / "link").symlink_to("main.py")
        (tmp_path / "copy").mkdir()
        workspace_packing.copy_workspace(str(source), str(tmp_path / "copy"))
        copied = workspace_packing.build_workspace_bundle(str(tmp_path / "copy"))
        assert names_of(copied) == names_of(workspace_packing.build_workspace_bundle(str(source)))
        assert os.readlink(tmp_path / "copy" / "link") == "main.py"


def test_a_folder_deeper_than_python_recurses_travels(tmp_path):
    levels = 200
    (tmp_path / "/".join("d" * levels)).mkdir(parents=True)
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 100)
    try:
        assert len(list(workspace_packing.walk_workspace(tmp_path))) == levels
        assert workspace_packing.describe_left_out(str(tmp_path)) == []
    finally:
        sys.setrecursionlimit(before)


@pytest.mark.parametrize("target", ["/dev/zero", None])
def test_an_ignore_file_that_is_no_file_is_refused(target, tmp_path):
    path = tmp_path / ".torchxignore"
    if target:
        path.symlink_to(target)
    else:
        os.mkfifo(path)
    with pytest.raises(workspace_packing.BundleError, match="a regular file"):
        workspace_packing.walk_workspace(tmp_path)
