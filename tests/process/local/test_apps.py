"""local_cwd through TorchX's interface: real supervisors and short-running replicas."""

import os
import re
import signal
import sys
import threading
from datetime import datetime
from pathlib import Path

import pytest
from harness import wait_until
from launchers import ONE_START
from torchx.schedulers.api import Stream
from torchx.specs import AppDef, Resource, Role
from torchx.specs.api import macros

from muster.schedulers.errors import SchedulerError
from muster.schedulers.local import create_detached_scheduler, create_scheduler
from muster.schedulers.supervision.app_folder import AppFolder
from muster.schedulers.supervision.registry import AppRegistry, find_state_dir

pytestmark = pytest.mark.torchx

PROGRAMS = Path(__file__).parents[2] / "programs"
TINY = Resource(cpu=1, gpu=0, memMB=1)
TERMINAL = ("SUCCEEDED", "FAILED", "CANCELLED")


@pytest.fixture(autouse=True)
def state_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def scheduler():
    made = create_scheduler("torchx")
    yield made
    made.close()


def shell(script, **more):
    return Role(**({"name": "r", "image": "", "entrypoint": "sh", "args": ["-c", script], "resource": TINY} | more))


def program(name, *args, **more):
    return Role(
        **(
            {"name": "r", "image": "", "entrypoint": sys.executable, "args": [str(PROGRAMS / name), *args]}
            | {"resource": TINY}
            | more
        )
    )


def agents(script, replicas=2, **more):
    args = ["-m", "muster.agent", "--nnodes", str(replicas), "--nproc-per-node", "1", "--rank0-env", macros.rank0_env]
    args += ["--node-rank", macros.replica_id, "--rdzv-id", macros.app_id, "--start", ONE_START or "cold", str(script)]
    fields = {"name": "r", "image": "", "entrypoint": "python3", "args": args, "num_replicas": replicas}
    return Role(**(fields | {"resource": TINY} | more))


def submit(scheduler, *roles, **cfg):
    return scheduler.submit(AppDef("app", roles=list(roles)), cfg)


def wait(scheduler, app_id, timeout_s=60.0):
    wait_until(
        lambda: scheduler.describe(app_id).state.name in TERMINAL, timeout_s=timeout_s, what=f"the end of {app_id}"
    )
    return scheduler.describe(app_id)


def read(scheduler, app_id, role="r", k=0, **more):
    return list(scheduler.log_iter(app_id, role, k, **more))


def folder_of(app_id, name="local_cwd"):
    return AppFolder(AppRegistry(find_state_dir(os.environ), name).find(app_id))


def pids_of(app_id):
    return [handle["pid"] for handle in folder_of(app_id).read_record().handles.values()]


class TestNormalRun:
    def test_succeeds_and_can_be_read_by_any_command_afterwards(self, scheduler):
        app_id = submit(scheduler, shell("echo out; echo err >&2", num_replicas=2), shell("true", name="side"))
        assert wait(scheduler, app_id).state.name == "SUCCEEDED"
        another = create_scheduler("torchx")
        assert another.describe(app_id).state.name == "SUCCEEDED"
        assert [each.app_id for each in another.list()] == [app_id]
        assert read(another, app_id, k=1, streams=Stream.STDOUT) == ["out\n"]
        assert read(another, app_id, k=1, streams=Stream.STDERR) == ["err\n"]
        assert sorted(read(another, app_id, k=0)) == ["err\n", "out\n"]
        assert read(another, app_id, "side") == []

    def test_fails_with_a_reason_and_stops_the_rest(self, scheduler):
        app_id = submit(scheduler, shell("exit 7"), shell("sleep 1000", name="side"))
        response = wait(scheduler, app_id)
        assert response.state.name == "FAILED"
        assert response.msg == "r/0 exited with code 7; no retries by the scheduler (--max_retries 0)"

    def test_running_while_it_runs(self, scheduler):
        app_id = submit(scheduler, shell("sleep 1000"))
        assert scheduler.describe(app_id).state.name == "RUNNING"

    def test_each_replica_knows_its_index(self, scheduler):
        show = "echo $0 $1 $TORCHX_RANK0_HOST"
        role = shell(show, args=["-c", show, macros.replica_id, macros.app_id], num_replicas=2)
        app_id = submit(scheduler, role)
        wait(scheduler, app_id)
        assert [read(scheduler, app_id, k=k) for k in (0, 1)] == [[f"{k} {app_id} 127.0.0.1\n"] for k in (0, 1)]

    def test_runs_in_the_current_folder_with_the_callers_environment(self, scheduler, tmp_path, monkeypatch):
        monkeypatch.setenv("FROM_CALLER", "yes")
        app_id = submit(scheduler, shell("pwd; echo $FROM_CALLER $FROM_ROLE", env={"FROM_ROLE": "too"}))
        wait(scheduler, app_id)
        assert read(scheduler, app_id) == [f"{tmp_path}\n", "yes too\n"]

    @pytest.mark.parametrize(("prepend", "expected"), [(False, "other"), (True, "here")])
    def test_current_folder_in_path(self, scheduler, tmp_path, monkeypatch, prepend, expected):
        for folder, word in ((tmp_path / "bin", "other"), (tmp_path, "here")):
            folder.mkdir(exist_ok=True)
            (folder / "mytool").write_text(f"#!/bin/sh\necho {word}\n")
            (folder / "mytool").chmod(0o755)
        (tmp_path / "only-here").write_text("#!/bin/sh\necho found\n")
        (tmp_path / "only-here").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        app_id = submit(scheduler, shell("mytool; only-here"), prepend_cwd=prepend)
        wait(scheduler, app_id)
        assert read(scheduler, app_id) == [f"{expected}\n", "found\n"]

    def test_a_command_that_does_not_exist(self, scheduler):
        app_id = submit(scheduler, shell("", entrypoint="no-such-command"))
        response = wait(scheduler, app_id)
        assert response.state.name == "FAILED"
        assert "exited with code 127" in response.msg
        assert any("no-such-command" in line for line in read(scheduler, app_id))

    def test_an_interpreter_that_does_not_exist(self, scheduler):
        app_id = submit(scheduler, agents("x.py", entrypoint="/no/such/python3", max_retries=3))
        response = wait(scheduler, app_id)
        assert (response.state.name, response.num_restarts) == ("FAILED", 0)
        assert response.msg == "r/0 could not be started: '/no/such/python3': No such file or directory"

    def test_user_modules_do_not_shadow_ours(self, scheduler, tmp_path):
        for name in ("selectors", "signal", "json", "socket", "dataclasses"):
            (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')\n")
        app_id = submit(scheduler, shell("echo fine"))
        assert wait(scheduler, app_id).state.name == "SUCCEEDED"
        assert read(scheduler, app_id) == ["fine\n"]

    def test_unknown_roles_and_replicas(self, scheduler):
        app_id = submit(scheduler, shell("true"))
        with pytest.raises(SchedulerError, match="has no role 'x'; it has: r"):
            scheduler.log_iter(app_id, "x")
        with pytest.raises(SchedulerError, match="has replicas 0 to 0, not 1"):
            scheduler.log_iter(app_id, "r", 1)
        with pytest.raises(SchedulerError, match="regex"):
            scheduler.log_iter(app_id, "r", regex="(")

    def test_errors_are_structured(self, scheduler):
        write = """echo '{"message": {"message": "boom"}}' > $TORCHELASTIC_ERROR_FILE; exit 1"""
        app_id = submit(scheduler, shell(write))
        assert wait(scheduler, app_id).structured_error_msg == '{"message": {"message": "boom"}}'

    def test_log_dir(self, scheduler, tmp_path):
        app_id = submit(scheduler, shell("echo x"), log_dir=str(tmp_path / "logs"))
        wait(scheduler, app_id)
        assert (tmp_path / "logs" / "torchx" / app_id / "r" / "0" / "stdout.log").read_text() == "x\n"
        assert read(create_scheduler("torchx"), app_id) == ["x\n"]

    def test_an_impossible_log_dir(self, scheduler, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(RuntimeError, match=r"cannot start app-\w+: .*Not a directory"):
            submit(scheduler, shell("echo x"), log_dir=str(tmp_path / "file"))
        assert list(scheduler.list()) == []

    def test_secrets_are_gone_after_the_end(self, scheduler):
        app_id = submit(scheduler, shell("read x"))
        wait(scheduler, app_id)
        assert not folder_of(app_id).private_file.exists()


class TestRetries:
    def test_a_lost_agent_is_started_again_at_the_same_address(self, scheduler, tmp_path):
        (tmp_path / "work.py").write_text(
            "import os, pathlib, time\n"
            "print('port', os.environ['MASTER_PORT'], flush=True)\n"
            "while not pathlib.Path('go').exists(): time.sleep(0.01)\n"
        )
        app_id = submit(scheduler, agents(tmp_path / "work.py", max_retries=1))
        wait_until(lambda: any("port" in line for line in read(scheduler, app_id, k=1)), what="workers")
        victim = pids_of(app_id)[1]
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: scheduler.describe(app_id).num_restarts == 1, what="the restart")
        (tmp_path / "go").touch()
        assert wait(scheduler, app_id).state.name == "SUCCEEDED"

    def test_below_the_minimum_it_ends_completely(self, scheduler):
        app_id = submit(scheduler, shell("sleep 1000", num_replicas=3, min_replicas=2))
        first, second, third = pids_of(app_id)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: "going on with 2" in scheduler.describe(app_id).msg, what="going on")
        assert scheduler.describe(app_id).state.name == "RUNNING"
        os.kill(second, signal.SIGKILL)
        response = wait(scheduler, app_id)
        assert response.state.name == "FAILED"
        assert (
            "r/1 was ended by SIGKILL; no retries by the scheduler (--max_retries 0); it needs 2 replicas and has 1"
            in response.msg
        )
        assert not os.path.exists(f"/proc/{third}")


class TestAgents:
    def test_two_jobs_of_two_nodes_side_by_side(self, scheduler, tmp_path):
        (tmp_path / "work.py").write_text(
            "import os\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'], 'MUSTER_TOKEN' in os.environ)\n"
        )
        apps = [submit(scheduler, agents(tmp_path / "work.py")) for _ in range(2)]
        assert [wait(scheduler, app_id).state.name for app_id in apps] == ["SUCCEEDED"] * 2
        for app_id in apps:
            lines = [line for k in (0, 1) for line in read(scheduler, app_id, k=k)]
            seen = sorted(line for line in lines if not line.startswith("[muster] succeeded after "))
            assert [re.search(r"\d 2 \w+$", line).group() for line in seen] == ["0 2 False", "1 2 False"]

    def test_two_agent_roles_of_one_app_are_two_jobs(self, scheduler, tmp_path):
        (tmp_path / "work.py").write_text(
            "import os\n"
            "what = ('ROLE_NAME', 'RANK', 'WORLD_SIZE', 'TORCHELASTIC_RUN_ID', 'MASTER_PORT')\n"
            "print('job', *(os.environ[name] for name in what))\n"
        )
        names = ("actor", "critic")
        roles = [agents(tmp_path / "work.py", name=name) for name in names]
        for role in roles:
            role.args[2:2] = ["--role", role.name]
        app_id = submit(scheduler, shell("echo beside", name="ps"), *roles)
        assert wait(scheduler, app_id).state.name == "SUCCEEDED"
        jobs = {name: [read(scheduler, app_id, name, k) for k in (0, 1)] for name in names}
        for name, nodes in jobs.items():
            printed = [line.split("job ")[1].split() for node in nodes for line in node if "job " in line]
            assert sorted(words[:4] for words in printed) == [[name, str(k), "2", f"{app_id}-{name}"] for k in (0, 1)]
            assert len({words[4] for words in printed}) == 1
            assert (folder_of(app_id).path / name / f"{app_id}-{name}").is_dir(), "the log folder of its agents"

    def test_the_bundle_serves_where_muster_is_not_installed(self, scheduler, tmp_path, monkeypatch):
        bare = tmp_path / "venv" / "bin"
        bare.mkdir(parents=True)
        (bare / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
        (bare / "python3").chmod(0o755)
        monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / "venv"))
        (tmp_path / "work.py").write_text("print('works')\n")
        app_id = submit(scheduler, agents(tmp_path / "work.py", replicas=1))
        assert wait(scheduler, app_id).state.name == "SUCCEEDED"
        assert (folder_of(app_id).state_dir / "muster-agent.zip").is_file()
        assert any("works" in line for line in read(scheduler, app_id))

    def test_an_environment_without_python_is_named(self, scheduler, tmp_path, monkeypatch):
        monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / "gone"))
        with pytest.raises(SchedulerError, match=r"VIRTUAL_ENV=.*gone has no bin/python3"):
            submit(scheduler, agents("x.py"))


class TestCancel:
    def test_reads_cancelled_and_leaves_no_grandchild(self, scheduler):
        app_id = submit(scheduler, program("local_tree.py", num_replicas=3), grace_s=30)
        wait_until(lambda: all(read(scheduler, app_id, k=k) for k in range(3)), what="the trees")
        supervisor = folder_of(app_id).read_record().supervisor
        scheduler.cancel(app_id)
        assert wait(scheduler, app_id).state.name == "CANCELLED"
        wait_until(lambda: not supervisor.is_alive(), what="the supervisor's end")

    def test_a_replica_that_ignores_it_is_killed_after_the_grace_period(self, scheduler):
        app_id = submit(scheduler, program("local_tree.py", "ignore-term", num_replicas=3), grace_s=0.2)
        wait_until(lambda: all(read(scheduler, app_id, k=k) for k in range(3)), what="the trees")
        scheduler.cancel(app_id)
        response = wait(scheduler, app_id)
        assert response.state.name == "CANCELLED"
        assert [row.exit_code for row in folder_of(app_id).read_record().app.replicas.values()] == [137] * 3

    def test_close_ends_what_was_started_here(self):
        ours = create_scheduler("torchx")
        app_id = submit(ours, shell("sleep 1000"))
        ours.close()
        assert ours.describe(app_id).state.name == "CANCELLED"
        ours.close()

    def test_an_app_outlives_the_thread_that_submitted_it(self, scheduler):
        found = []
        thread = threading.Thread(target=lambda: found.append(submit(scheduler, shell("sleep 1000"))))
        thread.start()
        thread.join()
        (app_id,) = found
        threading.Event().wait(0.2)
        assert scheduler.describe(app_id).state.name == "RUNNING"

    def test_close_leaves_detached_apps(self):
        ours = create_detached_scheduler("torchx")
        app_id = submit(ours, shell("sleep 1000"))
        ours.close()
        assert ours.describe(app_id).state.name == "RUNNING"
        ours.delete(app_id)


class TestSupervisorDies:
    def test_nothing_is_left_and_the_next_command_reports_it(self, scheduler):
        app_id = submit(scheduler, program("local_tree.py", num_replicas=2))
        wait_until(lambda: all(read(scheduler, app_id, k=k) for k in range(2)), what="the trees")
        pids = pids_of(app_id)
        os.kill(folder_of(app_id).read_record().supervisor.pid, signal.SIGKILL)
        wait_until(lambda: not [pid for pid in pids if os.path.exists(f"/proc/{pid}")], what="the guards' end")
        response = wait(scheduler, app_id)
        assert response.state.name == "FAILED"
        assert "its supervisor had died" in response.msg

    def test_a_later_command_starts_it_again_within_max_retries(self, scheduler, tmp_path):
        app_id = submit(scheduler, shell("echo up; test -e go || sleep 1000", max_retries=1))
        wait_until(lambda: read(scheduler, app_id) == ["up\n"], what="the first start")
        first = folder_of(app_id).read_record().supervisor
        (tmp_path / "go").touch()
        os.kill(first.pid, signal.SIGKILL)
        response = wait(scheduler, app_id)
        assert (response.state.name, response.num_restarts) == ("SUCCEEDED", 1)
        assert read(scheduler, app_id) == ["up\n", "up\n"]

    def test_a_request_made_without_it_is_not_lost(self, scheduler):
        app_id = submit(scheduler, shell("sleep 1000", max_retries=5))
        os.kill(folder_of(app_id).read_record().supervisor.pid, signal.SIGKILL)
        scheduler.cancel(app_id)
        assert wait(scheduler, app_id).state.name == "CANCELLED"

    def test_on_sigterm_it_ends_the_app_first(self, scheduler):
        app_id = submit(scheduler, program("local_tree.py"))
        wait_until(lambda: read(scheduler, app_id), what="the tree")
        supervisor = folder_of(app_id).read_record().supervisor
        os.kill(supervisor.pid, signal.SIGTERM)
        response = wait(scheduler, app_id)
        assert (response.state.name, response.msg) == ("CANCELLED", "cancelled: its supervisor got SIGTERM")
        wait_until(lambda: not supervisor.is_alive(), what="the supervisor's end")


class TestLogs:
    def test_both_streams_in_true_order(self, scheduler):
        count = 400
        app_id = submit(scheduler, program("local_alternate.py", str(count)))
        wait(scheduler, app_id)
        expected = [line for number in range(count) for line in (f"out {number}\n", f"err {number}\n")]
        assert read(scheduler, app_id) == expected
        assert read(scheduler, app_id, streams=Stream.STDERR) == expected[1::2]

    def test_a_flood_loses_nothing(self, scheduler):
        count = 20000
        app_id = submit(scheduler, program("local_alternate.py", str(count)))
        wait(scheduler, app_id)
        for stream, word in ((Stream.STDOUT, "out"), (Stream.STDERR, "err")):
            assert read(scheduler, app_id, streams=stream) == [f"{word} {number}\n" for number in range(count)]
        assert len(read(scheduler, app_id)) == 2 * count

    def test_the_supervisors_memory_does_not_grow_with_the_output(self, scheduler):
        """19 MiB at its peak when this was written; one that imported torch has 230."""
        app_id = submit(scheduler, shell(f"yes {'x' * 99} | head -n 500000; echo end >&2; sleep 1000"))
        wait_until(lambda: read(scheduler, app_id, streams=Stream.STDERR) == ["end\n"], what="the end of the output")
        status = Path(f"/proc/{folder_of(app_id).read_record().supervisor.pid}/status").read_text()
        (peak,) = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")]
        assert peak < 100 << 10, f"{peak} KiB"

    def test_big_writes_and_the_last_line_survive(self, scheduler):
        app_id = submit(scheduler, shell("head -c 3000000 /dev/zero | tr '\\0' x; printf end"))
        wait(scheduler, app_id)
        assert read(scheduler, app_id) == ["x" * 3000000 + "end"]

    def test_follows_to_the_end(self, scheduler, tmp_path):
        app_id = submit(scheduler, shell("echo one; while ! test -e go; do sleep 0.05; done; echo two; printf three"))
        lines = scheduler.log_iter(app_id, "r", should_tail=True)
        assert next(lines) == "one\n"
        (tmp_path / "go").touch()
        assert list(lines) == ["two\n", "three"]

    def test_follows_from_before_the_first_line(self, scheduler, tmp_path):
        app_id = submit(scheduler, shell("while ! test -e go; do sleep 0.05; done; echo late"))
        found = []
        reader = threading.Thread(target=lambda: found.extend(scheduler.log_iter(app_id, "r", should_tail=True)))
        reader.start()
        (tmp_path / "go").touch()
        reader.join(60)
        assert found == ["late\n"]

    def test_without_following_it_returns_at_once(self, scheduler):
        app_id = submit(scheduler, shell("echo one; sleep 1000"))
        wait_until(lambda: read(scheduler, app_id) == ["one\n"], what="the line")

    def test_a_prompt_without_newline_is_shown(self, scheduler):
        app_id = submit(scheduler, shell("printf 'Password: '; sleep 1000"))
        assert next(iter(scheduler.log_iter(app_id, "r", should_tail=True))) == "Password: "

    def test_progress_bars_are_shown_as_they_are_drawn(self, scheduler):
        app_id = submit(scheduler, shell("printf '\\r 10%%'; sleep 1000"))
        assert next(iter(scheduler.log_iter(app_id, "r", should_tail=True))) == "\r 10%"

    def test_bytes_that_are_not_text(self, scheduler):
        app_id = submit(scheduler, shell("printf 'a\\377b\\n'"))
        wait(scheduler, app_id)
        assert read(scheduler, app_id) == ["a\ufffdb\n"]

    def test_since_and_until(self, scheduler, tmp_path):
        steps = (
            "echo one; while ! test -e two; do sleep 0.02; done; echo two; while ! test -e three; do sleep 0.02; done"
        )
        app_id = submit(scheduler, shell(f"{steps}; echo three"))
        times = []
        for number, word in enumerate(("one", "two", "three")):
            wait_until(lambda w=word: f"{w}\n" in read(scheduler, app_id), what=word)
            times.append(datetime.now())  # noqa: DTZ005 - TorchX passes naive local times
            threading.Event().wait(0.05)
            if number < 2:
                (tmp_path / ("two", "three")[number]).touch()
        wait(scheduler, app_id)
        assert read(scheduler, app_id, since=times[0]) == ["two\n", "three\n"]
        assert read(scheduler, app_id, until=times[1]) == ["one\n", "two\n"]
        assert read(scheduler, app_id, since=times[0], until=times[1]) == ["two\n"]
        assert read(scheduler, app_id, since=times[2]) == []
        # Following ends where `until` is, not where the app ends.
        assert read(scheduler, app_id, until=times[0], should_tail=True) == ["one\n"]


class TestDryRun:
    def test_prints_no_secret_and_touches_nothing(self, scheduler, tmp_path):
        app = AppDef("app", roles=[agents("x.py", env={"HF_TOKEN": "h1dden"})])
        info = scheduler.submit_dryrun(app, {})
        text = str(info)
        assert info.request.token not in text
        assert "h1dden" not in text
        assert info.request.app_id in text
        assert app.roles[0].env == {"HF_TOKEN": "h1dden"}
        assert list(scheduler.list()) == []
        assert not Path(info.request.folder).exists()

    @pytest.mark.parametrize("grace_s", [-1, 1e9])
    def test_impossible_grace(self, scheduler, grace_s):
        with pytest.raises(SchedulerError, match=r"grace_s=.* is not a number of seconds from 0 to 86400"):
            scheduler.submit_dryrun(AppDef("app", roles=[shell("true")]), {"grace_s": grace_s})

    def test_devices_are_divided(self, scheduler, monkeypatch):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-a,7,5,9")
        role = shell("true", num_replicas=2, resource=Resource(cpu=1, gpu=2, memMB=1))
        cfg = {"auto_set_cuda_visible_devices": True}
        info = scheduler.submit_dryrun(AppDef("app", roles=[role]), cfg)
        assert [each.env["CUDA_VISIBLE_DEVICES"] for each in info.request.replicas["r"]] == ["3,GPU-a", "7,5"]
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,-1,2,3")
        with pytest.raises(SchedulerError, match=r"needs 4 GPUs \(r: 2 x 2\), but this process may use 2 \(0,1\)"):
            scheduler.submit_dryrun(AppDef("app", roles=[role]), cfg)

    def test_devices_are_counted_where_none_are_named(self, scheduler, tmp_path, monkeypatch):
        (tmp_path / "nvidia-smi").write_text(
            "#!/bin/sh\necho 'GPU 0: H200 (UUID: GPU-a)'\necho '  MIG 1g'\necho 'GPU 1: H (UUID: GPU-b)'\n"
        )
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        role = shell("true", num_replicas=2, resource=Resource(cpu=1, gpu=1, memMB=1))
        info = scheduler.submit_dryrun(AppDef("app", roles=[role]), {"auto_set_cuda_visible_devices": True})
        assert [each.env["CUDA_VISIBLE_DEVICES"] for each in info.request.replicas["r"]] == ["0", "1"]
