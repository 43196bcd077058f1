"""A second user of this machine, for tests of what it must not be able to do. Root can be any user."""

import json
import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

OTHER = 42422
"""A user and a group without an account."""

needs_two_users = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")


def call_as_other(call: Callable[[], Any], meanwhile: Callable[[], object] | None = None) -> Any:
    """Call something in a child process of the other user; its exception fails the test.

    That user may be unable to read this interpreter's files: `call` imports nothing. `meanwhile` is called again and
    again until it has ended.

    Returns: what `call` returned, by way of JSON of at most 64 KiB.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(OTHER)
            os.setuid(OTHER)
            os.write(writer, json.dumps(call()).encode())
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    ended, status = 0, 0
    while not ended:
        ended, status = os.waitpid(pid, os.WNOHANG if meanwhile else 0)
        if meanwhile:
            meanwhile()
    with os.fdopen(reader) as answer:
        assert os.waitstatus_to_exitcode(status) == 0
        return json.loads(answer.read())


@pytest.fixture
def shared_dir() -> Iterator[Path]:
    """A folder that all users can enter, as pytest's are not."""
    folder = Path(tempfile.mkdtemp(prefix="two-users-", dir="/tmp"))  # the sticky one, where users meet
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def other_dir(shared_dir: Path) -> Path:
    """A folder of the other user."""
    folder = shared_dir / "other"
    folder.mkdir()
    os.chown(folder, OTHER, OTHER)
    return folder
