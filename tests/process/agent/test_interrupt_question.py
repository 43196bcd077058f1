"""`--interrupt-action ask`: what Ctrl-C asks at the terminal of `muster-agent`, and what follows each answer."""

import os
import re
import signal

import pytest
from harness import AGENT, PROGRAMS, Tree
from terminal import TerminalProgram

SCRIPT = str(PROGRAMS / "agent" / "interrupted.py")
QUESTION = "Ctrl-C kills [Y/n/c]"


def build_command(*words):
    flags = ["--standalone", "--nproc-per-node", "2", "--start", "cold", "--shutdown-timeout", "20"]
    return [*AGENT, *flags, "--interrupt-action", "ask", SCRIPT, *words]


def start(tmp_path, *words):
    env = {**os.environ, "TMPDIR": str(tmp_path), "TERM": "dumb"}
    return TerminalProgram(build_command(*words), env=env, cwd=tmp_path, has_keys=True)


def wait_counting(program):
    for _ in range(2):
        program.expect("counting")


def ask(program):
    program.type("\x03")
    program.expect("pausing all ranks at one step; Ctrl-C again kills")
    program.expect("all 2 ranks wait at step")
    program.expect(QUESTION)


def test_continue_then_save_and_stop(tmp_path):
    with start(tmp_path, "pause", "stop") as program:
        wait_counting(program)
        ask(program)
        program.type("perhaps\n")
        program.expect(QUESTION)
        program.type("c\n")
        program.expect("all 2 ranks go on")
        ask(program)
        program.type("y\n")
        program.finish(None)
        stopped = re.findall(r"saves and stops at step (\d+)", program.text)
        assert len(stopped) == 2, program.text
        assert len(set(stopped)) == 1, program.text


@pytest.mark.parametrize("default", ["\n", "\x04"], ids=["empty line", "Ctrl-D"])
def test_scripts_that_do_not_ask_for_a_stop_save_a_checkpoint_and_get_the_signal(tmp_path, default):
    with start(tmp_path, "pause", "checkpoint") as program:
        wait_counting(program)
        ask(program)
        program.type(default)  # it is to save
        program.finish(128 + signal.SIGINT)
        assert program.text.count("saves at step") == 2, program.text
        assert program.text.count("2 ranks saved at") == 1, program.text


def test_a_second_ctrl_c_kills_while_it_asks(tmp_path):
    with start(tmp_path, "pause", "stop") as program:
        wait_counting(program)
        ask(program)
        program.type("\x03")
        program.finish(128 + signal.SIGINT)
        assert "saves" not in program.text


def test_without_a_terminal_one_line_says_so(tmp_path):
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with Tree(build_command("pause"), cwd=tmp_path, env=env) as tree:
        tree.wait_for_line("counting", count=2)
        tree.send(signal.SIGINT)
        outcome = tree.wait().check(128 + signal.SIGINT)
    assert outcome.stderr.count("--interrupt-action ask: ") == 1
