"""`python -m muster prune`: shows what jobs that have ended left behind, asks, and removes it."""

import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack

from muster._shared.contract import print_line
from muster.cli.adapters import describe_error
from muster.cli.answers import confirm, say
from muster.cli.leftovers import find_leftovers
from muster.schedulers.adapter.scheduler import Leftover
from muster.schedulers.errors import EngineError

_UNITS = ("B", "kB", "MB", "GB", "TB")


def prune(*, older_than_s: float, dry_run: bool, yes: bool) -> int:
    """Remove what jobs left behind.

    Args:
        older_than_s: only of jobs that ended at least this long ago.
        dry_run: remove nothing.
        yes: do not ask.

    Returns:
        The exit code: 1 if something could not be removed or the answer was no.
    """
    with ExitStack() as opened:
        try:
            found = find_leftovers(os.environ, ended_before_s=time.time() - older_than_s, opened=opened)
        except EngineError as error:
            say(str(error))
            return 1
        return _remove_all(found, dry_run=dry_run, yes=yes)


def _remove_all(found: Sequence[Leftover], *, dry_run: bool, yes: bool) -> int:
    """Show it, ask, and remove it. Return the exit code."""
    if not found:
        print("nothing to remove")
        return 0
    print_leftovers(found)
    if dry_run:
        return 0
    if not yes and not confirm(f"Remove {'it' if len(found) == 1 else 'all of it'}?", "remove this"):
        print("nothing was removed")
        return 1
    failed = sum(not _remove(each) for each in found)
    return 1 if failed else 0


def print_leftovers(found: Sequence[Leftover]) -> None:
    """Print one line for each, and the sum."""
    width = max(len(each.name) for each in found)
    for each in found:
        line = f"{each.name:{width}}  {format_size(each.size_bytes):>8}  {format_age(each.ended_s):>14}  {each.what}"
        print_line(line, sys.stdout)
    print_line(f"{len(found)} in all, {format_size(sum(each.size_bytes for each in found))} in files", sys.stdout)


def format_size(size_bytes: float) -> str:
    """Format a number of bytes: `1234567` as "1.2 MB"."""
    unit = 0
    while size_bytes >= 1000 and unit < len(_UNITS) - 1:
        size_bytes, unit = size_bytes / 1000, unit + 1
    return f"{size_bytes:.0f} B" if unit == 0 else f"{size_bytes:.1f} {_UNITS[unit]}"


def format_age(ended_s: float | None) -> str:
    """Return how long ago, in the largest unit that fits, for people."""
    if ended_s is None:
        return ""
    age_s = max(0.0, time.time() - ended_s)
    for unit_s, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if age_s >= unit_s:
            count = int(age_s // unit_s)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


def _remove(leftover: Leftover) -> bool:
    try:
        leftover.remove()
    except FileNotFoundError:  # another command has removed it
        pass
    except BlockingIOError:
        print_line(f"{leftover.name} stays: a job has begun to use it", sys.stdout)
    except Exception as error:  # noqa: BLE001  # it may be another package's
        print_line(f"{leftover.name} is not removed: {describe_error(error)}")
        return False
    return True
