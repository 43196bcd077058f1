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
"""

import contextlib
import fcntl
import functools
import json
import os
import stat
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from muster._shared import processes
from muster._shared.contract import FORMAT, FormatError, check_format
from muster._shared.folders import remove_folder
from muster._shared.foreign_files import parse_json, read_whole
from muster.schedulers.supervision.machine import Machine
from muster.schedulers.supervision.state import ReplicaId, SupervisedApp, SupervisedRole
from muster.schedulers.wording.reasons import Reason, parse_reasons, to_data

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
    """From the polite signal to the kill, of roles without one of their own."""
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

    def find_grace_s(self, role: str) -> float:
        """Return the grace period of a role."""
        own = next(each.policy.grace_s for each in self.roles if each.name == role)
        return self.grace_s if own is None else own

    @property
    def longest_grace_s(self) -> float:
        """The longest grace period of its roles."""
        return max((self.find_grace_s(role.name) for role in self.roles), default=self.grace_s)

    def encode(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the contents of spec.json and private.json."""
        content = _encode(self) | {"format": FORMAT}
        return content, content.pop("details")


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
        details = {}
        with contextlib.suppress(FileNotFoundError):
            details = _read(self.private_file)
        spec: AppSpec = _read(self.spec_file, AppSpec, details=details)
        return spec

    def write_record(self, record: AppRecord) -> None:
        """Replace state.json. A reader sees either the old or the new content, complete."""
        _write(self.state_file, _encode(record) | {"format": FORMAT})

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
        with contextlib.suppress(FileNotFoundError):
            record: AppRecord = _read(self.state_file, AppRecord)
            return record
        return None

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


def _encode(value: Any) -> Any:
    """Return a value in JSON's types, as its class declares it: `_decode` reads it by the same annotations."""
    if isinstance(value, ReplicaId):
        return str(value)
    if isinstance(value, Reason):
        return to_data(value)
    if is_dataclass(value):
        return {each.name: _encode(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _encode(each) for key, each in value.items()}
    return [_encode(each) for each in value] if isinstance(value, (tuple, list)) else value


def _decode(kind: Any, value: Any) -> Any:
    """Return a value of an annotated type from what `_encode` has returned. Fields without a default must be there.

    Raises:
        ArithmeticError, AttributeError, LookupError, TypeError, ValueError: it has another form.
    """
    origin, args = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return None if value is None else _decode(args[0], value)
    if origin is tuple:
        return tuple(_decode(args[0], each) for each in value)
    if origin is Mapping:
        return {_decode(args[0], key): _decode(args[1], each) for key, each in value.items()}
    if kind is ReplicaId:
        role, _, index = value.rpartition("/")
        return ReplicaId(role, int(index))
    if kind is Reason:
        return parse_reasons([value])[0]
    if hasattr(kind, "__dataclass_fields__"):
        types = _find_types(kind)
        return kind(**{name: _decode(types[name], each) for name, each in value.items()})
    return kind(value) if isinstance(kind, type) and issubclass(kind, Enum) else value


@functools.cache
def _find_types(kind: type[Any]) -> Mapping[str, Any]:
    return get_type_hints(kind)


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


def _read(path: Path, kind: type[Any] | None = None, **more: object) -> Any:
    """Return a file's JSON, or the record of this kind that it has, with `more` fields.

    Raises:
        FileNotFoundError: there is no file.
        StateError: see there.
    """
    try:
        parsed: Any = parse_json(read_whole(path, _LIMIT_BYTES))
        content = {**parsed}
        if kind is None:
            return content
        check_format(content.pop("format", None), str(path))
        return _decode(kind, content | more)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StateError(f"{path} cannot be read: {error.strerror}") from error
    except FormatError as error:
        raise StateError(str(error)) from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise StateError(f"{path} cannot be read, it is damaged ({error})") from error


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
