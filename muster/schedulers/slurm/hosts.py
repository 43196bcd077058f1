"""Node lists and times as Slurm writes them: `gpu[01-03,7],login`. Standard library only."""

import re
import time
from collections.abc import Iterator

_PART = re.compile(r"(?:[^,\[\]]|\[[^\]]*\])+")
_BRACKETS = re.compile(r"\[([^\]]*)\]")


def expand_hosts(text: str) -> list[str]:
    """Return the names in a node list, in its order.

    Raises:
        ValueError: it is no node list.
    """
    return [name for part in _PART.findall(text) for name in _expand(part)]


def parse_time(text: str) -> float | None:
    """Return Slurm's local time in wall-clock seconds. None: it is no time, such as `N/A`."""
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


def parse_fields(line: str) -> dict[str, str]:
    """Return the fields of a line of `scontrol -o show`."""
    return dict(word.partition("=")[::2] for word in line.split())


def _expand(part: str) -> Iterator[str]:
    found = _BRACKETS.search(part)
    if found is None:
        yield part
        return
    for numbers in found[1].split(","):
        first, _, last = numbers.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield from _expand(f"{part[: found.start()]}{number:0{len(first)}d}{part[found.end() :]}")
