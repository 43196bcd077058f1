"""Installed packages, for the few choices of the command line that name one.

The agent of a forked job starts without them (`python -S`, see `elastic.fork.tree`), because what they make Python run
at start takes longer than the interpreter's own start.
"""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def add_installed() -> None:
    """Make installed packages importable, if this process was started without them."""
    if sys.flags.no_site:
        import site  # already imported

        site.main()


def find_entry_points(group: str) -> "dict[str, EntryPoint]":
    """Find what installed packages offer in this group, by name."""
    add_installed()
    from importlib.metadata import entry_points  # 15 ms

    return {point.name: point for point in entry_points(group=group)}
