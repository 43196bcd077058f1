"""The default hold: where it is, what it refuses, which agent goes there, and which kinds of agents it keeps."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from other_user import OTHER, needs_two_users

from muster._shared.holds import default
from muster._shared.holds.connection import listen
from muster.agent.hold import wishes
from muster.agent.hold.wishes import Wish, is_other_cgroup, read_wish
from muster.schedulers.agent_command import AGENT_ENTRY
from muster.schedulers.local import everyday
from muster.schedulers.processes.launch import Launch

WORDS = ("/venv/bin/python", "/venv/agent.py")


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Of a user who wants it."""
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "state/muster").mkdir(parents=True)
    (tmp_path / "state/muster/default-hold.json").write_text('{"idle_limit_s": 60}')
    return {"XDG_RUNTIME_DIR": str(tmp_path / "run"), "XDG_STATE_HOME": str(tmp_path / "state"), "HOME": "/nowhere"}


def test_nobody_has_it_without_asking_for_it(tmp_path: Path) -> None:
    assert default.read_idle_limit_s({}) is None
    assert default.read_idle_limit_s({"HOME": str(tmp_path), "XDG_STATE_HOME": "relative"}) is None


def test_a_state_folder_of_its_own_has_a_wish_of_its_own(env: dict[str, str], tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    Path(default.find_settings_path(home)).parent.mkdir(parents=True)
    Path(default.find_settings_path(env)).rename(default.find_settings_path(home))
    assert default.read_idle_limit_s(home) == 60.0
    assert default.read_idle_limit_s({**env, **home}) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"idle_limit_s": "soon"}', "\0"])
def test_a_broken_file_is_none(env: dict[str, str], text: str) -> None:
    assert default.read_idle_limit_s(env) == 60.0
    Path(default.find_settings_path(env)).write_text(text)
    assert default.read_idle_limit_s(env) is None


def test_a_link_or_a_pipe_in_its_place_is_none(env: dict[str, str]) -> None:
    path = Path(default.find_settings_path(env))
    path.rename(path.with_name("other"))
    path.symlink_to("other")
    assert default.read_idle_limit_s(env) is None
    path.unlink()
    os.mkfifo(path)
    assert default.read_idle_limit_s(env) is None


def test_it_is_in_the_users_runtime_folder(env: dict[str, str]) -> None:
    assert default.find_folder(env, WORDS, "1").startswith(f"{env['XDG_RUNTIME_DIR']}/muster/hold-")


@pytest.mark.parametrize("value", [None, "", "relative", "/does/not/exist"])
def test_without_one_it_is_in_tmp(value: str | None) -> None:
    env = {} if value is None else {"XDG_RUNTIME_DIR": value}
    assert default.find_folder(env, WORDS, "1").startswith(f"{default._TMP}/muster-{os.geteuid()}/hold-")


@needs_two_users
def test_with_another_users_it_is_in_tmp(env: dict[str, str]) -> None:
    """`sudo` keeps the variable."""
    os.chown(env["XDG_RUNTIME_DIR"], OTHER, OTHER)
    assert default.list_runtime_dirs(env) == [f"{default._TMP}/muster-{os.geteuid()}"]


def test_each_python_and_each_version_has_its_own(env: dict[str, str], tmp_path: Path) -> None:
    for name in ("one", "two"):  # two virtual environments link to one file
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin/python").symlink_to("/usr/bin/env")
    pythons = [str(tmp_path / name / "bin/python") for name in ("one", "two")]
    keys = {default.find_folder(env, (python, entry), "1") for python in pythons for entry in ("/a.py", "/b.py")}
    keys.add(default.find_folder(env, (pythons[0], "/a.py"), "2"))
    assert len(keys) == 5
    assert default.find_folder(env, (pythons[0], "/a.py"), "1") in keys


class TestFolders:
    @pytest.fixture
    def folder(self, env: dict[str, str]) -> Path:
        return Path(default.find_folder(env, WORDS, "1"))

    def test_they_are_made_for_the_user_alone(self, folder: Path) -> None:
        default.make_folder(str(folder))
        default.make_folder(str(folder))
        assert [path.stat().st_mode & 0o777 for path in (folder, folder.parent)] == [0o700, 0o700]
        default.check_folder(str(folder))

    def test_nothing_there_is_no_fault(self, folder: Path, env: dict[str, str]) -> None:
        with pytest.raises(FileNotFoundError):
            default.check_folder(str(folder))
        assert not default.may_have_agents(str(folder))
        assert default.list_folders(env) == []

    @pytest.mark.parametrize("which", ["inner", "outer"])
    @pytest.mark.parametrize("fault", ["mode", "link", "file", pytest.param("owner", marks=needs_two_users)])
    def test_another_one_is_refused_and_the_client_says_so(self, folder: Path, which: str, fault: str) -> None:
        default.make_folder(str(folder))
        path = folder if which == "inner" else folder.parent
        if fault == "mode":
            path.chmod(0o750)
        elif fault == "owner":
            os.chown(path, OTHER, OTHER)
        else:
            path.rename(path.with_name("moved"))
            path.symlink_to("moved") if fault == "link" else path.write_text("")
        for call in (default.check_folder, default.make_folder):
            with pytest.raises(PermissionError, match="it must be a folder of this user alone") as caught:
                call(str(folder))
            assert caught.value.filename == str(path)
        assert default.may_have_agents(str(folder)), "the client looks, too, and has a console"

    def test_a_socket_without_a_process_is_none(self, folder: Path, env: dict[str, str]) -> None:
        default.make_folder(str(folder))
        with listen(str(folder)):
            assert default.may_have_agents(str(folder))
        assert not default.may_have_agents(str(folder))
        assert default.list_folders(env) == [str(folder)]


class TestChoice:
    """Which agents of `local_cwd` go there."""

    @pytest.fixture
    def launch(self) -> Launch:
        return Launch(command=(*WORDS[:1], AGENT_ENTRY, "--nnodes", "1", "main.py"), env={"A": "b"}, cwd="/")

    @pytest.fixture(autouse=True)
    def there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(default, "may_have_agents", lambda _folder: True)

    def test_a_client_takes_the_agents_place(self, env: dict[str, str], launch: Launch) -> None:
        made = everyday.replace_launch(launch, env, "main-x")
        *_, option, folder, name, words = made.command[: -len(launch.command)]
        assert (option, name, words) == ("--default", "main-x", "2")
        assert folder.startswith(env["XDG_RUNTIME_DIR"])
        assert tuple(made.command[-len(launch.command) :]) == launch.command
        assert (made.env, made.cwd) == (launch.env, launch.cwd)

    def test_not_without_the_users_wish(self, launch: Launch, tmp_path: Path) -> None:
        assert everyday.replace_launch(launch, {"HOME": str(tmp_path)}, "main-x") is launch

    def test_not_where_none_listens(self, env: dict[str, str], launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(default, "may_have_agents", lambda _folder: False)
        assert everyday.replace_launch(launch, env, "main-x") is launch

    @pytest.mark.parametrize("words", [("/app/muster-agent.zip",), (AGENT_ENTRY, "--muster-hold", "0:60"), ("-c", "x")])
    def test_not_an_agent_of_a_bundle_and_no_holder(self, env: dict[str, str], words: tuple[str, ...]) -> None:
        launch = Launch(command=("/venv/bin/python", *words, "--nnodes", "1"), env={}, cwd="/")
        assert everyday.replace_launch(launch, env, "main-x") is launch

    @pytest.mark.parametrize("name", ["TORCHELASTIC_RUN_ID", "MUSTER_APP_ID", "MUSTER_STATUS_PAGE"])
    def test_none_is_started_inside_a_job(self, name: str) -> None:
        assert default.may_start({})
        assert not default.may_start({name: "x"})


def make_order(*args: str, **env: str) -> Mapping[str, Any]:
    return {"command": [*WORDS], "args": [*args, "main.py"], "env": {"HOME": "/h", **env}, "cpus": [0, 1]}


def read_key(*args: str, **env: str) -> str:
    wish = read_wish(make_order(*args, **env))
    assert wish is not None
    return wish.key


class TestWishes:
    def test_a_variable_that_is_read_at_imports_makes_another_kind(self) -> None:
        for name in ("PYTHONPATH", "OMP_NUM_THREADS", "LD_PRELOAD", "LANG", "TORCH_LOGS"):
            assert read_key(**{name: "x"}) != read_key(), name

    def test_others_do_not_and_are_not_kept(self) -> None:
        wish = read_wish(make_order(API_KEY="s3cr3t", PYTHONUNBUFFERED="1", MUSTER_TOKEN="s3cr3t", LEARNING_RATE="1"))
        assert wish is not None
        assert wish.env == {"HOME": "/h", "PYTHONUNBUFFERED": "1"}
        assert "s3cr3t" not in wish.key

    def test_so_do_processes_and_cores(self) -> None:
        keys = {read_key(), read_key("--nproc-per-node", "2"), read_key(PET_NPROC_PER_NODE="3")}
        assert len(keys) == 3
        assert read_key("--nproc-per-node=2") == read_key("--nproc_per_node", "2", PET_NPROC_PER_NODE="3")
        fewer = read_wish({**make_order(), "cpus": [1]})
        assert fewer is not None
        assert fewer.key not in keys
        assert read_wish({**make_order(), "cpus": [2, 3]}).key == read_key()  # type: ignore[union-attr]

    def test_devices_count_where_the_agent_counts_them(self) -> None:
        assert read_key("--nproc-per-node", "2", CUDA_VISIBLE_DEVICES="0") == read_key("--nproc-per-node", "2")
        words = ("--nproc-per-node", "gpu")
        assert read_key(*words, CUDA_VISIBLE_DEVICES="0") != read_key(*words)

    @pytest.mark.parametrize(
        ("args", "env"),
        [
            (("--no-python",), {}),
            (("--start", "cold"), {}),
            (("--preload", "torch,numpy"), {}),
            (("--numa-binding", "node"), {}),
            (("--run-path",), {}),
            (("--no-such-flag",), {}),
            ((), {"PYTHON_EXEC": "/other/python"}),
            ((), {"MUSTER_CONTROL_FD": "5"}),
        ],
    )
    def test_what_does_not_fork_from_such_a_template_starts_cold(
        self, args: tuple[str, ...], env: dict[str, str]
    ) -> None:
        assert read_wish(make_order(*args, **env)) is None

    def test_as_many_wait_as_one_of_the_last_jobs_had_nodes(self) -> None:
        wish = read_wish(make_order())
        assert wish is not None
        assert wish.count == 1
        for job in ("a", "b", "b", "b", "c"):
            wish.add(job)
        assert wish.count == 3
        for job in "defg":
            wish.add(job)
        assert wish.count == 1
        wish.failed = wishes.FAILED_STARTS
        assert wish.count == 0

    def test_a_pool_that_begins_again_has_the_same_wishes(self) -> None:
        wish = Wish(WORDS, "2", {"LANG": "C", "HOME": "/h"}, [0, 1])
        for _ in range(2):
            wish.add("job")
        devices = Wish(WORDS, "gpu", {"CUDA_VISIBLE_DEVICES": "1"}, [0])
        for each in (wish, devices):
            orders = json.loads(json.dumps(each.build_orders()))
            assert len(orders) == each.count
            again = read_wish(orders[0])
            assert again is not None
            assert again.key == each.key


class TestCgroups:
    LOGINS = f"0::/user.slice/user-{os.getuid()}.slice"

    def test_the_same_is_no_other(self) -> None:
        assert not is_other_cgroup("0::/a\n", "0::/a\n")

    def test_logins_of_the_user_are_one(self) -> None:
        terminal = f"{self.LOGINS}/user@{os.getuid()}.service/app.slice/vte-spawn-1.scope\n"
        assert not is_other_cgroup(f"{self.LOGINS}/session-2.scope\n", terminal)

    @pytest.mark.parametrize(
        "theirs",
        ["0::/system.slice/slurmstepd.scope/job_4\n", "0::/user.slice/user-77777.slice/session-2.scope\n", "0::/\n"],
    )
    def test_another_one_is(self, theirs: str) -> None:
        assert is_other_cgroup(theirs, f"{self.LOGINS}/session-2.scope\n")

    def test_a_login_with_limits_of_its_own_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(wishes.difference, "read_cgroup_limits", lambda text: [text])
        assert is_other_cgroup(f"{self.LOGINS}/session-2.scope\n", f"{self.LOGINS}/session-3.scope\n")
