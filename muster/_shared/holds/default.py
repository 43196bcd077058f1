"""The default hold: whether this user wants one on this machine, where its processes listen, and how one is started.

    <state>/muster/default-hold.json    the user wants it: `muster hold --default`. $XDG_STATE_HOME, or ~/.local/state
    <runtime>/hold-KEY                  of one Python and one version of muster: socket, state and log
    <runtime>                           $XDG_RUNTIME_DIR/muster, or /tmp/muster-UID

It is there for everyday jobs. Where `local_cwd` or `muster-agent` would start an agent, one that waits with torch
imported takes its place, if the hold has one that can become the same. Otherwise the agent starts cold as ever, and the
hold has one ready for the next job. `agent.hold.pool` is what the hold does.

If the user does not want it, all of this costs one `open` that fails. This module does not travel with jobs.
"""

import contextlib
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

SETTINGS_NAME = "default-hold.json"
IDLE_LIMIT_KEY = "idle_limit_s"
_TMP = "/tmp"  # noqa: S108  # the folder below it is checked
_PREFIX = "hold-"
POOL = os.path.abspath(f"{__file__}/../../../agent/hold/pool_entry.py")
POOL_AGAIN = "--again"
"""Its first argument when it begins again, as the same process."""
_IN_JOB = ("TORCHELASTIC_RUN_ID", "MUSTER_APP_ID", "MUSTER_STATUS_PAGE")
"""A process with one of these is below a guard, which ends all that is left of its job: no hold is started there."""


def find_settings_path(env: Mapping[str, str]) -> str:
    """Return where the user's wish is."""
    folder = env.get("XDG_STATE_HOME", "")
    if not folder.startswith("/"):  # the XDG specification ignores relative paths
        folder = os.path.join(env.get("HOME", "/"), ".local", "state")
    return os.path.join(folder, "muster", SETTINGS_NAME)


def read_idle_limit_s(env: Mapping[str, str]) -> float | None:
    """Return after how many seconds without a job the default hold ends. None: the user wants none."""
    try:
        fd = os.open(find_settings_path(env), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    import json

    with open(fd, "rb") as file:
        try:
            return float(json.loads(file.read(4096))[IDLE_LIMIT_KEY])
        except (ValueError, KeyError, TypeError, OSError):
            return None


def list_runtime_dirs(env: Mapping[str, str]) -> list[str]:
    """Return where default holds of this user may be. The first is where they are made."""
    found = [os.path.join(_TMP, f"muster-{os.geteuid()}")]
    folder = env.get("XDG_RUNTIME_DIR", "")
    try:
        # `sudo` keeps another user's variable.
        if folder.startswith("/") and os.stat(folder).st_uid == os.geteuid():
            found.insert(0, os.path.join(folder, "muster"))
    except OSError:
        pass
    return found


def find_folder(env: Mapping[str, str], words: Sequence[str], version: str) -> str:
    """Return the folder of the default hold for agents that are started by a command.

    Args:
        env: the caller's environment.
        words: the interpreter and the agent as a file.
        version: muster's.
    """
    import hashlib

    # The folder too: virtual environments share one file.
    key = [version, os.path.dirname(words[0]), os.path.realpath(words[0]), *map(os.path.realpath, words[1:])]
    digest = hashlib.sha256("\0".join(key).encode(errors="surrogateescape")).hexdigest()
    return os.path.join(list_runtime_dirs(env)[0], _PREFIX + digest[:16])


def list_folders(env: Mapping[str, str]) -> list[str]:
    """Return the folders of all default holds that there are. Folders that others can change are left out."""
    found = []
    for runtime in list_runtime_dirs(env):
        with contextlib.suppress(OSError):
            _check(runtime)
            found += [os.path.join(runtime, name) for name in sorted(os.listdir(runtime)) if name.startswith(_PREFIX)]
    return [folder for folder in found if os.path.isdir(folder)]


def check_folder(folder: str) -> None:
    """Refuse a hold's folder, or the one above it, that is not this user's alone.

    Raises:
        PermissionError: names it, in `filename`.
        FileNotFoundError: there is none.
    """
    _check(os.path.dirname(folder))
    _check(folder)


def make_folder(folder: str) -> None:
    """Make a hold's folder, and the one above it.

    Raises:
        OSError: it cannot be made, or is not this user's alone.
    """
    for path in (os.path.dirname(folder), folder):
        if not os.path.lexists(path):
            _make(path)
        _check(path)


def _make(path: str) -> None:
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return  # another process was faster


def _check(path: str) -> None:
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(1, "it must be a folder of this user alone", path)


def may_have_agents(folder: str) -> bool:
    """Return whether to start a client: the hold listens, or its folder is unsafe, which the client then says."""
    from muster._shared.holds.connection import connect

    try:
        check_folder(folder)
        connect(folder).close()
    except PermissionError:
        return True
    except OSError:
        return False
    return True


def may_start(env: Mapping[str, str]) -> bool:
    """Return whether this process is outside of any job."""
    return not any(name in env for name in _IN_JOB)


def write_order(orders: Iterable[Mapping[str, Any]], *, idle_limit_s: float, after_pid: int) -> int:
    """Write what a hold is started with into a memory file, and return its descriptor.

    Args:
        orders: command, args, env, cpus and name of the agents that have started cold instead.
        idle_limit_s: see `read_idle_limit_s`.
        after_pid: while this process runs, the hold waits some seconds before it imports: its job comes first. 0: none.
    """
    import json

    fd = os.memfd_create("orders")
    content = {"orders": list(orders), IDLE_LIMIT_KEY: idle_limit_s, "after_pid": after_pid}
    data = json.dumps(content).encode()
    while data:
        data = data[os.write(fd, data) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def build_command(words: Sequence[str], folder: str) -> list[str]:
    """Build the command that starts a hold, with `write_order`'s file as its standard input. It ends at once."""
    return [words[0], "-I", POOL, folder, *words]


def build_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Build the environment of a hold: nothing of the job that starts it."""
    return {name: env[name] for name in ("HOME", "PATH", "LANG", "LC_ALL", "XDG_RUNTIME_DIR") if name in env}
