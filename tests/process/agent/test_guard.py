"""The guard with real processes: nothing outlives it, codes and signals pass through, the lease fences."""

import os
import signal
import sys
import textwrap

import pytest
from harness import Tree, run_tree, wait_until

from muster._shared import guard, processes

GUARD = [sys.executable, "-m", "muster._shared.guard", "--"]


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["true"], 0),
        (["sh", "-c", "exit 7"], 7),
        (["sh", "-c", "kill -TERM $$"], 143),
        (["sh", "-c", "kill -KILL $$"], 137),
        (["/no/such/program"], 127),
        (["/etc/passwd"], 126),
    ],
)
def test_exit_code_passes_through(command: list[str], code: int) -> None:
    run_tree([*GUARD, *command]).check(code)


def test_usage() -> None:
    outcome = run_tree(GUARD).check(2)
    assert outcome.stderr.count("\n") == 1
    assert "usage" in outcome.stderr


def test_another_system_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(processes, "LINUX", False)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert guard.run_guarded(lambda _lease: pytest.fail("it runs")) == 1
    assert "darwin" in capfd.readouterr().err


@pytest.mark.parametrize(
    "left",
    [
        "sleep 1000 &",
        "setsid sleep 1000 &",
        "setsid env -i sleep 1000 < /dev/null > /dev/null 2>&1 &",
        "for i in $(seq 200); do setsid sleep 1000 & done",
        "trap '' TERM INT HUP; (trap '' TERM; while :; do sleep 1; done) &",
        "(sleep 1000 & kill -STOP $!) &",
    ],
)
def test_nothing_outlives_the_guard(left: str) -> None:
    run_tree([*GUARD, "sh", "-c", f"{left}\nexit 3"], settle_s=0.0).check(3)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1])
def test_signals_reach_the_guarded_process(signum: int) -> None:
    name = signal.Signals(signum).name.removeprefix("SIG")
    script = f"trap 'echo got {name}; exit 5' {name}; echo ready; while :; do sleep 0.05; done"
    with Tree([*GUARD, "sh", "-c", script]) as tree:
        tree.wait_for_line("ready")
        tree.send(signum)
        outcome = tree.wait().check(5)
    assert f"got {name}" in outcome.stdout


def test_an_agent_that_slurms_warning_has_ended_is_reported() -> None:
    body = "lambda _lease: os.kill(os.getpid(), signal.SIGUSR1)"
    code = f"import os, signal; from muster._shared.guard import run_guarded; run_guarded({body}, reported_as='it')"
    outcome = run_tree([sys.executable, "-c", code])
    assert "--preempt-signal" in outcome.stderr, outcome.explain()


def test_an_ignored_signal_stays_ignored() -> None:
    script = "trap '' HUP; exec \"$@\""
    charge = "echo ready; while :; do sleep 0.05; done"
    with Tree(["sh", "-c", script, "sh", *GUARD, "sh", "-c", charge]) as tree:
        tree.wait_for_line("ready")
        tree.send(signal.SIGHUP)
        tree.send(signal.SIGTERM)
        tree.wait().check(143)


def test_the_charge_ends_with_the_guard() -> None:
    with Tree([*GUARD, "sh", "-c", "echo ready; while :; do sleep 0.05; done"]) as tree:
        tree.wait_for_line("ready")
        tree.send(signal.SIGKILL)
        tree.wait().check(-9)


def test_a_guard_with_a_death_signal_gives_no_grace() -> None:
    """As local_cwd starts it: the parent's death signal is set, and the charge ignores SIGTERM."""
    parent = textwrap.dedent("""
        import os, subprocess, sys
        from muster._shared import processes
        def bind():
            processes.set_death_signal(15)
        guard = subprocess.Popen(sys.argv[1:], preexec_fn=bind)
        guard.wait()
    """)
    charge = "trap '' TERM; echo ready; while :; do sleep 0.05; done"
    with Tree([sys.executable, "-c", parent, *GUARD, "sh", "-c", charge]) as tree:
        tree.wait_for_line("ready")
        tree.send(signal.SIGKILL)
        outcome = tree.wait()
    assert outcome.leftovers == (), outcome.explain()


FENCED = """
import os, signal, subprocess, sys, time
from muster._shared.guard import run_guarded
from muster.agent.runtime.loop import SystemClock

def body(lease):
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    lease.renew(SystemClock().boottime_s() + 1000)
    lease.renew(SystemClock().boottime_s() + 0.3)
    print(f"ready {os.getpid()} {child.pid}", flush=True)
    if "stop" in sys.argv:
        os.kill(os.getpid(), signal.SIGSTOP)
    code = child.wait()
    print("child ended", code, "fenced", lease.count_fencings(), flush=True)
    return 4

sys.exit(run_guarded(body))
"""


@pytest.mark.parametrize("how", ["run", "stop"])
def test_the_lease_fences_even_when_the_agent_is_stopped(how: str) -> None:
    with Tree([sys.executable, "-c", FENCED, how]) as tree:
        agent, child = (int(word) for word in tree.wait_for_line("ready .* .*")[0].split()[1:])
        if how == "stop":
            wait_until(lambda: child not in processes.list_parents())
            os.kill(agent, signal.SIGCONT)
        outcome = tree.wait().check(4)
    assert "child ended -9 fenced 1" in outcome.stdout


def test_a_released_lease_kills_no_process() -> None:
    script = FENCED.replace("+ 0.3)", "+ 0.2); lease.release()").replace('"sleep", "1000"', '"sleep", "0.6"')
    outcome = run_tree([sys.executable, "-c", script, "run"])
    assert "child ended 0 fenced 0" in outcome.stdout, outcome.explain()


def test_an_exception_in_the_body_is_shown_and_fails() -> None:
    script = "import sys; from muster._shared.guard import run_guarded; sys.exit(run_guarded(lambda lease: 1 // 0))"
    outcome = run_tree([sys.executable, "-c", script]).check(1)
    assert "ZeroDivisionError" in outcome.stderr
    assert "bug in muster" in outcome.stderr


@pytest.mark.parametrize("name", ["SIGPIPE", "SIGXFSZ"])
def test_programs_find_default_dispositions(name: str) -> None:
    """The interpreter ignores both, and an exec would pass that on."""
    run_tree([*GUARD, "sh", "-c", f"kill -{name[3:]} $$; echo survived"]).check(128 + signal.Signals[name])


def test_a_pipe_that_is_closed_ends_its_writer() -> None:
    outcome = run_tree([*GUARD, "bash", "-o", "pipefail", "-c", "yes | head -1"])
    assert (outcome.exit_code, outcome.stdout) == (128 + signal.SIGPIPE, "y\n"), outcome.explain()
