"""The table of ends: each program ends alike under `python`, cold and warm, and a warm worker early where it may.

All programs run once, some at a time: the warm workers of all have one driver, and so have the cold ones, which run in
`make soak` only. Those that need torch have drivers of their own.
"""

import fcntl
import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

import pytest
from end_programs import LIGHT, TORCH, EndProgram
from fidelity import Probe, Shown, expect_same, run_started, start_plainly

HAS_TORCH = importlib.util.find_spec("torch") is not None
WITH_TORCH = TORCH if HAS_TORCH else {}
PRELOAD = (
    *("asyncio", "atexit", "builtins", "concurrent.futures", "contextlib", "ctypes", "functools", "gzip", "json"),
    *("logging.handlers", "multiprocessing", "pathlib", "shelve", "sqlite3", "socket", "subprocess", "tempfile"),
)
PRELOAD_TORCH = (
    *("torch", "torch._dynamo"),
    *(("tabulate",) if importlib.util.find_spec("tabulate") else ()),  # torch._dynamo imports it at exit
)
AT_A_TIME = 8

MARK = (
    "import ctypes as c, os, sys; f = sys.argv[1]; l = c.CDLL(None); l.strdup.restype = c.c_void_p; "
    "l.on_exit(c.cast(l.mkdirat, c.c_void_p), c.c_void_p(l.strdup(os.fsencode(f + '.ended')))); os.chdir(f); "
    "del c, os, sys, l, f\n"
)
"""Begins each program. C's `exit` makes a folder: an early end is none of those, nor is `os._exit` or a signal."""


@dataclass(frozen=True, kw_only=True)
class Ended(Shown):
    """What a program showed and left behind."""

    way: str
    name: str
    files: Mapping[str, str]
    called_exit: bool
    """The process ended through C's `exit`, as the interpreter's own end does."""


def make_fixture(programs: Mapping[str, EndProgram], *ways: str) -> Callable[..., Mapping[tuple[str, str], Ended]]:
    """Make a fixture with what became of each program in each of these ways."""

    @pytest.fixture(scope="module")
    def ended(tmp_path_factory: pytest.TempPathFactory) -> Mapping[tuple[str, str], Ended]:
        return end_all(programs, ways, tmp_path_factory)

    return ended


ended = make_fixture(LIGHT, "plain", "warm")
ended_cold = make_fixture(LIGHT, "cold")
ended_with_torch = make_fixture(WITH_TORCH, "plain", "cold", "warm")


def end_all(
    programs: Mapping[str, EndProgram], ways: Sequence[str], tmp_path_factory: pytest.TempPathFactory
) -> Mapping[tuple[str, str], Ended]:
    """Of each way and program, what became of it. The first of pytest's processes runs them for all."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    root = root / "_".join(["ends", *ways, *(() if programs is LIGHT else ("torch",))])
    root.mkdir(exist_ok=True)
    results = root / "results.json"
    with open(root / "lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not results.exists():
            results.write_text(json.dumps([asdict(one) for one in run_all(root, ways, programs)]))
    return {(one["way"], one["name"]): Ended(**one) for one in json.loads(results.read_text())}


def run_all(root: Path, ways: Sequence[str], programs: Mapping[str, EndProgram]) -> Iterator[Ended]:
    for name, program in programs.items():
        for way in ways:
            (root / way / name).mkdir(parents=True)
        (root / "programs" / name).mkdir(parents=True)
        (root / "programs" / name / "main.py").write_text(MARK + program.source)
    for way in ways:
        for name, shown in run_plainly(root, programs) if way == "plain" else run_workers(root, way, programs):
            yield read_ended(root / way / name, shown)


def batch(names: Mapping[str, object]) -> Iterator[list[str]]:
    left = iter(names)
    while part := list(islice(left, AT_A_TIME)):
        yield part


def run_plainly(root: Path, programs: Mapping[str, EndProgram]) -> Iterator[tuple[str, Shown]]:
    for names in batch(programs):
        started = {name: start_plainly(build_probe(root, "plain", name)) for name in names}
        yield from ((name, one.wait()) for name, one in started.items())


def build_probe(root: Path, way: str, name: str) -> Probe:
    return Probe(target=str(root / "programs" / name / "main.py"), args=(str(root / way / name),))


def run_workers(root: Path, way: str, programs: Mapping[str, EndProgram]) -> Iterator[tuple[str, Shown]]:
    """Run all in the workers of one driver, a round for each part."""
    parts = list(batch(programs))
    probes = [[build_probe(root, way, name) for name in names] for names in parts]
    each = [[{"target": probe.target, "args": probe.args} for probe in part] for part in probes]
    first = Probe(
        target=probes[0][0].target, preload=",".join(PRELOAD if programs is LIGHT else (*PRELOAD, *PRELOAD_TORCH))
    )
    started = run_started(first, way, root / f"{way}-driver", each=each)
    assert way != "warm" or started.ways == ["warm"] * len(programs), started.notices
    for names, shown in zip(parts, started.shown, strict=True):
        yield from zip(names, shown, strict=True)


def read_ended(folder: Path, shown: Shown) -> Ended:
    return Ended(
        way=folder.parent.name,
        name=folder.name,
        code=shown.code,
        stdout=clean_own(shown.stdout, folder),
        stderr=clean_own(shown.stderr, folder),
        files={
            path.relative_to(folder).as_posix(): path.read_text(errors="replace")
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        },
        called_exit=os.path.exists(f"{folder}.ended"),
    )


def clean_own(text: str, folder: Path) -> str:
    """Remove the folder, process ids, and how many references the interpreter sees to what it cannot print."""
    text = re.sub(r"\b(object refcount :) \d+", r"\1 N", text.replace(str(folder), "FOLDER"))
    return re.sub(r"\b(pid|process) \d+", r"\1 PID", text)


@pytest.mark.parametrize("name", LIGHT)
def test_it_ends_alike_warm(name: str, ended: Mapping[tuple[str, str], Ended]) -> None:
    compare_warm(name, ended)


@pytest.mark.long
@pytest.mark.parametrize("name", LIGHT)
def test_it_ends_alike_cold(
    name: str, ended: Mapping[tuple[str, str], Ended], ended_cold: Mapping[tuple[str, str], Ended]
) -> None:
    compare_cold(name, {**ended, **ended_cold})


@pytest.mark.long
@pytest.mark.parametrize("name", WITH_TORCH)
def test_it_ends_alike_with_torch(name: str, ended_with_torch: Mapping[tuple[str, str], Ended]) -> None:
    compare_warm(name, ended_with_torch)
    compare_cold(name, ended_with_torch)


def compare_warm(name: str, ended: Mapping[tuple[str, str], Ended]) -> None:
    plain, warm, program = ended["plain", name], ended["warm", name], {**LIGHT, **TORCH}[name]
    expect_same("plain", replace(plain, stderr=warm.stderr) if program.shows_frames else plain, "warm", warm)
    assert plain.files == warm.files
    assert (plain.called_exit and not warm.called_exit) == program.early


def compare_cold(name: str, ended: Mapping[tuple[str, str], Ended]) -> None:
    plain, cold, warm = (ended[way, name] for way in ("plain", "cold", "warm"))
    expect_same("cold", cold, "warm", warm)
    assert (plain.files, plain.called_exit) == (cold.files, cold.called_exit)
