"""What commands do with an app: submit it, read its state, request its end, delete it. Any process, any shell.

Looking at an app changes nothing. An app whose supervisor has died is reported as lost. Its supervisor is started again
by what waits for the app, by what asks for its end, and by `muster recover`.
"""

import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from muster._shared import processes
from muster._shared.contract import show_controls
from muster._shared.folders import remove_folder
from muster._shared.foreign_files import read_regular
from muster._shared.ownership import make_folders
from muster.schedulers.errors import EngineError
from muster.schedulers.interrupts import raise_dropped_interrupts
from muster.schedulers.supervision.app_folder import (
    INTERRUPT_WORD,
    LENT_FDS,
    AppFolder,
    AppRecord,
    AppSpec,
    StateError,
    is_own_app_folder,
)
from muster.schedulers.supervision.machine import Machine
from muster.schedulers.supervision.registry import AppRegistry
from muster.schedulers.supervision.state import AppPhase
from muster.schedulers.wording.reasons import Code, Reason
from muster.schedulers.wording.words import word

LOG_TAIL_LIMIT_BYTES = 2000
INTERRUPT_POLL_S = 1.0
"""A signal between Python's last look for one and the system call does not end that."""
OTHER_HOST_POLL_S = 0.2
RECOVERS = "recovers"
"""The word by which a supervisor is started for `muster recover`."""
RESTART_INTERVAL_S = 1.0
"""Between two starts of one app's supervisor."""

logger = logging.getLogger(__name__)


def submit(
    spec: AppSpec,
    registry: AppRegistry,
    files: Mapping[str, bytes | Path] | None = None,
    lent_fds: Mapping[str, Sequence[int]] | None = None,
) -> None:
    """Create the app's folder, start its supervisor, wait until it has started all replicas.

    Args:
        spec: what to run.
        registry: where later commands find the app.
        files: name -> content of the driver's own files, or a file with it, put beside the state before the supervisor
            starts.
        lent_fds: descriptors that the driver inherits, see `driver.take_lent_fds`.

    Raises:
        EngineError: it could not be started. Nothing of the app is left then.
        FileExistsError: the app exists already.
        UnsafeFolderError: another user could change or replace its folder.
    """
    folder = AppFolder(spec.folder)
    AppRegistry.check(folder.path)
    make_folders(folder.path.parent, 0o755)
    folder.create(spec)
    with ExitStack() as undo:
        undo.callback(_roll_back, folder, spec, registry)
        with raise_dropped_interrupts():
            for name, content in (files or {}).items():
                _put_file(folder.state_dir / name, content)
            registry.add(spec.app_id, folder.path)
            start_supervisor(folder, spec, lent_fds=lent_fds)
        undo.pop_all()


def _put_file(path: Path, content: bytes | Path) -> None:
    if isinstance(content, bytes):
        path.write_bytes(content)
        return
    try:
        # A packed workspace may be large. With any descriptor, `link` follows a path of /proc to a file without a name.
        os.link(content, path, src_dir_fd=0)
    except OSError:
        shutil.copyfile(content, path)


def _roll_back(folder: AppFolder, spec: AppSpec, registry: AppRegistry) -> None:
    folder.write_request("kill")
    folder.send_request("kill")
    wait_ended(folder, limit_s=10.0)
    registry.remove(spec.app_id)
    remove_folder(folder.path, ignores_errors=True)


def start_supervisor(
    folder: AppFolder,
    spec: AppSpec,
    *,
    recovers: bool = False,
    lent_fds: Mapping[str, Sequence[int]] | None = None,
) -> None:
    """Start the supervisor of an app and wait until it has started the replicas. A running one is kept.

    Args:
        folder: the app's.
        spec: the app.
        recovers: what has ended is started again without a retry, and the app does not end with the command that
            submitted it, which may be gone, too. What still runs is adopted in any case.
        lent_fds: see `submit`.

    Raises:
        EngineError: it ended before that. The message has the last line of its log.
    """
    ready_read, ready_write = os.pipe()
    # `-m` and `-c` would put the user's selectors.py before the standard library's.
    program = (
        f"import sys; sys.path[:] = [*(path for path in sys.path if path), {spec.import_root!r}]\n"
        "from muster.schedulers.supervision import supervisor\n"
        "supervisor.main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])"
    )
    old_log_bytes = folder.log_file.stat().st_size if folder.log_file.exists() else 0
    try:
        subprocess.run(
            [spec.python, "-c", program, str(folder.path), str(ready_write), *([RECOVERS] if recovers else [])],
            stdin=subprocess.DEVNULL,
            cwd=folder.path,
            env={**os.environ, LENT_FDS: json.dumps(dict(lent_fds))} if lent_fds else None,
            pass_fds=(ready_write, *(fd for fds in (lent_fds or {}).values() for fd in fds)),
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        os.close(ready_read)
        raise EngineError(f"cannot start a supervisor process: {error}") from error
    finally:
        os.close(ready_write)
    with open(ready_read, "rb") as ready:
        answer = ready.read().decode(errors="replace")
    if answer != "ok":
        why = answer or _read_last_line(folder, old_log_bytes)
        raise EngineError(f"the supervisor of {spec.app_id} ended early: {why}")


def _read_last_line(folder: AppFolder, skip_bytes: int) -> str:
    """Return the last line the supervisor wrote: of a traceback, the error."""
    try:
        left_bytes = folder.log_file.stat().st_size - skip_bytes
        tail_bytes = min(LOG_TAIL_LIMIT_BYTES, left_bytes)
        text = read_regular(folder.log_file, tail_bytes, -tail_bytes).decode(errors="replace") if tail_bytes > 0 else ""
    except OSError:
        text = ""
    lines = text.strip().splitlines()
    return lines[-1] if lines else "its log is empty"


def read_app(folder: AppFolder) -> tuple[AppSpec, AppRecord | None]:
    """Return an app and its current state.

    Raises:
        FileNotFoundError: no app here.
        EngineError: the files are damaged, or have another format.
    """
    try:
        return folder.read_spec(), folder.read_record()
    except StateError as error:
        raise EngineError(str(error)) from error


def revive_app(folder: AppFolder) -> tuple[AppSpec, AppRecord | None]:
    """Return an app and its current state. Start its supervisor again if that has died.

    Replicas that have ended count as lost: they use retries.

    Raises:
        FileNotFoundError: no app here.
        EngineError: the supervisor died and cannot be started again, or see `read_app`.
    """
    spec, record = read_app(folder)
    if not is_lost(folder, record):
        return spec, record
    _wait_before_restart(folder)
    start_supervisor(folder, spec)
    return read_app(folder)


def is_lost(folder: AppFolder, record: AppRecord | None) -> bool:
    """Return whether the app has not ended, and its supervisor has."""
    if record is None or has_ended(record) or is_supervised(folder, record) is not False:
        return False
    latest = folder.read_record()  # it may have ended, or been replaced
    return latest is not None and not has_ended(latest) and is_supervised(folder, latest) is False


def find_loss(folder: AppFolder, record: AppRecord | None) -> Reason | None:
    """Return what is known of the loss of an app's supervisor. None: it runs, or the app has ended."""
    if record is None or not is_lost(folder, record):
        return None
    files = (folder.state_file, folder.log_file, folder.lock_file)
    seen_s = max((path.stat().st_mtime for path in files if path.exists()), default=record.submitted_s)
    running = len(record.app.running())
    return Reason(code=Code.SUPERVISOR_LOST, at_s=seen_s, count=running, job=folder.path.name)


def has_ended(record: AppRecord | None) -> bool:
    """Return whether the app has ended, logs and all."""
    return record is not None and record.app.phase is AppPhase.ENDED


def is_supervised(folder: AppFolder, record: AppRecord) -> bool | None:
    """Return whether the app's supervisor runs. None: on another machine, where this cannot be seen."""
    here = Machine.here()
    if here.shows_pids_of(record.machine):
        return record.supervisor is not None and record.supervisor.is_alive()
    if here.shares_kernel_with(record.machine):
        return folder.is_locked()  # another container or host name
    return False if here.is_later_boot_of(record.machine) else None


def runs_here(record: AppRecord) -> bool:
    """Return whether the app's supervisor is a process that this one can wait for."""
    return Machine.here().shows_pids_of(record.machine)


def _wait_before_restart(folder: AppFolder) -> None:
    """Wait until `RESTART_INTERVAL_S` has passed since the last start: a supervisor may die at once every time."""
    try:
        age_s = time.time() - folder.lock_file.stat().st_mtime  # every supervisor opens it anew
    except FileNotFoundError:
        return
    if 0 <= age_s < RESTART_INTERVAL_S:
        time.sleep(RESTART_INTERVAL_S - age_s)


def request_stop(folder: AppFolder, request: str = "cancel", *, sends: str = "") -> OSError | None:
    """Ask the supervisor to end the app, and return at once.

    Args:
        folder: the app's.
        request: "cancel" (politely, one grace period), `INTERRUPT_WORD` (the same, by a Ctrl-C), or "kill". It is
            recorded for the case that the supervisor dies.
        sends: what a supervisor that runs is told instead. "": the same.

    Returns:
        None, or why the request could not be recorded. The supervisor that runs carries it out all the same.

    Raises:
        EngineError: none runs, and none can be started that would end the app.
    """
    refusal = folder.write_request(request)
    if not folder.send_request(sends or request):
        if refusal is not None:  # a new one would go on with the app
            why = f"{folder.path}: {refusal.strerror}"
            line = f"no supervisor runs, and the request cannot be kept for a new one: {why}"
            raise EngineError(line) from refusal
        revive_app(folder)
    return refusal


def wait_ended(folder: AppFolder, *, limit_s: float) -> bool:
    """Wait until an app has ended. Return False if the limit expires first.

    A supervisor that dies is started again, so that the app does end.
    """
    deadline_s = time.monotonic() + limit_s
    while True:
        record = folder.read_record() if is_own_app_folder(folder.path) else None
        if record is None or has_ended(record):
            return True
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return False
        if is_supervised(folder, record) is False:
            revive_app(folder)
        elif record.supervisor is None or not runs_here(record):
            time.sleep(min(left_s, OTHER_HOST_POLL_S))  # writes on another machine are not announced
        else:
            _wait_process(record.supervisor.pid, min(left_s, INTERRUPT_POLL_S))


def _wait_process(pid: int, limit_s: float) -> None:
    """Wait for the end of a process that need not be our child."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        processes.wait_readable(pidfd, limit_s)
    finally:
        os.close(pidfd)


def end_all(folders: Iterable[AppFolder], *, flush_s: float) -> None:
    """Stop apps politely and wait for their ends. An interrupt kills them.

    If a Ctrl-C is ending the program, their agents get SIGINT, else SIGTERM.

    Args:
        folders: of the apps. Apps that have ended or been deleted are skipped.
        flush_s: the time an end may take beyond the grace period.

    Raises:
        KeyboardInterrupt: after the kill, unless an earlier one is ending the program already.
    """
    left = [folder for folder in folders if folder.spec_file.exists() and not has_ended(folder.read_record())]
    request = INTERRUPT_WORD if isinstance(sys.exc_info()[1], KeyboardInterrupt) else "cancel"
    try:
        for folder in left:
            with _report_each():
                grace_s = folder.read_spec().longest_grace_s
                logger.info("stopping %s, up to %g s; Ctrl-C again kills", folder.path.name, grace_s)
                request_stop(folder, request)
        for folder in left:
            with _report_each():
                wait_ended(folder, limit_s=folder.read_spec().longest_grace_s + flush_s)
    except KeyboardInterrupt as interrupt:
        for folder in left:
            with _report_each():
                request_stop(folder, "kill")
        for folder in left:
            with _report_each():
                wait_ended(folder, limit_s=flush_s)
        if not isinstance(interrupt.__context__, KeyboardInterrupt):
            raise


@contextmanager
def _report_each() -> Iterator[None]:
    """Report errors of each app: one that cannot be stopped keeps no other one running.

    Each supervisor sees that the owner has ended, too.
    """
    try:
        yield
    except FileNotFoundError:  # another shell has deleted it
        return
    except (EngineError, StateError, OSError) as error:
        logger.warning("%s", error)


def has_ended_logs(folder: AppFolder, *, keeps: bool = False) -> bool:
    """Return whether an app has ended, with complete logs, or was deleted.

    Args:
        folder: the app's.
        keeps: this process submitted the app: it starts a supervisor that has died again. For all others a lost app has
            ended: nothing follows in its logs.
    """
    try:
        record = folder.read_record()
        lost = find_loss(folder, record)
        if lost is not None and not keeps:
            logger.warning("%s: %s", folder.path.name, show_controls(word(lost)))
            return True
        if lost is not None:
            _, record = revive_app(folder)
    except FileNotFoundError:
        return True
    except (EngineError, StateError):
        return False
    return has_ended(record) or (record is None and not folder.spec_file.exists())


def delete(folder: AppFolder, registry: AppRegistry, app_id: str) -> None:
    """Stop an app if it runs, then remove its folder, logs and all.

    Raises:
        EngineError: it could not be stopped. Nothing is removed then.
    """
    try:
        ended, grace_s = has_ended(folder.read_record()), folder.read_spec().longest_grace_s
    except StateError:
        ended, grace_s = True, 0.0  # no supervisor of today can run it
    if not ended:
        request_stop(folder, "cancel")
        if not wait_ended(folder, limit_s=grace_s + 30.0):
            raise EngineError(f"{app_id} did not end within its grace period of {grace_s:g} s; not deleted")
    if is_own_app_folder(folder.path):
        remove_folder(folder.path)
    registry.remove(app_id)
