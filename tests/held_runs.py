"""Holds of any adapter, for their tests: commands, runs, what their processes are, and what all adapters must do.

A module's class derives from `HeldContract`, and has these fixtures:

    held      a `Held` of two nodes of one process, which the tests leave usable
    hold_one  called with options of `muster hold`, makes one of one node and three retries, for a test of its own
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from harness import LIMIT_S, read_command, wait_until
from subreaper import list_descendants

BIN = Path(sys.executable).parent
REDUCE = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
print("sum", value.item(), sorted(os.listdir()), os.environ.get("A_WORD"), flush=True)
dist.destroy_process_group()
"""
SLEEP = "import time\nimport torch\nprint('up', flush=True)\ntime.sleep(600)\n"

VARYING = ("TORCHELASTIC_", "MASTER_", "MUSTER_", "TORCHX_", "PYTEST_", "KUBEFLOW_")
"""Prefixes of variables that have a job's id, folder or port."""
FACTS = """
import json, os, resource, signal, sys, threading, time
import torch
def count_threads():
    value = torch.ones(400, 400)
    torch.mm(value, value)
    return [torch.get_num_threads(), *torch.__config__.parallel_info().splitlines()]
def count_in_another_thread():
    found = []
    thread = threading.Thread(target=lambda: found.extend(count_threads()))
    thread.start()
    thread.join()
    while os.path.exists(f"/proc/self/task/{thread.native_id}"):
        time.sleep(0.001)  # at its end, free() opens /proc/sys/vm/overcommit_memory
    return found
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
facts = {
    "environ": {k: v for k, v in os.environ.items() if not k.startswith(VARYING)},
    "cwd": os.getcwd(), "argv": sys.argv, "path": sys.path, "flags": str(sys.flags), "orig_argv": sys.orig_argv[1:],
    "limits": {n: resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith("RLIMIT_")},
    "signals": {int(s): str(signal.getsignal(s)) for s in signal.valid_signals()},
    "status": {k: status[k].strip() for k in ("Umask", "SigBlk", "SigIgn", "CapEff", "Groups", "NoNewPrivs")},
    "nice": os.nice(0), "cpus": sorted(os.sched_getaffinity(0)), "oom": open("/proc/self/oom_score_adj").read(),
    "threads": threading.active_count(), "torch_threads": count_threads(), "others": count_in_another_thread(),
    "zone": [time.tzname, time.timezone, time.localtime(0)[:5]], "cuda": torch.cuda._parse_visible_devices(),
    "fds": sorted(n for n in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd/" + n)),
    "stdin": os.readlink("/proc/self/fd/0"), "cgroup": open("/proc/self/cgroup").read(),
    "shm": sorted(n for n in os.listdir("/dev/shm") if "muster" in n and not n.startswith("muster-bench-")),
    "modules": sorted(n for n in sys.modules if n.partition(".")[0] == "muster"),
}
open(sys.argv[1] + os.environ["RANK"], "w").write(json.dumps(facts, sort_keys=True, indent=1))
""".replace("VARYING", repr(VARYING))


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    except OSError:
        return True


def hide_torch(folder: Path) -> dict[str, str]:
    """Variables with which no torch can be imported: holds and workers start in tenths of a second."""
    (folder / "without/torch").mkdir(parents=True)
    (folder / "without/torch/__init__.py").write_text("raise ModuleNotFoundError('hidden', name='torch')\n")
    return {"PYTHONPATH": str(folder / "without")}


class Commands:
    """A user's commands in a folder, with a state folder of their own."""

    def __init__(self, folder: Path, env: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.work = folder / "work"
        self.work.mkdir(exist_ok=True)
        own = {"XDG_STATE_HOME": str(folder / "state"), "TORCHX_CONFIG": "", "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"}
        self.env = {**os.environ, **own, **(env or {})}

    def call(self, *words: str, **more: Any) -> "subprocess.CompletedProcess[str]":
        command = [str(BIN / words[0]), *words[1:]]
        given = {"cwd": self.work, "env": self.env, **more}
        return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, **given)

    def hold(self, *words: str) -> "Held":
        done = self.call("muster", "hold", "--json", *words)
        assert done.returncode == 0, done
        return Held(self, json.loads(done.stdout.splitlines()[-1]))

    def run(
        self, script: str, *words: str, j: str = "2x1", cfg: str = "", on: str = "held", **more: Any
    ) -> "subprocess.CompletedProcess[str]":
        (self.work / "main.py").write_text(script)
        options = ["-cfg", cfg] if cfg else []
        command = ["muster", "run", "-s", on, *options, "dist.ddp", "-j", j, "--script", "main.py", *words]
        return self.call(*command, **more)

    @contextlib.contextmanager
    def started(self, script: str, name: str, j: str = "2x1", until: str | None = "up") -> "Iterator[Run]":
        """A run that has printed `until`, or that has just begun; it is killed at the end if it is left."""
        (self.work / f"{name}.py").write_text(script)
        command = [str(BIN / "muster"), "run", "-s", "held", "dist.ddp", "-j", j, "--script", f"{name}.py"]
        with subprocess.Popen(
            command, cwd=self.work, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            made = Run(self, process)
            try:
                if until is not None:
                    made.wait_line(until)
                yield made
            finally:
                process.send_signal(signal.SIGINT)
                try:
                    process.communicate(timeout=LIMIT_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    raise


class Run:
    """A run that goes on."""

    def __init__(self, commands: Commands, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.app_id = ""
        assert process.stdout is not None
        self._lines = iter(process.stdout.readline, "")
        self._commands = commands
        self.text = ""

    def wait_line(self, text: str) -> None:
        """Read its output until a line has this text."""
        for line in self._lines:
            self.text += line
            if line.startswith("held://"):
                self.app_id = line.strip().rpartition("/")[2]
                if text == "held://":
                    return
            elif text in line:
                return
        raise AssertionError(self.text)

    def wait_end(self) -> int:
        """Read the rest; the exit code of its command."""
        self.text += "".join(self._lines)
        return self.process.wait(LIMIT_S)

    def find_links(self) -> list[int]:
        """Processes of this machine that stand for its nodes, by node."""
        handles = self._read_state()["handles"]
        return [int(handles[each]["pid"]) for each in sorted(handles, key=lambda name: int(name.rpartition("/")[2]))]

    def find_supervisor(self) -> int:
        return int(self._read_state()["supervisor"]["pid"])

    def _read_state(self) -> Any:
        folder = next((self._commands.folder / "state").rglob(f"logs/*/{self.app_id}"))
        return json.loads((folder / ".muster/state.json").read_text())


class Held:
    """A hold."""

    def __init__(self, commands: Commands, facts: Mapping[str, Any]) -> None:
        self.commands = commands
        self.facts = facts
        self.handle = str(facts["handle"]).replace("torchx/", "")
        self.app_id = self.handle.rpartition("/")[2]

    @property
    def app_dir(self) -> Path:
        """Where a hold of this machine has its logs."""
        return next((self.commands.folder / "state").rglob(f"logs/*/{self.app_id}"))

    def read(self, index: int = 0) -> dict[str, Any]:
        """What a holder of this machine reports of itself."""
        (path,) = self.app_dir.glob(f"*/hold-{index}/hold.json")
        return dict(json.loads(path.read_text()))

    def wait_ready(self) -> None:
        """As `wait_idle`, of a hold of this machine."""
        wait_until(lambda: self.read()["state"] == "ready", what="an agent waits")

    def list_tree(self) -> dict[int, str]:
        """Processes below the supervisor of a hold of this machine, with their command lines."""
        return {pid: read_command(pid) for pid in list_descendants(self.find_supervisor())}

    def find_supervisor(self) -> int:
        return int(json.loads((self.app_dir / ".muster/state.json").read_text())["supervisor"]["pid"])

    def read_line(self) -> str:
        """What `muster status` says of it."""
        return self.commands.call("muster", "status", self.handle).stdout

    def find_state(self) -> str:
        done = self.commands.call("muster", "status", "--json", self.handle)
        return str(json.loads(done.stdout)["state"])

    def wait_idle(self) -> None:
        """Wait until an agent waits on node 0."""
        wait_until(lambda: "held: idle" in self.read_line(), what="the hold is idle")

    def wait_ended(self) -> str:
        """Wait for its end; its state."""
        wait_until(lambda: self.find_state() != "RUNNING", what="the hold has ended")
        return self.find_state()


class HeldContract:
    """What holds of every adapter do. A subclass sets a test to None whose sense its adapter has not."""

    @pytest.mark.long
    def test_two_runs_after_one_another(self, held: Held) -> None:
        check_two_runs(held)

    @pytest.mark.long
    def test_one_run_at_a_time(self, held: Held) -> None:
        """A second run is refused with the name of the first, `list` and `release` name it, and Ctrl-C ends it."""
        commands = held.commands
        with commands.started(SLEEP, "first") as first:
            done = commands.run(REDUCE)
            line = f"{held.handle} runs {first.app_id} now; with -cfg wait=true this run waits for it"
            assert (done.returncode, done.stderr.strip()) == (1, f"muster: {line}"), done
            assert f"held: it runs {first.app_id}" in held.read_line()
            release = commands.call("muster", "release")
            assert (release.returncode, f"runs {first.app_id}" in release.stderr) == (1, True), release
            words = ("--node", "1", "--", "sh", "-c", "echo $RANK")
            inside = commands.call("muster", "exec", f"held://{first.app_id}", *words)
            assert (inside.returncode, inside.stdout) == (0, "1\n"), inside
            first.process.send_signal(signal.SIGINT)
            assert first.wait_end() == 130, first.text

    @pytest.mark.long
    def test_a_run_that_fails_has_its_report_and_what_does_not_fit_is_refused(self, held: Held) -> None:
        done = held.commands.run("import torch\nraise ValueError('boom')\n")
        assert (done.returncode, "ValueError: boom" in done.stderr) == (1, True), done
        run = done.stdout.strip().rpartition("/")[2]
        assert "ValueError: boom" in held.commands.call("muster", "status", run).stdout
        done = held.commands.run(REDUCE, j="3x1")
        assert "needs 3 nodes" in done.stderr, done
        done = held.commands.run(REDUCE, j="1x2")
        assert f"{held.handle} holds 1" in done.stderr, done
        done = held.commands.run(REDUCE, cfg="prepend_cwd=true")
        assert "prepend_cwd is for" in done.stderr, done

    @pytest.mark.long
    @pytest.mark.parametrize("victim", ["link", "supervisor"])
    def test_a_run_whose_process_is_killed_ends_and_the_hold_goes_on(self, held: Held, victim: str) -> None:
        with held.commands.started(SLEEP, "main") as run:
            os.kill(run.find_links()[1] if victim == "link" else run.find_supervisor(), signal.SIGKILL)
            assert run.wait_end() == 1, run.text
        held.wait_idle()
        check_two_runs(held)

    @pytest.mark.long
    def test_release_during_a_run(self, hold_one: "Callable[..., Held]") -> None:
        """`release --now` stops the run, and ends the hold."""
        held = hold_one()
        with held.commands.started(SLEEP, "main", j="1x1") as run:
            done = held.commands.call("muster", "release", "--now", "--json")
            assert (done.returncode, json.loads(done.stdout)["outcome"]) == (0, "done"), done
            assert run.wait_end() == 1, run.text
        assert held.wait_ended() == "CANCELLED"
        done = held.commands.run(REDUCE, j="1x1")
        assert "nothing is held" in done.stderr, done

    @pytest.mark.long
    def test_a_hold_that_is_idle_ends_with_success(self, hold_one: "Callable[..., Held]") -> None:
        """Whatever retries it has."""
        held = hold_one("--idle-minutes", "0.2")
        assert held.wait_ended() == "SUCCEEDED", held.read_line()


def check_two_runs(held: Held, nodes: int = 2) -> None:
    """Two runs after one another: each has its own script, folder and variables, and nothing of the other."""
    commands = held.commands
    for each in commands.work.iterdir():
        each.unlink()
    (commands.work / "first.txt").write_text("first")
    done = commands.run(REDUCE, j=f"{nodes}x1", cfg="env=A_WORD:one")
    assert done.returncode == 0, done
    assert done.stderr.count(f"sum {nodes}.0 ['first.txt', 'main.py'] one") == nodes, done.stderr
    assert "cold" not in done.stderr, done.stderr
    assert "hold's template" not in done.stderr, done.stderr
    (commands.work / "first.txt").unlink()
    (commands.work / "second").mkdir()
    (commands.work / "second" / "a.py").write_text("")
    done = commands.run(REDUCE.replace('"sum"', '"total"'), j="1x1")
    assert done.returncode == 0, done
    assert "total 1.0 ['main.py', 'second'] None" in done.stderr, done.stderr
    run = done.stdout.strip().rpartition("/")[2]
    status = commands.call("muster", "status", run)
    assert "SUCCEEDED" in status.stdout, status
    (commands.work / "second" / "a.py").unlink()
    (commands.work / "second").rmdir()


def look_settled(look: Callable[[], object]) -> object:
    """Look until nothing changes: on a busy machine processes of nodes that wait come one after another."""
    looks: list[object] = []

    def is_settled() -> bool:
        time.sleep(0.5)
        looks.append(look())
        return looks[-3:] == [looks[-1]] * 3

    wait_until(is_settled, what="nothing changes any more")
    return looks[-1]
