"""The harness itself: it must see every kind of leftover, or the tests that rely on it cannot fail."""

import os
import signal
import sys

import pytest
from harness import Tree, run_tree, wait_until


def python(code: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code]


def test_a_clean_command_leaves_nothing() -> None:
    outcome = run_tree(python("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"))
    assert (outcome.exit_code, outcome.stdout, outcome.stderr, outcome.leftovers) == (3, "out\n", "err\n", ())


def test_a_signal_is_the_negative_exit_code() -> None:
    assert run_tree(python("import os; os.kill(os.getpid(), 9)")).exit_code == -9


def test_a_command_that_does_not_exist_says_so() -> None:
    outcome = run_tree(["/no/such/command"])
    assert outcome.exit_code == 127
    assert "/no/such/command" in outcome.stderr


ORPHAN = """
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve("/bin/sleep", ["sleep", "1000"], {})
    os._exit(0)
os.wait()
"""


def test_an_orphan_with_its_own_session_and_no_environment_is_seen_and_killed() -> None:
    outcome = run_tree(python(ORPHAN), settle_s=0.1)
    assert outcome.exit_code == 0
    [(pid, name, command)] = outcome.leftovers
    assert (name, command) == ("sleep", "sleep 1000")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_past_the_limit_everything_is_killed() -> None:
    outcome = run_tree(python("print('begun', flush=True); import time; time.sleep(1000)"), timeout_s=1)
    assert outcome.timed_out
    assert outcome.stdout == "begun\n"
    assert len(outcome.leftovers) == 1


def test_signals_midway() -> None:
    code = "import os, signal; signal.signal(15, lambda *_: os._exit(7)); print('ready', flush=True); signal.pause()"
    with Tree(python(code)) as tree:
        assert tree.wait_for_line("^ready$") == ["ready"]
        assert tree.descendants() == [tree.pid]
        tree.send(signal.SIGTERM)
        assert tree.wait().exit_code == 7


def test_children_are_listed() -> None:
    with Tree(["/bin/sh", "-c", "sleep 1000 & echo $!; wait"], settle_s=3.0) as tree:
        pid = int(tree.wait_for_line(".")[0])
        assert tree.children() == [pid]
        tree.send(signal.SIGKILL)
        wait_until(lambda: tree.descendants() == [pid], what="the orphan comes to the subreaper")
        assert [left[0] for left in tree.wait().leftovers] == [pid]


def test_a_line_that_never_comes_fails_with_what_was_written() -> None:
    with Tree(python("print('something else')")) as tree, pytest.raises(AssertionError, match="something else"):
        tree.wait_for_line("expected")
