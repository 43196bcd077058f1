"""Hosts for tests of ssh: one sshd on each of a few addresses of loopback, and a client's configuration for them."""

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness import LIMIT_S

from muster._shared import processes

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/usr/local/sbin")
PRIVILEGES = Path("/run/sshd")


def find_reason() -> str | None:
    """Why there can be no sshd here; None: there can."""
    missing = [name for name in ("ssh", "ssh-keygen") if shutil.which(name) is None] + ["sshd"] * (SSHD is None)
    return f"not installed: {', '.join(missing)} (openssh-client, openssh-server)" if missing else None


class SshWorld:
    """Hosts `a`, `b` and so on; close it.

    Args:
        folder: for keys, configurations and what the servers say.
        hosts: how many.
        spaces: a network namespace for each, with the address 10.77.0.N, and one more for the client (`netns_world`);
            empty: all are this machine, at addresses of loopback.
        users: accounts that the hosts have besides, with their uids; each host then has a mount namespace of its own.
    """

    def __init__(
        self, folder: Path, hosts: int = 4, spaces: Sequence[str] = (), users: Mapping[str, int] | None = None
    ) -> None:
        self.folder = folder
        self.names = [chr(ord("a") + number) for number in range(hosts)]
        self.config = folder / "client config"
        self.addresses = {name: f"127.0.0.{number}" for number, name in enumerate(self.names, 2)}
        if spaces:
            self.addresses = {name: f"10.77.0.{number}" for number, name in enumerate(self.names, 1)}
        self._inside = {name: ["ip", "netns", "exec", space] for name, space in zip(self.names, spaces, strict=False)}
        self._client = ["ip", "netns", "exec", spaces[hosts]] if spaces else []
        if users:
            folder.mkdir(parents=True, exist_ok=True)
            self._inside = dict.fromkeys(self.names, _write_accounts(folder, users))
        self._servers: dict[str, subprocess.Popen[bytes]] = {}
        self._ports: dict[str, int] = {}
        self._sessions: list[int] = []
        folder.mkdir(parents=True, exist_ok=True)
        if os.geteuid() == 0:
            PRIVILEGES.mkdir(mode=0o755, exist_ok=True)
        for key in ("host_key", "user_key"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        for name in self.names:
            self.start(name)
        self._write_config()
        for name in self.names:
            self.wait(name)

    def start(self, name: str, *lines: str) -> None:
        """Start the server of a host, with lines of its configuration."""
        if self._client:
            self._ports[name] = 22
        if name not in self._ports:
            with socket.socket() as free:
                free.bind((self.addresses[name], 0))
                self._ports[name] = free.getsockname()[1]
        config = self.folder / f"sshd_{name}"
        config.write_text(
            f"ListenAddress {self.addresses[name]}\nPort {self._ports[name]}\nPidFile none\nUsePAM no\n"
            f'HostKey "{self.folder}/host_key"\nAuthorizedKeysFile "{self.folder}/user_key.pub"\nStrictModes no\n'
            "PasswordAuthentication no\nMaxStartups 200\nAllowTcpForwarding yes\n"
            + "".join(f"{line}\n" for line in lines)
        )
        assert SSHD is not None
        log = (self.folder / f"sshd_{name}.log").open("ab")
        with log:
            self._servers[name] = subprocess.Popen(
                [*self._inside.get(name, []), SSHD, "-D", "-e", "-f", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def stop(self, name: str) -> None:
        """End the server of a host; connections stay until `close`."""
        server = self._servers.pop(name)
        for pid in processes.list_descendants(server.pid):
            with contextlib.suppress(ProcessLookupError):
                self._sessions.append(os.pidfd_open(pid))
        server.terminate()
        server.wait()

    def wait(self, name: str) -> None:
        """Until the client reaches the server of a host."""
        if self._client:
            command = [*shlex.split(self.ssh), "-o", "ConnectionAttempts=20", name, "true"]
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=LIMIT_S)
            return
        limit_s = time.monotonic() + 20
        while True:
            try:
                socket.create_connection((self.addresses[name], self._ports[name]), 1).close()
            except OSError:
                assert time.monotonic() < limit_s, (self.folder / f"sshd_{name}.log").read_text()
                time.sleep(0.02)
            else:
                return

    def _write_config(self) -> None:
        common = (
            f'  IdentityFile "{self.folder}/user_key"\n  IdentitiesOnly yes\n  StrictHostKeyChecking no\n'
            f'  UserKnownHostsFile "{self.folder}/known"\n  LogLevel ERROR\n'
        )
        entries = [
            f"Host {name}\n  HostName {self.addresses[name]}\n  Port {self._ports[name]}\n{common}"
            for name in self.names
        ]
        self.config.write_text("".join(entries) + self.extra_config(common))

    def extra_config(self, common: str) -> str:
        """More hosts: `jumped` is the last one, by way of the first."""
        first, last = self.names[0], self.names[-1]
        return (
            f"Host jumped\n  HostName {self.addresses[last]}\n  Port {self._ports[last]}\n"
            f'  ProxyCommand ssh -F "{self.config}" -W %h:%p {first}\n{common}'
        )

    @property
    def ssh(self) -> str:
        """The program, for `-cfg ssh=`."""
        return shlex.join([*self._client, "ssh", "-F", str(self.config)])

    def close(self) -> None:
        """End all servers and their connections, also those whose client is out of reach for ever."""
        for name in list(self._servers):
            self.stop(name)
        while self._sessions:
            session = self._sessions.pop()
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(session, signal.SIGKILL)
            os.close(session)


def _write_accounts(folder: Path, users: Mapping[str, int]) -> list[str]:
    """Write account files with more users; the words before a command that is to see them."""
    mounts = "mount --make-rprivate /"
    for name, line in (("passwd", "{user}:x:{uid}:{uid}::{home}:/bin/sh\n"), ("shadow", "{user}:*:19000::::::\n")):
        path = folder / name
        path.write_text(Path(f"/etc/{name}").read_text())
        path.chmod(0o644 if name == "passwd" else 0o600)
        for user, uid in users.items():
            home = folder / user
            home.mkdir(exist_ok=True)
            os.chown(home, uid, uid)
            with path.open("a") as file:
                file.write(line.format(user=user, uid=uid, home=home))
        mounts += f" && mount --bind {shlex.quote(str(path))} /etc/{name}"
    return ["unshare", "-m", "sh", "-c", f'{mounts} && exec "$@"', "-"]
