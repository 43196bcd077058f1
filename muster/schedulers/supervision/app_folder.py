"""The files of one app's folder and their content. The supervisor writes them, every command reads them.

<role>/<index>/  stdout.log stderr.log combined.log, and what the replica's agent adds; the rest is in `.muster/`:

spec.json      what was submitted; never changes
private.json   the part with secrets (environments, the job's token); only the owner can read it, removed at the end
state.json     the app's state; replaced atomically at every transition
control        a named pipe: one line per request, read by the supervisor
stop.request   "cancel", "interrupt" or "kill": a request that the next supervisor finds if this one is dead
lock           held by the one supervisor
resize.lock    held by the command that resizes the app, until its request is recorded
supervisor.log errors of the supervisor itself (normally empty)

The driver's own files (the agent's bundle, Docker's workspaces) lie beside these. A role's folder has the role's name,
with one more dot if the name begins with a dot. So no role's folder is `.muster`.

Over 400 lines: one place names the files and says what is in them.
"""

import contextlib
import fcntl
import json
import os
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from muster._shared import processes
from muster._shared.contract import FORMAT, FormatError, check_format
from muster._shared.folders import remove_folder
from muster._shared.foreign_files import parse_json, read_whole
from muster.schedulers.supervision.machine import Machine
from muster.schedulers.supervision.state import (
    AppPhase,
    Outcome,
    ReplicaId,
    ReplicaState,
    ReplicaStatus,
    RetryScope,
    SupervisedApp,
    SupervisedRole,
)
from muster.schedulers.wording.reasons import parse_reasons, to_data

STATE_DIR_NAME = ".muster"
"""The folder inside an app's folder for all files that are not a role's."""

DRAIN_WORD = "drain:"
"""Begins a request to the supervisor: the app ends, and the agents have the given seconds to stop at one step."""

RESIZE_WORD = "resize:"
"""Begins a request to the supervisor: `resize:NODES:ROLE`, the role's name with percent escapes."""

INTERRUPT_WORD = "interrupt"
"""A request to the supervisor: a cancel by Ctrl-C at the command that the app belongs to."""

LENT_FDS = "MUSTER_LENT_FDS"
"""Variable of a supervisor: JSON, the descriptors that its submission has lent to the driver, by name."""

_SPEC_NAME = "spec.json"

_LIMIT_BYTES = 256 << 20
"""The limit for a file that is read. A larger one is no file of ours."""


class StateError(ValueError):
    """A file of an app's folder is damaged, or has another format. `str()` names it."""


@dataclass(frozen=True, kw_only=True)
class ProcessId:
    """Identifies one process for good: the system reuses a pid, but not a pid with its start time."""

    pid: int
    start_ticks: str
    """Field 22 of /proc/<pid>/stat."""

    @staticmethod
    def of(pid: int) -> "ProcessId | None":
        """Return the process that has this pid now, or None if there is none."""
        fields = processes.read_stat(pid)
        return None if fields is None else ProcessId(pid=pid, start_ticks=fields[19])

    def is_alive(self) -> bool:
        """Return whether exactly this process still runs (a zombie does not)."""
        fields = processes.read_stat(self.pid)
        return fields is not None and fields[19] == self.start_ticks and fields[0] not in ("Z", "X")


@dataclass(frozen=True, kw_only=True)
class AppSpec:
    """Everything a supervisor must know about its app."""

    app_id: str
    scheduler: str
    """Name under which it was submitted: local_cwd, detached, local_docker, ..."""
    folder: str
    """Absolute path of the app's folder."""
    driver: str
    """`package.module:function`, a `driver.DriverFactory`."""
    roles: tuple[SupervisedRole, ...]
    grace_s: float
    """From the polite signal to the kill."""
    owner: ProcessId | None = None
    """The app ends when this process ends. None: it keeps running (detached)."""
    python: str = sys.executable
    """Interpreter of the supervisor, also when a command of another environment starts it again."""
    import_root: str = str(Path(__file__).resolve().parents[3])
    """Folder that holds the package `muster`: the last place where the supervisor looks for modules."""
    description: Mapping[str, Any] = field(default_factory=dict)
    """What `describe` shows: the AppDef, without secrets. JSON."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """The driver's own data: commands, environments, images.

    It is JSON, kept in private.json, and empty after the app's end.
    """

    def encode(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the contents of spec.json and private.json."""
        content = asdict(self) | {"format": FORMAT}
        details = content.pop("details")
        return content, details


@dataclass(frozen=True, kw_only=True)
class AppRecord:
    """The recorded state of an app."""

    app: SupervisedApp
    machine: Machine
    supervisor: ProcessId | None = None
    """The last supervisor, dead or alive. None: there was none yet."""
    handles: Mapping[ReplicaId, Mapping[str, Any]] = field(default_factory=dict)
    """How the driver finds running replicas."""
    hosts: Mapping[ReplicaId, str] = field(default_factory=dict)
    """Other machines on which replicas ran that have no handle any more."""
    submitted_s: float = 0.0
    """Wall-clock seconds, for people."""
    ended_s: float | None = None

    def find_hosts(self) -> dict[ReplicaId, str]:
        """Return the machine of each replica that runs, or ran, on another one than its supervisor."""
        before = {each: host for each, host in self.hosts.items() if each not in self.handles}
        return before | {each: handle["host"] for each, handle in self.handles.items() if "host" in handle}


class AppFolder:
    """Names, reads and writes the files of one app."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.state_dir = self.path / STATE_DIR_NAME
        self.spec_file = self.state_dir / _SPEC_NAME
        self.private_file = self.state_dir / "private.json"
        self.state_file = self.state_dir / "state.json"
        self.control_pipe = self.state_dir / "control"
        self.request_file = self.state_dir / "stop.request"
        self.lock_file = self.state_dir / "lock"
        self.resize_lock_file = self.state_dir / "resize.lock"
        self.log_file = self.state_dir / "supervisor.log"

    def role_dir(self, role: str) -> Path:
        """Return the folder of one role: its replicas' output, and the logs of its agents."""
        return self.path / build_role_dir_name(role)

    def replica_dir(self, replica: ReplicaId) -> Path:
        """Return the folder of one replica's output."""
        return self.role_dir(replica.role) / str(replica.index)

    def create(self, spec: AppSpec) -> None:
        """Make the folder for a new app.

        Raises:
            FileExistsError: it exists already.
            OSError: it cannot be made. Nothing of it is left.
        """
        self.path.mkdir(mode=0o700, parents=True)
        with contextlib.ExitStack() as undo:
            undo.callback(remove_folder, self.path, ignores_errors=True)
            self.state_dir.mkdir(mode=0o700)
            os.mkfifo(self.control_pipe, 0o600)  # some file systems have no pipes
            content, details = spec.encode()
            _write(self.private_file, details)
            _write(self.spec_file, content)
            undo.pop_all()

    def read_spec(self) -> AppSpec:
        """Return the app as submitted.

        Raises:
            FileNotFoundError: no app here (any more).
            StateError: see there.
        """
        content = _read_formatted(self.spec_file)
        try:
            details = _read(self.private_file)
        except FileNotFoundError:
            details = {}
        with _translate_errors(self.spec_file):
            return _parse_spec(content, details)

    def write_record(self, record: AppRecord) -> None:
        """Replace state.json. A reader sees either the old or the new content, complete."""
        app = record.app
        content = {
            "format": FORMAT,
            "phase": app.phase,
            "outcome": app.outcome,
            "reasons": [to_data(each) for each in app.reasons],
            "retries": dict(app.retries),
            "restarting": list(app.restarting),
            "grace_number": app.grace_number,
            "lingering": app.lingering,
            "lingering_role": app.lingering_role,
            "draining": app.is_draining,
            "sizes": dict(app.sizes),
            "leaving": [asdict(each) for each in app.leaving],
            "over": list(app.over),
            "resizes": app.resizes,
            "replicas": [
                {"role": each.role, "index": each.index, **asdict(known), "handle": record.handles.get(each)}
                for each, known in app.replicas.items()
            ],
            "hosts": [{**asdict(each), "host": host} for each, host in record.hosts.items()],
            "machine": asdict(record.machine),
            "supervisor": None if record.supervisor is None else asdict(record.supervisor),
            "submitted_s": record.submitted_s,
            "ended_s": record.ended_s,
        }
        _write(self.state_file, content)

    def check_space(self) -> None:
        """Check, before a request that counts only when it is recorded, that the next record can be written.

        Raises:
            OSError: it cannot, for instance because the disk is full.
        """
        with tempfile.NamedTemporaryFile(prefix=".space.", dir=self.state_dir) as file:
            file.write(read_whole(self.state_file, _LIMIT_BYTES))

    def read_record(self) -> AppRecord | None:
        """Return the app's state. None: its supervisor has not recorded any yet.

        Raises:
            StateError: see there.
        """
        try:
            content = _read_formatted(self.state_file)
        except FileNotFoundError:
            return None
        with _translate_errors(self.state_file):
            return _parse_record(content)

    def write_request(self, request: str) -> OSError | None:
        """Record a request ("cancel", "interrupt", "kill") for the next supervisor if this one is dead.

        A kill is never undone.

        Returns:
            None, or why the disk refuses it: it is full, or read-only after an error. A supervisor that runs can carry
            it out all the same.

        Raises:
            FileNotFoundError: no app here (any more).
        """
        if self.read_request() != "kill":
            try:
                write_text(self.request_file, request)
            except FileNotFoundError:
                raise
            except OSError as error:
                return error
        return None

    def read_request(self) -> str | None:
        """Return the recorded request, or None."""
        try:
            return read_whole(self.request_file).decode(errors="replace").strip()
        except FileNotFoundError:
            return None

    def send_request(self, request: str) -> bool:
        """Send a request to the supervisor now. Return False if none is running."""
        try:
            fd = os.open(self.control_pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # no process reads, or no app
            return False
        try:
            os.write(fd, request.encode() + b"\n")
        except (BlockingIOError, BrokenPipeError):  # full, or the supervisor has just ended
            return False
        finally:
            os.close(fd)
        return True

    def is_locked(self) -> bool:
        """Return whether a supervisor on this kernel holds the lock, in whatever process namespace."""
        try:
            with open(self.lock_file) as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def remove_secrets(self) -> None:
        """Remove the file that only a running app needs, unless its disk is read-only by now."""
        with contextlib.suppress(OSError):
            self.private_file.unlink(missing_ok=True)


def build_role_dir_name(role: str) -> str:
    """Return the name of a role's folder in an app's folder: unique to the role, and never `STATE_DIR_NAME`."""
    return f".{role}" if role.startswith(".") else role


def _parse_spec(content: dict[str, Any], details: Mapping[str, Any]) -> AppSpec:
    fields = {name: value for name, value in content.items() if name not in ("format", "owner", "roles")}
    owner = content["owner"]
    return AppSpec(
        **fields,
        owner=None if owner is None else ProcessId(**owner),
        roles=tuple(
            SupervisedRole(**role | {"retry_scope": RetryScope(role["retry_scope"])}) for role in content["roles"]
        ),
        details=details,
    )


def _parse_record(content: dict[str, Any]) -> AppRecord:
    replicas, handles = {}, {}
    for row in content["replicas"]:
        each = ReplicaId(row["role"], row["index"])
        status = ReplicaStatus(row["status"])
        replicas[each] = ReplicaState(status=status, starts=row["starts"], exit_code=row["exit_code"])
        if row["handle"] is not None:
            handles[each] = row["handle"]
    supervisor = content["supervisor"]
    app = SupervisedApp(
        replicas=replicas,
        phase=AppPhase(content["phase"]),
        retries=content["retries"],
        restarting=tuple(content["restarting"]),
        grace_number=content["grace_number"],
        lingering=content["lingering"],
        lingering_role=content["lingering_role"],
        is_draining=content["draining"],
        sizes=content["sizes"],
        leaving=tuple(ReplicaId(**each) for each in content["leaving"]),
        over=tuple(content["over"]),
        resizes=content["resizes"],
        outcome=None if content["outcome"] is None else Outcome(content["outcome"]),
        reasons=parse_reasons(content["reasons"]),
    )
    return AppRecord(
        app=app,
        machine=Machine(**content["machine"]),
        supervisor=None if supervisor is None else ProcessId(**supervisor),
        handles=handles,
        hosts={ReplicaId(row["role"], row["index"]): row["host"] for row in content["hosts"]},
        submitted_s=content["submitted_s"],
        ended_s=content["ended_s"],
    )


@contextlib.contextmanager
def _translate_errors(path: Path) -> Iterator[None]:
    """Turn errors about a file, or its content, into one line. A file that is not there is no such error."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StateError(f"{path} cannot be read: {error.strerror}") from error
    except FormatError as error:
        raise StateError(str(error)) from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise StateError(f"{path} cannot be read, it is damaged ({error})") from error


def _write(path: Path, content: object) -> None:
    write_text(path, json.dumps(content, indent=1))


def write_text(path: Path, text: str) -> None:
    """Write a unique temporary file, then replace. mkstemp makes it readable by the owner only.

    Raises:
        OSError: it cannot be written. Nothing is left of it.
    """
    fd, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(fd, "w") as out:
            out.write(text)
        os.replace(name, path)
    except OSError:
        os.unlink(name)
        raise


def _read_formatted(path: Path) -> dict[str, Any]:
    content = _read(path)
    with _translate_errors(path):
        check_format(content.get("format"), str(path))
    return content


def _read(path: Path) -> dict[str, Any]:
    with _translate_errors(path):
        content = parse_json(read_whole(path, _LIMIT_BYTES))
        if not isinstance(content, dict):
            raise TypeError("no object")
        return content


def is_own_app_folder(path: Path) -> bool:
    """Return whether a folder holds an app of this user. This is checked before anything is removed."""
    try:
        mode = os.stat(AppFolder(path).spec_file)
    except OSError:
        return False
    return stat.S_ISREG(mode.st_mode) and mode.st_uid == os.geteuid()


def may_hold_app(path: Path) -> bool:
    """Return whether a folder holds an app, or cannot be entered."""
    try:
        return stat.S_ISREG(AppFolder(path).spec_file.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
