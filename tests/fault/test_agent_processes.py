"""Every way an agent, its guard, its workers and their children can end: nothing is left, and the exit code is right.

The harness is itself a subreaper: whatever the job leaves, however it hides, is its descendant afterwards.
"""

import contextlib
import os
import shutil
import signal
import socket
from pathlib import Path

import pytest
from harness import AGENT, PROGRAMS, Tree, find_free_port, run_tree, wait_until
from launchers import MOSTLY_WARM, START_FLAGS, STARTS

PROGRAM = str(PROGRAMS / "agent" / "ready.py")
COMMAND = [*AGENT, "--shutdown-timeout", "1", *START_FLAGS]
SIGNALS = [
    signal.SIGTERM,
    *(pytest.param(signum, marks=pytest.mark.long) for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)),
]
pytestmark = [pytest.mark.soak, pytest.mark.filterwarnings("ignore::ResourceWarning")]


@pytest.fixture(params=MOSTLY_WARM)
def agent(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """An agent of one node with two workers, output captured and shown."""
    return build_agent(tmp_path, request.param)


@pytest.fixture
def cold_agent(tmp_path: Path) -> list[str]:
    """The same where no template can start the program."""
    return build_agent(tmp_path, "cold")


def build_agent(folder: Path, start: str, nproc: int = 2) -> list[str]:
    flags = ["--standalone", "--nproc-per-node", str(nproc), "--tee", "3", "--start", start]
    return [*COMMAND, *flags, "--log-dir", str(folder / "logs")]


MOMENTS = {
    "running": ((), ("",), r"ready rank", 2),
    # between the end of one attempt and the start of the next
    "restarting": (("--max-restarts", "5", "--restart-backoff", "30"), ("crash",), r"--restart-backoff", 1),
    # as soon as the first of many workers is there
    "spawning": (("--nproc-per-node", "16"), ("ignore-term",), r"ready rank", 1),
}
"""What the agent does when the signal comes: its flags, the program's words, the line to wait for, and how often."""


@pytest.mark.parametrize("signum", SIGNALS, ids=lambda s: signal.Signals(s).name)
class TestSignals:
    @pytest.mark.parametrize("moment", MOMENTS)
    def test_while_it_is(self, agent: list[str], signum: int, moment: str) -> None:
        flags, words, line, count = MOMENTS[moment]
        with Tree([*agent, *flags, PROGRAM, *words]) as tree:
            tree.wait_for_line(line, count=count, stream="stderr" if moment == "restarting" else "stdout")
            tree.send(signum)
            tree.wait().check(128 + signum)

    def test_before_rendezvous_is_complete(self, signum: int) -> None:
        port = find_free_port()
        flags = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "x"]
        with Tree([*COMMAND, *flags, PROGRAM]) as tree:
            wait_until_listening(tree, port)
            tree.send(signum)
            tree.wait().check(128 + signum)

    def test_while_stopping(self, agent: list[str], signum: int) -> None:
        """During the grace period of workers that ignore the first signal."""
        with Tree([*agent, PROGRAM, "ignore-term"]) as tree:
            tree.wait_for_line("ready rank", count=2)
            tree.send(signal.SIGTERM)
            tree.wait_for_line("SIGTERM", stream="stderr")
            tree.send(signum)
            tree.wait().check(143)

    def test_at_process_start(self, agent: list[str], signum: int) -> None:
        """As early as a sender can know the process: the interpreter may not have a handler yet."""
        with Tree([*agent, PROGRAM]) as tree:
            command = Path(f"/proc/{tree.pid}/cmdline")
            while b"subreaper" in command.read_bytes():  # not yet replaced by the agent's own
                os.sched_yield()
            tree.send(signum)
            outcome = tree.wait()
        # Before the guard runs, the signal's default applies, as for any program; and while Python starts, before any
        # line of ours, it reports Ctrl-C as a broken installation.
        own = ("Fatal Python error: init_", "Could not import runpy module\n")
        is_pythons_own = signum == signal.SIGINT and outcome.stderr.startswith(own)
        assert outcome.exit_code in ((1,) if is_pythons_own else (128 + signum, -signum)), outcome.explain()
        assert outcome.leftovers == (), outcome.explain()


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(
    "words",
    [
        *(pytest.param(each, marks=pytest.mark.long) for each in ("", "ignore-term", "grandchildren")),
        "ignore-term grandchild-ignores-term grandchild-hides",
    ],
)
@pytest.mark.parametrize("victim", ["guard", "agent"])
def test_sigkill(tmp_path: Path, start: str, victim: str, words: str) -> None:
    agent = build_agent(tmp_path, start)
    # 400 grandchildren take a busy machine a moment; the harness continues as soon as nothing is left
    with Tree([*agent, PROGRAM, *words.split()]) as tree:
        tree.wait_for_line("ready rank", count=2)
        if victim == "guard":
            tree.send(signal.SIGKILL)
        else:
            tree.send(signal.SIGKILL, tree.children()[0])
        outcome = tree.wait()
    expected = -9 if victim == "guard" else 137
    assert (outcome.exit_code, outcome.leftovers) == (expected, ()), outcome.explain()
    line = "ended by SIGKILL ("
    assert (line in outcome.stderr) is (victim == "agent"), outcome.explain()


@pytest.mark.parametrize(
    "words",
    [
        "grandchild-ignores-term grandchild-hides",
        "ignore-term stop-self",
        *(pytest.param(each, marks=pytest.mark.long) for each in ("ignore-term", "grandchildren", "stop-self")),
    ],
)
def test_whatever_workers_do_the_end_is_clean(agent: list[str], words: str) -> None:
    with Tree([*agent, PROGRAM, *words.split()]) as tree:
        tree.wait_for_line("ready rank", count=2)
        tree.send(signal.SIGTERM)
        tree.wait().check(143)


def test_grandchildren_of_a_crashed_attempt_are_gone_in_the_next(agent: list[str]) -> None:
    with Tree([*agent, "--max-restarts", "1", PROGRAM, "grandchild-hides", "crash-once"]) as tree:
        tree.wait_for_line("ready rank . attempt 1", count=2)
        wait_until(lambda: count_sleeping(tree) == 2)
        tree.send(signal.SIGTERM)
        tree.wait().check(143)


def test_sigterm_reaches_workers_and_not_their_children(agent: list[str], tmp_path: Path) -> None:
    witness = tmp_path / "child-got-sigterm"
    with Tree([*agent, PROGRAM, "term-witness", str(witness)]) as tree:
        tree.wait_for_line("ready rank", count=2)
        tree.send(signal.SIGTERM)
        tree.wait().check(143)
    assert not witness.exists()


class TestSpawnFailures:
    def test_not_executable(self, cold_agent: list[str]) -> None:
        outcome = run_tree([*cold_agent, "--no-python", "/etc/passwd"]).check(1)
        assert "'/etc/passwd': Permission denied" in outcome.stderr

    @pytest.mark.parametrize("start", MOSTLY_WARM)
    def test_too_many_open_files(self, tmp_path: Path, start: str) -> None:
        many = build_agent(tmp_path, start, nproc=16)
        outcome = run_tree(["sh", "-c", 'ulimit -n 40; exec "$@"', "sh", *many, PROGRAM]).check(1)
        assert "Too many open files" in outcome.stderr
        assert "Traceback" not in outcome.stderr

    @pytest.mark.parametrize(
        "most", [each if each % 3 == 0 else pytest.param(each, marks=pytest.mark.long) for each in range(5, 15)]
    )
    def test_too_few_open_files_to_begin(self, most: int, agent: list[str]) -> None:
        """Wherever descriptors run out, there is one line and no traceback."""
        outcome = run_tree(["sh", "-c", f'ulimit -n {most}; exec "$@"', "sh", *agent, PROGRAM]).check(1)
        assert "Too many open files" in outcome.stderr
        assert "Traceback" not in outcome.stderr

    @pytest.mark.parametrize("start", MOSTLY_WARM)
    def test_no_processes_left(self, tmp_path: Path, start: str) -> None:
        """As a user with a process limit: root is not bound by one."""
        if os.geteuid() != 0:
            pytest.skip("needs root to become a user with a limit")
        cgroup = Path("/sys/fs/cgroup/pids")
        if not cgroup.is_dir():
            pytest.skip("no pids controller to limit processes with")
        limited = cgroup / f"muster-test-{os.getpid()}"
        try:
            limited.mkdir()
        except OSError as error:
            pytest.skip(f"cannot make a cgroup: {error}")
        try:
            (limited / "pids.max").write_text("8")
            many = build_agent(tmp_path, start, nproc=16)
            join = f'echo $$ > {limited}/cgroup.procs; exec "$@"'
            outcome = run_tree(["sh", "-c", join, "sh", *many, PROGRAM])
        finally:
            limited.rmdir()
        assert (outcome.exit_code, outcome.leftovers) == (1, ()), outcome.explain()
        assert "Resource temporarily unavailable" in outcome.stderr


def test_as_pid_1_orphans_are_reaped(cold_agent: list[str]) -> None:
    """In a container no other process reaps them."""
    alone = ["unshare", "--pid", "--fork", "--mount-proc"]
    if shutil.which("ps") is None or run_tree([*alone, "true"]).exit_code != 0:
        pytest.skip("needs ps, and the right to make a pid namespace")
    script = (
        "for i in 1 2 3 4 5; do (setsid sh -c 'exit 0' &) ; done\n"
        "for i in $(seq 200); do left=$(ps -eo stat= | grep -c Z); [ $left = 0 ] && break; sleep 0.05; done\n"
        "echo zombies $left"
    )
    outcome = run_tree([*alone, *cold_agent, "--no-python", "sh", "-c", script]).check()
    assert outcome.stdout.count("zombies 0") == 2, outcome.explain()


def count_sleeping(tree: Tree) -> int:
    """Descendants that run `sleep`."""
    count = 0
    for pid in tree.descendants():
        with contextlib.suppress(OSError):
            count += Path(f"/proc/{pid}/comm").read_text() == "sleep\n"
    return count


def wait_until_listening(tree: Tree, port: int) -> None:
    """Wait until the agent's leader accepts: a connection that sends nothing does no harm."""
    while True:
        assert tree.descendants(), "the agent ended"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        os.sched_yield()
