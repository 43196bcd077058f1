"""Folders that another user could change or replace are not used."""

import os
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from other_user import OTHER, needs_two_users

import muster
from muster._shared import ownership
from muster.cli.commands import main
from muster.schedulers.errors import EngineError, UnsafeFolderError
from muster.schedulers.supervision.app_folder import AppFolder, AppSpec
from muster.schedulers.supervision.registry import AppRegistry, find_state_dir


@pytest.fixture
def open_dir(tmp_path, monkeypatch):
    """A folder that all may enter, and nothing above it is looked at: pytest's own folders are closed to others."""
    folder = tmp_path / "open"
    folder.mkdir()
    walk = ownership._walk
    monkeypatch.setattr(
        ownership, "_walk", lambda path: (each for each in walk(path) if each[0].startswith(str(folder)))
    )
    return folder


def make(folder: Path, mode: int, uid: int = -1, gid: int = -1) -> Path:
    folder.mkdir()
    os.chown(folder, uid, gid)
    folder.chmod(mode)
    return folder


def build_app(path: Path) -> AppSpec:
    spec = AppSpec(app_id="app-x", scheduler="local_cwd", folder=str(path), driver="a.b:c", roles=(), grace_s=2.5)
    AppFolder(path).create(spec)
    return spec


@needs_two_users
def test_a_folder_of_another_user_is_refused_wherever_it_is_on_the_way(open_dir):
    above = make(open_dir / "above", 0o755, OTHER)
    build_app(above / "logs/torchx/app-x")
    with pytest.raises(PermissionError, match=rf"^{above} .* {OTHER}, .*: do this$"):
        ownership.check_folder(above / "logs/torchx/app-x", "do this")
    with pytest.raises(PermissionError, match=rf"^{above} belongs"):
        ownership.check_folder(above / "not/there/yet", "do this")


@needs_two_users
@pytest.mark.parametrize("name", ["app-x", "app-x/.muster", "app-x/.muster/spec.json", "app-x/.muster/private.json"])
def test_what_the_supervisor_is_started_from_must_be_ours(tmp_path, name):
    """Also where nothing above it lets another user in: they may have come from elsewhere."""
    spec = build_app(tmp_path / "app-x")
    registry = AppRegistry(tmp_path / "state", "local_cwd")
    registry.add(spec.app_id, Path(spec.folder))
    assert registry.open("app-x").path == tmp_path / "app-x"
    os.chown(tmp_path / name, OTHER, -1)
    with pytest.raises(EngineError, match=rf"^{tmp_path / name} .* {OTHER}, .*log_dir"):
        registry.open("app-x")
    assert list(registry) == ["app-x"], "and the others are still listed"


@pytest.mark.parametrize("name", ["above", "above/app-x", "above/app-x/.muster", "above/app-x/.muster/spec.json"])
def test_what_every_user_can_write_to_is_refused(open_dir, name):
    build_app(open_dir / "above/app-x")
    (open_dir / "above/app-x").chmod(0o755)  # by hand: else others could not enter it
    (open_dir / "above/app-x/.muster").chmod(0o755)
    registry = AppRegistry(open_dir / "state", "local_cwd")
    registry.add("app-x", open_dir / "above/app-x")
    assert registry.open("app-x") is not None
    (open_dir / name).chmod(0o777 if (open_dir / name).is_dir() else 0o666)
    with pytest.raises(UnsafeFolderError, match=rf" {open_dir / name}: run `chmod go-w "):
        registry.open("app-x")


def test_the_sticky_bit_is_enough(open_dir):
    make(open_dir / "tmp", 0o1777)
    build_app(open_dir / "tmp/app-x")
    ownership.check_folder(open_dir / "tmp/app-x", "")


def test_below_a_closed_folder_all_may_write(open_dir):
    make(open_dir / "home", 0o700)
    make(open_dir / "home/logs", 0o777)
    build_app(open_dir / "home/logs/app-x")
    ownership.check_folder(open_dir / "home/logs/app-x", "")


def test_a_link_leaves_the_closed_folder(open_dir):
    make(open_dir / "home", 0o700)
    make(open_dir / "elsewhere", 0o777)
    build_app(open_dir / "elsewhere/app-x")
    (open_dir / "home/logs").symlink_to(open_dir / "elsewhere")
    with pytest.raises(PermissionError, match=rf" {open_dir}/elsewhere: "):
        ownership.check_folder(open_dir / "home/logs/app-x", "")


def test_links_without_an_end_are_no_folder(open_dir):
    (open_dir / "a").symlink_to("b")
    (open_dir / "b").symlink_to("a")
    ownership.check_folder(open_dir / "a/app-x", "")
    assert AppRegistry(open_dir, "x").open("app-x") is None


@needs_two_users
def test_a_link_of_another_user_is_refused(open_dir):
    build_app(open_dir / "app-x")
    make(open_dir / "tmp", 0o1777)
    (open_dir / "tmp/logs").symlink_to(open_dir)
    os.chown(open_dir / "tmp/logs", OTHER, OTHER, follow_symlinks=False)
    with pytest.raises(PermissionError, match=rf"^{open_dir}/tmp/logs belongs to user {OTHER}"):
        ownership.check_folder(open_dir / "tmp/logs/app-x", "")


class Groups:
    """The groups and users of a machine; the tests' user is `me`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.groups: dict[int, SimpleNamespace] = {}
        self.users = [SimpleNamespace(pw_name="root", pw_gid=0), SimpleNamespace(pw_name="me", pw_gid=42)]
        monkeypatch.setattr("grp.getgrgid", lambda gid: self.groups[gid])
        monkeypatch.setattr("pwd.getpwuid", lambda uid: self.users[1])
        monkeypatch.setattr("pwd.getpwall", lambda: self.users)

    def add(self, gid: int, name: str, *members: str) -> None:
        self.groups[gid] = SimpleNamespace(gr_name=name, gr_mem=list(members))


@pytest.fixture
def groups(monkeypatch):
    return Groups(monkeypatch)


@pytest.mark.parametrize(
    ("name", "members", "others", "is_fine"),
    [
        pytest.param("me", (), (), True, id="a user's own group, umask 002"),
        pytest.param("me", ("me",), (), True, id="with its user as a member"),
        pytest.param("me", ("me", "bob"), (), False, id="which another user has joined"),
        pytest.param("users", (), (), True, id="the first group of this user only, as in Jupyter's images"),
        pytest.param("users", (), ("bob",), False, id="the first group of all users"),
        pytest.param("lab", ("bob",), (), False, id="a group of several"),
        pytest.param(None, (), (), True, id="no group of the machine: a volume's, in a container"),
        pytest.param(None, (), ("bob",), False, id="without a name, and another user's first"),
    ],
)
def test_a_group_that_has_no_other_user_is_this_user(groups, open_dir, name, members, others, is_fine):
    folder = make(open_dir / "home", 0o775)
    gid = folder.stat().st_gid
    if name is not None:
        groups.add(gid, name, *members)
    groups.users[1].pw_gid = gid
    groups.users += [SimpleNamespace(pw_name=other, pw_gid=gid) for other in others]
    if is_fine:
        ownership.check_folder(folder, "")
    else:
        with pytest.raises(PermissionError, match=rf"^group {name or gid} .* {folder}: .*`chmod go-w "):
            ownership.check_folder(folder, "")


@needs_two_users
def test_a_file_system_that_shows_our_files_as_another_users(open_dir, monkeypatch):
    """NFS with root_squash: what root makes belongs to nobody."""
    build_app(open_dir / "app-x")
    for path in (open_dir / "app-x", *(open_dir / "app-x").rglob("*")):
        os.chown(path, 65534, 65534)
    with pytest.raises(PermissionError, match="belongs to "):
        ownership.check_folder(open_dir / "app-x", "")
    fstat = os.fstat

    def show(fd):
        status = list(fstat(fd))
        status[4] = 65534
        return os.stat_result(status)

    monkeypatch.setattr(ownership, "os", SimpleNamespace(**{**vars(os), "fstat": show}))
    ownership.check_folder(open_dir / "app-x", "", [open_dir / "app-x/.muster/spec.json"])


@needs_two_users
def test_a_state_folder_of_another_user_is_refused_and_says_what_to_do(open_dir):
    home = make(open_dir / "home", 0o755, OTHER)
    with pytest.raises(UnsafeFolderError, match=rf"^{home} .* {OTHER}, .*: set XDG_STATE_HOME"):
        find_state_dir({"HOME": str(home)})


@needs_two_users
@pytest.mark.parametrize("words", [["hold"], ["release"], ["prune"], ["rerun"], ["status"], ["stop", "last"]])
def test_a_command_in_a_state_folder_of_another_user_is_one_line(open_dir, monkeypatch, capsys, words):
    home = make(open_dir / "home", 0o755, OTHER)
    monkeypatch.setenv("XDG_STATE_HOME", str(home))
    monkeypatch.setenv("TMPDIR", str(open_dir))  # `prune` looks there, too
    assert main(words) != 0
    line = f"muster: {home} belongs to user {OTHER}, not to you: set XDG_STATE_HOME to a folder of your own\n"
    assert capsys.readouterr().err == line


@needs_two_users
@pytest.mark.parametrize("put", [Path.mkdir, Path.touch, lambda path: path.symlink_to("nowhere")])
def test_what_another_user_has_put_where_state_lies_without_a_home_is_refused(open_dir, monkeypatch, put):
    temporary = make(open_dir / "tmp", 0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    path = temporary / f"muster-{os.geteuid()}"
    put(path)
    os.chown(path, OTHER, OTHER, follow_symlinks=False)
    with pytest.raises(UnsafeFolderError, match=rf"^{path} .* {OTHER}, .*: set XDG_STATE_HOME"):
        find_state_dir({})
    path.rmdir() if path.is_dir() else path.unlink()
    assert find_state_dir({}) == path
    temporary.chmod(0o777)
    with pytest.raises(UnsafeFolderError, match=rf" {temporary}: "):
        find_state_dir({})


def test_folders_on_the_way_are_safe_whatever_the_umask(open_dir):
    old = os.umask(0)
    try:
        find_state_dir({"HOME": str(open_dir / "home")})
    finally:
        os.umask(old)
    assert not any(path.stat().st_mode & 0o022 for path in open_dir.rglob("*"))


@needs_two_users
def test_a_cluster_needs_no_safe_home(open_dir, monkeypatch):
    """Only logs of cancelled apps are kept there: a job that was submitted has been submitted."""
    from muster.cli.handles import list_names
    from muster.schedulers.kubernetes.running_apps.app import AppRef
    from muster.schedulers.kubernetes.running_apps.logs import forget_logs, read_kept_logs

    monkeypatch.setenv("XDG_STATE_HOME", str(make(open_dir / "home", 0o755, OTHER)))
    assert read_kept_logs(AppRef(namespace="default", name="app-x"), "role", 0) == {}
    forget_logs(AppRef(namespace="default", name="app-x"))
    assert list_names(os.environ) == ["last"]
    assert issubclass(UnsafeFolderError, OSError), "which `last` does without"


@pytest.mark.parametrize("path", ["/tmp/" + "a" * 300, "/proc/self/status/x"])
def test_a_folder_that_cannot_exist_is_one_line(path: str) -> None:
    with pytest.raises(UnsafeFolderError, match=r"^/\S+: (File name too long|Not a directory)$"):
        AppRegistry.check(Path(path))


SHARED_PLACES = {
    "`check_folder`": "schedulers/supervision/registry cli/prune",
    "its own check, which imports little": "schedulers/bundle_start",
    "how much room there is, and no more": "agent/features/preflight/node cli/doctor/machine",
    "a socket whose name is removed at once": "agent/workers/hooks/groups",
}


def test_all_that_looks_into_a_temporary_folder_is_known():
    """Elsewhere, `mkdtemp` and its like make what no other user can have made."""
    root = Path(muster.__file__).parent
    found = (path for path in root.rglob("*.py") if re.search(r"gettempdir\(|\(\"TMPDIR\"\)", path.read_text()))
    names = {str(path.relative_to(root).with_suffix("")) for path in found}
    listed = set(" ".join(SHARED_PLACES.values()).split())
    assert names == {each for each in listed if "/features/" not in each or (root / f"{each}.py").exists()}
