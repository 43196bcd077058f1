"""Looks at all hosts at once before anything is started: Python, disk, clock, and how they reach the first one."""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from muster._shared.processes import READ, wait_events
from muster.schedulers.node_program.frames import write_all
from muster.schedulers.node_program.pipe import PipedProcess
from muster.schedulers.node_program.session import build_input
from muster.schedulers.ssh.command import build_ssh, explain_failure
from muster.schedulers.ssh.hosts import Host

LIMIT_S: Final = 30.0
"""For each host's answer."""
_LEAST_PYTHON: Final = (3, 10)
_MARK: Final = b"\0muster-check\n"
_LINE_LIMIT_BYTES: Final = 1 << 20
_END_LIMIT_S: Final = 5.0

# Any Python compiles it, 2.7 included, and reports its version.
_PROGRAM: Final = rb"""
import json, os, sys, time
def say(answer):
    sys.stdout.write("\0muster-check\n" + json.dumps(answer) + "\n")
    sys.stdout.flush()
def check(order):
    answer = {"version": list(sys.version_info[:3]), "python": sys.executable}
    if sys.version_info < (3, 10):
        return say(answer)
    import fcntl, random, socket, struct
    folder = order["folder"]
    while not os.path.isdir(folder) and folder != "/":
        folder = os.path.dirname(folder)
    there = os.statvfs(folder)
    answer.update(folder=folder, free_bytes=there.f_bavail * there.f_frsize)
    answer["writable"] = os.access(folder, os.W_OK | os.X_OK)
    found = os.environ.get("SSH_CONNECTION", "").split()[2:3]
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            try:
                packed = fcntl.ioctl(asked, 0x8915, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(packed[20:24]))
            except OSError:
                pass
    for line in open("/proc/net/if_inet6") if os.path.exists("/proc/net/if_inet6") else ():
        digits, _, _, scope = line.split()[:4]
        if scope == "00":
            found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    ordered = [each for each in found if not each.startswith("127.") or each == found[0]]
    answer["addresses"] = list(dict.fromkeys(ordered)) or ["127.0.0.1"]
    listeners = []
    for _ in range(order["ports"]):
        for _ in range(100):
            listener = socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET)
            if listener.family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            try:
                listener.bind(("", random.randrange(20000, 30000)))
                listener.listen(1024)
                listeners.append(listener)
                break
            except OSError:
                listener.close()
    answer["ports"] = [listener.getsockname()[1] for listener in listeners]
    say(answer)
    for line in iter(stdin.readline, b""):
        order = json.loads(line.decode())
        if isinstance(order, int):
            for listener in listeners:
                listener.close()
            exec(stdin.read(order).decode("utf-8"), {"__name__": "__main__", "stdin": stdin})
        say(reach(order["reach"]))
def reach(candidates):
    import selectors, socket
    reached, waiting = [], selectors.DefaultSelector()
    for address, port in candidates:
        made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        made.setblocking(False)
        try:
            made.connect_ex((address, port))
            waiting.register(made, selectors.EVENT_WRITE, address)
        except OSError:
            pass
    limit_s = time.monotonic() + 3
    while waiting.get_map() and time.monotonic() < limit_s:
        for key, _ in waiting.select(limit_s - time.monotonic()):
            waiting.unregister(key.fileobj)
            if key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                reached.append(key.data)
        if reached:
            limit_s = min(limit_s, time.monotonic() + 0.3)
    return reached
check(json.loads(stdin.readline().decode()))
"""

T = TypeVar("T")


class CheckError(Exception):
    """A host cannot be used. `str()` says why in one line."""


class Probe:
    """One connection to a host, with questions and answers in lines of JSON. A program can follow, see `lend`."""

    def __init__(self, ssh: Sequence[str], host: Host, python: str) -> None:
        self._python = python
        self._ssh = PipedProcess.start(build_ssh(ssh, host.name, python))
        self._unsent = build_input(_PROGRAM)
        self._received = {self._ssh.stdout: b"", self._ssh.stderr: b""}
        self._is_open = True
        """It is neither given away nor closed."""

    def ask(self, question: Any) -> Any:
        """Send a line and return the answer.

        Raises:
            CheckError: none comes.
        """
        with contextlib.suppress(OSError):  # it has ended, and says why
            write_all(self._ssh.stdin, self._unsent + json.dumps(question).encode() + b"\n")
        self._unsent = b""
        limit_s = time.monotonic() + LIMIT_S
        stdout = self._ssh.stdout
        wanted = dict.fromkeys(self._received, READ)
        while True:
            _, mark, line = self._received[stdout].partition(_MARK)
            if mark and b"\n" in line:
                answer, _, self._received[stdout] = line.partition(b"\n")
                return json.loads(answer)
            ready = wait_events(wanted, limit_s - time.monotonic())
            if not ready:
                raise CheckError(f"it does not answer within {LIMIT_S:g} s")
            for fd in ready:
                if not self._read(fd):
                    del wanted[fd]
            if stdout not in wanted or len(self._received[stdout]) > _LINE_LIMIT_BYTES:
                raise CheckError(self._explain())

    def _read(self, fd: int) -> bool:
        data = os.read(fd, 65536)
        self._received[fd] += data
        return bool(data)

    def _explain(self) -> str:
        code = self._ssh.end(_END_LIMIT_S)
        os.set_blocking(self._ssh.stderr, False)  # a program that it has left may have it
        with contextlib.suppress(BlockingIOError):
            while self._read(self._ssh.stderr):
                pass
        self._close_pipes()
        return explain_failure(self._received[self._ssh.stderr], code, self._python)

    def _close_pipes(self) -> None:
        self._is_open = False
        for fd in self._ssh.fds:
            os.close(fd)

    def lend(self) -> tuple[int, ...]:
        """Return the descriptors for a process that sends another program the same way. Then `give` or `close` it."""
        return self._ssh.lend()

    def give(self) -> None:
        """Forget the connection: that process has it now."""
        self._is_open = False
        self._ssh.forget()

    def close(self) -> None:
        """End it, unless it was given away."""
        if self._is_open:
            self._ssh.end(0.0)
            self._close_pipes()


@dataclass(kw_only=True)
class Checked:
    """What is known of a host that can be used."""

    host: Host
    addresses: Sequence[str]
    """Addresses at which the first host may be reached. That of the connection comes first."""
    ports: Sequence[int]
    """Free ones, when it was asked for some."""
    connection: Probe = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What the hosts must have."""

    ssh: Sequence[str]
    python: str
    folder: str
    disk_bytes: int
    ports: int
    """Roles whose agents meet. Each needs a port on its first host."""


def check_hosts(hosts: Sequence[Host], needs: Needs) -> tuple[list[Checked], dict[str, str]]:
    """Look at all hosts at once.

    Returns:
        The hosts that can be used, in order, whose connections the caller closes, and why the others cannot, by name.
    """
    results = _run_all(lambda host: _check(host, needs), hosts)
    return (
        [each for each in results if isinstance(each, Checked)],
        {host.name: str(each) for host, each in zip(hosts, results, strict=True) if isinstance(each, CheckError)},
    )


def _check(host: Host, needs: Needs) -> Checked:
    probe = Probe(needs.ssh, host, needs.python)
    try:
        answer = probe.ask({"folder": needs.folder, "ports": needs.ports})
        _judge(answer, needs)
    except BaseException:
        probe.close()
        raise
    return Checked(host=host, addresses=answer["addresses"], ports=answer["ports"], connection=probe)


def _judge(answer: Mapping[str, Any], needs: Needs) -> None:
    if tuple(answer["version"]) < _LEAST_PYTHON:
        name = ".".join(map(str, answer["version"]))
        raise CheckError(f"{answer['python']} is Python {name}, 3.10 or newer is needed: -cfg python=PATH")
    if not answer["writable"]:
        raise CheckError(f"{answer['folder']} cannot be written; name another folder with -cfg folder=PATH")
    if answer["free_bytes"] < needs.disk_bytes:
        free, wanted = answer["free_bytes"] / 1e6, needs.disk_bytes / 1e6
        raise CheckError(f"{answer['folder']} has {free:.0f} MB free, and {wanted:.0f} MB are needed")


def find_address(first: Checked, others: Sequence[Checked]) -> tuple[str | None, dict[str, str]]:
    """Find an address of one host that all others reach, by trying.

    Returns:
        It, or None and a line for each host that reaches none.
    """
    candidates = [(address, first.ports[0]) for address in first.addresses]
    results = _run_all(lambda each: set(each.connection.ask({"reach": candidates})), others)
    failed = {
        each.host.name: str(got) for each, got in zip(others, results, strict=True) if isinstance(got, CheckError)
    }
    reached = [got for got in results if isinstance(got, set)]
    if failed:
        return None, failed
    common = next((address for address, _ in candidates if all(address in each for each in reached)), None)
    if common is not None:
        return common, {}
    tried = ", ".join(first.addresses)
    return None, {
        each.host.name: f"reaches {', '.join(sorted(got)) or 'none'} of {first.host.name}'s addresses ({tried})"
        for each, got in zip(others, reached, strict=True)
    }


def _run_all(work: Callable[[Any], T], items: Sequence[Any]) -> list[T | CheckError]:
    """Do something for each in a thread of its own: hosts that hang do not add up."""
    results: list[Any] = [None] * len(items)

    def run(number: int, item: Any) -> None:
        try:
            results[number] = work(item)
        except OSError as error:
            results[number] = CheckError(str(error))
        except BaseException as error:  # noqa: BLE001  # raised again below
            results[number] = error

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in enumerate(items)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, CheckError):
            raise result
    return results


def describe_failures(failed: Mapping[str, str], total: int) -> str:
    """Return one line for each host that cannot be used."""
    lines = [f"{len(failed)} of {total} hosts cannot be used:", *(f"{name}: {why}" for name, why in failed.items())]
    return "\n  ".join(lines)
