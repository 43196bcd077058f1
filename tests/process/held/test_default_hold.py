"""The default hold: jobs of local_cwd and `muster-agent` start on agents that wait, or cold and say why."""

import contextlib
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import wait_until
from held_jobs import FACTS, VARYING, is_gone, list_below, read_command
from memory_cgroup import join, memory_cgroup
from other_user import call_as_other, needs_two_users, shared_dir

from muster._shared.contract import HOLD_STATE_NAME
from muster._shared.holds import default as default_hold
from muster._shared.holds.connection import connect

__all__ = ["shared_dir"]

BIN = Path(sys.executable).parent
LONG = pytest.mark.long
CHAIN = """
import os, sys, torch
def read(pid):
    return open(f"/proc/{pid}/cmdline").read().replace("\\0", " ")
def read_parent(pid):
    return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
pid, found = os.getpid(), []
while pid > 1:
    found.append(f"{pid} {read(pid)}")
    pid = read_parent(pid)
with open(sys.argv[1] + os.environ["RANK"], "w") as file:
    file.write("\\n".join(found))
"""
SLEEP = """
import os, signal, sys, time
import torch
signal.signal(signal.SIGINT, lambda *_: sys.exit(print("saved", flush=True)))
open(sys.argv[1] + os.environ["RANK"], "w").write("up")
print("sleeps", flush=True)
while not os.path.exists(sys.argv[1] + "go"):
    time.sleep(0.02)
"""


def reset_signals() -> None:
    """A shell's background jobs ignore SIGINT, and what ignores other signals than the hold starts cold."""
    for signum in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_DFL)


class Everyday:
    """A user's commands, with folders of their own and the default hold switched on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "run").mkdir(mode=0o700)
        own = {"XDG_STATE_HOME": str(folder / "state"), "XDG_RUNTIME_DIR": str(folder / "run")}
        self.env = {**os.environ, **own, "HOME": str(folder), "TORCHX_CONFIG": "", "NO_COLOR": "1"}
        facts = FACTS.replace("VARYING", repr(VARYING)) + CHAIN.replace("sys.argv[1]", "sys.argv[1] + 'chain'")
        for name, text in (("chain", CHAIN), ("sleep", SLEEP), ("facts", facts)):
            (folder / f"{name}.py").write_text(text)

    def call(self, *words: str, prefix: tuple[str, ...] = (), **more: Any) -> "subprocess.CompletedProcess[str]":
        command = [*prefix, str(BIN / words[0]), *words[1:]]  # an absolute path stays what it is
        given = {"cwd": self.folder, "env": self.env, "preexec_fn": reset_signals, **more}
        return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False, **given)

    def run(self, script: str, *args: str, j: str = "1x2", **more: Any) -> "subprocess.CompletedProcess[str]":
        words = ["torchx", "run", "-s", "local_cwd", "dist.ddp", "-j", j, "--script", f"{script}.py"]
        return self.call(*words, "--", *args, **more)

    @contextlib.contextmanager
    def start(self, name: str) -> "Iterator[subprocess.Popen[str]]":
        """A job that ends when `name`go is there; its ranks make `name`RANK."""
        component = ["dist.ddp", "-j", "1x2", "--script", "sleep.py", "--", str(self.folder / name)]
        given: dict[str, Any] = {"text": True, "preexec_fn": reset_signals}
        for left in ("0", "1", "go"):  # of a repetition
            (self.folder / f"{name}{left}").unlink(missing_ok=True)
        made: subprocess.Popen[str] = subprocess.Popen(
            [str(BIN / "muster"), "run", "-s", "local_cwd", *component],
            cwd=self.folder,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            **given,
        )
        with made:
            try:
                ranks = [self.folder / f"{name}{rank}" for rank in "01"]
                wait_until(lambda: all(rank.exists() for rank in ranks), timeout_s=90, what="it runs")
                yield made
            finally:
                (self.folder / f"{name}go").touch()

    def switch(self, *words: str) -> dict[str, Any]:
        done = self.call("muster", "hold", "--default", *words, "--json")
        assert done.returncode == 0, done
        return dict(json.loads(done.stdout))

    def read(self) -> dict[str, Any]:
        found = [*self.folder.glob("run/muster/hold-*/hold.json")]
        return dict(json.loads(found[0].read_text())) if found else {}

    def wait_ready(self) -> int:
        """Wait until agents of all kinds wait, and no job runs; the pool's pid."""

        def is_ready() -> bool:
            state = self.read()
            return state.get("state") == "ready" and state["idle_since_s"] is not None

        wait_until(is_ready, timeout_s=90, what="agents wait")
        return int(self.read()["pid"])

    def read_chain(self, name: str = "chain") -> str:
        return (self.folder / f"{name}0").read_text()


@pytest.fixture(scope="module")
def everyday(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Everyday]:
    """One that the tests leave usable. Its first job was cold."""
    made = Everyday(tmp_path_factory.mktemp("everyday"))
    assert made.call("muster", "hold", "--default", "off").stdout == "the default hold is off\n"
    assert made.switch() == {"is_on": True, "idle_limit_s": 1800.0, "holds": [], "exit_code": 0}
    done = made.run("facts", str(made.folder / "facts"))
    assert done.returncode == 0, done
    assert "cold" not in done.stderr.replace(str(made.folder), ""), "it is the first one: nothing is to be said"
    yield made
    made.switch("off")


def test_the_hold_waits_for_a_job_whose_command_has_ended(tmp_path):
    """Its import of torch disturbed a detached job, and its idle time passed while the job ran."""
    made = Everyday(tmp_path)
    made.switch("--idle-minutes", "10")
    component = ["dist.ddp", "-j", "1x1", "--script", "sleep.py", "--", str(tmp_path / "up")]
    try:
        assert made.call("torchx", "run", "-s", "detached", *component).returncode == 0
        wait_until((tmp_path / "up0").exists, timeout_s=90, what="it runs")
        wait_until(lambda: bool(made.read()), timeout_s=30, what="the hold has started")
        state = made.read()
        assert state["idle_since_s"] is None, state
    finally:
        (tmp_path / "upgo").touch()
    made.wait_ready()
    made.switch("off")


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Everyday]:
    made = Everyday(tmp_path)
    made.switch("--idle-minutes", "10")
    assert made.run("chain", str(tmp_path / "chain")).returncode == 0
    yield made
    made.switch("off")


def test_the_second_job_starts_on_the_hold_and_sees_what_the_first_one_saw(everyday: Everyday) -> None:
    cold = [(everyday.folder / f"facts{rank}").read_text() for rank in (0, 1)]
    pool = everyday.wait_ready()
    assert os.getsid(pool) != os.getsid(0)
    assert os.readlink(f"/proc/{pool}/cwd") == "/"
    done = everyday.run("facts", str(everyday.folder / "facts"))
    assert done.returncode == 0, done
    assert not re.search("template|starts cold", done.stderr), done
    assert f"{pool} " in everyday.read_chain("factschain"), "its workers are below the hold"
    for rank in (0, 1):
        assert json.loads((everyday.folder / f"facts{rank}").read_text()) == json.loads(cold[rank])
    listed = everyday.call("muster", "list", "-n", "1").stdout.splitlines()[-1]
    assert listed.startswith("default hold: on; "), listed


@LONG
def test_muster_agent_starts_on_the_hold(everyday: Everyday) -> None:
    everyday.wait_ready()
    words = ("muster-agent", "--nproc-per-node", "2", "chain.py", str(everyday.folder / "chain"))
    found = []
    for _ in range(2):  # PYTHONUNBUFFERED, which local_cwd sets, makes another kind of agent
        done = everyday.call(*words)
        assert done.returncode == 0, done
        found.append(f"{everyday.wait_ready()} " in everyday.read_chain())
    assert found == [False, True]
    done = everyday.call("muster-agent", "--nproc-per-node", "2", "-m", "no_such_module")
    assert (done.returncode, "no_such_module" in done.stderr) == (2, True), done


def test_a_job_goes_on_without_its_hold_which_leaves_nothing(own: Everyday) -> None:
    pool = own.wait_ready()
    with own.start("job") as program:
        tree = [*list_below(pool), pool]
        assert any("sleep.py" in read_command(pid) for pid in tree)
        os.kill(pool, signal.SIGKILL)
        wait_until(lambda: is_gone(pool), what="it is gone")
        waiting = [pid for pid in tree if "muster-template\0" in read_command(pid)]
        own.switch("off")
        assert [*own.folder.glob("run/*")] == []
        wait_until(lambda: all(map(is_gone, waiting)), what="agents that waited have ended")
        (own.folder / "jobgo").touch()
        assert program.wait(60) == 0, program.stdout
    wait_until(lambda: all(map(is_gone, tree)), what="nothing of it runs")
    assert own.switch("off")["is_on"] is False
    assert not [*own.folder.glob("state/muster/default-hold*")]


@LONG
def test_off_ends_all_but_jobs(own: Everyday) -> None:
    pool = own.wait_ready()
    with own.start("job") as program:
        wait_until(lambda: own.read()["agents"] == 1, timeout_s=60, what="another one waits")
        tree = [*list_below(pool), pool]
        own.switch("off")
        left = [pid for pid in tree if not is_gone(pid)]
        assert left
        commands = {pid: read_command(pid) for pid in left}
        assert not any("/agent/hold/" in each or "--muster-hold" in each for each in commands.values()), (
            pool,
            commands,
        )
        (own.folder / "jobgo").touch()
        assert program.wait(60) == 0
    wait_until(lambda: all(map(is_gone, left)), what="nothing of it runs")


SLOW_END = """
import ctypes, sys
from muster.agent.hold.pool import main
libc = ctypes.CDLL(None)
libc.on_exit(libc.pause, None)  # after the end of the interpreter, which closes connections
sys.exit(main(sys.argv[1:]))
"""


def test_the_process_has_ended_when_its_connection_closes(tmp_path: Path) -> None:
    """Otherwise it is still there after `muster hold --default off`, as long as the end of the interpreter takes."""
    folder = tmp_path / "hold"
    orders = default_hold.write_order([], idle_limit_s=60.0, after_pid=0)
    command = [sys.executable, "-c", SLOW_END, str(folder), sys.executable, "none"]
    with subprocess.Popen(command, stdin=orders) as pool:
        os.close(orders)
        try:
            wait_until((folder / HOLD_STATE_NAME).exists, timeout_s=30, what="it listens")
            with connect(str(folder)) as connection:
                connection.settimeout(30)
                connection.send(b'{"end": true}')
                assert connection.recv(1) == b""
            assert pool.wait(10) == 0
        finally:
            pool.kill()


@LONG
def test_two_jobs_at_a_time(everyday: Everyday) -> None:
    pool, agents = everyday.wait_ready(), everyday.read()["agents"]  # also of other tests' kinds
    with everyday.start("first") as first:
        wait_until(lambda: len(everyday.read()["jobs"]) == 1, timeout_s=20, what="it has the first one")
        wait_until(lambda: everyday.read()["agents"] == agents, timeout_s=60, what="another one waits")
        with everyday.start("second") as second:
            wait_until(lambda: len(everyday.read()["jobs"]) == 2, what="it has both")
            for guard in everyday.read()["jobs"]:
                assert guard in list_below(pool)
                assert any("sleep.py" in read_command(pid) for pid in list_below(guard))
            for name in ("second", "first"):
                (everyday.folder / f"{name}go").touch()
            assert (first.wait(60), second.wait(60)) == (0, 0)


@LONG
def test_a_job_of_two_nodes_is_warm_on_both(own: Everyday) -> None:
    for _ in range(2):  # in the first one an agent may be ready for a node, or for none
        done = own.run("chain", str(own.folder / "two"), j="2x2")
        assert done.returncode == 0, done
        own.wait_ready()
    chains = [(own.folder / f"two{rank}").read_text() for rank in "02"]
    assert [f"{own.read()['pid']} " in chain for chain in chains] == [True] * 2


@LONG
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make all namespaces")
@pytest.mark.parametrize(
    ("flag", "name"), [("-n", "net"), ("-m", "mnt"), ("-i", "ipc"), ("-pf", "pid"), ("-U", "user"), ("-C", "cgroup")]
)
def test_another_namespace_starts_cold_and_says_why(everyday: Everyday, flag: str, name: str) -> None:
    everyday.wait_ready()
    more = ("--mount-proc",) if name == "pid" else ("-r",) if name == "user" else ()
    words = ("muster-agent", "--nproc-per-node", "2", "chain.py", str(everyday.folder / "chain"))
    done = everyday.call(*words, prefix=("unshare", flag, *more))
    assert done.returncode == 0, done
    lines = [line for line in done.stderr.splitlines() if "cold" in line]
    assert len(lines) == 1, done
    assert lines[0].startswith("muster: this node starts cold, not from the hold: "), lines
    several = {"user": r"\w+", "cgroup": "(its cgroup|cgroup namespace)", "pid": "(mnt|pid) namespace"}
    differs = several.get(name, f"{name} namespace")
    assert re.search(f"the hold: {differs} is not the hold's$", lines[0]), lines
    assert "pool_entry" not in everyday.read_chain()


@LONG
def test_a_cgroup_with_limits_starts_cold_and_says_why(everyday: Everyday) -> None:
    everyday.wait_ready()
    words = ("--nproc-per-node", "2", "chain.py", str(everyday.folder / "chain"))
    with memory_cgroup(4 << 30) as group:
        enter, *rest = join(group, str(BIN / "muster-agent"), *words)
        done = everyday.call(enter, *rest)
        assert done.returncode == 0, done
        assert "cold, not from the hold: its cgroup is not the hold's" in done.stderr, done


@LONG
def test_a_changed_site_packages_is_seen(own: Everyday) -> None:
    pool = own.wait_ready()
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = own.folder / f".local/lib/{version}/site-packages"  # another one is that of other tests, too
    packages.mkdir(parents=True)
    done = own.run("chain", str(own.folder / "chain"))
    assert done.returncode == 0, done
    assert f"cold, not from the hold: packages in {packages} have changed, and it begins again" in done.stderr
    assert own.wait_ready() == pool
    done = own.run("chain", str(own.folder / "chain"))
    assert "starts cold" not in done.stderr, done
    assert f"{pool} " in own.read_chain()


@LONG
@pytest.mark.parametrize("victim", ["client", "guard", "agent"])
def test_a_process_of_a_job_is_killed(everyday: Everyday, victim: str) -> None:
    pool = everyday.wait_ready()
    with everyday.start(victim) as program:
        wait_until(lambda: everyday.read()["jobs"], timeout_s=20, what="the hold has written that it has a job")
        (guard,) = everyday.read()["jobs"]
        tree = list_below(guard)
        clients = (int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit())
        (client,) = (pid for pid in clients if f"client.py --default {everyday.folder}/" in read_command(pid))
        agent = next(pid for pid in tree if "--muster-waiting" in read_command(pid))
        os.kill({"client": client, "guard": guard, "agent": agent}[victim], signal.SIGKILL)
        assert program.wait(60) == 1
    wait_until(lambda: all(map(is_gone, [guard, *tree])), what="nothing of it runs")
    assert everyday.wait_ready() == pool


@LONG
def test_signals_reach_a_job_of_the_hold(everyday: Everyday) -> None:
    everyday.wait_ready()
    with everyday.start("interrupted") as program:
        assert program.stdout is not None
        assert any("sleeps" in line for line in program.stdout)  # a command that still submits shows no lines
        program.send_signal(signal.SIGINT)
        assert "saved" in program.stdout.read()
        assert program.wait(60) == 130


@LONG
def test_a_shell_sees_a_job_of_the_hold_stop(everyday: Everyday) -> None:
    words = ("--nproc-per-node", "2", "chain.py", str(everyday.folder / "chain"))
    assert everyday.call("muster-agent", *words).returncode == 0  # there is one of its kind then
    pool = everyday.wait_ready()
    command = [str(BIN / "muster-agent"), "--nproc-per-node", "2", "sleep.py", str(everyday.folder / "stopped")]
    pid, terminal = pty.fork()
    if pid == 0:
        reset_signals()
        os.chdir(everyday.folder)
        os.execve(command[0], command, everyday.env)
    wait_until((everyday.folder / "stopped0").exists, timeout_s=60, what="it runs")
    wait_until(lambda: everyday.read()["jobs"], timeout_s=20, what="the hold has written that it has a job")
    (guard,) = everyday.read()["jobs"]
    assert guard in list_below(pool)
    os.write(terminal, b"\x1a")  # Ctrl-Z
    found, status = os.waitpid(pid, os.WUNTRACED)
    assert (found, os.WIFSTOPPED(status)) == (pid, True)
    wait_until(lambda: Path(f"/proc/{guard}/stat").read_text().rpartition(")")[2].split()[0] == "T", what="all stops")
    os.kill(pid, signal.SIGCONT)
    (everyday.folder / "stoppedgo").touch()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(terminal)


@LONG
def test_a_command_on_a_node_has_the_workers_variables(everyday: Everyday) -> None:
    everyday.wait_ready()
    with everyday.start("inside") as program:
        done = everyday.call("muster", "exec", "last", "--", "sh", "-c", "echo $RANK of $WORLD_SIZE")
        assert (done.returncode, done.stdout) == (0, "0 of 2\n"), done
        (everyday.folder / "insidego").touch()
        assert program.wait(60) == 0


@LONG
def test_a_hold_that_is_stopped_holds_no_job_up(own: Everyday) -> None:
    pool = own.wait_ready()
    os.kill(pool, signal.SIGSTOP)
    try:
        done = own.run("chain", str(own.folder / "chain"))
        assert done.returncode == 0, done
        assert "the default hold does not answer" in done.stderr, done
    finally:
        os.kill(pool, signal.SIGCONT)
    own.wait_ready()


@LONG
def test_it_ends_when_it_is_idle(own: Everyday) -> None:
    pool = own.wait_ready()
    tree = [pool, *list_below(pool)]
    assert own.switch("--idle-minutes", "0.01")["idle_limit_s"] == 0.6
    wait_until(lambda: all(map(is_gone, tree)), what="it has ended")
    assert [*own.folder.glob("run/*")] == []
    assert own.switch()["is_on"] is True


@LONG
def test_an_unsafe_folder_is_not_used(own: Everyday) -> None:
    pool = own.wait_ready()
    (own.folder / "run/muster").chmod(0o755)
    done = own.run("chain", str(own.folder / "chain"))
    (own.folder / "run/muster").chmod(0o700)
    assert done.returncode == 0, done
    assert f"{own.folder}/run/muster: it must be a folder of this user alone" in done.stderr, done
    assert f"{pool} " not in own.read_chain()


def read_unix_sockets() -> list[list[str]]:
    return [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]


@LONG
@needs_two_users
def test_another_user_gets_no_answer_and_reads_nothing(shared_dir: Path) -> None:
    folder = shared_dir / "user"
    folder.mkdir(mode=0o755)
    own = Everyday(folder)
    own.env["A_SECRET"] = "s3cr3t-of-the-job"
    own.switch()
    assert own.run("chain", str(folder / "chain")).returncode == 0
    pool = own.wait_ready()
    (place,) = folder.glob("run/muster/hold-*")
    secret = own.env["A_SECRET"].encode()

    def look() -> None:
        for path in (place, place / "socket", Path(f"/proc/{pool}/environ"), Path(f"/proc/{pool}/fd")):
            try:
                os.listdir(path) if path.is_dir() else os.open(path, os.O_RDONLY)
            except OSError:
                continue
            raise AssertionError(path)

    def connect() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as made:
            made.connect(str(place / "socket"))
            try:
                made.send(b'{"end": true}')
                assert made.recv(4096) == b""
            except ConnectionError:
                pass  # closed before it was read

    try:
        sockets = {os.readlink(each) for each in Path(f"/proc/{pool}/fd").iterdir() if each.exists()}
        names = {f"socket:[{row[6]}]": row[7] for row in read_unix_sockets() if len(row) > 7}
        assert [names[each][0] for each in sockets & names.keys()] == ["/"], "a socket with a name has it in a folder"
        for pid in (pool, *list_below(pool)):
            assert secret not in Path(f"/proc/{pid}/environ").read_bytes(), "nothing of a job stays in it"
        call_as_other(look)
        for each in (place, place / "socket", place.parent, place.parent.parent):
            each.chmod(0o777)  # whatever the folders say
        call_as_other(connect)
        for each in (place, place.parent, place.parent.parent):
            each.chmod(0o700)
        assert own.wait_ready() == pool
    finally:
        own.switch("off")


@pytest.mark.torchx
def test_what_does_not_go_with_it_is_one_line(tmp_path: Path) -> None:
    own = Everyday(tmp_path)
    done = own.call("muster", "hold", "--default", "on", "dist.ddp")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "muster: --default takes neither a scheduler nor a component: jobs say what they need\n"
