"""A token for agents that one user starts by hand on one machine, from a file that only this user can read."""

import hmac
import os
import stat
from contextlib import suppress

NAME = "agents-token"
_SECRET_BYTES = 32


def find_shared_token(port: int) -> str:
    """Return the token of this user's agents at one port of this machine. The first agent makes the file.

    The token is the same for all jobs: a node that asks for another job learns that.

    Raises:
        OSError: the file cannot be made or read, or other users can read it.
    """
    state_dir = os.environ.get("XDG_STATE_HOME", "")
    if not state_dir.startswith("/"):
        state_dir = os.path.join(os.path.expanduser("~"), ".local", "state")
    path = os.path.join(state_dir, "muster", NAME)
    try:
        secret = _read(path)
    except FileNotFoundError:
        _create(path)
        secret = _read(path)
    return hmac.new(secret, str(port).encode(), "sha256").hexdigest()


def _create(path: str) -> None:
    """Make the file, unless another agent was faster. The file is complete from the beginning."""
    os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
    own = f"{path}.{os.urandom(8).hex()}"
    fd = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(os.urandom(_SECRET_BYTES))
        with suppress(FileExistsError):
            os.link(own, path)
    finally:
        os.unlink(own)


def _read(path: str) -> bytes:
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError(f"{path} must be a file that only you can read: remove it")
        secret = file.read(_SECRET_BYTES + 1)
    if len(secret) != _SECRET_BYTES:
        raise PermissionError(f"{path} has not {_SECRET_BYTES} bytes: remove it")
    return secret
