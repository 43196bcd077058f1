"""`muster hold` on this machine, with real processes: runs on it are jobs of their own, and nothing of them stays.

What a holder decides is in `tests/unit/held`. Where torch is not the subject, no torch can be imported.
"""

import json
import os
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
from harness import LIMIT_S, read_command, wait_until
from held_runs import (
    BIN,
    FACTS,
    REDUCE,
    Commands,
    Held,
    Run,
    hide_torch,
    is_gone,
    look_settled,
)
from other_user import call_as_other, needs_two_users, shared_dir
from subreaper import list_descendants

from muster._shared.contract import WAITING_FLAG

__all__ = ["shared_dir"]

LONG = pytest.mark.long
SUM = "import os\nprint('sum', os.environ['WORLD_SIZE'], flush=True)\n"
SLEEP = "import time\nprint('up', flush=True)\ntime.sleep(600)\n"
SAVE = f"import signal, sys\nsignal.signal(signal.SIGINT, lambda *_: sys.exit(print('saved')))\n{SLEEP}"


@pytest.fixture
def light(tmp_path: Path) -> Iterator[Commands]:
    """For holds of a test's own, without torch."""
    made = Commands(tmp_path, hide_torch(tmp_path))
    yield made
    made.call("muster", "release", "--now")


def hold_two_nodes(folder: Path, env: Mapping[str, str]) -> Iterator[Held]:
    """A hold that the tests leave usable."""
    held = Commands(folder, env).hold("dist.ddp", "-j", "2x2")
    yield held
    done = held.commands.call("muster", "release")
    assert done.returncode == 0, done
    assert [pid for pid in (held.read(0)["pid"], held.read(1)["pid"]) if not is_gone(pid)] == []


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    """Without torch."""
    folder = tmp_path_factory.mktemp("held")
    yield from hold_two_nodes(folder, hide_torch(folder))


@pytest.fixture(scope="module")
def with_torch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    yield from hold_two_nodes(tmp_path_factory.mktemp("torch"), {})


def check_a_run(held: Held) -> None:
    """It can run on both nodes."""
    held.wait_ready()
    done = held.commands.run(SUM)
    assert (done.returncode, done.stderr.count("sum 2")) == (0, 2), done
    assert not re.search("cold|template", done.stderr), done


# -- what a run is ----------------------------------------------------------------------------------------------------

MARK = """
import os, warnings
warnings.simplefilter("ignore")
import torch
print("marked", hasattr(torch, "mark"), "MARK" in os.environ, os.getcwd(), flush=True)
torch.mark = os.environ["MARK"] = "1"
os.chdir("/")
"""


def list_with(held: Held, word: str) -> set[int]:
    """Processes of node 0 with a word in their command lines."""
    return {pid for pid in list_descendants(held.read()["pid"]) if word in read_command(pid)}


def find_original(held: Held) -> int:
    (pid,) = list_with(held, "muster-original")
    return pid


@pytest.mark.torch
def test_runs_start_warm_and_get_nothing_of_each_other(with_torch: Held) -> None:
    held, commands = with_torch, with_torch.commands
    held.wait_ready()
    original = find_original(held)
    done = commands.run(REDUCE)
    assert (done.returncode, done.stderr.count("sum 2.0")) == (0, 2), done
    assert re.fullmatch(r"held://torchx/main-\w+\n", done.stdout)
    assert not re.search("cold|template", done.stderr), done
    (run,) = re.findall(r"main-\w+", done.stdout)
    assert "SUCCEEDED" in commands.call("muster", "status", run).stdout
    assert commands.call("muster", "log", f"held://{run}", "--rank", "1").stdout.count("sum 2.0") == 1
    for _ in range(2):
        held.wait_ready()
        done = commands.run(MARK, j="1x2")
        assert done.stderr.count(f"marked False False {commands.work}") == 2, done
        assert "Warning" not in done.stderr, "warnings come by the program's own filters"
    held.wait_ready()
    assert find_original(held) == original
    done = commands.run("import sys\nprint('torch' in sys.modules)\n", j="1x2")
    assert (done.returncode, done.stderr.count("]:False")) == (0, 2), done
    assert re.search("template .* import torch; ", done.stderr), done


def prepare() -> None:
    """What a shell may have set for its processes."""
    import resource

    os.umask(0o027)
    os.nice(3)
    resource.setrlimit(resource.RLIMIT_NOFILE, (700, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


THREADS = {"MKL_NUM_THREADS": "1", "OMP_NUM_THREADS": "2", "TZ": "EST5EDT"}
LISTED = {"OMP_NUM_THREADS": "4", "TZ": "Asia/Kolkata", "CUDA_VISIBLE_DEVICES": "5,3"}
NETWORK = {"MKL_NUM_THREADS": "2", "NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "nowhere"}


@pytest.mark.torch
@pytest.mark.parametrize(
    ("j", "env", "prepared"),
    [
        pytest.param("1x2", {"A_WORD": "one two"}, True, id="changed"),
        pytest.param("1x2", THREADS, False, id="threads"),
        pytest.param("1x1", {}, False, id="one", marks=LONG),
        pytest.param("1x1", LISTED, False, id="listed", marks=LONG),
        pytest.param("1x2", NETWORK, False, id="network", marks=LONG),
    ],
)
def test_a_worker_sees_what_it_would_in_a_cold_job(
    with_torch: Held, tmp_path: Path, j: str, env: dict[str, str], prepared: bool
) -> None:
    """Thread counts and time zone are set after the fork."""
    found = compare_with_a_cold_job(
        with_torch, tmp_path, j, env={**with_torch.commands.env, **env}, preexec_fn=prepare if prepared else None
    )
    assert found["environ"].items() >= {k: v for k, v in env.items() if k != "MASTER_ADDR"}.items()
    assert (found["status"]["Umask"] == "0027") is prepared
    assert found["zone"][1] == {"Asia/Kolkata": -19800, "EST5EDT": 18000, None: time.timezone}[env.get("TZ")]


def compare_with_a_cold_job(held: Held, folder: Path, j: str, **more: Any) -> Any:
    """The facts of rank 0 of both."""
    found: dict[str, list[dict[str, Any]]] = {}
    held.wait_ready()
    for name in ("local_cwd", "held"):
        done = held.commands.run(FACTS, "--", str(folder / "f"), j=j, on=name, **more)
        assert done.returncode == 0, done
        assert "template" not in done.stderr, done.stderr
        found[name] = [json.loads((folder / f"f{rank}").read_text()) for rank in range(int(j[-1]))]
    for warm, cold in zip(found["held"], found["local_cwd"], strict=True):
        assert {
            name: (warm.get(name), cold.get(name)) for name in warm.keys() | cold.keys() if warm[name] != cold[name]
        } == {}
    return found["held"][0]


@pytest.mark.torchx
def test_torchx_runs(held: Held) -> None:
    (held.commands.work / "plain.py").write_text("raise SystemExit(3)\n")
    done = held.commands.call("torchx", "run", "-s", "local_held", "dist.ddp", "-j", "1x1", "--script", "plain.py")
    assert (done.returncode, "exited with code 3" in done.stderr) == (1, True), done


def test_one_run_at_a_time_and_a_ctrl_c_reaches_its_workers(held: Held) -> None:
    commands = held.commands
    held.wait_ready()
    with commands.started(SAVE, "first", j="1x2") as first:
        assert held.read()["run"] == first.app_id
        done = commands.run(SUM)
        assert (done.returncode, f"runs {first.app_id} now" in done.stderr) == (1, True), done
        release = commands.call("muster", "release")
        assert (release.returncode, f"runs {first.app_id}" in release.stderr) == (1, True), release
        assert f"runs {first.app_id}" in held.read_line()
        inside = commands.call("muster", "exec", first.app_id, "--", "sh", "-c", "echo $RANK of $WORLD_SIZE")
        assert (inside.returncode, inside.stdout) == (0, "0 of 2\n"), inside
        words = ["run", "-s", "held", "-cfg", "wait=true", "dist.ddp", "-j", "1x1", "--script", "main.py"]
        with subprocess.Popen(
            [str(BIN / "muster"), *words], cwd=commands.work, env=commands.env, stderr=subprocess.PIPE, text=True
        ) as second:
            assert second.stderr is not None
            assert f"waiting for {first.app_id}" in second.stderr.readline()
            first.process.send_signal(signal.SIGINT)
            assert (first.wait_end(), "saved" in first.text) == (130, True), first.text
            assert second.wait(LIMIT_S) == 0, second.stderr.read()


# -- what is left when a process is killed ----------------------------------------------------------------------------


def find_process(held: Held, run: Run, which: str) -> int:
    """A process of a run that is on the hold's first node."""
    if which == "command":
        return run.process.pid
    if which in ("client", "supervisor"):
        return run.find_links()[0] if which == "client" else run.find_supervisor()
    if which == "worker":
        return min(pid for pid, words in held.list_tree().items() if "slow.py" in words and "template" not in words)
    return find_waiting(held.read()["pid"])[1]


def find_waiting(holder: int) -> tuple[int, int]:
    """The guard and the agent that wait below a holder, or have its run."""
    guard = min(pid for pid in list_descendants(holder) if WAITING_FLAG in read_command(pid))
    return guard, min(pid for pid in list_descendants(guard) if WAITING_FLAG in read_command(pid))


@pytest.mark.parametrize(
    "victim", ["agent", *(pytest.param(each, marks=LONG) for each in ("client", "supervisor", "command"))]
)
def test_a_run_whose_process_is_killed_fails_and_the_hold_goes_on(held: Held, victim: str) -> None:
    held.wait_ready()
    with held.commands.started(SLEEP, "main", j="1x2") as run:
        workers = [pid for pid, words in held.list_tree().items() if "main.py" in words]
        assert workers, "they are below the hold"
        left = [*workers, *find_waiting(held.read()["pid"]), run.find_links()[0], run.find_supervisor()]
        os.kill(find_process(held, run, victim), signal.SIGKILL)
        wait_until(lambda: all(map(is_gone, left)), what="the run is gone")
        assert run.wait_end() == (-signal.SIGKILL if victim == "command" else 1), run.text
    check_a_run(held)


@LONG
def test_an_agent_that_is_killed_as_its_run_comes_is_the_runs_reason(held: Held) -> None:
    """Its guard stands still meanwhile, so that it finds both."""
    held.wait_ready()
    guard, agent = find_waiting(held.read()["pid"])
    os.kill(guard, signal.SIGSTOP)
    os.kill(agent, signal.SIGKILL)
    with held.commands.started(SUM, "main", j="1x2", until="held://") as run:
        wait_until(lambda: held.read()["run"] == run.app_id, what="the guard has the run")
        os.kill(guard, signal.SIGCONT)
        assert (run.wait_end(), "ended by SIGKILL" in run.text) == (1, True), run.text
    check_a_run(held)


@LONG
def test_an_original_that_is_killed_is_replaced_and_changed_packages_are_seen(light: Commands) -> None:
    packages = light.folder / "site-packages"
    packages.mkdir()
    light.env["PYTHONPATH"] += f":{packages}"
    held = light.hold("dist.ddp", "-j", "1x2")
    held.wait_ready()
    first = find_original(held)
    (packages / "new.py").touch()
    done = light.run(SUM, j="1x2")
    assert f"in {packages} have changed" in done.stderr, done
    held.wait_ready()
    assert find_original(held) == first
    for kill in (bool, lambda: os.kill(first, signal.SIGKILL)):  # after it the run is on the agent that waits
        kill()
        done = light.run(SUM, j="1x2")
        assert (done.returncode, done.stderr.count("sum 2"), "template" in done.stderr) == (0, 2, False), done
        held.wait_ready()
    assert find_original(held) != first


def test_the_program_on_the_node_ends_with_its_connection(held: Held) -> None:
    """That of a run from another machine, whose files have not come yet."""
    from muster.schedulers.node_program.frames import Kind, pack
    from muster.schedulers.node_program.session import build_program

    held.wait_ready()
    place = next(held.app_dir.glob("*/hold-0"))
    order = {"run": "x", "args": None, "env": {}, "cwd": None, "waits": False, "workspace": None}
    source = build_program("held_run", "main(sys.argv[2])")
    command = [sys.executable, "-I", "-S", "-c", source, "client", str(place)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(pack(Kind.ORDER, json.dumps(order).encode()))
        process.stdin.flush()
        expected = pack(Kind.READY) + pack(Kind.CLAIMED)
        assert process.stdout.read(len(expected)) == expected
        assert held.read()["run"] == "x"
        process.stdin.close()
        assert process.wait(LIMIT_S) == 0
    held.wait_ready()


# -- the hold's end ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", ["holder", pytest.param("supervisor", marks=LONG)])
def test_a_hold_whose_process_is_killed_is_gone(light: Commands, victim: str) -> None:
    held = light.hold("dist.ddp", "-j", "2x1")
    with light.started(SLEEP, "main") as run:
        tree = [*held.list_tree()]
        os.kill(held.read(0)["pid"] if victim == "holder" else held.find_supervisor(), signal.SIGKILL)
        assert (run.wait_end(), "the hold ended" in run.text) == (1, True), run.text
    wait_until(lambda: all(map(is_gone, tree)), what="nothing of it runs")
    if victim == "holder":
        wait_until(lambda: held.find_state() == "FAILED", what="its supervisor says so")
    assert "nothing is held" in light.run(SUM).stderr


@needs_two_users
def test_another_user_gets_no_answer_from_a_holder(light: Commands, shared_dir: Path) -> None:
    held = light.hold("-cfg", f"log_dir={shared_dir}/logs", "dist.ddp", "-j", "1x1")
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
    assert light.call("muster", "release").returncode == 0  # while its folder is there


# -- many runs --------------------------------------------------------------------------------------------------------

RUNS = int(os.environ.get("MUSTER_HOLD_RUNS", "20"))
FAILURES = {
    1: ("import torch\nraise ValueError('boom')\n", "boom"),
    10: ("import os, torch\nos.kill(os.getpid(), 9)\n", "SIGKILL"),
}
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
            wait_until(lambda index=index: held.read(index)["state"] == "ready", what="both wait")
        self.things = look_settled(self._look)
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
        assert self.things == before.things
        grown = {pid: size - before.memory[pid] for pid, size in self.memory.items()}
        assert max(grown.values()) < KEPT_BYTES, grown
        # Other tests on this machine have such objects, too, for a while.
        left = self.shm - before.shm
        wait_until(lambda: not left & set(os.listdir("/dev/shm")), what=f"{left} are gone")


def read_own_bytes(pid: int) -> int:
    """The memory that a process shares with no file."""
    (row,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(row.split()[1]) * 1024


def end_a_run(held: Held, number: int) -> None:
    """One run that does not end well: it fails, hangs and is stopped, or loses a process."""
    turn, kind = divmod(number, 12)
    if kind in FAILURES:
        script, text = FAILURES[kind]
        done = held.commands.run(script, j="1x2")
        assert (done.returncode, text in done.stderr) == (1, True), done
        return
    is_early = kind == 4 and turn % 2 == 1  # before it has begun
    script = f"import torch\n{SLEEP}"
    with held.commands.started(script, "slow", j="1x2", until="held://" if is_early else "up") as run:
        expected = 1
        if kind == 7:
            os.kill(find_process(held, run, VICTIMS[turn % len(VICTIMS)]), signal.SIGKILL)
        elif (signum := signal.SIGINT if is_early else INTERRUPTS[turn // 2 % len(INTERRUPTS)]) is None:
            done = held.commands.call("muster", "stop", run.app_id)
            assert done.returncode == 0, done
        else:
            run.process.send_signal(signum)
            expected = 128 + signum
        code = run.wait_end()
        assert (code if code >= 0 else 128 - code) == expected, run.text  # as a shell sees it


@LONG
@pytest.mark.torch
@pytest.mark.parametrize("count", [RUNS])
def test_nothing_of_many_runs_is_left(with_torch: Held, tmp_path: Path, count: int) -> None:
    """A third of them fail, hang, are killed or interrupted; of every tenth the environment is a cold job's."""
    held, before = with_torch, None
    for number in range(count):
        held.wait_ready()
        if number % 10 == 9:
            compare_with_a_cold_job(held, tmp_path, "1x2")
        elif number % 3 == 1:
            end_a_run(held, number)
        else:
            done = held.commands.run(REDUCE, j="1x2")
            assert (done.returncode, done.stderr.count("sum 2.0")) == (0, 2), done
            assert not re.search("cold|template", done.stderr), done
        if number == min(9, count // 3):
            before = Left(held)
    assert before is not None
    Left(held).check(before)
