"""What must be new in every worker, how exceptions and stacks are reported, terminals, start-up hooks, torch."""

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fidelity import DRIVER, PROBES, Probe, build_env, clean, compare, run_started
from harness import LIMIT_S, Tree, wait_until

from muster.agent.workers.program import get_stack_signal

BOTH = pytest.mark.parametrize("how", ["cold", "warm"])


def has_module(name: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
    return subprocess.run([sys.executable, "-c", code]).returncode == 0


needs_torch = pytest.mark.skipif(not has_module("torch"), reason="torch is not installed")
needs_numpy = pytest.mark.skipif(not has_module("numpy"), reason="numpy is not installed")


def check_distinct(probe: Probe, how: str, folder: Path, *names: str) -> None:
    """Assert that these states are others in each worker of two rounds of two."""
    started = run_started(probe, how, folder, nproc=2, rounds=2)
    assert how == "cold" or set(started.ways) == {"warm"}, started.notices
    found = [json.loads(shown.stdout) for workers in started.shown for shown in workers]
    for name in names or found[0]:
        assert len({state[name] for state in found}) == 4, (name, found)


@BOTH
def test_random_states_differ_between_workers_and_starts(how: str, tmp_path: Path) -> None:
    check_distinct(Probe(target="states.py", preload="random,uuid,tempfile,multiprocessing"), how, tmp_path)


@needs_torch
def test_random_states_of_torch(tmp_path: Path) -> None:
    check_distinct(Probe(target="states.py", args=("torch",)), "warm", tmp_path, "seed", "torch", "random")


@needs_numpy
@pytest.mark.parametrize("threads", [pytest.param(None, marks=pytest.mark.long), "2"])
def test_numpy_keeps_warm_start_on(threads: str | None, tmp_path: Path) -> None:
    """OpenBLAS runs a thread pool from its import on and has its own fork handlers."""
    env = {} if threads is None else {"OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
    check_distinct(Probe(target="states.py", args=("numpy",), preload="numpy", env=env), "warm", tmp_path, "numpy")


EXCEPTIONS = {
    "raise": "ValueError: the text",
    "odd": "Odd: <exception str() failed>",
    "chain": "KeyError: 'key'",
    "generator_exit": "GeneratorExit: gone",
    "failing_hook": "ValueError: the text",
    "exit_text": "SystemExit: a text",
    "keyboard": None,
    "thread": None,
}


@BOTH
def test_the_exception_is_recorded(how: str, tmp_path: Path) -> None:
    each = [[{"target": "exits.py", "args": (name,)} for name in EXCEPTIONS]]
    started = run_started(Probe(target="exits.py"), how, tmp_path, each=each)
    for rank, (name, message) in enumerate(EXCEPTIONS.items()):
        error, shown = started.error(rank), started.shown[0][rank]
        if message is None:
            assert error is None, name
            continue
        assert error["message"]["message"] == message
        extra = error["message"]["extraInfo"]
        assert extra["timestamp"].isdecimal()
        assert extra["py_callstack"].startswith("Traceback (most recent call last):\n")
        assert "program.py" not in extra["py_callstack"]
        if name == "failing_hook":  # as Python shows it
            assert shown.code == 1
            assert shown.stderr.startswith("Error in sys.excepthook:\n")
            assert "RuntimeError: the hook fails\n\nOriginal exception was:\nTraceback" in shown.stderr
            assert shown.stderr.endswith("ValueError: the text\n")
        elif name != "exit_text":  # Python prints no traceback of sys.exit("a text")
            assert shown.stderr.endswith(extra["py_callstack"])


@BOTH
def test_a_json_module_beside_the_script_does_not_matter(how: str, tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError('not this one')\n")
    script = tmp_path / "main.py"
    script.write_text("raise ValueError('recorded')\n")
    started = run_started(Probe(target=str(script)), how, tmp_path)
    assert started.error()["message"]["message"] == "ValueError: recorded"


@BOTH
def test_a_fatal_signal_leaves_the_python_stack_unless_its_variable_is_set(how: str, tmp_path: Path) -> None:
    shown = run_started(Probe(target="segfault.py"), how, tmp_path / "own").shown[0][0]
    assert shown.code == -signal.SIGSEGV
    assert shown.stderr.startswith("Fatal Python error: Segmentation fault\n")
    assert f'File "{PROBES}/segfault.py", line 5 in crash' in shown.stderr
    env = {"PYTHONFAULTHANDLER": ""}
    shown = run_started(Probe(target="segfault.py", env=env), how, tmp_path / "users").shown[0][0]
    assert (shown.code, shown.stderr) == (-signal.SIGSEGV, "")


@BOTH
def test_stacks_of_a_worker_stuck_in_c(how: str, tmp_path: Path) -> None:
    request = {"how": how, "kind": "script", "target": "busy.py", "folder": str(tmp_path), "env": build_env({})}
    (tmp_path / "request.json").write_text(json.dumps({**request, "stacks": True}))
    command = [sys.executable, str(DRIVER), str(tmp_path / "request.json")]
    out, stacks = tmp_path / "0.0.out", tmp_path / "0.0.stack"
    number = get_stack_signal()
    assert number is not None
    with Tree(command, env=build_env({}), cwd=PROBES) as tree:
        wait_until(lambda: out.exists() and out.read_text() == "waiting\n", what="the worker")
        pid = int(stacks.read_text().removeprefix("--- stacks of process ").strip())
        assert pid in tree.descendants()
        wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S", what="its pause")
        for count in (1, 2):
            tree.send(number, pid)
            wait_until(lambda count=count: stacks.read_text().count('busy.py", line 15 in <module>') == count)
        text = stacks.read_text()
        assert text.count('busy.py", line 9 in second') == 2
        tree.send(signal.SIGTERM, pid)
        outcome = tree.wait()
    assert outcome.leftovers == (), outcome.explain()
    assert json.loads((tmp_path / "result.json").read_text())["codes"] == [[-signal.SIGTERM]]


def run_on_terminal(command: list[str], typed: bytes, prompt: bytes) -> str:
    """Run a command on its own terminal; answer each prompt with a line."""
    main_fd, terminal_fd = pty.openpty()
    process = subprocess.Popen(
        command, stdin=terminal_fd, stdout=terminal_fd, stderr=terminal_fd, cwd=PROBES, env=build_env({"TERM": "dumb"})
    )
    os.close(terminal_fd)
    seen, answered = b"", 0
    lines = typed.splitlines(keepends=True)
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        ready, _, _ = select.select([main_fd], [], [], 1.0)
        if ready:
            try:
                data = os.read(main_fd, 4096)
            except OSError:
                break  # the last process has closed the terminal
            seen += data
            if seen.count(prompt) > answered and answered < len(lines):
                os.write(main_fd, lines[answered])
                answered += 1
    else:
        process.kill()
    os.close(main_fd)
    assert process.wait(LIMIT_S) == 0, seen
    return clean(seen.decode())


@BOTH
def test_pdb_on_a_terminal(how: str, tmp_path: Path) -> None:
    request = {"how": how, "kind": "script", "target": "debugger.py", "folder": str(tmp_path), "own_streams": True}
    file = tmp_path / "request.json"
    file.write_text(json.dumps({**request, "env": build_env({"TERM": "dumb"})}))
    typed = b"p value\nn\np value\nc\n"
    plain = run_on_terminal([sys.executable, "-u", "debugger.py"], typed, b"(Pdb) ")
    assert "value 42" in plain
    assert run_on_terminal([sys.executable, str(DRIVER), str(file)], typed, b"(Pdb) ") == plain


def write_site(folder: Path, text: str) -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(text)
    return {"PYTHONPATH": str(folder)}


def test_a_start_up_hook_runs_as_in_plain_python(tmp_path: Path) -> None:
    env = write_site(tmp_path / "site", "import atexit\nprint('at start')\natexit.register(print, 'at the end')\n")
    compare(Probe(target="exits.py", args=("zero",), env=env), tmp_path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import sys\nsys.setprofile(lambda *_: None)\n", "a profiler, debugger or coverage tool is active"),
        ("import os\nprint('rank', os.environ['RANK'])\n", "reads the environment when Python starts"),
        (
            "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n",
            "has left a thread",
        ),
    ],
    ids=["profiler", "environment", "thread"],
)
def test_start_up_hooks_that_a_fork_would_break_start_cold(text: str, reason: str, tmp_path: Path) -> None:
    env = write_site(tmp_path / "site", text)
    expect_cold(Probe(target="exits.py", args=("zero",), env=env), reason, tmp_path)


def expect_cold(probe: Probe, reason: str, folder: Path) -> None:
    """Assert that a warm start gives one notice why it is cold, and shows what a cold start shows."""
    cold = run_started(probe, "cold", folder / "cold", nproc=2)
    warm = run_started(probe, "warm", folder / "warm", nproc=2)
    assert set(warm.ways) == {"cold"}
    assert len(warm.notices) == 1
    assert reason in warm.notices[0]
    assert warm.shown == cold.shown


@needs_torch
@pytest.mark.parametrize("target", ["torch_state.py", pytest.param("data_loader.py", marks=pytest.mark.long)])
def test_torch(target: str, tmp_path: Path) -> None:
    compare(Probe(target=target, env={"OMP_NUM_THREADS": "2"}), tmp_path)


@pytest.mark.long
@needs_torch
def test_torch_with_bound_cpus(tmp_path: Path) -> None:
    cpu = min(os.sched_getaffinity(0))
    cold, warm = (run_bound(how, tmp_path, [cpu], [cpu]) for how in ("cold", "warm"))
    assert warm == cold


@pytest.mark.long
@needs_torch
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
@pytest.mark.parametrize("count", [1, 2])
def test_a_template_with_another_number_of_cpus_than_its_worker(count: int, tmp_path: Path) -> None:
    """As many threads work as there are CPUs; one idle thread may be left from resizing a pool."""
    cpus = sorted(os.sched_getaffinity(0))[:2]
    cold, warm = (run_bound(how, tmp_path, cpus[:count], cpus[: 3 - count]) for how in ("cold", "warm"))
    words = [next(line for line in text.splitlines() if line.startswith("threads")).split() for text in (cold, warm)]
    assert words[0][1:3] == words[1][1:3]
    assert int(words[1][3]) <= int(words[0][3]) + 1
    assert words[0][4] == words[1][4] == str(count)


def run_bound(how: str, folder: Path, cpus: list[int], template_cpus: list[int]) -> str:
    """What torch_state.py prints in a worker with these CPUs."""
    probe = Probe(target="torch_state.py")
    return run_started(probe, how, folder / how, cpus=cpus, template_cpus=template_cpus).shown[0][0].stdout


@needs_torch
@pytest.mark.parametrize(
    "args", [("plain",), *(pytest.param((how,), marks=pytest.mark.long) for how in ("rich", "exit"))], ids=" ".join
)
def test_torchs_own_record(args: tuple[str, ...], tmp_path: Path) -> None:
    """What it writes stays, and we add nothing to it."""
    errors = []
    for how in ("cold", "warm"):
        folder = tmp_path / how
        env = {"TORCHELASTIC_ERROR_FILE": str(folder / "0.0.json")}
        started = run_started(Probe(target="recorded.py", args=args, env=env), how, folder)
        assert started.shown[0][0].code == (6 if args == ("exit",) else 1)
        errors.append(started.error())
    if args == ("plain",):
        messages = [error["message"]["message"] for error in errors]
        assert messages == ["ValueError: recorded"] * 2
    else:
        expected = {"message": "written by the user's handler"} if args == ("rich",) else None
        assert errors == [expected, expected]


@needs_torch
def test_gloo_in_warm_workers(tmp_path: Path) -> None:
    env = {"PROBE_STORE": str(tmp_path / "store")}
    started = run_started(Probe(target="gloo.py", env=env), "warm", tmp_path, nproc=2)
    assert set(started.ways) == {"warm"}
    assert [(shown.code, shown.stdout) for shown in started.shown[0]] == [(0, "sum 2.0\n")] * 2


@needs_torch
@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_torch_compile_and_its_subprocess_pool(tmp_path: Path) -> None:
    probe = Probe(target="compiled.py", env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")})
    started = run_started(probe, "warm", tmp_path / "out")
    assert set(started.ways) == {"warm"}
    assert (started.shown[0][0].code, started.shown[0][0].stdout) == (0, "compiled 29.4635 8.6448\n")
