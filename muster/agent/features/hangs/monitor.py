"""Asks NCCL's own monitor (RAS) what the ranks of this node have launched. It may block, so call it in a thread.

Each process that uses NCCL 2.24 or newer has a thread that answers for the whole job, without Python, CUDA and torch.
The agent gives all workers of its node one address (`runtime.ports`), on which the kernel lets any of them
answer. If a user has given an address that other jobs share, their answers are recognised, because none of their
processes is a worker of this node. Nothing is asked while the job shows signs of life.

A rank is reported to stand still only after two reports. The reports are kept, so that a later look knows since when.

Source: NCCL 2.24.3 to 2.30.7, src/ras/client_support.cc (`rasClientEventLoop`), and its user guide,
troubleshooting/ras.rst. Several commands may be sent at once. An older NCCL answers unknown commands with ERROR.
"""

import re
import socket
import time
from collections.abc import Iterable, Mapping

from muster._shared.records import replace
from muster._shared.reports import LaunchCount, Launches
from muster.agent.features.hangs.monitor_reports import (
    Member,
    MonitorReport,
    read_report,
)
from muster.agent.features.hangs.nccl_launches import RUNNING, UNNAMED

DEADLINE_S = 2.0
"""The longest that an answer may take. NCCL gives its own processes `_TIMEOUT_S`."""
APART_S = 0.5
"""Time between two reports, if only one look is taken."""
_TIMEOUT_S = 1
_TRIES = 4
"""Other jobs may answer on a shared address, because the kernel chooses by the port of the asking process."""
_LIMIT_BYTES = 32 << 20
_COMMANDS = f"CLIENT PROTOCOL 2\nTIMEOUT {_TIMEOUT_S}\nSET FORMAT json\nVERBOSE STATUS\n".encode()
_CONNECT_S = 0.2
_EVENT_BYTES = 1 << 16
_DEATH = re.compile(rb"PEER_DEAD: Process (\d+) on node (\S+)")
_MOST_COMMUNICATORS = 32
"""The most communicators of one rank."""

Sessions = Mapping[int, Iterable[tuple[int, int]]]
"""Id and start time of all processes of a worker's session, by the worker's process id."""
_Key = tuple[str, int, int]
"""Communicator, rank in it, and process."""


class Monitor:
    """The monitor of one node's workers. Close it with `stop_listening`. Looks may overlap."""

    def __init__(self, address: str, world_size: int) -> None:
        """Open nothing.

        Args:
            address: the workers' NCCL_RAS_ADDR.
            world_size: the number of ranks of the job. A report that names no process belongs to a job with this many
                ranks.
        """
        self._address = address
        self._world_size = world_size
        self._since: dict[_Key, tuple[object, float]] = {}
        """The last report of a rank, and when it was first made."""
        self._local: dict[str, bool] = {}
        """Whether addresses are this host's."""
        self._events: socket.socket | None = None
        """A connection on which the monitor reports changes."""
        self._unread = b""
        self._has_events = True
        """As far as is known; NCCL before 2.29 has none."""

    def look(self, sessions: Sessions, deadline_s: float = DEADLINE_S) -> dict[int, tuple[Launches, ...]]:
        """Return what the workers have launched, by their process id.

        Return None if no monitor of theirs answers in time.
        """
        owners = {pid: worker for worker, members in sessions.items() for pid, _ in members}
        until_s = time.monotonic() + deadline_s
        for _ in range(_TRIES):
            text = ask(self._address, until_s)
            if text is None:
                return {}
            report = read_report(text)
            if report is not None and (found := self._sort(report, owners)) is not None:
                return found
        return {}

    def look_twice(self, sessions: Sessions) -> dict[int, tuple[Launches, ...]]:
        """Return two reports, `APART_S` apart. The second knows what has stood still."""
        if not self.look(sessions):
            return {}
        time.sleep(APART_S)
        return self.look(sessions)

    def read_deaths(self) -> list[str]:
        """Return the processes that the others have given up since the last call: "process 812 on 10.0.0.4".

        It does not block.
        """
        if not self._has_events:
            return []
        try:
            if self._events is None:
                self._events = _connect(self._address, time.monotonic() + _CONNECT_S)
                self._events.sendall(b"MONITOR\n")
                self._events.setblocking(False)
            part = self._events.recv(_EVENT_BYTES)
            if not part:
                raise ConnectionResetError
            self._unread += part
        except BlockingIOError:
            return []
        except (OSError, ValueError, OverflowError):
            self.stop_listening()
            return []
        *lines, self._unread = self._unread[-_EVENT_BYTES:].split(b"\n")
        self._has_events = not any(line.startswith(b"ERROR") for line in lines)
        found = [_DEATH.search(line) for line in lines]
        return [f"process {each[1].decode()} on {each[2].decode('ascii', 'replace')}" for each in found if each]

    def stop_listening(self) -> None:
        """Close the connection of `read_deaths`. Idempotent."""
        opened, self._events, self._unread = self._events, None, b""
        if opened is not None:
            opened.close()

    def _sort(self, report: MonitorReport, owners: Mapping[int, int]) -> dict[int, tuple[Launches, ...]] | None:
        """Return what the report says of each worker; None if the report is another job's."""
        now_s = time.monotonic()
        own = [each for each in report.members if each.pid in owners and self._is_here(each.host)]
        if not own and report.processes != self._world_size:
            return None
        # An older NCCL omits ranks that agree, but each worker is in a communicator of all ranks. 2.24 names no
        # communicators of a process that does not answer.
        rest = [each for each in report.unlisted if each.state == UNNAMED or each.size == self._world_size]
        lost = {owners[each.pid]: each.state for each in own if not each.communicator}
        listed = {(owners[each.pid], each.communicator) for each in own}
        found: dict[int, list[Launches]] = {worker: [] for worker in owners.values()}
        for member in own:
            if member.communicator or not rest:
                found[owners[member.pid]].append(self._build(member, member.pid, now_s))
        for worker, each in ((worker, each) for worker in found for each in rest):
            if (worker, each.communicator) not in listed:
                is_lost = worker in lost
                current = replace(each, state=lost[worker], counts=()) if is_lost else each
                found[worker].append(self._build(current, worker, now_s))
        return {worker: tuple(sorted(each, key=_has_no_others)[:_MOST_COMMUNICATORS]) for worker, each in found.items()}

    def _build(self, member: Member, pid: int, now_s: float) -> Launches:
        key = member.communicator, member.rank, pid
        current = member.state, member.counts
        before, since_s = self._since.get(key, (None, now_s))
        if before != current:
            since_s = now_s
        self._since[key] = current, since_s
        return Launches(
            communicator=member.communicator,
            size=member.size,
            state=member.state,
            counts=member.counts,
            still_s=round(now_s - since_s, 3),
        )

    def _is_here(self, host: str) -> bool:
        """Return whether the address is this host's, so that one can bind it."""
        if host not in self._local:
            self._local[host] = _can_bind(host)
        return self._local[host]


def _has_no_others(launches: Launches) -> bool:
    """Return whether its ranks agree; those that do not are listed first."""
    return all(each.least == each.most for each in launches.counts) and launches.state == RUNNING


def _can_bind(host: str) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as opened:
            opened.bind((host, 0))
    except OSError:
        return False
    return True


def ask(address: str, until_s: float) -> bytes | None:
    """Ask one of the processes that listen there for its report; None if none answers completely in time.

    Args:
        address: NCCL_RAS_ADDR.
        until_s: by the monotonic clock.
    """
    received = bytearray()
    try:
        with _connect(address, until_s) as connection:
            connection.sendall(_COMMANDS)
            while len(received) < _LIMIT_BYTES:
                connection.settimeout(max(0.001, until_s - time.monotonic()))
                part = connection.recv(1 << 18)
                if not part:  # closed after the report
                    return bytes(received)
                received += part
    except (OSError, ValueError, OverflowError):
        pass
    return None


def _connect(address: str, until_s: float) -> socket.socket:
    """Connect to one of the processes; the caller closes it.

    Raises:
        OSError, ValueError, OverflowError: no process listens there, or it is no address.
    """
    host, _, port = address.rpartition(":")
    return socket.create_connection(
        (host.strip("[]") or "localhost", int(port)), max(0.001, until_s - time.monotonic())
    )


def count_launches(launches: Iterable[Launches]) -> tuple[int, ...] | None:
    """Return what changes whenever a rank launches an operation; None if the ranks of all its communicators agree.

    Ranks that agree may compute without NCCL, or compile, so they are judged by other signs.
    """
    return (
        tuple(
            number
            for each in launches
            if each.state != RUNNING or any(count.least != count.most for count in each.counts)
            for count in each.counts or (LaunchCount(operation="", by_rank=0, least=0, most=0),)
            for number in (count.by_rank, count.least, count.most)
        )
        or None
    )
