"""What can be imported: whether the program of a job exists, before any worker is started, and installed packages.

It is standard library only, and does not import the program. The agent of a forked job starts without packages
(`python -S`, see `elastic.fork.tree`), because what they make Python run at start takes longer than the interpreter's
own start.
"""

import os
import sys
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def explain_missing(kind: str, target: str, cwd: str) -> str | None:
    """Say in one line that a program does not exist. Return None if it does, or if that cannot be known.

    Args:
        kind: "script" or "module".
        target: the script's path or the module's dotted name.
        cwd: where the program will run.
    """
    if kind == "script":
        return None if os.path.exists(os.path.join(cwd, target)) else f"no such script: {target} (in {cwd})"
    return None if _has_module(target, cwd) else f"no module named {target!r}: neither in {cwd} nor in {sys.prefix}"


def _has_module(name: str, cwd: str) -> bool:
    """Search as `python -m` does, but import no parent package: that would run the user's code here."""
    top, *rest = name.split(".")
    spec = _find_top(top, cwd)
    full = top
    for word in rest:
        full = f"{full}.{word}"
        if spec is None or spec.submodule_search_locations is None:
            return spec is not None and spec.origin in ("built-in", "frozen")
        # A package may extend its __path__ when imported.
        try:
            spec = PathFinder.find_spec(full, list(spec.submodule_search_locations)) or _find_init(spec)
        except KeyError:  # only an imported package knows its folders
            return True
        if spec is not None and spec.name != full:
            return True
    return spec is not None


def _find_top(name: str, cwd: str) -> Any:
    for finder in sys.meta_path:
        spec = finder.find_spec(name, None) if hasattr(finder, "find_spec") else None
        if spec is not None:
            return spec
    variable = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return PathFinder.find_spec(name, [cwd, *(path for path in variable if path)])


def _find_init(spec: Any) -> Any:
    """Return the package itself when its own code may change where its modules are found."""
    if spec.origin is None or not os.path.isfile(spec.origin):
        return None
    with open(spec.origin, "rb") as file:
        return spec if b"__path__" in file.read() else None


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
