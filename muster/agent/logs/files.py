"""Files of a run: claims the run's folder, names the files, and stops writing when the disk is full.

The folder may be where other users can write, as in `--log-dir /tmp`. What another user has put there is not used.
Files of another owner are used only if no other user could have put them there: a volume that an administrator has
mounted or made, and what the volume's owner has put into it. So a container's user may differ from the volume's.
"""

import contextlib
import errno
import fcntl
import itertools
import os
import stat
from collections.abc import Callable, Iterator

from muster._shared.contract import LogNames
from muster.agent.config import Std
from muster.agent.round import Round

STACKS = "stacks.txt"
"""The file beside a worker's logs to which the worker appends its Python stacks on request."""

_LOCK = ".lock"
_OWN = frozenset((os.geteuid(), 0))
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class LogFile:
    """A file that is appended to. The first write that fails closes it and calls `on_error` once.

    Its creator closes it.
    """

    def __init__(self, path: str, on_error: Callable[[str], None]) -> None:
        """Open or create the file.

        Raises:
            OSError: the file cannot be opened.
        """
        self.path = path
        self._on_error = on_error
        self.fd: int | None = open_own(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self.size_bytes = os.fstat(self.fd).st_size

    def write(self, data: bytes) -> int:
        """Append, and return how many bytes were written; they are fewer than given only if the file is closed now."""
        if self.fd is None:
            return 0
        done = 0
        try:
            while done < len(data):
                done += os.write(self.fd, data[done:] if done else data)
        except OSError as error:
            self.size_bytes += done
            self._stop(error)
            return done
        self.size_bytes += done
        return done

    def _stop(self, error: OSError) -> None:
        self.close()
        self._on_error(f"cannot write {self.path}: {error.strerror}")

    def close(self) -> None:
        """Release the descriptor. Idempotent."""
        fd, self.fd = self.fd, None
        if fd is not None:
            with contextlib.suppress(OSError):  # too late to act (network file systems)
                os.close(fd)


class RunFolder:
    """`<base>/<run_id>/attempt_<n>/<local_rank>/...`, claimed by this agent.

    With more than one node an agent's files are one level deeper, in `node_<index>/`. So agents that share a folder
    (two on one host, or on a network file system) never write the same file. A second live agent with the same folder
    gets `agent_<host>_<pid>/` below it. Files of an earlier run with the same id are moved to `earlier_<k>/`, never
    overwritten.
    """

    def __init__(self, base_dir: str | None, run_id: str, *, links_latest: bool = False) -> None:
        """Make the run's folder.

        Args:
            base_dir: `--log-dir`. None means a temporary folder, which `close` removes if it holds no log, error or
                report.
            run_id: a slash in it makes no sub-folder.
            links_latest: see `LogConfig`; with several nodes, that of the first one.

        Raises:
            OSError: the folder cannot be made.
        """
        self._temporary = base_dir is None
        self._base = base_dir or _make_temporary_dir()
        self._base_fd = _hold(self._base) if base_dir is None else None
        self.run_dir = os.path.join(os.path.abspath(self._base), run_id.replace("/", "_") or "none")
        self._links_latest = links_latest
        os.makedirs(self._base, exist_ok=True)
        self.base_owner = min(_find_owners(os.path.abspath(self._base)) - _OWN, default=None)
        """Another user who owns a folder on the path and can replace what is in it; None if there is none."""
        if os.path.basename(self.run_dir) == LogNames.LATEST and os.path.islink(self.run_dir):
            os.unlink(self.run_dir)  # of an earlier run
        _make_own_dir(self.run_dir, 0o777 if self.base_owner is not None else _choose_mode(self._base))
        if not os.access(self.run_dir, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied", self.run_dir)
        self._node_dir: str | None = None
        self._lock_fd: int | None = None

    def open_attempt(self, round: Round, nproc: int) -> str:  # noqa: A002
        """Make the folders of the round's attempt, or find them again, and return the attempt's path.

        Raises:
            OSError: the folders cannot be made.
        """
        if self._node_dir is None:
            self._node_dir = self._claim(round)
        path = os.path.join(self._node_dir, LogNames.ATTEMPT_DIR.format(attempt=round.attempt))
        _make_own_dir(path)
        for local_rank in range(nproc):
            _make_own_dir(build_rank_dir(path, local_rank))
        if self._links_latest and round.group_rank == 0:
            from muster._shared.foreign_files import link_latest

            base = os.path.abspath(self._base)
            link_latest(base, os.path.relpath(path, base))
        return path

    def _claim(self, round: Round) -> str:  # noqa: A002
        path = self.run_dir
        if round.group_world_size > 1:
            path = os.path.join(path, f"node_{round.node_index}")
        _make_own_dir(path)
        if not self._lock(path):
            path = os.path.join(path, f"agent_{os.uname().nodename}_{os.getpid()}")
            _make_own_dir(path)
        elif round.number <= 1:
            # Later rounds find only their own job's files.
            _move_earlier_run(path, self.run_dir if round.group_rank == 0 else path)
        return path

    def _lock(self, path: str) -> bool:
        """Lock the folder; return False if another live agent has it.

        Without locks in the file system, it counts as ours.
        """
        fd = open_own(os.path.join(path, _LOCK), os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        except OSError:
            os.close(fd)
            return True
        self._lock_fd = fd
        return True

    def close(self) -> None:
        """Release the claim, and remove a temporary folder that holds nothing of use. Idempotent."""
        if self._lock_fd is not None:
            if self._temporary:  # elsewhere another agent may have just opened it
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(self._node_dir or self.run_dir, _LOCK))
            os.close(self._lock_fd)
            self._lock_fd = None
        if self._temporary:
            _remove_if_unused(self._base)
        if self._base_fd is not None:
            os.close(self._base_fd)
            self._base_fd = None


def _remove_if_unused(base: str) -> None:
    """Remove a temporary folder that holds no log, no error and no report."""
    from muster._shared.folders import remove_folder
    from muster._shared.foreign_files import walk_files

    unused = (STACKS, LogNames.EVENTS, LogNames.CHECKPOINT, LogNames.STATUS)
    if all(each.name in unused for each in walk_files(base)):
        remove_folder(base, ignores_errors=True)


def _make_temporary_dir() -> str:
    """Make a private folder where `tempfile.mkdtemp` would. To import that takes 5 ms and 1 MB."""
    variables = (os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP"))
    for folder in (*filter(None, variables), "/tmp", "/var/tmp", "/usr/tmp"):  # noqa: S108  # made for this user only
        path = os.path.join(os.path.abspath(folder), f"muster_{os.urandom(4).hex()}")
        with contextlib.suppress(OSError):
            os.mkdir(path, 0o700)
            return path
    raise FileNotFoundError(errno.ENOENT, "no folder for temporary files can be written")


def _hold(folder: str) -> int | None:
    """Lock a temporary folder as long as this process lives, so that `muster prune` spares it."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    with contextlib.suppress(OSError):  # no locks: nothing is pruned
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return fd


def _move_earlier_run(path: str, report_dir: str) -> None:
    """Move an earlier run's attempts below `path` to `earlier_<k>/`, with what `report_dir` has of the whole job."""
    stem = LogNames.ATTEMPT_DIR.format(attempt="")
    old = [os.path.join(path, name) for name in os.listdir(path) if name.startswith(stem)]
    of_job = [os.path.join(report_dir, name) for name in (LogNames.REPORT, LogNames.NOTIFIED)]
    old += filter(os.path.exists, of_job)
    if not old:
        return
    target = _make_numbered_dir(os.path.join(path, "earlier_"))
    for name in old:
        os.rename(name, os.path.join(target, os.path.basename(name)))


def _make_numbered_dir(stem: str) -> str:
    for number in itertools.count(1):
        with contextlib.suppress(FileExistsError):
            os.mkdir(f"{stem}{number}")
            break
    return f"{stem}{number}"


def build_rank_dir(attempt_dir: str, local_rank: int) -> str:
    """Return the folder of one worker's files."""
    return os.path.join(attempt_dir, str(local_rank))


def build_log_path(attempt_dir: str, local_rank: int, std: Std) -> str:
    """Return the path of one stream's log."""
    return os.path.join(build_rank_dir(attempt_dir, local_rank), LogNames.STDOUT if std is Std.OUT else LogNames.STDERR)


def build_filtered_path(attempt_dir: str, std: Std) -> str:
    """Return the path of the attempt's filtered log of one stream, which its ranks share."""
    return os.path.join(attempt_dir, LogNames.FILTERED_STDOUT if std is Std.OUT else LogNames.FILTERED_STDERR)


# -- what other users may have put there ------------------------------------------------------------------------------


def open_own(path: str, flags: int) -> int:
    """Open a file, unless another user has put it there, or it is a link.

    Raises:
        OSError: the file cannot be opened, or is such a file.
    """
    try:
        # Opening a pipe would block. Writes may: they have separate threads.
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP:
            error.strerror = "it is a link"
        raise
    try:
        os.set_blocking(fd, True)
        if os.fstat(fd).st_uid not in _OWN:
            _find_owners(path)
    except OSError:
        os.close(fd)
        raise
    return fd


def replace_file(path: str, data: bytes) -> None:
    """Write a file, whole or not at all. The folder may be one that several nodes have.

    Raises:
        OSError: it cannot be written.
    """
    temporary = f"{path}.{os.uname().nodename}.{os.getpid()}.tmp"
    try:
        with open(open_own(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _make_own_dir(path: str, mode: int = 0o777) -> None:
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        if not os.path.isdir(path):
            raise
        if os.lstat(path).st_uid not in _OWN:
            _find_owners(path)


def _choose_mode(base: str) -> int:
    """Choose the mode of a run's folder in `base`: only for this user, or also readable for an inherited group.

    In a folder of another user (a container's volume) the umask decides, so that its owner can read the logs.
    """
    return 0o750 if os.stat(base).st_mode & stat.S_ISGID else 0o700


def _find_owners(path: str) -> set[int]:
    """Return the users whose files in a folder are used.

    Raises:
        PermissionError: the path, or one above it, belongs to another user, who could have put it there.
    """
    owners = set(_OWN)
    for way in dict.fromkeys((os.path.abspath(path), os.path.realpath(path))):
        above = os.stat("/")
        for ancestor in _list_places(way):
            found = os.lstat(ancestor)
            if found.st_uid not in owners:
                is_mounted = found.st_dev != above.st_dev
                if above.st_mode & _OTHERS_WRITE and not is_mounted and not _shows_ours(ancestor, found.st_uid):
                    raise PermissionError(errno.EPERM, f"it belongs to another user ({found.st_uid})", ancestor)
                owners.add(found.st_uid)
            above = os.stat(ancestor)
    return owners


def _list_places(path: str) -> Iterator[str]:
    """List all prefixes of a path: `/a/b` has `/a` and `/a/b`."""
    names = path.split("/")[1:]
    return ("/" + "/".join(names[:count]) for count in range(1, len(names) + 1))


def _shows_ours(path: str, uid: int) -> bool:
    """Return whether files that this process makes beside `path` appear as this user's.

    On NFS with root_squash they do.
    """
    probe = f"{path}.{os.getpid()}.owner"
    try:
        fd = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError:
        return False
    try:
        return os.fstat(fd).st_uid == uid
    finally:
        os.close(fd)
        os.unlink(probe)
