"""The template: a Python process that has imported what the program will import, and forks workers from itself.

It runs from `program.main`. `serve` returns in each worker, in the interpreter's outermost frames, with the worker's
`WorkerSpec`. A worker starts like this::

    template --fork--> intermediate --fork--> worker (parked)   the intermediate ends: the worker is the agent's child
    agent    ------- release, over its own socket ------> worker runs the program

Control is a SOCK_SEQPACKET pair with one JSON object per message. The agent sends {"fork": n} with n sockets attached;
the template sends a `TemplateMessage`. A release is one byte with three descriptors: a memory file with the
`WorkerSpec`, standard output, and standard error. A release with a single descriptor makes the worker the store's
process instead, see `store`. On end of file the template and parked workers exit.
"""

import gc
import os
import socket
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Final

from muster._shared.records import record
from muster.agent.workers.spec import HELD, Program, ProgramKind, WorkerSpec
from muster.agent.workers.warm import fork_safety, forked_worker
from muster.agent.workers.warm.early_end import EarlyEnd
from muster.agent.workers.warm.forking import (
    exit_unsafe,
    exit_with_agent,
    fork_on_demand,
    send,
    wait_for_release,
)

# What these import, the program's folder may have too.
from muster.agent.workers.warm.import_sites import ImportSite, ImportSites, import_at_site, show_warnings
from muster.agent.workers.warm.preload import (
    EarlyImports,
    brings_torch,
    choose_modules,
    find_early_obstacle,
    import_early,
)

_LINE_CHARACTERS: Final = 500
_PAUSED_THRESHOLD: Final = 1_000_003
"""Hardly any import leaves so many objects. No module sets exactly this value, but one may multiply it."""


def serve(
    argv: list[str],
    *,
    prepare_main: Callable[[Program], None],
    rename_process: Callable[[list[str]], None],
) -> tuple[WorkerSpec, EarlyEnd]:
    """Import, then fork on demand, and return only in a worker that has been released and set up.

    Args:
        argv: control descriptor, the agent's pid, --preload, and the program's kind, target and arguments. The kind
            `HELD` has a module as its target, whose `serve` returns in a fork that becomes the template. The program
            comes later, see `preload.import_early`.
        prepare_main: see `workers.program`, which imports this module.
        rename_process: see `workers.program`.

    Returns:
        What this process is launched as, and what ends it when the program has ended.
    """
    early_end = EarlyEnd()
    control_fd, agent_pid, requested, kind, *target_argv = argv
    control = socket.socket(fileno=int(control_fd))
    control.set_inheritable(False)
    exit_with_agent(int(agent_pid))
    known = fork_safety.list_descriptors()
    early = None
    hazard = None
    if kind == HELD:
        rename_process(["muster-original"])
        original = import_module(target_argv[0])
        settings = original.thread_counts.read_settings(os.environ)
        early = _import_early(requested)
        copy = original.serve(control, early, known)
        rename_process(["muster-template"])
        control, agent_pid, known, hazard = copy.control, str(copy.agent_pid), copy.known, copy.hazard
        exit_with_agent(copy.agent_pid)
        requested, program = original.adopt_order(control, settings, early)
    else:
        program = Program(kind=ProgramKind(kind), target=target_argv[0], args=tuple(target_argv[1:]))
    rename_process(["muster-template", program.target])
    path_before = len(sys.path)
    prepare_main(program)
    first_folder = sys.path[0] if len(sys.path) > path_before else None
    before = _Before(known=known, early=early, folder=first_folder, hazard=hazard)
    modules = _import_all(control, requested, program, before)
    early_end.record_template()
    # Listed here: a worker that lists modules would copy their pages.
    own_modules = [name for name in sys.modules if name == "muster" or name.startswith("muster.")]
    send(control, {"ready": {"modules": modules, "pid": os.getpid(), "memory": _read_memory()}})
    parked = fork_on_demand(control, int(agent_pid))
    control.close()
    spec = wait_for_release(parked, rename_process)
    forked_worker.become_worker(spec)
    reports = spec.env.get("RANK", "0") == "0"
    check_late_changes = _watch_late_changes(early_end.template_modules, reports=reports)
    if first_folder in sys.path:
        sys.path.remove(first_folder)
    early_end.record_start(check_late_changes)
    for name in own_modules:
        sys.modules.pop(name, None)  # the program imports the installed ones
    return spec, early_end


# -- imports ----------------------------------------------------------------------------------------------------------


@record
class _Before:
    """What existed before the program's own imports."""

    known: frozenset[int]
    """Our descriptors."""
    early: EarlyImports | None
    folder: str | None
    """The folder that the program's start has put first in `sys.path`."""
    hazard: str | None
    """Why no worker may be forked from the original."""


def _import_early(requested: str) -> EarlyImports:
    """Import without a program."""
    thresholds = _pause_collections()
    early = import_early(requested)
    _resume_collections(thresholds)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    return early


def _import_all(control: socket.socket, requested: str, program: Program, before: _Before) -> list[str]:
    """Import the requested modules and prepare memory for forking; exit if forking cannot be safe."""
    thresholds = _pause_collections()
    preload = choose_modules(requested, kind=program.kind, target=program.target)
    if preload.notice:
        send(control, {"notice": preload.notice})
    sites = ImportSites(program.kind, program.target)
    if before.early is not None:
        obstacle = find_early_obstacle(before.early, preload.modules) or _find_hiding(before.folder)
        if obstacle is not None:
            send(control, {"refused": obstacle})
            os._exit(0)
        show_warnings(before.early.warnings, sites.find("torch"))
    hidden = sites.find_hidden()  # before its imports
    if hidden is not None:
        exit_unsafe(control, f"the program imports {hidden}, and another module of that name is loaded already")
    send(control, {"brings_torch": brings_torch(preload.modules)})
    imported = []
    for name in preload.modules:
        send(control, {"importing": name})
        failure = _import(name, sites.find(name))
        if failure is None:
            imported.append(name)
            continue
        send(control, {"notice": f"cannot preload {name}: {failure.line}; left to the workers"})
        if failure.partial:
            exit_unsafe(control, f"the import of {name} failed half-way")
    _resume_collections(thresholds)
    shadowed = _find_inserted(preload.files)
    if shadowed is not None:
        exit_unsafe(control, f"the program inserts the folder of {shadowed} into sys.path, and another is imported")
    reason = before.hazard or fork_safety.find_hazard(before.known)
    if reason is not None:
        exit_unsafe(control, reason)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    # No collection visits the existing objects, so workers share their pages.
    gc.freeze()
    return imported


def _pause_collections() -> tuple[int, int, int]:
    """Stop automatic collections until `_resume_collections`: they take a seventh of the time of importing torch.

    This sets the threshold instead of calling `gc.disable`, so that a module that disables the collector keeps its
    effect.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(_PAUSED_THRESHOLD, *thresholds[1:])
    return thresholds


def _resume_collections(thresholds: tuple[int, int, int]) -> None:
    """Restore the thresholds, unless a module has set its own."""
    if gc.get_threshold() == (_PAUSED_THRESHOLD, *thresholds[1:]):
        gc.set_threshold(*thresholds)


@record
class _ImportFailure:
    """Why an import failed."""

    line: str
    partial: bool
    """Whether parts of it may be in `sys.modules`: a second import would differ from one in a fresh process."""


def _import(name: str, site: ImportSite) -> _ImportFailure | None:
    """Import by name. A module that does not exist leaves nothing behind; any other failure may."""
    try:
        import_at_site(name, site)
    except BaseException as error:  # noqa: BLE001  # a user's module may raise anything, SystemExit too
        absent = isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}.")
        line = f"{type(error).__name__}: {error}".splitlines()[0][:_LINE_CHARACTERS]
        return _ImportFailure(line=line, partial=not absent)
    return None


def _read_memory() -> dict[str, int]:
    """Read this process's memory in bytes.

    The values are `rss_bytes` and `pss_bytes`; in the latter a shared page counts in equal parts for its processes.

    The template reads them instead of the agent, because the kernel visits every page, and waits for page faults that
    wait for a disk. The result is empty if the kernel has no such file. Source: proc(5), smaps_rollup.
    """
    try:
        with open("/proc/self/smaps_rollup", encoding="ascii") as file:
            rows = [line.split() for line in file]
    except OSError:
        return {}
    sizes = {row[0]: int(row[1]) * 1024 for row in rows if len(row) == 3 and row[2] == "kB"}
    return {"rss_bytes": sizes.get("Rss:", 0), "pss_bytes": sizes.get("Pss:", 0)}


def _find_hiding(folder: str | None) -> str | None:
    """Find a loaded module whose name is that of a file in the program's folder, which would be found first."""
    from muster.agent.workers.warm.late_changes import find_shadowed

    found = None if folder is None else find_shadowed([folder], sys.modules)
    return None if found is None else f"{found} hides a module that is loaded already"


def _find_inserted(files: tuple[str, ...]) -> str | None:
    if "torch" not in sys.modules:
        return None
    from muster.agent.workers.warm.late_changes import find_inserted

    return find_inserted(files)


def _watch_late_changes(modules: Mapping[str, ModuleType], *, reports: bool) -> Callable[[], object]:
    """Watch this worker, and return what to call at its end."""
    if "torch" not in sys.modules:
        return bool
    from muster.agent.workers.warm.late_changes import LateChanges

    return LateChanges(modules, reports=reports).check_path
