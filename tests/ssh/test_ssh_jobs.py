"""Jobs on hosts behind real servers: what is sent, what breaks, and that nothing is left."""

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import wait_until
from ssh_jobs import LIMIT_S, find_link, find_processes, find_ssh, read, wait_gone, wait_state, wait_text
from sshd_world import SshWorld, find_reason
from torchx.specs import AppState

from muster._shared import processes
from muster.cli import leftovers
from muster.cli.commands import main
from muster.schedulers.adapter import EngineError, ReplicaId, SchedulerError
from muster.schedulers.ssh import create_scheduler, node
from muster.testing.contract_apps import COUNTS, ROLE, build_agents, build_shell

PROGRAM = Path(__file__).parents[1] / "programs" / "ssh_steps.py"
SECRET = 'it\'s "a" $secret'


@pytest.fixture
def cfg(world, runs):
    return {"hosts": ["a", "b"], "ssh": world.ssh, "python": sys.executable, "folder": str(runs), "lost_s": 5.0}


@pytest.mark.torchx
def test_the_command_line_runs_a_job_on_two_hosts(world, runs, tmp_path):
    code = tmp_path / "the code's"
    code.mkdir()
    (code / "my 'steps'.py").write_text(PROGRAM.read_text())
    options = f"hosts=a,jumped,ssh={world.ssh},python={sys.executable},folder={runs}"
    command = [str(Path(sys.executable).with_name("torchx")), "run", "--wait", "-s", "ssh", "-cfg", options]
    command += ["--workspace", f"file://{code}", "dist.ddp", "-j", "2x1", "--start", "cold"]
    command += ["--env", f"MY_API_KEY={SECRET}", "--script", "my 'steps'.py", "--", "3"]
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    paths = {path.resolve() for path in (tmp_path / "state").glob("muster/logs/*/*/*/[01]/stdout.log")}
    logs = [path.read_text() for path in sorted(paths)]
    for index, text in enumerate(logs):
        assert f"rank {index} of 2 attempt 0" in text
        assert f"secret is kept of {len(SECRET)}" in text
    assert len(logs) == 2
    assert list((tmp_path / "state").glob("muster/logs/*/*/*/*/events.jsonl")), "what the agents report is here"
    wait_gone(runs)


def test_a_connection_that_breaks_is_made_again(scheduler, cfg, runs, tmp_path):
    index = 1
    go = tmp_path / "go"
    go.write_text("0")
    waits = f"while [ $(cat {go}) -lt $i ]; do sleep 0.05; done"  # until the test has ended the connection
    body = f"echo line $i; sleep 0.1; case $i in 6|26) {waits};; esac"
    script = f"for i in $(seq 60); do {body}; done"
    app_id = scheduler.submit(build_shell(script, replicas=2), cfg)
    for line in (5, 25):
        wait_text(scheduler, app_id, f"line {line}\n", index)
        os.kill(find_ssh(find_link(scheduler, app_id, index)), signal.SIGKILL)
        go.write_text(f"{line + 1}")
    described = wait_state(scheduler, app_id, AppState.SUCCEEDED)
    assert described.num_restarts == 0
    for each in range(2):
        assert read(scheduler, app_id, each) == [f"line {number}\n" for number in range(1, 61)]
    wait_gone(runs)


def test_lines_come_in_the_order_in_which_they_were_written(scheduler, cfg, tmp_path):
    """Each is written in two parts, to both streams in turn, and the connection breaks once."""
    script = "for i in $(seq 300); do printf 'line '; echo $i; printf 'error ' >&2; echo $i >&2; done"
    waits = f"until [ -e {tmp_path}/killed ]; do sleep 0.05; done"
    app_id = scheduler.submit(build_shell(f"{script}; {waits}; {script}"), cfg)
    wait_text(scheduler, app_id, "error 300\n", 0)
    os.kill(find_ssh(find_link(scheduler, app_id, 0)), signal.SIGKILL)
    (tmp_path / "killed").touch()
    wait_state(scheduler, app_id, AppState.SUCCEEDED)
    expected = [f"{word} {number}\n" for number in range(1, 301) for word in ("line", "error")]
    assert read(scheduler, app_id, 0) == 2 * expected


@pytest.mark.parametrize("reached", [pytest.param("again", id="again"), pytest.param("elsewhere", id="elsewhere")])
def test_an_agent_is_asked_whose_host_is_reached(world, scheduler, cfg, runs, tmp_path, reached):
    """After a cut whoever asks first inherits the search for the host's address that began during it.

    A host that is lost is not reached again; another one knows what happens.
    """
    cut, ssh = tmp_path / "cut", tmp_path / "ssh"
    ssh.write_text(
        f'#!/bin/sh\nif [ -e \'{cut}.always\' ]; then case " $* " in *" a exec "*) cut=1; esac; fi\n'
        f"if [ \"$cut\" ] || rm '{cut}' 2>/dev/null; then touch '{cut}.seen'\n"
        f'  echo "ssh: connect to host a port 22: No route to host" >&2; exit 255\nfi\nexec {world.ssh} "$@"\n'
    )
    ssh.chmod(0o755)
    app_id = scheduler.submit(build_agents(COUNTS), {**cfg, "ssh": str(ssh)})
    for index in range(2):
        wait_text(scheduler, app_id, "counts", index)
    for name in {"again": ["cut"], "elsewhere": ["cut", "cut.always"]}[reached]:
        (tmp_path / name).touch()
    stopped = scheduler.stop_app(app_id, 60.0)
    assert (tmp_path / "cut.seen").exists()
    assert stopped.step is not None, stopped.line
    wait_state(scheduler, app_id, AppState.CANCELLED)
    wait_gone(runs)


def test_an_answer_that_is_cut_is_none(world, scheduler, cfg, runs, tmp_path):
    cut, ssh = tmp_path / "cut", tmp_path / "ssh"
    some = len(node.MAGIC) + 5
    ssh.write_text(
        f"#!/bin/sh\nif rm '{cut}' 2>/dev/null; then {world.ssh} \"$@\" | head -c {some}; exit; fi\n"
        f'exec {world.ssh} "$@"\n'
    )
    ssh.chmod(0o755)
    app_id = scheduler.submit(build_agents(COUNTS), {**cfg, "ssh": str(ssh)})
    for index in range(2):
        wait_text(scheduler, app_id, "counts", index)
    cut.touch()
    stopped = scheduler.stop_app(app_id, 60.0)
    assert not cut.exists()
    assert stopped.line.startswith("w/0 cannot be asked: a: ")
    wait_state(scheduler, app_id, AppState.CANCELLED)
    wait_gone(runs)


def test_prune_removes_what_a_job_has_left_here(scheduler, cfg, runs, monkeypatch):
    monkeypatch.setattr(leftovers, "_find_lost_containers", lambda _: ())  # this machine may have no engine
    app_id = scheduler.submit(build_shell("echo done"), cfg)
    wait_state(scheduler, app_id, AppState.SUCCEEDED)
    folder = scheduler.find_folder(app_id).path
    with contextlib.ExitStack() as opened:
        found = leftovers.find_leftovers(os.environ, ended_before_s=time.time() + 60, opened=opened)
        [left] = [each for each in found if each.name == f"ssh://{app_id}"]
        assert left.what == "succeeded: logs"
        left.remove()
    assert not folder.exists()
    assert scheduler.describe(app_id) is None
    wait_gone(runs)


@pytest.mark.long
def test_a_replica_without_a_connection_for_ever_ends(scheduler, cfg, runs):
    app_id = scheduler.submit(build_shell("echo started; exec sleep 600"), cfg)
    wait_text(scheduler, app_id, "started", 0)
    link = find_link(scheduler, app_id, 0)
    supervisor = scheduler.find_folder(app_id).read_record().supervisor.pid
    for pid in (supervisor, link, find_ssh(link)):
        os.kill(pid, signal.SIGSTOP)  # as a network that carries nothing any more
    try:
        wait_gone_except = {supervisor, link}
        wait_until(lambda: not list(runs.iterdir()), what="the host has ended it", timeout_s=LIMIT_S)
        assert not set(find_processes(f"{runs}/muster-")) - wait_gone_except
    finally:
        for pid in (find_ssh(link), link, supervisor):
            os.kill(pid, signal.SIGCONT)
    described = wait_state(scheduler, app_id, AppState.FAILED)
    assert "a: " in described.msg


def test_the_line_and_the_output_of_a_rank(scheduler, cfg, capsys):
    app = build_agents(COUNTS)
    app.roles[0].args[2:2] = ["--tee", "3"]
    app_id = scheduler.submit(app, cfg)
    for index in range(2):
        wait_text(scheduler, app_id, "counts", index)
    handle = f"ssh://test/{app_id}"
    wait_until(lambda: " step " in read_shell(capsys, "list", "-s", "ssh"), what="steps in the list", timeout_s=LIMIT_S)
    assert f"ssh://torchx/{app_id}" in (listed := read_shell(capsys, "list", "-s", "ssh"))
    assert "RUNNING: attempt 0, no restarts allowed; 2 of 2 nodes run; step " in listed
    assert "RUNNING: attempt 0, no restarts allowed; 2 of 2 nodes run; step " in read_shell(capsys, "status", handle)
    code = main(["log", handle, "--rank", "1"])
    out, err = capsys.readouterr()
    assert (code, out) == (0, "rank 1 of 2 counts\n"), err


def read_shell(capsys, *words):
    """What a command of muster prints."""
    capsys.readouterr()
    main([*words])
    return capsys.readouterr().out


@pytest.mark.long
def test_replicas_that_stay_are_found_again(scheduler, cfg, runs):
    app_id = scheduler.submit(build_agents(COUNTS), {**cfg, "stays": True})
    for index in range(2):
        wait_text(scheduler, app_id, "counts", index)
    record = scheduler.find_folder(app_id).read_record()
    links = [find_link(scheduler, app_id, index) for index in range(2)]
    os.kill(record.supervisor.pid, signal.SIGKILL)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in links), what="the links end", timeout_s=LIMIT_S)
    time.sleep(6)  # over lost_s
    other = create_scheduler("test")  # one that submits starts a supervisor again by itself
    assert other.describe(app_id).state is AppState.UNKNOWN
    assert "2 still ran" in other.recover_app(app_id).line
    stopped = other.stop_app(app_id, 30.0)
    assert stopped.step is not None, stopped.line
    wait_state(scheduler, app_id, AppState.CANCELLED)
    for index in range(2):
        text = "".join(read(scheduler, app_id, index))
        assert text.count("counts") == 1, "no line twice, and not started again"
        assert f"stops at {stopped.step}" in text
    wait_gone(runs)


def test_a_killed_command_takes_its_own_job_along_only(scheduler, cfg, runs, tmp_path):
    other = scheduler.submit(build_shell("echo started; exec sleep 600", replicas=2), cfg)
    program = (
        "import json, sys, time\n"
        "from muster.schedulers.ssh import create_scheduler\n"
        "from muster.testing.contract_apps import build_shell\n"
        "made = create_scheduler('test')\n"
        "app = build_shell('echo started; exec sleep 600', replicas=2)\n"
        "print(made.submit(app, json.loads(sys.argv[1])), flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", program, json.dumps({**cfg, "detach": False})]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            app_id = process.stdout.readline().strip()
            wait_text(scheduler, app_id, "started", 1)
        finally:
            process.kill()
    wait_state(scheduler, app_id, AppState.CANCELLED)
    wait_until(lambda: [path.name for path in runs.iterdir()] == [f"muster-{other}"], what="its folders go")
    assert scheduler.describe(other).state is AppState.RUNNING
    scheduler.delete(other)
    wait_gone(runs)


@pytest.mark.long
def test_a_spare_takes_the_place_of_a_lost_host(world, scheduler, cfg, runs):
    app = build_agents(COUNTS, retries=1)
    app_id = scheduler.submit(app, {**cfg, "hosts": ["a", "b", "c"], "spares": 1})
    for index in range(2):
        wait_text(scheduler, app_id, "counts", index)
    connection = find_ssh(find_link(scheduler, app_id, 0))
    world.stop("a")
    try:
        # The connection first: an exit that is still told would use the only retry on a host that is gone.
        for pid in (connection, *find_processes(f"{runs}/muster-{app_id}/w-0-1")):
            with contextlib.suppress(ProcessLookupError):  # one that ends takes others along
                os.kill(pid, signal.SIGKILL)
        wait_text(scheduler, app_id, "counts", 0, times=2)
        wait_text(scheduler, app_id, "counts", 1, times=2)
        described = wait_state(scheduler, app_id, AppState.RUNNING)
        assert described.num_restarts >= 1
        handles = scheduler.find_folder(app_id).read_record().handles
        assert [handles[ReplicaId(ROLE, index)]["host"] for index in range(2)] == ["c", "b"]
    finally:
        world.start("a")
    assert scheduler.stop_app(app_id, 30.0).step is not None


def test_each_host_that_cannot_be_used_has_a_line(scheduler, cfg, tmp_path, world):
    old = tmp_path / "old python"
    old.write_text('#!/bin/sh\nexec python3 -c \'import sys; sys.version_info = (3, 8, 1)\n\'"$(echo "$2")" "$3"\n')
    old.chmod(0o755)
    with pytest.raises(EngineError) as raised:
        scheduler.submit(build_shell("true", replicas=2), {**cfg, "hosts": ["a", "no-such-host.invalid"]})
    assert "1 of 2 hosts cannot be used:\n  no-such-host.invalid: Could not resolve hostname" in str(raised.value)
    cases = [
        ({"python": "python-9"}, "no python-9 there; name one with -cfg python=PATH"),
        ({"python": str(old)}, "is Python 3.8.1, 3.10 or newer is needed"),
        ({"folder": "/proc/none"}, "/proc has 0 MB free, and 34 MB are needed"),
    ]
    for options, line in cases:
        with pytest.raises(EngineError) as raised:
            scheduler.submit(build_shell("true", replicas=2), {**cfg, **options})
        lines = str(raised.value).splitlines()
        assert lines[0] == "2 of 2 hosts cannot be used:"
        assert [text[:5] for text in lines[1:]] == ["  a: ", "  b: "]
        assert all(line in text for text in lines[1:]), lines
    assert scheduler.list({}) == []


def test_an_ssh_that_says_nothing_more_and_stays_has_a_line(scheduler, cfg, tmp_path):
    broken = tmp_path / "broken ssh"
    broken.write_text("#!/bin/sh\nexec >&-\nexec sleep 603\n")
    broken.chmod(0o755)
    with pytest.raises(EngineError, match="a: the connection ended"):
        scheduler.submit(build_shell("true"), {**cfg, "ssh": shlex.quote(str(broken)), "hosts": ["a"]})
    assert not find_processes("sleep\x00603")


def test_a_host_is_looked_at_and_started_by_one_connection(world, scheduler, cfg, runs):
    def count() -> list[int]:
        return [(world.folder / f"sshd_{name}.log").read_text().count("Accepted publickey") for name in "ab"]

    before = count()
    app_id = scheduler.submit(build_shell("echo $0", replicas=2), cfg)
    wait_state(scheduler, app_id, AppState.SUCCEEDED)
    assert [after - number for after, number in zip(count(), before, strict=True)] == [1, 1]
    wait_gone(runs)


def test_hosts_are_named_by_one_option(scheduler, cfg, tmp_path):
    for options, line in [
        ({"hosts": []}, "none of them is given"),
        ({"hostfile": str(tmp_path / "none")}, "hosts and hostfile"),
        ({"hosts": ["a", "a"]}, "names 'a' twice"),
        ({"hosts": ["a"]}, "2 nodes need as many hosts, and 1 is named"),
        ({"hosts": ["a", "-oProxyCommand=x"]}, "is not HOST, USER@HOST or HOST:N"),
    ]:
        with pytest.raises(SchedulerError, match=line):
            scheduler.submit(build_agents(COUNTS), {**cfg, **options})


@pytest.mark.long
def test_an_elastic_job_follows_a_discovery_script(scheduler, cfg, runs, tmp_path):
    hosts = tmp_path / "hosts"
    script = tmp_path / "discover hosts.sh"
    script.write_text(f"#!/bin/sh\ncat '{hosts}'\n")
    script.chmod(0o755)

    def name(*names: str) -> None:
        made = tmp_path / "hosts.new"
        made.write_text("".join(f"{each}:4\n" for each in names))
        made.replace(hosts)

    def wait_nodes(count: int) -> None:
        def check() -> bool:
            record = scheduler.find_folder(app_id).read_record()
            return len(record.app.running()) == count and not record.app.leaving

        wait_until(check, what=f"{count} nodes run", timeout_s=LIMIT_S)

    name("a", "b")
    app = build_agents(COUNTS, nodes=3, least=1)
    app_id = scheduler.submit(app, {**cfg, "hosts": [], "discover": str(script)})
    for index in range(2):
        wait_text(scheduler, app_id, "of 2 counts", index)
    name("a", "b", "c")
    wait_text(scheduler, app_id, "rank 2 of 3 counts", 2)
    name("a", "c")
    wait_nodes(2)
    wait_text(scheduler, app_id, "rank 1 of 2 counts", 1, times=2)
    record = scheduler.find_folder(app_id).read_record()
    assert {each.index: record.handles[each]["host"] for each in record.app.running()} == {0: "a", 1: "c"}
    assert sum(record.app.retries.values()) == 0
    assert "stops at" in "".join(read(scheduler, app_id, 1)), "by a drain"
    assert scheduler.stop_app(app_id, 30.0).step is not None
    wait_gone(runs)


@pytest.mark.long
def test_a_host_that_hangs_and_one_that_refuses_have_a_line_each(world, scheduler, cfg, tmp_path):
    with socket.create_server(("127.0.0.1", 0), backlog=0) as silent, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        config = tmp_path / "more"
        config.write_text(
            f"Host silent\n  HostName 127.0.0.1\n  Port {silent.getsockname()[1]}\n"
            f"Host closed\n  HostName 127.0.0.1\n  Port {closed.getsockname()[1]}\n" + world.config.read_text()
        )
        options = {**cfg, "ssh": shlex.join(["ssh", "-F", str(config)]), "hosts": ["a", "silent", "closed"]}
        with pytest.raises(EngineError) as raised:
            scheduler.submit(build_shell("true", replicas=3), options)
    first, silent_line, closed_line = str(raised.value).splitlines()
    assert first == "2 of 3 hosts cannot be used:"
    assert silent_line.startswith("  silent: ")
    assert "timed out" in silent_line.lower()
    assert closed_line.startswith("  closed: ")
    assert closed_line.endswith("Connection refused")
    assert scheduler.list({}) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root")
def test_a_host_with_a_full_disk_has_a_line(scheduler, cfg, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(small)], check=False).returncode != 0:
        pytest.skip("no file system can be mounted here")
    try:
        with pytest.raises(EngineError, match=r"a: .*small has 1 MB free, and 34 MB are needed"):
            scheduler.submit(build_shell("true"), {**cfg, "folder": str(small)})
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_two_jobs_share_their_hosts(scheduler, cfg, runs):
    ids = [scheduler.submit(build_agents(COUNTS), cfg) for _ in range(2)]
    for app_id in ids:
        for index in range(2):
            wait_text(scheduler, app_id, "of 2 counts", index)
    scheduler.cancel(ids[0])
    wait_state(scheduler, ids[0], AppState.CANCELLED)
    assert scheduler.describe(ids[1]).state is AppState.RUNNING
    assert scheduler.stop_app(ids[1], 30.0).step is not None
    wait_state(scheduler, ids[1], AppState.CANCELLED)
    wait_gone(runs)


def test_ctrl_c_reaches_all_hosts(scheduler, cfg, runs):
    app_id = scheduler.submit(build_agents(COUNTS), cfg)
    for index in range(2):
        wait_text(scheduler, app_id, "of 2 counts", index)
    assert [each.hostname for each in scheduler.describe(app_id).roles_statuses[0].replicas] == ["a", "b"]
    assert scheduler.find_folder(app_id).send_request("interrupt")
    wait_state(scheduler, app_id, AppState.CANCELLED)
    assert [each.hostname for each in scheduler.describe(app_id).roles_statuses[0].replicas] == ["a", "b"]
    for index in range(2):
        text = "".join(read(scheduler, app_id, index))
        assert "KeyboardInterrupt" in text or "Ctrl-C" in text, "by the signal, not by the kill after the grace period"
    wait_gone(runs)


@pytest.mark.skipif(find_reason() is not None, reason=str(find_reason()))
def test_servers_leave_no_connection_whose_client_is_out_of_reach(tmp_path):
    made = SshWorld(tmp_path / "one host", hosts=1)
    client = subprocess.Popen([*shlex.split(made.ssh), "a", "echo on; exec sleep 601"], stdout=subprocess.PIPE)
    try:
        assert client.stdout.read(2) == b"on"
        client.send_signal(signal.SIGSTOP)  # as behind a network that carries nothing any more
        [server] = made._servers.values()
        sessions = processes.list_descendants(server.pid)
        assert len(sessions) >= 2
        made.close()
        wait_until(lambda: all((processes.read_stat(pid) or "Z")[0] == "Z" for pid in sessions), what="they end")
    finally:
        made.close()
        client.kill()
        client.communicate()
