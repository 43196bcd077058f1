"""A template on a node that is held: it imports torch before there is a program, and learns of one when a run comes.

What it has imported must be what the program's own imports would have found. Where it is not, it says why and ends, and
the agent starts another one: the program imports no torch, or other packages were installed meanwhile, or what lies
beside the program hides a module that is loaded already. Warnings of the imports are kept, and shown by the program's
own filters.
"""

import importlib
import json
import os
import socket
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from muster._shared.records import record
from muster.agent.workers.spec import Program, ProgramKind
from muster.agent.workers.warm import forked_worker

if TYPE_CHECKING:
    from muster.agent.workers.warm.import_sites import ImportSites

_MESSAGE_BYTES = 16


@record
class Held:
    """What a template has done before it had a program."""

    modules: tuple[str, ...]
    stamps: dict[str, int]
    warnings: tuple[Any, ...]


def import_without_program(requested: str) -> Held:
    """Import what nearly every program needs: torch, and what `--preload` names; what is not installed is left out."""
    import warnings

    names = ["torch" if name == "auto" else name for name in map(str.strip, requested.split(",")) if name]
    stamps = _read_stamps()
    shown: list[Any] = []
    shows = warnings._showwarnmsg_impl  # type: ignore[attr-defined]  # noqa: SLF001
    warnings._showwarnmsg_impl = shown.append  # type: ignore[attr-defined]  # noqa: SLF001
    try:
        imported = [name for name in names if _import(name)]
    finally:
        warnings._showwarnmsg_impl = shows  # type: ignore[attr-defined]  # noqa: SLF001
    return Held(modules=tuple(imported), stamps=stamps, warnings=tuple(shown))


def _import(name: str) -> bool:
    """False: it is not installed."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):
            return False
        raise
    return True


def receive_program(control: socket.socket) -> tuple[str, Program]:
    """Wait for the run: become what its processes inherit; the value of --preload, and the program."""
    _message, fds, _flags, _address = socket.recv_fds(control, _MESSAGE_BYTES, 2)
    if len(fds) < 2:
        os._exit(0)  # released, or the run starts cold
    with os.fdopen(fds[0], "rb") as file:
        file.seek(0)
        order = json.loads(file.read())
    os.dup2(fds[1], 0)
    os.close(fds[1])
    forked_worker.replace_environment(order["env"])
    forked_worker.apply_settings(order["settings"])
    kind, target, *args = order["program"]
    return order["preload"], Program(kind=ProgramKind(kind), target=target, args=tuple(args))


def find_obstacle(held: Held, modules: Iterable[str], folder: str | None) -> str | None:
    """Why this process cannot become the program's template; None: it can.

    Args:
        held: what it has done.
        modules: that the program's own template would import.
        folder: that the program's start has put first in `sys.path`.
    """
    more = [name for name in held.modules if name not in modules]
    if more:
        return f"the program does not import {more[0]}"
    changed = [path for path, stamp in _read_stamps().items() if held.stamps.get(path) != stamp]
    if changed:
        return f"packages in {changed[0]} have changed"
    if folder is not None:
        from muster.agent.workers.warm.late_changes import find_shadowed

        shadowed = find_shadowed([folder], sys.modules)
        if shadowed is not None:
            return f"{shadowed} hides a module that is loaded already"
    return None


def show_warnings(held: Held, sites: "ImportSites") -> None:
    """Show the warnings of the imports as the program's own import would have."""
    if not held.warnings:
        return
    import warnings

    from muster.agent.workers.warm.import_sites import apply_filters

    filters = sites.find("torch").filters
    for each in held.warnings if filters is not None else ():
        with apply_filters(filters) if filters else nullcontext():
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)


def _read_stamps() -> dict[str, int]:
    """When something was last installed or removed, by folder."""
    stamps = {}
    for path in sys.path:
        if os.path.basename(path) in ("site-packages", "dist-packages"):
            try:
                stamps[path] = os.stat(path).st_mtime_ns
            except OSError:
                continue
    return stamps
