"""Where the time of tests goes, and which failed, from the JUnit XML of `make test`.

python tests/durations.py [FOLDER]                  # of the last run: build/junit
python tests/durations.py [FOLDER] --before OTHER   # what became slower or faster since a run whose files were kept
"""

import argparse
import sys
import xml.etree.ElementTree as ET  # of our own files
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SLOWEST = 30
SAID_LINES = 12


def read_durations(folder: Path) -> dict[tuple[str, str], float]:
    """Read the seconds of each test, set-up and clean-up included.

    Args:
        folder: has one file for each run of pytest; the name of a file is that of its part, as in `processes.xml`.

    Returns:
        seconds by part and test, as in `("nightly", "tests/unit/test_codec.py::test_a_list")`.
    """
    seconds: Counter[tuple[str, str]] = Counter()
    for path in sorted(folder.glob("*.xml")):
        for case in ET.parse(path).iter("testcase"):
            test = f"{_find_class(case.get('classname', ''))}::{case.get('name')}"
            seconds[path.stem, test] += float(case.get("time", 0))
    return dict(seconds)


def _find_class(name: str) -> str:
    """Turn `tests.unit.test_codec.TestLists` into `tests/unit/test_codec.py::TestLists`."""
    parts = name.split(".")
    at = next((index for index, part in enumerate(parts) if part.startswith("test_")), len(parts) - 1)
    return "/".join(parts[: at + 1]) + ".py" + "".join(f"::{part}" for part in parts[at + 1 :])


def sum_folders(seconds: dict[tuple[str, str], float]) -> Counter[tuple[str, str]]:
    """Sum by part and folder."""
    sums: Counter[tuple[str, str]] = Counter()
    for (part, test), value in seconds.items():
        sums[part, test.partition("::")[0].rpartition("/")[0]] += value
    return sums


def print_run(seconds: dict[tuple[str, str], float]) -> None:
    """Print the slowest tests and the sums."""
    print(f"The {SLOWEST} slowest of {len(seconds)} tests (seconds):")
    for (part, test), value in Counter(seconds).most_common(SLOWEST):
        print(f"{value:7.1f}  {part:10} {test}")
    print("Seconds of tests by folder:")
    for (part, folder), value in sum_folders(seconds).most_common():
        print(f"{value:7.1f}  {part:10} {folder}")
    print(f"{sum(seconds.values()):7.1f}  in all")


def print_failures(folder: Path) -> None:
    """Print each test that failed, and what it said."""
    for path in sorted(folder.glob("*.xml")):
        for case in ET.parse(path).iter("testcase"):
            for failure in (*case.iter("failure"), *case.iter("error")):
                print(f"FAILED {path.stem} {_find_class(case.get('classname', ''))}::{case.get('name')}")
                print("\n".join((failure.text or failure.get("message") or "").splitlines()[-SAID_LINES:]))


def print_changes(now: dict[tuple[str, str], float], before: dict[tuple[str, str], float]) -> None:
    """Print what differs most between two runs."""
    for title, new, old in (("folder", sum_folders(now), sum_folders(before)), ("test", Counter(now), Counter(before))):
        changes = {key: new[key] - old[key] for key in new.keys() | old.keys()}
        print(f"By {title}: seconds before, now")
        for key in sorted(changes, key=lambda key: -abs(changes[key]))[:SLOWEST]:
            print(f"{old[key]:8.1f} {new[key]:8.1f}  {key[0]:10} {key[1]}")
    print(f"{sum(before.values()):8.1f} {sum(now.values()):8.1f}  in all")


def main() -> None:
    """Print one run, or what has changed since another."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", metavar="FOLDER", nargs="?", type=Path, default=ROOT / "build" / "junit")
    parser.add_argument("--before", metavar="OTHER", type=Path, help="the files of another run")
    args = parser.parse_args()
    now = read_durations(args.folder)
    if not now:
        sys.exit(f"no JUnit XML in {args.folder}: `make test` writes it")
    if args.before is None:
        print_run(now)
        print_failures(args.folder)  # last: of a long log the end is read
    else:
        print_changes(now, read_durations(args.before))


if __name__ == "__main__":
    main()
