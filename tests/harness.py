"""Runs commands below a subreaper, so that a test can say what they leave behind.

    outcome = run_tree([*AGENT, "script.py"]).check()

    with Tree([...]) as tree:
        tree.wait_for_line("worker 1 runs")
        tree.send(signal.SIGTERM)
        tree.wait().check(143)

Whatever happens, nothing that the command started outlives the `with` block.
"""

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NoReturn, TypeVar

from subreaper import list_descendants, list_processes

SUBREAPER = Path(__file__).with_name("subreaper.py")
PROGRAMS = Path(__file__).with_name("programs")
ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
"""Where `torchx` and `muster` are installed."""
AGENT = (sys.executable, "-m", "muster.agent")
T = TypeVar("T")
LIMIT_S = 150.0
"""How long a test waits for what must come. A test waits less only where the time itself is what it is about."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a command."""

    exit_code: int | None
    """As in subprocess: -n when signal n ended it. None: it ran past the limit and was killed."""
    stdout: str
    """Undecodable bytes as surrogates; `stdout.encode(errors="surrogateescape")` gives them back."""
    stderr: str
    leftovers: tuple[tuple[int, str, str], ...]
    """(pid, name, command line) of each descendant still there `settle_s` after the command's end."""
    wall_s: float
    """For benchmarks; no test asserts on it."""

    @property
    def timed_out(self) -> bool:
        """True when the limit ended it."""
        return self.exit_code is None

    def explain(self) -> str:
        """All of it, for an assertion's message."""
        return (
            f"exit {self.exit_code} after {self.wall_s:.1f} s, left behind {list(self.leftovers)}\n"
            f"--- stdout\n{self.stdout[-6000:]}\n--- stderr\n{self.stderr[-6000:]}"
        )

    def check(self, code: int = 0) -> "Outcome":
        """Expect this exit code, and that nothing is left behind.

        Returns: itself.
        """
        assert (self.exit_code, self.leftovers) == (code, ()), self.explain()
        return self


class Tree:
    """A command and everything below it, running; a context manager."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        settle_s: float = 10.0,
    ) -> None:
        """Start it.

        Args:
            argv: the command.
            env: its whole environment; None: this process's.
            cwd: its working directory.
            settle_s: how long descendants may outlive the command before they count as left behind.
        """
        self._how = (argv, env, cwd, settle_s)
        report_r, report_w = os.pipe()
        self.started_s = time.monotonic()
        command = [sys.executable, "-I", "-S", str(SUBREAPER), str(report_w), str(settle_s), *argv]
        try:
            self._subreaper = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=None if env is None else dict(env),
                cwd=cwd,
                pass_fds=[report_w],
                start_new_session=True,
            )
        finally:
            os.close(report_w)
        self._changed = threading.Condition()
        self._output = {"stdout": b"", "stderr": b""}
        self._ended_s: float | None = None
        self._readers = [
            threading.Thread(target=self._read, args=("stdout", self._subreaper.stdout), daemon=True),
            threading.Thread(target=self._read, args=("stderr", self._subreaper.stderr), daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        self._reports = os.fdopen(report_r, encoding="utf-8")
        self.pid: int = json.loads(self._reports.readline())["pid"]
        """The command's own process."""
        self._outcome: Outcome | None = None

    def _read(self, name: str, pipe: IO[bytes]) -> None:
        while chunk := os.read(pipe.fileno(), 65536):
            with self._changed:
                self._output[name] += chunk
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    # -- while it runs ----------------------------------------------------------------------------------------------

    @property
    def stdout(self) -> str:
        """What it has written so far."""
        return self._output["stdout"].decode(errors="surrogateescape")

    @property
    def stderr(self) -> str:
        """What it has written so far."""
        return self._output["stderr"].decode(errors="surrogateescape")

    def wait_for_line(
        self, pattern: str, *, stream: str = "stdout", count: int = 1, timeout_s: float = LIMIT_S
    ) -> list[str]:
        """Wait until `count` whole lines of a stream match a regular expression; returns those lines.

        The start of a line that is still being written does not count: it may be the first half of a number.

        Raises:
            AssertionError: they did not come in time, or the command ended without them; says what was written.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while True:
                over = not any(reader.is_alive() for reader in self._readers)
                text = self._output[stream].decode(errors="surrogateescape")
                whole = text if over else text[: max(text.rfind("\n"), text.rfind("\r")) + 1]
                lines = [line for line in whole.splitlines() if re.search(pattern, line)]
                if len(lines) >= count:
                    return lines
                if over or not self._changed.wait(max(0.0, deadline_s - time.monotonic())):
                    why = "the output ended" if over else f"{timeout_s} s passed"
                    raise AssertionError(
                        f"{why} with {len(lines)} of {count} lines like {pattern!r} on {stream}\n"
                        f"--- stdout\n{self.stdout[-4000:]}\n--- stderr\n{self.stderr[-4000:]}"
                    )

    def send(self, signum: int, pid: int | None = None) -> None:
        """Send a signal, to the command's own process unless `pid` says otherwise."""
        os.kill(self.pid if pid is None else pid, signum)

    def kill_agent(self) -> None:
        """SIGKILL of the agent alone, the command being its guard, which cleans up."""
        children = self.children()
        assert children, f"no agent runs\n{self.stdout[-2000:]}\n{self.stderr[-2000:]}"
        self.send(signal.SIGKILL, children[0])
        self.wait().check(128 + signal.SIGKILL)

    def start_again(self) -> "Tree":
        """Start the same command."""
        argv, env, cwd, settle_s = self._how
        return Tree(argv, env=env, cwd=cwd, settle_s=settle_s)

    def kill_all(self) -> Outcome:
        """Kill a node: the command and all below it, at once."""
        for pid in self.descendants():
            with contextlib.suppress(ProcessLookupError):
                self.send(signal.SIGKILL, pid)
        return self.wait()

    def children(self, pid: int | None = None) -> list[int]:
        """Living direct children of the command, or of `pid`."""
        parent = self.pid if pid is None else pid
        return sorted(p for p, (ppid, state, _) in list_processes().items() if ppid == parent and state not in "ZX")

    def descendants(self) -> list[int]:
        """All living processes below the subreaper: the command, its children, and its orphans."""
        return list_descendants(self._subreaper.pid)

    # -- its end ----------------------------------------------------------------------------------------------------

    def wait(self, timeout_s: float = LIMIT_S) -> Outcome:
        """Wait for the command's end (kill everything past the limit) and say what it left behind."""
        if self._outcome is None:
            try:
                self._subreaper.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._outcome = self._finish(timed_out=True)
            else:
                self._outcome = self._finish(timed_out=False)
        return self._outcome

    def _finish(self, *, timed_out: bool) -> Outcome:
        stdin = self._subreaper.stdin
        assert stdin is not None
        stdin.close()
        self._subreaper.wait(30)
        record = json.loads(self._reports.readline())
        ended_s = time.monotonic() if record["ended_s"] is None else record["ended_s"]
        self._reports.close()
        for reader in self._readers:
            reader.join(10)
        for pipe in (self._subreaper.stdout, self._subreaper.stderr):
            assert pipe is not None
            pipe.close()
        status = record["status"]
        return Outcome(
            exit_code=None if timed_out or status is None else os.waitstatus_to_exitcode(status),
            stdout=self.stdout,
            stderr=self.stderr,
            leftovers=tuple((pid, name, command) for pid, name, command in record["leftovers"]),
            wall_s=ended_s - self.started_s,
        )

    def __enter__(self) -> "Tree":  # noqa: PYI034 - typing.Self is Python 3.11, no class derives from it
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._outcome is None:
            self._outcome = self._finish(timed_out=True)


def run_tree(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    timeout_s: float = LIMIT_S,
    settle_s: float = 10.0,
) -> Outcome:
    """Run a command to its end; see `Tree`. Past `timeout_s` it is killed and `exit_code` is None."""
    with Tree(argv, env=env, cwd=cwd, settle_s=settle_s) as tree:
        return tree.wait(timeout_s)


@contextlib.contextmanager
def start_nodes(
    count: int,
    *words: str | Path,
    envs: Sequence[Mapping[str, str] | None] = (),
    cwd: Path | None = None,
    wrapper: Sequence[str] = (),
) -> Iterator[list[Tree]]:
    """Run the agents of the nodes of one job on this machine, each in its environment.

    `words` are flags, which come after those of the job, the program, and its words; "{node}" in one is the node's
    index. `wrapper` is a command that starts each agent.
    """
    job = ["--nnodes", str(count), "--rdzv-backend", "muster", "--rdzv-endpoint", f"127.0.0.1:{find_free_port()}"]
    with contextlib.ExitStack() as stack:
        trees = []
        for node, env in enumerate(envs or [None] * count):
            own = [str(word).replace("{node}", str(node)) for word in words]
            command = [*wrapper, *AGENT, *job, "--rdzv-id", "job", "--node-rank", str(node), *own]
            trees.append(stack.enter_context(Tree(command, env=env, cwd=cwd)))
        yield trees


def check_all(trees: Sequence[Tree], code: int = 0, *, timeout_s: float = LIMIT_S) -> list[Outcome]:
    """Wait for the end of all: each has this exit code and leaves nothing behind."""
    outcomes = [tree.wait(timeout_s) for tree in trees]
    ends = [(outcome.exit_code, outcome.leftovers) for outcome in outcomes]
    assert ends == [(code, ())] * len(trees), "\n".join(outcome.explain() for outcome in outcomes)
    return outcomes


def read_events(folder: Path) -> list[dict[str, Any]]:
    """The event records so far of all jobs and nodes that log below this folder."""
    text = "".join(path.read_text() for path in sorted(folder.rglob("events.jsonl")))
    return [json.loads(line) for line in text.splitlines()]


def wait_until(
    holds: Callable[[], T],
    what: object = "the condition",
    timeout_s: float = LIMIT_S,
    *,
    show: Callable[[], object] = lambda: "",
    every_s: float = 0.01,
) -> T:
    """Poll a condition of the real world until it holds; `what` names it, and may be called for its name.

    Returns: what it has returned then.

    Raises:
        AssertionError: it did not within `timeout_s`. The message has what `show` returns.
    """
    pause = threading.Event()
    deadline_s = time.monotonic() + timeout_s
    while not (found := holds()):
        if time.monotonic() > deadline_s:
            name = what() if callable(what) else what
            raise AssertionError(f"{timeout_s} s passed and {name} does not hold {show()}")
        pause.wait(every_s)
    return found


def skip_or_fail(name: str, reason: str) -> NoReturn:
    """Skip a test for which this machine lacks something, or fail it where MUSTER_REQUIRE has the name."""
    import pytest

    if name in os.environ.get("MUSTER_REQUIRE", "").split(","):
        pytest.fail(f"MUSTER_REQUIRE names {name}, but {reason}")
    pytest.skip(reason)


def read_command(pid: int) -> str:
    """Its words and a space after each; "" when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    except OSError:
        return ""


def find_processes(*needles: str) -> list[int]:
    """Processes that have one of the texts in their environment or command."""
    found = []
    for pid in list_processes():
        try:
            told = Path(f"/proc/{pid}/environ").read_bytes() + Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if pid != os.getpid() and any(needle.encode() in told for needle in needles):
            found.append(pid)
    return found


def find_free_port() -> int:
    """A port of 127.0.0.1 without a listener, and none that the system gives to somebody who asks for any port.

    The port after it may be taken by another test.
    """
    for port in random.sample(range(20000, 30000), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port), reuse_port=False):
            return port
    raise AssertionError("no free port in 20000 to 29999: who listens? (ss -ltn)")


@contextlib.contextmanager
def reserve_port() -> Iterator[int]:
    """A port of 127.0.0.1 that no other program gets: it stays bound, not listening."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
