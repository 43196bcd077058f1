"""Puts the seeded faults of `faults.txt` into the product, one at a time, and records which test catches each.

    .venv/bin/python tests/mutations/run.py                                  the tests that each fault names
    .venv/bin/python tests/mutations/run.py --rest tests/unit tests/process  then all of these, until one fails
    .venv/bin/python tests/mutations/run.py --check                          only whether all faults can be applied
    .venv/bin/python tests/mutations/run.py --part 1/2                       the first half, in a copy of its own

A run goes on where the last one ended: what is in the file of results is not run again. At the end it names the faults
that `baseline.txt` has as caught and that are not. What follows unknown arguments goes to pytest.
"""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT))

from muster._shared import processes  # noqa: E402  # before a fault is in it

CAUGHT, MISSED, ANCHOR, LIMIT, FAILS_ANYHOW, ENGINE = "caught", "missed", "anchor", "limit", "fails-anyhow", "engine"
"""Results. `limit`: the tests did not end. `fails-anyhow`: the test that failed also fails without the fault.
`engine`: missed, and the fault is in an adapter whose other tests need an engine that is not here."""


class Fault(NamedTuple):
    """One text of the product, which occurs once, and what stands there instead."""

    name: str
    file: Path
    old: str
    new: str
    tests: tuple[str, ...]
    engine: tuple[str, ...]

    def apply(self) -> str | None:
        """Return the text of the file with the fault, None if the old text is not there exactly once."""
        text = self.file.read_text() if self.file.exists() else ""
        return text.replace(self.old, self.new) if text.count(self.old) == 1 else None


def read_faults() -> list[Fault]:
    """Read the blocks of `faults.txt`."""
    faults = []
    for block in re.split(r"\n\s*\n", (HERE / "faults.txt").read_text()):
        lines = [line for line in block.splitlines() if line and not line.startswith("#")]
        if not lines:
            continue
        fields = dict(line.split(": ", 1) for line in lines if line[0] not in "-+")
        old, new = ("\n".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
        tests, engine = (tuple(f"tests/{each}" for each in fields.get(key, "").split()) for key in ("tests", "engine"))
        faults.append(Fault(fields["name"], ROOT / fields["file"], old, new, tests, engine))
    return faults


@contextlib.contextmanager
def put_in(fault: Fault, text: str) -> Iterator[None]:
    """Have the fault in the product for a while. The file gets its old time again, so that no `.pyc` file is stale."""
    before, stat = fault.file.read_text(), fault.file.stat()
    try:
        fault.file.write_text(text)
        yield
    finally:
        fault.file.write_text(before)
        os.utime(fault.file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def run_pytest(tests: list[str], args: argparse.Namespace, limit_s: float) -> tuple[str, str]:
    """Run tests until one fails. Return the result and the test."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=no", "--timeout", str(args.timeout)]
    try:
        done = subprocess.run(
            [*command, "-m", args.marker, *args.pytest, *tests],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=limit_s,
            text=True,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return LIMIT, f"{limit_s:g} s"
    finally:
        end_leftovers()
    found = re.search(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if done.returncode == 4 and any("::" in each for each in tests):  # one has another name now
        return run_pytest([each.split("::")[0] for each in tests], args, limit_s)
    if done.returncode in (0, 5):
        return MISSED, ""
    return CAUGHT, found[1] if found else f"pytest ended with {done.returncode}"


def end_leftovers() -> None:
    """Kill what the tests have left behind: a fault may be just that."""
    for _ in range(100):
        left = processes.kill_descendants(os.getpid())
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not left:
            return
        time.sleep(0.05)


def try_fault(fault: Fault, args: argparse.Namespace, known: str) -> tuple[str, str]:
    """Run the tests of a fault. Return the result and the test.

    First comes the test that has caught it before (`known`), then the unit tests, then the others, then the rest.
    """
    text = fault.apply()
    if text is None:
        return ANCHOR, str(fault.file.relative_to(ROOT))
    changes = subprocess.run(["git", "status", "--porcelain", "--", fault.file], cwd=ROOT, capture_output=True)
    if changes.returncode or changes.stdout:
        sys.exit(f"{fault.file} has changes that are not committed; nothing was done to it")
    present = [each for each in fault.tests if (ROOT / each.split("::")[0]).exists()]
    units = [each for each in present if each.startswith("tests/unit")]
    stages = {
        "known": ([known] if is_there(known) else [], args.limit),
        "unit": (units, args.limit),
        "process": ([each for each in present if each not in units], args.limit),
        "rest": (args.rest, args.rest_limit),
    }
    result, test = MISSED, ""
    for tests, limit_s in map(stages.__getitem__, args.stages):
        if tests:
            with put_in(fault, text):
                result, test = run_pytest(list(tests), args, limit_s)
        if result != MISSED:
            break
    is_sure = not test.startswith("tests/") or test.startswith("tests/unit")
    if result == CAUGHT and not is_sure and run_pytest([test], args, args.limit)[0] != MISSED:
        result = FAILS_ANYHOW
    return (ENGINE, " ".join(fault.engine)) if result == MISSED and fault.engine else (result, test)


def is_there(test: str) -> bool:
    """Return whether a test still has this name."""
    path, name = ROOT / test.partition("::")[0], re.search(r"::(test\w*)", test)
    return name is not None and path.exists() and f"def {name[1]}(" in path.read_text()


def read_results(path: Path) -> dict[str, list[str]]:
    """Read a file of results: for each fault the result, the fault, the seconds and the test."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [line.split(maxsplit=3) for line in lines if line and not line.startswith("#")]
    return {row[1]: row for row in rows}


def check(faults: list[Fault]) -> int:
    """Say which faults cannot be applied, or make no Python. Return their number."""
    bad = 0
    names = [fault.name for fault in faults]
    for fault in faults:
        text, said = fault.apply(), ""
        if text is None:
            said = "its old text does not occur exactly once"
        elif names.count(fault.name) > 1:
            said = "its name occurs twice"
        else:
            try:
                compile(text, str(fault.file), "exec")
            except SyntaxError as error:
                said = str(error)
        missing = [each for each in (*fault.tests, *fault.engine) if not (ROOT / each.split("::")[0]).exists()]
        if missing:
            print(f"{fault.name}: no longer there: {' '.join(missing)}")
        if said:
            bad += 1
            print(f"{fault.name} ({fault.file.relative_to(ROOT)}): {said}")
    return bad


def main() -> int:
    """Run all faults that have no result yet. Return 1 if one that was caught before is not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="apply no fault")
    stages = ["known", "unit", "process", "rest"]
    parser.add_argument("--stages", nargs="*", default=stages, choices=stages, help="only these tests of a fault")
    parser.add_argument("--rest", nargs="*", default=[], help="what runs if the named tests miss a fault")
    parser.add_argument("--again", nargs="*", default=[], metavar="NAME", help="faults, or results, to run again")
    parser.add_argument("--only", default="", metavar="REGEX", help="only faults whose name matches")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="each n-th fault; run parts in copies")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no fault after that time; exit with 3")
    parser.add_argument("--marker", "-m", default="not long")
    parser.add_argument("--timeout", type=int, default=60, help="seconds for a test")
    parser.add_argument("--limit", type=float, default=400, help="seconds for a run of named tests")
    parser.add_argument("--rest-limit", type=float, default=1800)
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "mutations.txt")
    parser.add_argument("--baseline", type=Path, default=HERE / "baseline.txt")
    args, args.pytest = parser.parse_known_args()
    processes.become_subreaper()
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda number, _frame: sys.exit(128 + number))
    faults, begun_s = read_faults(), time.monotonic()
    bad = check(faults)
    if args.check:
        print(f"{len(faults)} faults, {bad} cannot be applied")
        return int(bad > 0)
    part, parts = map(int, args.part.split("/"))
    faults = [each for each in faults[part - 1 :: parts] if re.search(args.only, each.name)]
    results, before = read_results(args.results), read_results(args.baseline)
    for number, fault in enumerate(faults, 1):
        known = results.get(fault.name)
        if known and not {*known[:2]} & {*args.again}:
            continue
        if time.monotonic() - begun_s > 60 * args.minutes:
            return 3
        before_s = time.monotonic()
        earlier = before.get(fault.name, [""])
        result, test = try_fault(fault, args, earlier[3] if earlier[0] == CAUGHT else "")
        results[fault.name] = [result, fault.name, f"{time.monotonic() - before_s:.0f}s", test]
        args.results.parent.mkdir(parents=True, exist_ok=True)
        rows = ["{:12} {:46} {:>5} {}".format(*row, "").rstrip() for row in results.values()]
        args.results.write_text("\n".join(rows) + "\n")
        print(f"{number}/{len(faults)}", *results[fault.name], flush=True)
    lost = [each.name for each in faults if before.get(each.name, [""])[0] == CAUGHT != results[each.name][0]]
    caught = sum(results[each.name][0] == CAUGHT for each in faults)
    print(f"{caught} of {len(faults)} caught")
    for name in lost:
        print(f"caught in {args.baseline.name}, now not: {' '.join(results[name])}")
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())
