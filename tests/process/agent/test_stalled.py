"""Consumers that stop: full pipes, and files on a disk that hangs."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from harness import AGENT, LIMIT_S, Tree, check_all, run_tree, start_nodes
from launchers import MOSTLY_WARM


def fill(fd: int) -> None:
    """Leave no room in a pipe."""
    os.set_blocking(fd, False)
    for size in (4096, 1):
        try:
            while True:
                os.write(fd, b"." * size)
        except BlockingIOError:
            continue
    os.set_blocking(fd, True)


@pytest.fixture
def full_pipe() -> Iterator[int]:
    """The write end of a pipe that nothing reads and that has no room."""
    read_fd, write_fd = os.pipe()
    fill(write_fd)
    yield write_fd
    os.close(read_fd)
    os.close(write_fd)


@pytest.mark.parametrize("start", MOSTLY_WARM)
@pytest.mark.parametrize("code", [0, 3])
def test_the_agent_ends_although_its_console_is_full(start: str, code: int, full_pipe: int, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(f"import os\nos._exit({code})\n")
    flags = ["--standalone", "--start", start, "--event-log-handler", "console", "--log-dir", str(tmp_path / "logs")]
    with subprocess.Popen([*AGENT, *flags, "program.py"], stderr=full_pipe, cwd=tmp_path) as agent:
        assert agent.wait(LIMIT_S) == (1 if code else 0)


def test_an_error_line_does_not_wait_for_a_console_that_is_full(full_pipe: int) -> None:
    with subprocess.Popen([*AGENT, "--nnodes", "none", "program.py"], stderr=full_pipe) as agent:
        assert agent.wait(LIMIT_S) == 2


LONG = """
import os, time
os.write(1, b"ready\\n")
while not os.path.exists("go"):
    time.sleep(0.01)
"""


def start_two_nodes(tmp_path: Path, program: str, *flags: str | Path, **how: Any) -> AbstractContextManager[list[Tree]]:
    (tmp_path / "program.py").write_text(program)
    shared = ["--start", "cold", "--rdzv-conf", "keep_alive_interval=0.2,keep_alive_max_attempt=10"]
    return start_nodes(2, *shared, *flags, "--log-dir", "logs{node}", "program.py", cwd=tmp_path, **how)


HANGS = """
import os, threading
open_file = os.open
def hang(path, *rest, **named):
    if str(path).endswith("events.jsonl"):
        threading.Event().wait()
    return open_file(path, *rest, **named)
os.open = hang
"""


def make_hanging_disk(tmp_path: Path) -> dict[str, str]:
    """The environment of an agent for which opening its event log never returns.

    A named pipe would not do: it is opened without waiting, and refused.
    """
    folder = tmp_path / "hangs"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(HANGS)
    return {**os.environ, "PYTHONPATH": str(folder)}


def test_a_node_whose_event_log_hangs_is_not_lost_and_its_agent_ends(tmp_path: Path) -> None:
    with start_two_nodes(tmp_path, LONG, "--tee", "3", envs=[None, make_hanging_disk(tmp_path)]) as (one, two):
        one.wait_for_line("ready")
        two.wait_for_line("ready")
        signal.sigtimedwait([], 3.0)  # longer than a node that sends no heartbeat is kept: 10 times 0.2 s
        (tmp_path / "go").touch()
        outcomes = check_all([one, two])
    assert "lost" not in outcomes[0].stderr, outcomes[0].explain() + outcomes[1].explain()
    assert "may be missing" in outcomes[1].stderr


def test_log_files_that_cannot_be_opened_in_time_are_left_out(tmp_path: Path) -> None:
    """The folder hangs, not a file: no FIFO can stand for that."""
    program = tmp_path / "program.py"
    program.write_text('print("ready")\n')
    launcher = (
        "import sys, threading\n"
        "from muster.agent.logs import opening, routing\n"
        "opening.OPEN_LIMIT_S = 0.5\n"
        "make = routing.FolderLayout.open_round\n"
        "def hang(self, round, nproc):\n"
        "    if self.run_dir is not None:\n"
        "        threading.Event().wait()\n"
        "    make(self, round, nproc)\n"
        "routing.FolderLayout.open_round = hang\n"
        "from muster.agent.__main__ import main\n"
        "sys.exit(main())\n"
    )
    flags = ["--standalone", "--start", "cold", "--tee", "3", "--log-dir", str(tmp_path / "logs")]
    with Tree([sys.executable, "-c", launcher, *flags, str(program)], cwd=tmp_path) as tree:
        outcome = tree.wait()
    assert (outcome.exit_code, outcome.stdout) == (0, "[default0]:ready\n"), outcome.explain()
    assert "console only" in outcome.stderr


def test_a_report_that_cannot_be_written_in_time_does_not_keep_the_agent(tmp_path: Path) -> None:
    """The worker's error file and the termination log hang."""
    (tmp_path / "program.py").write_text("import os\nos.mkfifo(os.environ['TORCHELASTIC_ERROR_FILE'])\nos._exit(3)\n")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    command = [*AGENT, "--standalone", "--start", "cold", "--log-dir", str(tmp_path / "logs"), "program.py"]
    outcome = run_tree(command, cwd=tmp_path, env={**os.environ, "MUSTER_TERMINATION_LOG": str(fifo)}).check(1)
    assert f"cannot write {fifo}: " in outcome.stderr, outcome.explain()
