"""Jobs on hosts behind real servers: what is sent, what breaks, and that nothing is left."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import LIMIT_S, PROGRAMS, find_processes, wait_until
from ssh_jobs import find_link, find_ssh, read, read_shell, wait_gone, wait_state, wait_text
from torchx.specs import AppDef, AppState

from muster.schedulers.adapter import EngineError, ReplicaId
from muster.schedulers.ssh import create_scheduler
from muster.testing.contract_apps import COUNTS, ROLE, build_agents, build_shell

PROGRAM = PROGRAMS / "ssh_steps.py"
SECRET = 'it\'s "a" $secret'


@pytest.fixture
def cfg(world, runs):
    return {"hosts": ["a", "b"], "ssh": world.ssh, "python": sys.executable, "folder": str(runs)}


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
    """Lines come in the order in which they were written, to both streams in turn, each in two parts."""
    index = 1
    go = tmp_path / "go"
    go.write_text("0")
    waits = f"while [ $(cat {go}) -lt $i ]; do sleep 0.05; done"  # until the test has ended the connection
    body = f"printf 'line '; echo $i; printf 'error ' >&2; echo $i >&2; case $i in 100|200) {waits};; esac"
    app_id = scheduler.submit(build_shell(f"for i in $(seq 300); do {body}; done", replicas=2), cfg)
    for line in (100, 200):
        wait_text(scheduler, app_id, f"error {line}\n", index)
        os.kill(find_ssh(find_link(scheduler, app_id, index)), signal.SIGKILL)
        whole = go.with_name("whole")
        whole.write_text(f"{line}")
        whole.replace(go)
    described = wait_state(scheduler, app_id, AppState.SUCCEEDED)
    assert described.num_restarts == 0
    expected = [f"{word} {number}\n" for number in range(1, 301) for word in ("line", "error")]
    for each in range(2):
        assert read(scheduler, app_id, each) == expected
    wait_gone(runs)


@pytest.mark.parametrize("reached", ["again", pytest.param("elsewhere", marks=pytest.mark.long)])
def test_an_agent_is_asked_whose_host_is_reached(world, scheduler, cfg, runs, tmp_path, reached):
    """After a cut whoever asks first inherits the search for the host's address that began during it.

    A host that is lost is not reached again; another one knows what happens.
    """
    cut = tmp_path / "cut"
    lines = (
        f'if [ -e \'{cut}.always\' ]; then case " $* " in *" a exec "*) cut=1; esac; fi\n'
        f"if [ \"$cut\" ] || rm '{cut}' 2>/dev/null; then touch '{cut}.seen'\n"
        '  echo "ssh: connect to host a port 22: No route to host" >&2; exit 255\nfi\n'
    )
    program = tmp_path / "ssh"
    program.write_text(f'#!/bin/sh\n{lines}exec {world.ssh} "$@"\n')
    program.chmod(0o755)
    app_id = scheduler.submit(build_agents(COUNTS), {**cfg, "ssh": str(program)})
    wait_counting(scheduler, app_id)
    for name in {"again": ["cut"], "elsewhere": ["cut.always"]}[reached]:
        (tmp_path / name).touch()
    stopped = scheduler.stop_app(app_id, 60.0)
    assert (tmp_path / "cut.seen").exists()
    assert stopped.step is not None, stopped.line
    wait_state(scheduler, app_id, AppState.CANCELLED)
    wait_gone(runs)


def wait_counting(scheduler, *app_ids):
    """Wait until both ranks of each job count."""
    for app_id in app_ids:
        for index in range(2):
            wait_text(scheduler, app_id, "of 2 counts", index)


@pytest.mark.long
def test_a_replica_without_a_connection_for_ever_ends(scheduler, cfg, runs):
    app_id = scheduler.submit(build_shell("echo started; exec sleep 600"), {**cfg, "lost_s": 5.0})
    wait_text(scheduler, app_id, "started", 0)
    link = find_link(scheduler, app_id, 0)
    supervisor = scheduler.find_folder(app_id).read_record().supervisor.pid
    for pid in (supervisor, link, find_ssh(link)):
        os.kill(pid, signal.SIGSTOP)  # as a network that carries nothing any more
    try:
        wait_gone_except = {supervisor, link}
        wait_until(lambda: not list(runs.iterdir()), what="the host has ended it")
        assert not set(find_processes(f"{runs}/muster-")) - wait_gone_except
    finally:
        for pid in (find_ssh(link), link, supervisor):
            os.kill(pid, signal.SIGCONT)
    described = wait_state(scheduler, app_id, AppState.FAILED)
    assert "a: " in described.msg


def test_two_jobs_share_their_hosts_and_ctrl_c_reaches_all_of_one(scheduler, cfg, runs, capsys):
    """What is told of each, and the output of a rank."""
    app = build_agents(COUNTS)
    app.roles[0].args[2:2] = ["--tee", "3"]
    ids = [scheduler.submit(app, cfg) for _ in range(2)]
    wait_counting(scheduler, *ids)
    told = "RUNNING: attempt 0, no restarts allowed; 2 of 2 nodes run; step "
    handles = [f"ssh://test/{app_id}" for app_id in ids]
    for handle in handles:
        wait_until(lambda each=handle: told in read_shell(capsys, "status", each), what="steps")
    listed = read_shell(capsys, "list", "-s", "ssh")
    assert [f"ssh://torchx/{app_id}" in listed for app_id in ids] == [True, True], listed
    assert listed.count(told) == 2, listed
    assert read_shell(capsys, "log", handles[0], "--rank", "1") == "rank 1 of 2 counts\n"
    assert scheduler.find_folder(ids[0]).send_request("interrupt")
    found = wait_state(scheduler, ids[0], AppState.CANCELLED)
    assert [each.hostname for each in found.roles_statuses[0].replicas] == ["a", "b"]
    for index in range(2):
        text = "".join(read(scheduler, ids[0], index))
        assert "KeyboardInterrupt" in text or "Ctrl-C" in text, "by the signal, not by the kill after the grace period"
    assert scheduler.describe(ids[1]).state is AppState.RUNNING
    assert scheduler.stop_app(ids[1], 30.0).step is not None
    wait_state(scheduler, ids[1], AppState.CANCELLED)
    wait_gone(runs)


@pytest.mark.long
def test_replicas_that_stay_are_found_again(scheduler, cfg, runs):
    app_id = scheduler.submit(build_agents(COUNTS), {**cfg, "lost_s": 5.0, "stays": True})
    wait_counting(scheduler, app_id)
    record = scheduler.find_folder(app_id).read_record()
    links = [find_link(scheduler, app_id, index) for index in range(2)]
    os.kill(record.supervisor.pid, signal.SIGKILL)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in links), what="the links end")
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


@pytest.mark.long
def test_a_spare_takes_the_place_of_a_lost_host(world, scheduler, cfg, runs):
    app = build_agents(COUNTS, retries=1)
    app_id = scheduler.submit(app, {**cfg, "hosts": ["a", "b", "c"], "spares": 1, "lost_s": 5.0})
    wait_counting(scheduler, app_id)
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


@pytest.mark.long
def test_the_other_roles_see_where_one_that_moves_has_gone(world, scheduler, cfg, runs):
    """The file counts instead of the variables, which were true at the start."""
    reads = 'echo "by variable $MUSTER_ROLE_W_HOSTS"; until [ -e "$MUSTER_ROLES_FILE" ]; do sleep 0.1; done; '
    looks = f'{reads}echo "by file $(cat "$MUSTER_ROLES_FILE")"; exec sleep 600'
    [moves], [watches] = build_shell("exec sleep 600", retries=1).roles, build_shell(looks).roles
    watches.name = "watch"
    app = AppDef(name="contract", roles=[moves, watches])
    app_id = scheduler.submit(app, {**cfg, "hosts": ["a", "b", "c"], "spares": 1, "lost_s": 5.0})
    wait_state(scheduler, app_id, AppState.RUNNING)
    wait_until(lambda: "by variable" in "".join(scheduler.log_iter(app_id, "watch", 0)), what="the other role looks")
    before = scheduler.find_folder(app_id).read_record().handles[ReplicaId(ROLE, 0)]["host"]
    connection = find_ssh(find_link(scheduler, app_id, 0))
    world.stop(before)
    try:
        for pid in (connection, *find_processes(f"{runs}/muster-{app_id}/w-0-1")):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: "by file" in "".join(scheduler.log_iter(app_id, "watch", 0)), what="the file is there")
        text = "".join(scheduler.log_iter(app_id, "watch", 0))
        assert world.addresses["c"] in text.partition("by file")[2], text
    finally:
        world.start(before)
    scheduler.delete(app_id)


def test_each_host_that_cannot_be_used_has_a_line(scheduler, cfg, tmp_path, world):
    old = tmp_path / "old python"
    old.write_text('#!/bin/sh\nexec python3 -c \'import sys; sys.version_info = (3, 8, 1)\n\'"$(echo "$2")" "$3"\n')
    old.chmod(0o755)
    with pytest.raises(EngineError) as raised:
        scheduler.submit(build_shell("true", replicas=2), {**cfg, "hosts": ["a", "no-such-host.invalid"]})
    assert "1 of 2 hosts" in str(raised.value)
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


def test_a_host_is_looked_at_and_started_by_one_connection(world, scheduler, cfg, runs):
    def count() -> list[int]:
        return [(world.folder / f"sshd_{name}.log").read_text().count("Accepted publickey") for name in "ab"]

    before = count()
    app_id = scheduler.submit(build_shell("echo $0", replicas=2), cfg)
    wait_state(scheduler, app_id, AppState.SUCCEEDED)
    assert [after - number for after, number in zip(count(), before, strict=True)] == [1, 1]
    wait_gone(runs)


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

        wait_until(check, what=f"{count} nodes run")

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
