"""Which end a warm worker takes, where the worker's start and not its program decides. See also `test_end_programs`."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fidelity import Probe, run_started
from harness import LIMIT_S

PRELOAD = "atexit,ctypes,hashlib"


@pytest.mark.parametrize(
    ("preload", "code"),
    [(PRELOAD, 0), ("ctypes", -signal.SIGABRT)],
)
def test_a_worker_ends_early_where_its_template_has_all_libraries(preload: str, code: int, tmp_path: Path) -> None:
    started = run_started(Probe(target="ends.py", preload=preload), "warm", tmp_path)
    assert set(started.ways) == {"warm"}
    assert started.shown[0][0].code == code


@pytest.mark.parametrize(
    ("flags", "env"),
    [(("-X", "dev"), {}), (("-W", "default"), {}), ((), {"LD_AUDIT": ""}), ((), {"KINETO_USE_DAEMON": "1"})],
    ids=str,
)
def test_where_the_two_ends_could_differ_the_interpreter_ends_the_worker(
    flags: tuple[str, ...], env: dict[str, str], tmp_path: Path
) -> None:
    probe = Probe(target="ends.py", preload=PRELOAD, flags=flags, env=env)
    started = run_started(probe, "warm", tmp_path)
    assert set(started.ways) == {"warm"}
    assert started.shown[0][0].code == -signal.SIGABRT


OPERATORS = """
import gc, sys, weakref
from muster.agent.workers.warm.early_end import EarlyEnd

class Library:
    pass

def remove():
    print("removed")

remove.__module__, remove.__qualname__ = "torch.library", "_del_library"
end, library = EarlyEnd(), Library()
weakref.finalize(library, remove)
end.record_template()
gc.freeze()
end.record_start(bool)
weakref.finalize(library, print, "own")
end.record_code(eval(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("recorded", "flags", "code", "lines"),
    [
        ("7", (), 7, ["own"]),
        ("7", ("-X", "dev"), 0, ["own", "removed"]),  # the slow way: the interpreter's own code
        ("None", (), 0, ["own", "removed"]),
    ],
)
def test_torchs_operators_are_removed_in_the_slow_way_only(
    recorded: str, flags: tuple[str, ...], code: int, lines: list[str]
) -> None:
    """Once, and after what the program registered."""
    ended = subprocess.run(
        [sys.executable, *flags, "-c", OPERATORS, recorded],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert (ended.returncode, ended.stdout.splitlines(), ended.stderr) == (code, lines, "")


def test_torch_registers_its_operators_as_expected() -> None:
    """Else a worker's end takes twice as long, and nothing else shows it."""
    pytest.importorskip("torch")
    source = "import torch\nfrom muster.agent.workers.warm import early_end\nprint(len(early_end._list_finalizers()))"
    ended = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=120)
    assert int(ended.stdout) > 10
