"""local_cwd through TorchX's interface: real supervisors and short-running replicas."""

import os
import signal
import sys
import threading
from datetime import datetime
from pathlib import Path

import pytest
from harness import LIMIT_S, PROGRAMS, wait_until
from launchers import ONE_START
from supervised_apps import make_folder
from torchx.schedulers.api import Stream
from torchx.specs import AppDef, Resource, Role
from torchx.specs.api import macros

from muster.schedulers.errors import EngineError, SchedulerError
from muster.schedulers.local import create_scheduler
from muster.schedulers.supervision.client import start_supervisor
from muster.schedulers.supervision.registry import AppRegistry, find_state_dir

TINY = Resource(cpu=1, gpu=0, memMB=1)
TERMINAL = ("SUCCEEDED", "FAILED", "CANCELLED")


pytestmark = pytest.mark.usefixtures("state_home")


def shell(script, **more):
    return Role(**({"name": "r", "image": "", "entrypoint": "sh", "args": ["-c", script], "resource": TINY} | more))


def program(file, *args, **more):
    return Role(
        **(
            {"name": "r", "image": "", "entrypoint": sys.executable, "args": [str(PROGRAMS / file), *args]}
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


def wait(scheduler, app_id, timeout_s=LIMIT_S):
    wait_until(
        lambda: scheduler.describe(app_id).state.name in TERMINAL, timeout_s=timeout_s, what=f"the end of {app_id}"
    )
    return scheduler.describe(app_id)


def read(scheduler, app_id, role="r", k=0, **more):
    return list(scheduler.log_iter(app_id, role, k, **more))


def folder_of(app_id, name="local_cwd"):
    return AppRegistry(find_state_dir(os.environ), name).open(app_id)


def test_what_replicas_get_and_what_another_command_reads_of_them(scheduler, tmp_path, monkeypatch):
    """One app, a role for each question. Beside it lie modules that no supervisor and no guard may import."""
    for name in ("selectors", "signal", "json", "socket", "dataclasses"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')\n")
    (tmp_path / "only-here").write_text("#!/bin/sh\necho found\n")
    (tmp_path / "only-here").chmod(0o755)
    monkeypatch.setenv("FROM_CALLER", "yes")
    show = "echo $0 $1 $TORCHX_RANK0_HOST; echo err >&2"
    app_id = submit(
        scheduler,
        shell(show, name="index", args=["-c", show, macros.replica_id, macros.app_id], num_replicas=2),
        shell("pwd; echo $FROM_CALLER $FROM_ROLE; only-here", name="place", env={"FROM_ROLE": "too"}),
        shell("head -c 3000000 /dev/zero | tr '\\0' x; printf end", name="big"),
        shell("printf 'a\\377b\\n'", name="bytes"),
        program("local_alternate.py", "400", name="streams"),
        shell("true", name="silent"),
        log_dir=str(tmp_path / "logs"),
    )
    assert wait(scheduler, app_id).state.name == "SUCCEEDED"
    another = create_scheduler("torchx")
    assert another.describe(app_id).state.name == "SUCCEEDED"
    assert [each.app_id for each in another.list()] == [app_id]
    for k in (0, 1):
        assert read(another, app_id, "index", k, streams=Stream.STDOUT) == [f"{k} {app_id} 127.0.0.1\n"]
        assert read(another, app_id, "index", k, streams=Stream.STDERR) == ["err\n"]
    assert read(another, app_id, "place") == [f"{tmp_path}\n", "yes too\n", "found\n"]
    assert (tmp_path / "logs/torchx" / app_id / "place/0/stdout.log").read_text().endswith("yes too\nfound\n")
    assert read(another, app_id, "big") == ["x" * 3000000 + "end"]
    assert read(another, app_id, "bytes") == ["a\ufffdb\n"]
    assert read(another, app_id, "silent") == []
    lines = [line for number in range(400) for line in (f"out {number}\n", f"err {number}\n")]
    assert read(another, app_id, "streams") == lines, "both streams in true order"
    for role, k, more in (("x", 0, {}), ("index", 2, {}), ("index", 0, {"regex": "("})):
        with pytest.raises(SchedulerError, match=r"role 'x'|not 2|regex"):
            another.log_iter(app_id, role, k, **more)


def test_what_cannot_be_executed_says_so(scheduler):
    app_id = submit(scheduler, shell("", entrypoint="no-such-command"))
    response = wait(scheduler, app_id)
    assert response.state.name == "FAILED"
    assert "exited with code 127" in response.msg
    assert any("no-such-command" in line for line in read(scheduler, app_id))
    response = wait(scheduler, submit(scheduler, agents("x.py", entrypoint="/no/such/python3", max_retries=3)))
    assert (response.state.name, response.num_restarts) == ("FAILED", 0)
    assert "'/no/such/python3'" in response.msg


def test_the_error_file_of_a_replica_is_in_the_status(scheduler):
    app_id = submit(scheduler, shell("""echo '{"message": {"message": "boom"}}' > $TORCHELASTIC_ERROR_FILE; exit 1"""))
    assert wait(scheduler, app_id).structured_error_msg == '{"message": {"message": "boom"}}'


def test_an_impossible_log_dir(scheduler, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match=r"app-\w+: .*Not a directory"):
        submit(scheduler, shell("echo x"), log_dir=str(tmp_path / "file"))
    assert list(scheduler.list()) == []


def test_two_agent_roles_of_one_app_are_two_jobs(scheduler, tmp_path):
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


def test_the_bundle_serves_where_muster_is_not_installed(scheduler, tmp_path, monkeypatch):
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


def test_an_app_outlives_the_thread_that_submitted_it_but_not_its_scheduler():
    ours, found = create_scheduler("torchx"), []
    thread = threading.Thread(target=lambda: found.append(submit(ours, shell("sleep 1000"))))
    thread.start()
    thread.join()
    (app_id,) = found
    assert ours.describe(app_id).state.name == "RUNNING"
    ours.close()
    assert ours.describe(app_id).state.name == "CANCELLED"
    ours.close()


def test_on_sigterm_the_supervisor_ends_the_app_first(scheduler):
    app_id = submit(scheduler, program("local_tree.py"))
    wait_until(lambda: read(scheduler, app_id), what="the tree")
    supervisor = folder_of(app_id).read_record().supervisor
    os.kill(supervisor.pid, signal.SIGTERM)
    response = wait(scheduler, app_id)
    assert (response.state.name, "got SIGTERM" in response.msg) == ("CANCELLED", True)
    wait_until(lambda: not supervisor.is_alive(), what="the supervisor's end")


def test_the_supervisors_memory_does_not_grow_with_the_output(scheduler):
    """19 MiB at its peak when this was written; one that imported torch has 230."""
    app_id = submit(scheduler, shell(f"yes {'x' * 99} | head -n 500000; echo end >&2; sleep 1000"))
    wait_until(lambda: read(scheduler, app_id, streams=Stream.STDERR) == ["end\n"], what="the end of the output")
    status = Path(f"/proc/{folder_of(app_id).read_record().supervisor.pid}/status").read_text()
    (peak,) = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")]
    assert peak < 100 << 10, f"{peak} KiB"


def test_since_and_until(scheduler, tmp_path):
    steps = "echo one; while ! test -e two; do sleep 0.02; done; echo two; while ! test -e three; do sleep 0.02; done"
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


def test_a_supervisor_without_a_log_says_why(tmp_path, capfd):
    """It wrote a traceback to the terminal, and the command said only that the log is empty."""
    folder = make_folder(tmp_path / "a")
    folder.log_file.mkdir()
    with pytest.raises(EngineError, match=rf"{folder.log_file}: Is a directory$"):
        start_supervisor(folder, folder.read_spec())
    assert capfd.readouterr() == ("", "")
