"""`muster hold` on this machine: runs on it are jobs of their own, one at a time, and nothing of them stays."""

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
from held_jobs import FACTS, VARYING, is_gone, list_below, read_command
from held_runs import find_waiting
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


def find_differences(held: Mapping[str, Any], cold: Mapping[str, Any]) -> dict[str, Any]:
    """The facts that differ, in both forms."""
    return {name: (held.get(name), cold.get(name)) for name in held.keys() | cold.keys() if held[name] != cold[name]}


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
    for held, cold in zip(found["held"], found["local_cwd"], strict=True):
        assert find_differences(held, cold) == {}
    assert found["held"][0]["status"]["Umask"] == ("0027" if prepared else found["local_cwd"][0]["status"]["Umask"])
    assert found["held"][0]["environ"]["A_WORD"] == "one two"


@pytest.mark.parametrize(
    ("j", "env"),
    [
        pytest.param("1x1", {}, marks=pytest.mark.long),
        ("1x1", {"OMP_NUM_THREADS": "4", "TZ": "Asia/Kolkata", "CUDA_VISIBLE_DEVICES": "5,3"}),
        pytest.param(
            "1x2",
            {"MKL_NUM_THREADS": "2", "NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "nowhere"},
            marks=pytest.mark.long,
        ),
        ("1x2", {"MKL_NUM_THREADS": "1", "OMP_NUM_THREADS": "2", "TZ": "EST5EDT"}),
    ],
    ids=str,
)
def test_thread_counts_and_time_zone_are_set_after_the_fork(
    shared: Held, tmp_path: Path, j: str, env: dict[str, str]
) -> None:
    (tmp_path / "facts.py").write_text(FACTS.replace("VARYING", repr(VARYING)))
    found = {}
    shared.wait_ready()
    for name in ("local_cwd", "held"):
        words = ["muster", "run", "-s", name, "dist.ddp", "-j", j, "--script", "facts.py", "--", str(tmp_path / "f")]
        done = shared.machine.call(*words, cwd=tmp_path, env={**shared.machine.env, **env})
        assert done.returncode == 0, done
        assert "template" not in done.stderr, done.stderr
        found[name] = json.loads((tmp_path / "f0").read_text())
    assert find_differences(found["held"], found["local_cwd"]) == {}
    assert found["held"]["environ"].items() >= {k: v for k, v in env.items() if k != "MASTER_ADDR"}.items()
    if "TZ" in env:
        assert found["held"]["zone"][1] == {"Asia/Kolkata": -19800, "EST5EDT": 18000}[env["TZ"]]


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ({"OMP_NUM_THREADS": "2,1"}, "OMP_NUM_THREADS differs: '2,1' is no count, and is read only at start"),
        ({"OMP_PROC_BIND": "true"}, "OMP_PROC_BIND differs, and is read only at start"),
    ],
    ids=str,
)
def test_a_thread_setting_that_cannot_be_adopted_makes_a_template(
    shared: Held, env: dict[str, str], reason: str
) -> None:
    shared.wait_ready()
    done = shared.machine.run(REDUCE, env={**shared.machine.env, **env})
    assert done.returncode == 0, done
    assert f"the hold's template is not used: {reason}; another one took" in done.stderr, done


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
    assert done.stderr.strip() == f"muster: 'other' is none of the holds here: local_cwd://{shared.app_id}"


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


@pytest.mark.parametrize(
    "victim", ["agent", *(pytest.param(each, marks=pytest.mark.long) for each in ("client", "supervisor", "command"))]
)
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
        guard, agent = find_waiting(shared.read()["pid"])
        supervisor = state["supervisor"]["pid"]
        pids = {"client": client, "agent": agent, "supervisor": supervisor, "command": program.pid}
        os.kill(pids[victim], signal.SIGKILL)
        left = (*run, agent, guard, client, supervisor)
        wait_until(lambda: all(map(is_gone, left)), what="the run is gone")
        text = "".join(lines)
        assert program.wait(60) == (-signal.SIGKILL if victim == "command" else 1), text
    shared.wait_ready()
    done = shared.machine.run(REDUCE)
    assert (done.returncode, done.stderr.count("sum 2.0")) == (0, 2), done


def is_polling(pid: int) -> bool:
    """Whether it waits for a message, as a client does for its holder's answer."""
    return "poll" in Path(f"/proc/{pid}/wchan").read_text()


@pytest.mark.long
@pytest.mark.parametrize("victim", ["command", "supervisor", "client", "agent"])
def test_a_process_is_killed_before_the_holder_looks_at_the_run(shared: Held, victim: str) -> None:
    shared.wait_ready()
    holder = int(shared.read()["pid"])
    guard, agent = find_waiting(holder)
    os.kill(holder, signal.SIGSTOP)
    try:
        with shared.machine.start(REDUCE, "main") as program:
            assert program.stdout is not None
            name = program.stdout.readline().strip()
            client = find_process(shared, name, "client")
            wait_until(lambda: is_polling(client), what="the holder has the run's order")
            pids = {"command": program.pid, "client": client, "agent": agent}
            found = pids.get(victim) or find_process(shared, name, victim)
            os.kill(found, signal.SIGKILL)
            wait_until(lambda: is_gone(guard if victim == "agent" else found), what="it is gone")
            os.kill(holder, signal.SIGCONT)
            text, code = program.stdout.read(), program.wait(60)
    finally:
        os.kill(holder, signal.SIGCONT)
    # An agent that has not begun is replaced.
    ends = {"command": (-signal.SIGKILL, 0), "agent": (0, 2)}
    assert (code, text.count("sum 2.0")) == ends.get(victim, (1, 0)), text
    shared.wait_ready()
    assert shared.read()["pid"] == holder
    done = shared.machine.run(REDUCE, j="2x2")
    assert (done.returncode, done.stderr.count("sum 4.0")) == (0, 4), done


@pytest.mark.long
def test_an_agent_that_is_killed_as_its_run_comes_is_the_runs_reason(shared: Held) -> None:
    """Its guard stands still meanwhile, so that it finds both."""
    shared.wait_ready()
    guard, agent = find_waiting(shared.read()["pid"])
    os.kill(guard, signal.SIGSTOP)
    os.kill(agent, signal.SIGKILL)
    with shared.machine.start(REDUCE, "main") as program:
        assert program.stdout is not None
        name = program.stdout.readline().strip().rpartition("/")[2]
        wait_until(lambda: shared.read()["run"] == name, what="the guard has the run")
        os.kill(guard, signal.SIGCONT)
        text, code = program.stdout.read(), program.wait(60)
    assert (code, "the agent of this node was ended by SIGKILL" in text) == (1, True), text
    shared.wait_ready()
    done = shared.machine.run(REDUCE)
    assert (done.returncode, done.stderr.count("sum 2.0")) == (0, 2), done


MARK = """
import os, torch
print("marked", hasattr(torch, "mark"), "MARK" in os.environ, os.getcwd(), flush=True)
torch.mark = os.environ["MARK"] = "1"
os.chdir("/")
"""


def list_with(held: Held, word: str) -> set[int]:
    """Processes of node 0 with a word in their command lines."""
    return {pid for pid in list_below(held.read()["pid"]) if word in read_command(pid)}


def find_original(held: Held) -> int:
    (pid,) = list_with(held, "muster-original")
    return pid


def test_the_original_outlives_runs_and_gets_nothing_of_them(shared: Held) -> None:
    shared.wait_ready()
    before = find_original(shared)
    for _ in range(2):
        shared.wait_ready()
        done = shared.machine.run(MARK)
        assert done.stderr.count(f"marked False False {shared.machine.folder}") == 2, done
    shared.wait_ready()
    assert find_original(shared) == before


@pytest.mark.long
def test_an_original_that_is_killed_is_replaced_and_changed_packages_are_seen(machine: Machine) -> None:
    packages = machine.folder / "site-packages"
    packages.mkdir()
    machine.env["PYTHONPATH"] = str(packages)
    held = machine.hold("dist.ddp", "-j", "1x2")
    held.wait_ready()
    first = find_original(held)
    (packages / "new.py").touch()
    done = machine.run(REDUCE)
    assert f"the hold's template is not used: packages in {packages} have changed; another" in done.stderr, done
    held.wait_ready()
    assert find_original(held) == first
    done = machine.run(REDUCE)
    assert (done.returncode, done.stderr.count("sum 2.0"), "template" in done.stderr) == (0, 2, False), done
    held.wait_ready()
    os.kill(first, signal.SIGKILL)
    done = machine.run(REDUCE)  # on the agent that waits
    assert (done.returncode, "template" in done.stderr) == (0, False), done
    held.wait_ready()
    assert find_original(held) != first


@pytest.mark.long
def test_a_template_or_an_agent_that_is_killed_while_it_waits_is_replaced(shared: Held) -> None:
    for word in ("muster-template", "--muster-waiting"):
        shared.wait_ready()
        before = list_with(shared, word)
        os.kill(max(before), signal.SIGKILL)
        wait_until(
            lambda word=word, before=before: not (found := list_with(shared, word)) & before and found,
            timeout_s=60,
            what="others wait",
        )
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


RUNS = int(os.environ.get("MUSTER_HOLD_RUNS", "20"))
BOOM = "import torch\nraise ValueError('boom')\n"
SUICIDE = "import os\nimport torch\nos.kill(os.getpid(), 9)\n"
INTERRUPTS = (signal.SIGINT, None, signal.SIGTERM)
"""How a run that hangs is stopped; None: by `muster stop`."""
VICTIMS = ("worker", "agent", "client", "supervisor")
KEPT_BYTES = 2 << 20
"""An interpreter's memory varies by less."""


class Left:
    """What a hold of two nodes has while both wait."""

    def __init__(self, held: Held) -> None:
        self._held = held
        self.shm = set(os.listdir("/dev/shm"))
        for index in (0, 1):  # on a busy machine the processes of a node that waits come one after another
            wait_until(lambda index=index: held.read(index)["state"] == "ready", timeout_s=60, what="both wait")
        looks = [self._look()]

        def is_settled() -> bool:
            time.sleep(0.5)
            looks.append(self._look())
            return looks[-3:] == [looks[-1]] * 3

        wait_until(is_settled, timeout_s=60, what="nothing changes any more")
        self.things = looks[-1]
        self.memory = {pid: read_own_bytes(pid) for pid in self._list_lasting()}

    def _list_lasting(self) -> list[int]:
        return [self._held.find_supervisor(), self._held.read(0)["pid"], self._held.read(1)["pid"]]

    def _look(self) -> dict[str, object]:
        held = self._held
        return {
            "processes": sorted(re.sub(r"\d+", "N", words.rstrip()) for words in held.list_tree().values()),
            "descriptors": [len(os.listdir(f"/proc/{pid}/fd")) for pid in self._list_lasting()],
            "files": sorted(str(each.relative_to(held.app_dir)) for each in held.app_dir.rglob("*")),
        }

    def check(self, before: "Left") -> None:
        for name, was in before.things.items():
            assert self.things[name] == was, name
        grown = {pid: size - before.memory[pid] for pid, size in self.memory.items()}
        assert max(grown.values()) < KEPT_BYTES, grown
        # Other tests on this machine have such objects, too, for a while.
        left = self.shm - before.shm
        wait_until(lambda: not left & set(os.listdir("/dev/shm")), timeout_s=60, what=f"{left} are gone")


def read_own_bytes(pid: int) -> int:
    """The memory that a process shares with no file."""
    (row,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(row.split()[1]) * 1024


def end_a_run(held: Held, number: int) -> None:
    """One run that does not end well: it fails, hangs and is stopped, or loses a process."""
    turn = number // 12
    kind = number % 12
    if kind in (1, 10):
        script = BOOM if kind == 1 else SUICIDE
        done = held.machine.run(script)
        assert (done.returncode, "sum" in done.stderr) == (1, False), done
        assert ("boom" if kind == 1 else "SIGKILL") in done.stderr, done
        return
    with held.machine.start(SLEEP, "slow") as program:
        assert program.stdout is not None
        name = program.stdout.readline().strip()
        assert name.startswith("held://"), name
        if kind == 4 and turn % 2:  # before it has begun
            program.send_signal(signal.SIGINT)
            assert program.wait(60) == 130
            return
        assert any("up" in line for line in iter(program.stdout.readline, ""))
        if kind == 7:
            os.kill(find_process(held, name, VICTIMS[turn % len(VICTIMS)]), signal.SIGKILL)
            expected = 1
        else:
            signum = INTERRUPTS[turn // 2 % len(INTERRUPTS)]
            if signum is None:
                done = held.machine.call("muster", "stop", name)
                assert done.returncode == 0, done
            else:
                program.send_signal(signum)
            expected = 1 if signum is None else 128 + signum
        rest = program.stdout.read()
        code = program.wait(60)
        assert (code if code >= 0 else 128 - code) == expected, rest  # as a shell sees it


def find_process(held: Held, name: str, which: str) -> int:
    """A process of a run that is on the hold's first node."""
    (folder,) = held.app_dir.parent.glob(name.rpartition("/")[2])
    state = json.loads((folder / ".muster/state.json").read_text())
    if which == "supervisor":
        return int(state["supervisor"]["pid"])
    if which == "client":
        return int(state["replicas"][0]["handle"]["pid"])
    if which == "worker":
        workers = [pid for pid, words in held.list_tree().items() if "slow.py" in words and "template" not in words]
        return min(workers)
    return find_waiting(held.read()["pid"])[1]


def compare_with_a_cold_job(held: Held) -> None:
    machine = held.machine
    (machine.folder / "facts.py").write_text(FACTS.replace("VARYING", repr(VARYING)))
    found = {}
    for name in ("local_cwd", "held"):
        words = ["muster", "run", "-s", name, "dist.ddp", "-j", "1x2", "--script", "facts.py", "--", "facts"]
        done = machine.call(*words)
        assert done.returncode == 0, done
        assert "template" not in done.stderr, done.stderr
        found[name] = [json.loads((machine.folder / f"facts{rank}").read_text()) for rank in (0, 1)]
    for warm, cold in zip(found["held"], found["local_cwd"], strict=True):
        assert find_differences(warm, cold) == {}


@pytest.mark.long
@pytest.mark.parametrize("count", [RUNS])
def test_nothing_of_many_runs_is_left(shared: Held, count: int) -> None:
    """A third of them fail, hang, are killed or interrupted; of every tenth the environment is a cold job's."""
    first = min(9, count // 3)
    before = None
    for number in range(count):
        shared.wait_ready()
        if number % 10 == 9:
            compare_with_a_cold_job(shared)
        elif number % 3 == 1:
            end_a_run(shared, number)
        else:
            done = shared.machine.run(REDUCE)
            assert done.returncode == 0, done
            assert done.stderr.count("sum 2.0") == 2, done
            assert not re.search("cold|template", done.stderr), done
        if number == first:
            before = Left(shared)
    assert before is not None
    Left(shared).check(before)


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
        assert "the hold ended during this run" in text, text
    wait_until(lambda: all(map(is_gone, tree)), what="nothing of it runs")
    wait_until(lambda: held.find_state() == "FAILED", what="its supervisor says so")
    done = machine.run(REDUCE)
    assert done.stderr.strip() == "muster: nothing is held here; `muster hold` holds this machine", done


@pytest.mark.long
def test_a_hold_whose_supervisor_is_killed_is_gone(machine: Machine) -> None:
    held = machine.hold("dist.ddp", "-j", "1x1")
    tree = [*held.list_tree()]
    os.kill(held.find_supervisor(), signal.SIGKILL)
    wait_until(lambda: all(map(is_gone, tree)), what="nothing of it runs")
    done = machine.run(REDUCE)
    assert "nothing is held here" in done.stderr, done


def test_a_hold_that_is_idle_ends(machine: Machine) -> None:
    held = machine.hold("--idle-minutes", "0.3", "dist.ddp", "-j", "2x1")  # node 0 does not wait for node 1
    deadline_s = time.monotonic() + 75
    while held.find_state() == "RUNNING":
        refused = machine.run(REDUCE, j="5x1")
        assert refused.returncode == 1
        assert time.monotonic() < deadline_s, "refused runs do not count"
    assert held.find_state() == "SUCCEEDED"
    assert "was idle for 0.3 min and ends" in machine.call("muster", "log", held.app_id).stdout


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
        (("-s", "held"), "-s held runs jobs on a hold: name the scheduler whose nodes to hold, such as -s local_cwd"),
        (("dist.ddp", "--script", "main.py"), "a hold has no program of its own: leave --script, -m and arguments out"),
        (("--idle-minutes", "0"), "'0' is not a number of minutes from 0.01 to 10080"),
        (("-cfg", "detach=false"), "a hold always goes on when its command ends: leave detach=false out"),
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
