"""A link that cannot connect for a reason of this machine, or whose host is hostile."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from muster.schedulers.node_program.frames import LOST, MAGIC, STATE_NAME
from muster.schedulers.ssh import link

ORDER = {"verb": "start", "lost_s": 60, "fds": [], "stays": False, "host": "host-a", "python": "python3"}
ORDER |= {"ssh": [], "node": {}, "files": []}


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link changes no signals of this process."""
    monkeypatch.setattr(link, "_SIGNALS", {})
    monkeypatch.setattr(link.signal, "set_wakeup_fd", lambda *_, **__: None)
    monkeypatch.setattr(link, "build_ssh", lambda *_: ["ssh"])


@pytest.mark.usefixtures("quiet")
def test_a_replica_whose_link_finds_no_free_process_is_lost_and_no_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its exit code 1 would mean that it must not be started again."""
    tries = []

    def start(*command: Any, **_: Any) -> None:
        tries.append(command)
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(link, "_PAUSE_S", 0.0)
    monkeypatch.setattr(link.PipedProcess, "start", start)
    made = link.SshLink({**ORDER, "replica_dir": str(tmp_path), "role_dir": str(tmp_path)})
    try:
        assert made.run() == LOST
    finally:
        os.close(made._wake)
    assert len(tries) == 3
    [lost] = json.loads((tmp_path / STATE_NAME).read_text())["lost"]
    assert lost["facts"]["host"] == "host-a"
    assert "[Errno 11]" in lost["facts"]["text"]


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("sent", "why"), [(b"1\xff\xff\xff\xff", "4294967295 bytes"), (b"X\0\0\0\1x", "b'x'"), (b"F\0\0\0\1x", "got 1")]
)
def test_a_host_that_sends_something_else_is_lost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sent: bytes, why: str
) -> None:
    stdout, theirs = os.pipe()
    os.write(theirs, MAGIC + sent)
    null = [os.open(os.devnull, os.O_RDWR) for _ in range(2)]
    ssh = link.PipedProcess((null[0], stdout, null[1]))
    monkeypatch.setattr(ssh, "end", lambda _limit_s: 0)
    monkeypatch.setattr(link.PipedProcess, "start", lambda *_, **__: ssh)
    made = link.SshLink({**ORDER, "replica_dir": str(tmp_path), "role_dir": str(tmp_path)})
    try:
        assert made.run() == LOST
    finally:
        for fd in (made._wake, theirs):
            os.close(fd)
    [lost] = json.loads((tmp_path / STATE_NAME).read_text())["lost"]
    assert why in lost["facts"]["text"]


def test_an_ssh_is_lent_also_by_a_system_without_pidfds() -> None:
    """The descriptor -1 was lent and closed."""
    fds = [os.open(os.devnull, os.O_RDWR) for _ in range(3)]
    ssh = link.PipedProcess(fds)
    assert list(ssh.lend()) == fds
    assert link.PipedProcess.adopt(ssh.lend()).end(0.0) is None
    ssh.forget()
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
