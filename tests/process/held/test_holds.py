"""`muster hold` on this machine: runs on it are jobs of their own, one at a time, and nothing of them stays."""

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from harness import wait_until
from other_user import call_as_other, needs_two_users, shared_dir

__all__ = ["shared_dir"]

BIN = Path(sys.executable).parent
REDUCE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
print("sum", value.item(), flush=True)
dist.destroy_process_group()
"""
FACTS = """
import json, os, resource, signal, sys, threading
import torch
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
facts = {
    "environ": {k: v for k, v in os.environ.items() if not k.startswith(VARYING)},
    "cwd": os.getcwd(), "argv": sys.argv, "path": sys.path, "flags": str(sys.flags), "orig_argv": sys.orig_argv[1:],
    "limits": {n: resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith("RLIMIT_")},
    "signals": {int(s): str(signal.getsignal(s)) for s in signal.valid_signals()},
    "status": {k: status[k].strip() for k in ("Umask", "SigBlk", "SigIgn", "CapEff", "Groups", "NoNewPrivs")},
    "nice": os.nice(0), "cpus": sorted(os.sched_getaffinity(0)), "oom": open("/proc/self/oom_score_adj").read(),
    "threads": threading.active_count(), "torch_threads": torch.get_num_threads(),
    "fds": sorted(n for n in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd/" + n)),
    "stdin": os.readlink("/proc/self/fd/0"), "cgroup": open("/proc/self/cgroup").read(),
    "shm": sorted(n for n in os.listdir("/dev/shm") if "muster" in n),
    "modules": sorted(n for n in sys.modules if n.partition(".")[0] == "muster"),
}
open(sys.argv[1] + os.environ["RANK"], "w").write(json.dumps(facts, sort_keys=True, indent=1))
"""
VARYING = ("TORCHELASTIC_", "MASTER_", "MUSTER_", "TORCHX_", "PYTEST_", "KUBEFLOW_")
"""Prefixes of variables that have a job's id, folder or port."""
SLEEP = "import time\nimport torch\nprint('up', flush=True)\ntime.sleep(600)\n"


class Machine:
    """A user's commands, with a state folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "TORCHX_CONFIG": "", "NO_COLOR": "1"}

    def call(self, *words: str, **more: Any) -> "subprocess.CompletedProcess[str]":
        command = [str(BIN / words[0]), *words[1:]]
        given = {"cwd": self.folder, "env": self.env, **more}
        return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False, **given)

    def run(self, script: str, *words: str, j: str = "1x2", cfg: str = "", **more: Any) -> Any:
        path = self.folder / "main.py"
        path.write_text(script)
        options = ["-cfg", cfg] if cfg else []
        return self.call(
            "muster", "run", "-s", "held", *options, "dist.ddp", "-j", j, "--script", str(path), *words, **more
        )

    def start(self, script: str, name: str, *words: str) -> "subprocess.Popen[str]":
        (self.folder / f"{name}.py").write_text(script)
        command = [str(BIN / "muster"), "run", "-s", "held", "dist.ddp", "-j", "1x2", "--script", f"{name}.py", *words]
        return subprocess.Popen(
            command, cwd=self.folder, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def hold(self, *words: str) -> "Held":
        done = self.call("muster", "hold", "--json", *words)
        assert done.returncode == 0, done
        return Held(self, json.loads(done.stdout))


class Held:
    """A hold."""

    def __init__(self, machine: Machine, facts: Mapping[str, Any]) -> None:
        self.machine = machine
        self.facts = facts
        self.app_id = str(facts["handle"]).rpartition("/")[2]
        self.app_dir = next((machine.folder / "state").rglob(f"logs/*/{self.app_id}"), machine.folder)

    def read(self, index: int = 0) -> dict[str, Any]:
        (path,) = self.app_dir.glob(f"*/hold-{index}/hold.json")
        return dict(json.loads(path.read_text()))

    def wait_ready(self) -> None:
        wait_until(lambda: self.read()["state"] == "ready", timeout_s=60, what="an agent waits")

    def find_state(self) -> str:
        done = self.machine.call("muster", "status", "--json", self.app_id)
        return str(json.loads(done.stdout)["state"])

    def find_supervisor(self) -> int:
        return int(json.loads((self.app_dir / ".muster/state.json").read_text())["supervisor"]["pid"])

    def list_tree(self) -> dict[int, str]:
        """Processes below the hold's supervisor, with their command lines."""
        return {pid: read_command(pid) for pid in list_below(self.find_supervisor())}


def read_command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def list_below(root: int) -> list[int]:
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found, todo = [], [root]
    while todo:
        each = todo.pop()
        below = [pid for pid, parent in parents.items() if parent == each]
        found += below
        todo += below
    return found


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    except OSError:
        return True


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    made.call("muster", "release", "--now")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    """A hold of two nodes that the tests leave usable."""
    machine = Machine(tmp_path_factory.mktemp("held"))
    held = machine.hold("dist.ddp", "-j", "2x2")
    yield held
    done = machine.call("muster", "release")
    assert done.returncode == 0, done
    pids = [pid for pid in (held.read(0)["pid"], held.read(1)["pid"]) if not is_gone(pid)]
    assert pids == []


def test_a_run_on_two_nodes_starts_warm(shared: Held) -> None:
    shared.wait_ready()
    done = shared.machine.run(REDUCE, j="2x2")
    assert done.returncode == 0, done
    assert len(re.findall(r"sum 4\.0", done.stderr)) == 4, done.stderr
    assert re.fullmatch(r"held://torchx/main-\w+\n", done.stdout)
    assert not re.search("cold|template", done.stderr), done.stderr
    (run,) = re.findall(r"main-\w+", done.stdout)
    status = shared.machine.call("muster", "status", run)
    assert "SUCCEEDED" in status.stdout, status
    log = shared.machine.call("muster", "log", f"held://{run}", "--rank", "3")
    assert log.stdout.count("sum 4.0") == 1, log


@pytest.mark.torchx
def test_torchx_runs_and_waits(shared: Held) -> None:
    (shared.machine.folder / "plain.py").write_text("raise SystemExit(3)\n")
    for scheduler in ("local_held", "held"):
        words = ["run", "-s", scheduler, "--wait", "dist.ddp", "-j", "1x1", "--script", "plain.py"]
        done = shared.machine.call("torchx", *(word for word in words if scheduler == "held" or word != "--wait"))
        assert done.returncode == 1, done
        assert "exited with code 3" in done.stderr, done.stderr


def prepare() -> None:
    """What a shell may have set for its processes."""
    import resource

    os.umask(0o027)
    os.nice(3)
    resource.setrlimit(resource.RLIMIT_NOFILE, (700, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


@pytest.mark.parametrize("prepared", [False, True], ids=["as it is", "changed"])
def test_a_worker_sees_what_it_would_in_a_cold_job(shared: Held, tmp_path: Path, prepared: bool) -> None:
    (tmp_path / "facts.py").write_text(FACTS.replace("VARYING", repr(VARYING)))
    machine = Machine(tmp_path)
    machine.env["A_WORD"] = "one two"
    found = {}
    for name in ("local_cwd", "held"):
        machine.env["XDG_STATE_HOME"] = str(shared.machine.folder / "state")
        words = [
            "muster",
            "run",
            "-s",
            name,
            "dist.ddp",
            "-j",
            "1x2",
            "--script",
            "facts.py",
            "--",
            str(tmp_path / "f"),
        ]
        done = machine.call(*words, preexec_fn=prepare if prepared else None)
        assert done.returncode == 0, done
        assert "template" not in done.stderr, done.stderr
        found[name] = [json.loads((tmp_path / f"f{rank}").read_text()) for rank in (0, 1)]
    assert found["held"] == found["local_cwd"]
    assert found["held"][0]["status"]["Umask"] == ("0027" if prepared else found["local_cwd"][0]["status"]["Umask"])
    assert found["held"][0]["environ"]["A_WORD"] == "one two"


def test_what_the_template_cannot_become_is_made_anew_in_one_line(shared: Held) -> None:
    folder = shared.machine.folder
    shared.wait_ready()
    done = shared.machine.run("import sys\nprint('torch' in sys.modules)\n")
    assert done.returncode == 0, done
    assert re.search(
        r"the hold's template is not used: the program does not import torch; another .* took", done.stderr
    )
    assert done.stderr.count("]:False") == 2, done.stderr
    shared.wait_ready()
    done = shared.machine.run("import os, torch\nprint(os.environ['MALLOC_ARENA_MAX'])\n", cfg="env=MALLOC_ARENA_MAX:2")
    assert re.search(r"not used: MALLOC_ARENA_MAX differs, and is read only at start; another .* took", done.stderr), (
        done
    )
    shared.wait_ready()
    (folder / "random.py").write_text(Path(random.__file__).read_text() + "\nMARK = 5\n")
    done = shared.machine.run("import torch, random\nprint('mark', random.MARK)\n")
    (folder / "random.py").unlink()
    assert (done.returncode, done.stderr.count("mark 5")) == (0, 2), done.stderr
    assert re.search("random.py hides a module that is loaded already(; another one took|\\))", done.stderr), (
        done.stderr
    )


def test_warnings_come_by_the_programs_own_filters(shared: Held) -> None:
    shared.wait_ready()
    script = "import warnings\nwarnings.simplefilter('ignore')\nimport torch\nprint('up')\n"
    done = shared.machine.run(script)
    assert done.returncode == 0, done
    assert "Warning" not in done.stderr, done.stderr


@pytest.mark.torchx
def test_what_does_not_fit_is_refused(shared: Held) -> None:
    done = shared.machine.run(REDUCE, j="3x1")
    assert done.returncode == 1, done
    assert done.stderr.strip() == f"muster: the run needs 3 nodes, and local_cwd://{shared.app_id} has 2 nodes"
    done = shared.machine.run(REDUCE, j="1x3")
    assert done.stderr.strip().endswith(f"runs 3 processes on each node, and local_cwd://{shared.app_id} holds 2")
    done = shared.machine.run(REDUCE, cfg="app=other")
    assert done.stderr.strip() == f"muster: 'other' is none of the held apps: local_cwd://{shared.app_id}"


def test_one_run_at_a_time(shared: Held) -> None:
    shared.wait_ready()
    with shared.machine.start(SLEEP, "first") as first:
        assert first.stdout is not None
        name = first.stdout.readline().strip().rpartition("/")[2]
        assert name.startswith("first-")
        wait_until(lambda: shared.read()["run"] == name, what="the run is on the node")
        done = shared.machine.run(REDUCE)
        assert (done.returncode, done.stderr.strip()) == (
            1,
            f"muster: local_cwd://{shared.app_id} runs {name} now; with -cfg wait=true this run waits for it",
        )
        release = shared.machine.call("muster", "release")
        assert release.returncode == 1, release
        assert f"runs {name}" in release.stderr
        listed = shared.machine.call("muster", "list", "-s", "local_cwd")
        assert f"held: it runs {name}" in listed.stdout, listed
        words = ["run", "-s", "held", "-cfg", "wait=true", "dist.ddp", "-j", "1x1", "--script", "main.py"]
        with subprocess.Popen(
            [str(BIN / "muster"), *words],
            cwd=shared.machine.folder,
            env=shared.machine.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as second:
            assert second.stderr is not None
            assert second.stderr.readline() == f"held: waiting for {name} on local_cwd://{shared.app_id}\n"
            first.send_signal(signal.SIGINT)
            assert first.wait(60) == 130
            assert second.wait(60) == 0, second.stderr.read()


def test_a_ctrl_c_reaches_the_workers(shared: Held) -> None:
    shared.wait_ready()
    script = (
        "import signal, sys, time\nimport torch\nsignal.signal(signal.SIGINT, lambda *_: sys.exit(print('saved')))\n"
    )
    with shared.machine.start(f"{script}print('up', flush=True)\ntime.sleep(600)\n", "slow") as program:
        assert program.stdout is not None
        lines = iter(program.stdout.readline, "")
        assert any("up" in line for line in lines)
        program.send_signal(signal.SIGINT)
        assert "saved" in "".join(lines)
        assert program.wait(60) == 130
    shared.wait_ready()


@pytest.mark.parametrize("victim", ["client", "agent", "supervisor", "command"])
def test_a_run_whose_process_is_killed_fails_and_the_hold_goes_on(shared: Held, victim: str) -> None:
    shared.wait_ready()
    with shared.machine.start(SLEEP, "main") as program:
        assert program.stdout is not None
        name = program.stdout.readline().strip().rpartition("/")[2]
        lines = iter(program.stdout.readline, "")
        assert any("up" in line for line in lines)
        (folder,) = shared.app_dir.parent.glob(name)
        state = json.loads((folder / ".muster/state.json").read_text())
        client = state["replicas"][0]["handle"]["pid"]
        run = [pid for pid, words in shared.list_tree().items() if "main.py" in words]
        assert run, "its workers are below the hold"
        guard = min(pid for pid in list_below(shared.read()["pid"]) if "--muster-waiting" in read_command(pid))
        agent = min(pid for pid in list_below(guard) if "--muster-waiting" in read_command(pid))
        pids = {"client": client, "agent": agent, "supervisor": state["supervisor"]["pid"], "command": program.pid}
        os.kill(pids[victim], signal.SIGKILL)
        wait_until(lambda: all(is_gone(pid) for pid in (*run, agent, guard, client)), what="the run is gone")
        text = "".join(lines)
        assert program.wait(60) == (-signal.SIGKILL if victim == "command" else 1), text
    shared.wait_ready()
    done = shared.machine.run(REDUCE)
    assert (done.returncode, done.stderr.count("sum 2.0")) == (0, 2), done


def test_a_template_or_an_agent_that_is_killed_while_it_waits_is_replaced(shared: Held) -> None:
    for word in ("muster-template", "--muster-waiting"):
        shared.wait_ready()
        holder = shared.read()["pid"]
        pid = max(pid for pid in list_below(holder) if word in read_command(pid))
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: shared.read()["state"] != "ready", what="the holder has seen it")
    shared.wait_ready()
    done = shared.machine.run(REDUCE)
    assert done.returncode == 0, done


def test_a_command_on_a_node_has_the_workers_variables(shared: Held) -> None:
    shared.wait_ready()
    with shared.machine.start(SLEEP, "main") as program:
        assert program.stdout is not None
        name = program.stdout.readline().strip()
        assert any("up" in line for line in iter(program.stdout.readline, ""))
        done = shared.machine.call("muster", "exec", name, "--", "sh", "-c", "echo $RANK of $WORLD_SIZE")
        assert (done.returncode, done.stdout) == (0, "0 of 2\n"), done
        program.send_signal(signal.SIGINT)
        assert program.wait(60) == 130


SOAK = pytest.mark.long


@pytest.mark.parametrize("count", [6, pytest.param(30, marks=SOAK)])
def test_nothing_of_many_runs_is_left(shared: Held, count: int) -> None:
    """A third of them fail, are killed or interrupted."""

    def look() -> dict[str, object]:
        pid = shared.read()["pid"]
        return {
            "processes": sorted(re.sub(r"\d+", "N", words.rstrip()) for words in shared.list_tree().values()),
            "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
            "files": sorted(str(each.relative_to(shared.app_dir)) for each in shared.app_dir.rglob("*")),
            "shm": sorted(os.listdir("/dev/shm")),
        }

    def look_when_both_wait() -> dict[str, object]:
        """On a busy machine the processes of a node that waits come one after another."""
        for index in (0, 1):
            wait_until(lambda index=index: shared.read(index)["state"] == "ready", timeout_s=60, what="both wait")
        looks = [look()]

        def is_settled() -> bool:
            time.sleep(0.5)
            looks.append(look())
            return looks[-3:] == [looks[-1]] * 3

        wait_until(is_settled, timeout_s=60, what="nothing changes any more")
        return looks[-1]

    kinds = [
        REDUCE,
        "import torch\nraise ValueError('boom')\n",
        REDUCE,
        "import os, signal\nimport torch\nos.kill(os.getpid(), 9)\n",
    ]
    before: dict[str, object] = {}
    for number in range(count):
        shared.wait_ready()
        if number % 6 == 5:
            with shared.machine.start(SLEEP, "slow") as program:
                assert program.stdout is not None
                assert any("up" in line for line in iter(program.stdout.readline, ""))
                program.send_signal(signal.SIGINT)
                assert program.wait(60) == 130
        else:
            script = kinds[number % 6 % 4]
            done = shared.machine.run(script)
            assert done.returncode == (0 if script is REDUCE else 1), done
            assert done.stderr.count("sum 2.0") == (2 if script is REDUCE else 0), done
            assert "cold" not in done.stderr, done
        if number == 1:
            before = look_when_both_wait()
    after = look_when_both_wait()
    for name, was in before.items():
        assert after[name] == was, name


def test_a_hold_whose_holder_is_killed_is_gone(machine: Machine) -> None:
    held = machine.hold("dist.ddp", "-j", "2x2")
    with machine.start(SLEEP, "main") as program:
        assert program.stdout is not None
        lines = iter(program.stdout.readline, "")
        assert any("up" in line for line in lines)
        tree = [*held.list_tree()]
        os.kill(held.read(0)["pid"], signal.SIGKILL)
        text = "".join(lines)
        assert program.wait(60) == 1
        assert "the hold has ended while this run was on it" in text, text
    wait_until(lambda: all(map(is_gone, tree)), what="nothing of it runs")
    assert held.find_state() == "FAILED"
    done = machine.run(REDUCE)
    assert done.stderr.strip() == "muster: nothing is held here; `muster hold` holds this machine", done


def test_a_hold_whose_supervisor_is_killed_is_gone(machine: Machine) -> None:
    held = machine.hold("dist.ddp", "-j", "1x1")
    tree = [*held.list_tree()]
    os.kill(held.find_supervisor(), signal.SIGKILL)
    wait_until(lambda: all(map(is_gone, tree)), what="nothing of it runs")
    done = machine.run(REDUCE)
    assert "nothing is held here" in done.stderr, done


def test_a_hold_that_is_idle_ends(machine: Machine) -> None:
    held = machine.hold("--idle-minutes", "0.1", "dist.ddp", "-j", "2x1")  # busy machines need longer until it is ready
    deadline_s = time.monotonic() + 60
    while held.find_state() == "RUNNING":
        refused = machine.run(REDUCE, j="5x1")
        assert refused.returncode == 1
        assert time.monotonic() < deadline_s, "refused runs do not count"
    assert held.find_state() == "SUCCEEDED"
    assert "was idle for 0.1 min and ends" in machine.call("muster", "log", held.app_id).stdout


def test_release_now_stops_the_run(machine: Machine) -> None:
    held = machine.hold("dist.ddp", "-j", "1x2")
    tree = [*held.list_tree()]
    with machine.start(SLEEP, "main") as program:
        assert program.stdout is not None
        assert any("up" in line for line in iter(program.stdout.readline, ""))
        done = machine.call("muster", "release", "--now", "--json")
        assert (done.returncode, json.loads(done.stdout)["outcome"]) == (0, "done"), done
        assert program.wait(60) == 1
    wait_until(lambda: all(map(is_gone, tree)), what="nothing of it runs")


@pytest.mark.torchx
@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("-s", "kubernetes"), "holds are on this machine for now: -s local_cwd, not kubernetes"),
        (("dist.ddp", "--script", "main.py"), "a hold has no program of its own: leave --script, -m and arguments out"),
        (("--idle-minutes", "0"), "'0' is not a number of minutes from 0.01 to 10080"),
        (("-cfg", "detach=false"), "a hold goes on when its command ends: detach=true"),
    ],
)
def test_wrong_holds_are_one_line(machine: Machine, words: tuple[str, ...], problem: str) -> None:
    done = machine.call("muster", "hold", *words)
    assert done.returncode == 2, done
    assert done.stderr.splitlines()[-1].endswith(problem), done


@needs_two_users
def test_another_user_gets_no_answer_from_a_holder(machine: Machine, shared_dir: Path) -> None:
    held = machine.hold("-cfg", f"log_dir={shared_dir}/logs", "dist.ddp", "-j", "1x1")
    (app_dir,) = shared_dir.rglob(held.app_id)
    (socket_path,) = app_dir.glob("*/hold-0/socket")
    assert socket_path.parent.stat().st_mode & 0o777 == 0o700

    def connect(*, is_open: bool) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as made:
            try:
                made.connect(str(socket_path))
                made.send(b'{"run": "theirs"}')
                assert made.recv(4096) == b""
            except PermissionError:
                assert not is_open
            except ConnectionError:  # closed before it was read
                assert is_open
            else:
                assert is_open

    call_as_other(lambda: connect(is_open=False))
    opened = [each for each in (socket_path, *socket_path.parents) if each.is_relative_to(shared_dir)]
    modes = {each: each.stat().st_mode & 0o777 for each in opened}
    for each in opened:
        each.chmod(0o777)  # whatever the folders say
    call_as_other(lambda: connect(is_open=True))
    for each, mode in modes.items():
        each.chmod(mode)
    done = machine.call("muster", "release")  # while its folder is there
    assert done.returncode == 0, done
