"""The end of a warm worker: what the program left behind ends as in plain Python, whether early or in the slow way."""

import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fidelity import PROBES, Probe, compare, run_started

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="warm start is for Linux")

LISTED = subprocess.run([sys.executable, str(PROBES / "ends.py"), "list"], capture_output=True, text=True, check=True)
WAYS = [way for way in LISTED.stdout.split() if not way.startswith(("aborts", "gloo"))]
PRELOAD = "atexit,builtins,contextlib,ctypes,functools,json,logging,tempfile,threading,weakref"


@pytest.mark.parametrize("way", WAYS)
def test_what_a_program_leaves_ends_as_in_plain_python(way: str, tmp_path: Path) -> None:
    compare(Probe(target="ends.py", args=(way,), preload=PRELOAD), tmp_path)


@pytest.mark.parametrize("way", ["gloo", "gloo_exception"])
def test_a_process_group_that_is_left_ends_as_in_plain_python(way: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    compare(Probe(target="ends.py", args=(way,), preload="torch"), tmp_path)


@pytest.mark.parametrize(
    ("way", "preload", "code"),
    [
        ("aborts_in_c", PRELOAD, 0),
        pytest.param(
            *("aborts_in_c_names", PRELOAD, 0),  # a module of the name service, as nsswitch.conf may name one
            marks=pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the module is glibc's"),
        ),
        ("aborts_in_c_exception", PRELOAD, 1),
        ("aborts_in_c_elsewhere", PRELOAD, -signal.SIGABRT),
        ("aborts_in_c", "json", -signal.SIGABRT),  # the program loads libcrypto, which has exit handlers of its own
    ],
)
def test_only_an_end_that_could_differ_takes_the_slow_way(way: str, preload: str, code: int, tmp_path: Path) -> None:
    """C's exit handlers run in the slow way only."""
    started = run_started(Probe(target="ends.py", args=(way,), preload=preload), "warm", tmp_path)
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
    probe = Probe(target="ends.py", args=("aborts_in_c",), preload=PRELOAD, flags=flags, env=env)
    started = run_started(probe, "warm", tmp_path)
    assert set(started.ways) == {"warm"}
    assert started.shown[0][0].code == -signal.SIGABRT


OPERATORS = """
import sys, weakref
from muster.agent.workers.warm.early_end import EarlyEnd

class Library:
    pass

def remove():
    print("removed")

remove.__module__, remove.__qualname__ = "torch.library", "_del_library"
end, library = EarlyEnd(), Library()
weakref.finalize(library, remove)
end.record_template()
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
        [sys.executable, *flags, "-c", OPERATORS, recorded], capture_output=True, text=True, check=False, timeout=60
    )
    assert (ended.returncode, ended.stdout.splitlines(), ended.stderr) == (code, lines, "")


def test_torch_registers_its_operators_as_expected() -> None:
    """Else a worker's end takes twice as long, and nothing else shows it."""
    pytest.importorskip("torch")
    source = "import torch\nfrom muster.agent.workers.warm import early_end\nprint(len(early_end._list_finalizers()))"
    ended = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=120)
    assert int(ended.stdout) > 10
