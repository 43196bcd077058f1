"""Commands on a hold of any adapter, for its tests: holds, runs, and what their processes are."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from harness import wait_until

BIN = Path(sys.executable).parent
LIMIT_S = 180.0
REDUCE = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
print("sum", value.item(), sorted(os.listdir()), os.environ.get("A_WORD"), flush=True)
dist.destroy_process_group()
"""
SLEEP = "import time\nimport torch\nprint('up', flush=True)\ntime.sleep(600)\n"


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

    def run(self, script: str, *words: str, j: str = "2x1", cfg: str = "") -> "subprocess.CompletedProcess[str]":
        (self.work / "main.py").write_text(script)
        options = ["-cfg", cfg] if cfg else []
        return self.call("muster", "run", "-s", "held", *options, "dist.ddp", "-j", j, "--script", "main.py", *words)

    @contextlib.contextmanager
    def started(self, script: str, name: str, j: str = "2x1") -> "Iterator[Run]":
        """A run that has printed `up`; it is killed at the end if it is left."""
        (self.work / f"{name}.py").write_text(script)
        command = [str(BIN / "muster"), "run", "-s", "held", "dist.ddp", "-j", j, "--script", f"{name}.py"]
        with subprocess.Popen(
            command, cwd=self.work, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            made = Run(self, process)
            try:
                made.wait_line("up")
                yield made
            finally:
                process.send_signal(signal.SIGINT)
                try:
                    process.communicate(timeout=60)
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
            if text in line.removeprefix(f"held://torchx/{self.app_id}"):
                return
        raise AssertionError(self.text)

    def wait_end(self) -> int:
        """Read the rest; the exit code of its command."""
        self.text += "".join(self._lines)
        return self.process.wait(60)

    def find_links(self) -> list[int]:
        """Processes of this machine that stand for its nodes, by node."""
        folder = next((self._commands.folder / "state").rglob(f"logs/*/{self.app_id}"))
        state = json.loads((folder / ".muster/state.json").read_text())
        return [int(each["handle"]["pid"]) for each in state["replicas"]]


class Held:
    """A hold."""

    def __init__(self, commands: Commands, facts: Mapping[str, Any]) -> None:
        self.commands = commands
        self.facts = facts
        self.handle = str(facts["handle"]).replace("torchx/", "")
        self.app_id = self.handle.rpartition("/")[2]

    def read_line(self) -> str:
        """What `muster status` says of it."""
        return self.commands.call("muster", "status", self.handle).stdout

    def find_state(self) -> str:
        done = self.commands.call("muster", "status", "--json", self.handle)
        return str(json.loads(done.stdout)["state"])

    def wait_idle(self) -> None:
        """Wait until an agent waits on node 0."""
        wait_until(lambda: "held: idle" in self.read_line(), timeout_s=90, what="the hold is idle")

    def wait_ended(self) -> str:
        """Wait for its end; its state."""
        wait_until(lambda: self.find_state() != "RUNNING", timeout_s=90, what="the hold has ended")
        return self.find_state()


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


def check_failure(held: Held) -> None:
    """A run that fails has its report and its exit code, and the hold goes on."""
    done = held.commands.run("import torch\nraise ValueError('boom')\n")
    assert done.returncode == 1, done
    assert "ValueError: boom" in done.stderr, done.stderr
    run = done.stdout.strip().rpartition("/")[2]
    assert "ValueError: boom" in held.commands.call("muster", "status", run).stdout


def check_one_at_a_time(held: Held) -> None:
    """A second run is refused with the name of the first, `list` and `release` name it, and Ctrl-C ends it."""
    commands = held.commands
    with commands.started(SLEEP, "first") as first:
        done = commands.run(REDUCE)
        line = f"{held.handle} runs {first.app_id} now; with -cfg wait=true this run waits for it"
        assert (done.returncode, done.stderr.strip()) == (1, f"muster: {line}"), done
        assert f"held: it runs {first.app_id}" in held.read_line()
        release = commands.call("muster", "release")
        assert (release.returncode, f"runs {first.app_id}" in release.stderr) == (1, True), release
        inside = commands.call(
            "muster", "exec", f"held://{first.app_id}", "--node", "1", "--", "sh", "-c", "echo $RANK"
        )
        assert (inside.returncode, inside.stdout) == (0, "1\n"), inside
        first.process.send_signal(signal.SIGINT)
        assert first.wait_end() == 130, first.text


def check_no_fit(held: Held) -> None:
    """What does not fit is refused in one line."""
    done = held.commands.run(REDUCE, j="3x1")
    assert done.stderr.strip() == f"muster: the run needs 3 nodes, and {held.handle} has 2 nodes", done
    done = held.commands.run(REDUCE, j="1x2")
    assert done.stderr.strip().endswith(f"runs 2 processes on each node, and {held.handle} holds 1"), done
    done = held.commands.run(REDUCE, cfg="prepend_cwd=true")
    assert "prepend_cwd is for holds on this machine" in done.stderr, done


def check_killed_link(held: Held) -> None:
    """A run whose link is killed fails, and the hold goes on."""
    with held.commands.started(SLEEP, "main") as run:
        os.kill(run.find_links()[1], signal.SIGKILL)
        assert run.wait_end() == 1, run.text
    held.wait_idle()
    check_two_runs(held)


def check_killed_supervisor(held: Held) -> None:
    """A run whose supervisor is killed ends, and the hold goes on."""
    with held.commands.started(SLEEP, "main") as run:
        folder = next((held.commands.folder / "state").rglob(f"logs/*/{run.app_id}"))
        os.kill(json.loads((folder / ".muster/state.json").read_text())["supervisor"]["pid"], signal.SIGKILL)
        run.wait_end()
    held.wait_idle()
    check_two_runs(held)


def check_many_runs(held: Held, look: Callable[[], object], count: int = 10) -> None:
    """Nothing of many runs is left, a third of which fail.

    Args:
        held: the hold.
        look: returns what must be alike.
        count: of runs.
    """
    before: object = None
    for number in range(count):
        held.wait_idle()
        if number % 3 == 2:
            check_failure(held)
        else:
            done = held.commands.run(REDUCE)
            assert (done.returncode, done.stderr.count("sum 2.0")) == (0, 2), done
        if number == 2:
            held.wait_idle()
            before = look()
    held.wait_idle()
    wait_until(lambda: look() == before, timeout_s=30, what=f"as before: {before} {look()}")


def check_release_during_a_run(held: Held) -> None:
    """`release --now` stops the run, and ends the hold, which has one node."""
    with held.commands.started(SLEEP, "main", j="1x1") as run:
        done = held.commands.call("muster", "release", "--now", "--json")
        assert (done.returncode, json.loads(done.stdout)["outcome"]) == (0, "done"), done
        assert run.wait_end() == 1, run.text
    assert held.wait_ended() == "CANCELLED"
    done = held.commands.run(REDUCE, j="1x1")
    assert done.stderr.strip() == "muster: nothing is held here; `muster hold` holds this machine", done


def check_idle_end(held: Held) -> None:
    """A hold that is idle ends with success, whatever retries it has."""
    assert held.wait_ended() == "SUCCEEDED", held.read_line()
