"""`muster.worker.breakpoint` and `breakpoint()`: one rank's pdb at the terminal that the job was started in."""

import os
import signal
from pathlib import Path

import pytest
from harness import AGENT, PROGRAMS, find_free_port, list_descendants, run_tree
from terminal import TerminalProgram

SCRIPT = str(PROGRAMS / "agent" / "debugged.py")
PROMPT = "(Pdb, rank {}) "


def agent(tmp_path, *args, flags=("--standalone",), nproc=2, start="cold"):
    flags = [*flags, "--nproc-per-node", str(nproc), "--start", start, "--shutdown-timeout", "20"]
    env = {**os.environ, "TMPDIR": str(tmp_path), "TERM": "dumb"}
    return TerminalProgram([*AGENT, *flags, SCRIPT, *args], env=env, cwd=tmp_path, has_keys=True)


@pytest.mark.parametrize(
    ("nproc", "rank", "start"),
    [
        pytest.param(1, 0, "cold", marks=pytest.mark.long),
        (2, 1, "cold"),
        pytest.param(4, 2, "auto", marks=pytest.mark.long),
    ],
)
def test_what_is_typed_reaches_the_rank_and_all_goes_on_afterwards(tmp_path, nproc, rank, start):
    with agent(tmp_path, str(rank), nproc=nproc, start=start) as program:
        prompt = PROMPT.format(rank)
        program.expect(prompt)
        program.type("p secret\n")
        program.expect(f"\n{40 + rank}\r\n")
        program.type("n\n")
        program.expect("-> print")
        program.type("p secret * 1000\n")
        program.expect(f"{41 + rank}000")
        program.type("continue\n")
        program.finish()
    for each in range(nproc):
        assert f"after {each} {41 + each}" in program.text


def test_the_output_of_other_ranks_waits(tmp_path):
    with agent(tmp_path, "0", "talks") as program:
        program.expect(PROMPT.format(0))
        program.type("pathlib.Path('held').touch(); wait_for('written')\n")  # by rank 1, after a line of output
        program.expect(PROMPT.format(0))
        assert "rank 1 talks" not in program.text
        program.type("continue\n")
        program.expect("rank 1 talks")
        program.finish()


def test_the_builtin_stops_rank_0(tmp_path):
    with agent(tmp_path, "builtin") as program:
        program.expect(PROMPT.format(0))
        program.type("c\n")
        program.finish()
        assert "after 1 42" in program.text


def test_a_breakpoint_in_a_loop_stops_in_each_turn(tmp_path):
    """`continue` comes to the next one before the agent has seen that the last one is over."""
    with agent(tmp_path, "0", "again") as program:
        for _ in range(4):
            program.expect(PROMPT.format(0))
            program.type("c\n")
        program.finish()
        assert [f"turn {turn} of 0" in program.text for turn in range(3)] == [True] * 3


def interrupt(program):
    """Ctrl-C at pdb's prompt. One that comes before readline waits for a key is seen at the next key, in any Python."""
    program.type("\x03")
    while not program.comes("KeyboardInterrupt", 5):
        program.type("\n")


RANKS = pytest.mark.parametrize(
    ("nproc", "rank"), [(2, 1), *(pytest.param(*each, marks=pytest.mark.long) for each in ((1, 0), (4, 2)))]
)


@RANKS
def test_quit_ends_the_job_as_ctrl_c_does(tmp_path, nproc, rank):
    with agent(tmp_path, str(rank), "600", nproc=nproc) as program:
        program.expect(PROMPT.format(rank))
        program.type("q\n")
        program.finish(128 + signal.SIGINT)
        assert f"[default{rank}]:Traceback" not in program.text


@RANKS
def test_ctrl_c_is_for_the_debugger_and_afterwards_for_the_job(tmp_path, nproc, rank):
    with agent(tmp_path, str(rank), "600", nproc=nproc) as program:
        program.expect(PROMPT.format(rank))
        interrupt(program)
        program.type("continue\n")
        program.expect(f"after {rank} {41 + rank}")
        program.type("\x03")
        program.finish(128 + signal.SIGINT)


def test_a_rank_in_the_debugger_does_not_hang_nor_do_those_that_wait_for_it(tmp_path):
    with agent(tmp_path, "0", flags=("--standalone", "--hang-timeout", "2")) as program:
        program.expect(PROMPT.format(0))
        program.type("time.sleep(6)\n")
        program.expect(PROMPT.format(0))
        program.type("continue\n")
        program.finish()


@pytest.mark.parametrize(
    ("victim", "nproc"),
    [
        ("worker", 1),
        ("agent", 2),
        *(pytest.param(*each, marks=pytest.mark.long) for each in (("worker", 4), ("guard", 2))),
    ],
)
def test_the_terminal_is_restored_whatever_is_killed(tmp_path, victim, nproc):
    with agent(tmp_path, "0", "600", nproc=nproc) as program:
        before = program.settings
        program.expect(PROMPT.format(0))
        assert program.settings != before
        pids = list_descendants(program.pid)
        if victim == "guard":
            os.kill(program.pid, signal.SIGKILL)
        else:
            children = Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
            agent_pid = int(children[0])
            if victim == "agent":
                os.kill(agent_pid, signal.SIGKILL)
            else:
                os.kill(find_rank(pids, 0), signal.SIGKILL)
        program.finish(None)


def find_rank(pids, rank):
    for pid in pids:
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if b"RANK=%d" % rank in environ:
            return pid
    raise AssertionError(f"no process of rank {rank} among {pids}")


def start_two_nodes(tmp_path, rank, then):
    flags = ["--nnodes", "2", "--rdzv-endpoint", f"localhost:{find_free_port()}", "--rdzv-id", "debugged"]
    return [agent(tmp_path, rank, then, flags=[*flags, "--node-rank", str(node)], nproc=1) for node in (0, 1)]


def test_two_nodes_each_with_its_own_terminal(tmp_path):
    first, second = start_two_nodes(tmp_path, "1", "0")
    with first, second:
        second.expect(PROMPT.format(1))
        second.type("p secret\n")
        second.expect("41\r\n")
        assert "Pdb" not in first.text
        second.type("c\n")
        for program in (first, second):
            program.finish()


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), 1])
def test_quit_on_one_of_two_nodes_ends_both(tmp_path, rank):
    nodes = start_two_nodes(tmp_path, str(rank), "600")
    with nodes[0], nodes[1]:
        nodes[rank].expect(PROMPT.format(rank))
        nodes[rank].type("quit\n")
        nodes[rank].finish(128 + signal.SIGINT)
        nodes[1 - rank].finish(1)
        other = " ".join(nodes[1 - rank].text.split())
        assert "debugger of one" in other
        assert "Root cause" not in other
        if rank == 1:  # the leader tells what it knows; without it the reason is all there is
            assert " of it rank 0 (node 0, " in other


def test_without_a_terminal_one_line_says_so_and_the_script_goes_on(tmp_path):
    flags = ["--standalone", "--nproc-per-node", "2", "--start", "cold"]
    done = run_tree(
        [*AGENT, *flags, SCRIPT, "builtin"], cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path)}
    ).check()
    assert done.stderr.count("for a debugger") == 1
    assert "after 0 41" in done.stdout
