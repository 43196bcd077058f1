"""`muster top` on a terminal: every key, a new size, Ctrl-Z and fg, Ctrl-C, a terminal that is closed."""

import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import PROGRAMS
from terminal import TerminalProgram

PROGRAM = PROGRAMS / "top_view.py"
_ROW = re.compile(r"\x1b\[(\d+);1H(.*?)\x1b\[0m\x1b\[K", re.DOTALL)
_LEFT = "\x1b[?25h\x1b[?1049l"


class Top(TerminalProgram):
    """The view over made-up jobs."""

    def __init__(self, tmp_path: Path, *words: str, has_shell: bool = False) -> None:
        """With `has_shell` a shell with job control starts it, and continues it when it is stopped."""
        self.asked_file = tmp_path / "asked"
        env = {**os.environ, "TERM": "xterm-256color", "ASKED_FILE": str(self.asked_file), "PYTHONPATH": os.getcwd()}
        env.pop("NO_COLOR", None)
        argv = [sys.executable, str(PROGRAM), *words]
        shell = ["bash", "-m", "-c", f"{shlex.join(argv)}; echo in the shell; fg >/dev/null"]
        super().__init__(shell if has_shell else argv, env=env, cwd=tmp_path, has_keys=True)
        self.settings_before = self.settings

    @property
    def rows(self) -> dict[int, str]:
        """What stands on the screen, by row from 1, without colours. Only since the last time it was taken."""
        text = self.text.rpartition("\x1b[?1049h")[2]
        return {int(row): re.sub(r"\x1b\[[0-9;]*m", "", content) for row, content in _ROW.findall(text)}

    def shows(self, wanted: str) -> bool:
        """Wait until a row has this."""
        deadline_s = time.monotonic() + 60
        while not any(wanted in row for row in self.rows.values()):
            assert time.monotonic() < deadline_s, "\n".join(row for _, row in sorted(self.rows.items()))
            self.comes("\x1b[?2026l", 5)
        return True


@pytest.fixture
def top(tmp_path: Path) -> Iterator[Top]:
    with Top(tmp_path, "job", "8", "1", "local_cwd://a") as program:
        assert program.shows("rank 3 on host-0 is")
        yield program


def test_every_key_of_a_job(top: Top) -> None:
    for key, wanted in (("c", "answer of checkpoint"), ("p", "answer of pause")):
        top.type(key)
        assert top.shows(wanted)
    for key in "sh":
        top.type(key)
        assert top.shows("answer of " + {"s": "stacks", "h": "waits"}[key])
        assert top.shows("Esc back")
        top.type("\x1b")
        assert top.shows("Enter log")
    top.type("S")
    assert top.shows("stop the job?")
    top.type("n")
    assert top.shows("not stopped")
    top.type("Sy")
    assert top.shows("answer of stop")
    top.type("q")
    top.finish()
    assert top.asked_file.read_text().split()[::2] == ["checkpoint", "pause", "stacks", "waits", "stop"]
    assert top.text.rstrip().endswith("left")
    assert top.settings == top.settings_before


def test_a_new_size_draws_all_rows_anew(top: Top) -> None:
    top.resize(50, 200)
    top.expect("\x1b[50;1H")
    top.resize(5, 20)
    top.expect("\x1b[5;1H")
    top.type("q")
    top.finish()


def test_ctrl_z_gives_the_terminal_back_and_fg_takes_it(tmp_path: Path) -> None:
    with Top(tmp_path, "job", "8", "1", "local_cwd://a", has_shell=True) as program:
        assert program.shows("Enter log")
        program.type("\x1a")
        program.expect(_LEFT)
        program.expect("in the shell")
        program.expect("\x1b[?1049h")
        assert program.shows("Enter log")
        program.type("q")
        program.finish()


def test_ctrl_c_and_signals_leave_the_terminal_as_it_was(tmp_path: Path) -> None:
    for end, code in (("\x03", 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)):
        with Top(tmp_path, "hang", "8", "2", "local_cwd://a") as program:
            assert program.shows("did not enter all_reduce")
            program.type(end) if isinstance(end, str) else program.send(end)
            program.finish(code)
            assert program.text.rstrip().endswith(_LEFT)


def test_a_terminal_that_is_closed_ends_the_view(tmp_path: Path) -> None:
    with Top(tmp_path, "job", "1", "1", "local_cwd://a") as program:
        assert program.shows("Enter log")
        os.close(program._main_fd)
        assert program.wait() == 128 + signal.SIGHUP
        program._main_fd = os.open(os.devnull, os.O_RDONLY)
