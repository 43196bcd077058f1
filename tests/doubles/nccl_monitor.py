"""A stand-in for NCCL's own monitor (RAS): what a client of it gets, byte by byte, in the formats of NCCL 2.24 to 2.30.

Written from src/ras/client_support.cc of NCCL 2.24.3, 2.27.7, 2.28.9, 2.29.3 and 2.30.7 (commands:
`rasClientEventLoop`; text: `rasClientRunInit`, `rasClientRunComms`, `rasCountIsOutlier`; JSON: `rasDumpCommsToJSON`;
events: `rasClientsNotifyEvent`, `rasPeerInfoToString`). No device has answered here.
"""

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from typing_extensions import Self

OPERATIONS = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")
"""ncclFuncStr of src/init.cc."""
ERRORS = {1: "Unhandled CUDA error", 6: "Remote process error"}


@dataclass(frozen=True)
class Rank:
    """Of a communicator."""

    number: int
    pid: int
    host: str = "127.0.0.1"
    gpu: int = 0
    counts: tuple[int, ...] = (0, 0, 0, 0, 0)
    """By operation."""
    init_state: int = 0
    async_error: int = 0
    is_ending: bool = False
    lost: str = ""
    """"silent", "dead" or "left"; "": it answers."""

    @property
    def status(self) -> str:
        return "FINALIZE" if self.is_ending else "INIT" if self.init_state else "RUNNING"

    @property
    def place(self) -> str:
        return f"GPU {self.gpu} managed by process {self.pid} on node {self.host}"


@dataclass(frozen=True)
class Communicator:
    ranks: tuple[Rank, ...]
    name: str = "27a079b828ff1a75"

    @property
    def answering(self) -> tuple[Rank, ...]:
        return tuple(rank for rank in self.ranks if not rank.lost)

    @property
    def missing(self) -> tuple[Rank, ...]:
        return tuple(rank for rank in self.ranks if rank.lost)


@dataclass(frozen=True)
class Job:
    communicators: tuple[Communicator, ...] = ()
    version: tuple[int, int, int] = (2, 29, 3)

    @property
    def processes(self) -> list[Rank]:
        return list({rank.pid: rank for each in self.communicators for rank in each.ranks}.values())


def render_json(job: Job) -> str:
    comma = "" if job.version < (2, 29, 0) else ","  # the damage of 2.28.7 and 2.28.9
    parts = []
    for each in job.communicators:
        ranks = ",\n".join(
            f"""        {{
          "rank": {rank.number},
          "host": "{rank.host}",
          "pid": {rank.pid},
          "cuda_dev": {rank.gpu},
          "nvml_dev": {rank.gpu},
          "status": {{
            "init_state": {rank.init_state},
            "async_error": {rank.async_error},
            "finalize_called": {str(rank.is_ending).lower()},
            "destroy_flag": false,
            "abort_flag": false
          }},
          "collective_counts": {{
{_render_counts(rank)}
          }}
        }}"""
            for rank in each.answering
        )
        missing = ",\n".join(
            f"""        {{
          "rank": {rank.number},
          "host": "{rank.host}",
          "pid": {rank.pid},
          "cuda_dev": {rank.gpu},
          "nvml_dev": {rank.gpu}{comma}
          "status": {{
            "unresponsive": {str(rank.lost in ("silent", "dead")).lower()},
            "considered_dead": {str(rank.lost == "dead").lower()}
          }}
        }}"""
            for rank in each.missing
        )
        parts.append(
            f"""    {{
      "hash": "0x{each.name}",
      "secondary_hash": "0xb7e7187447156001:0xb8242ed28a71381e",
      "size": {len(each.ranks)},
      "ranks_count": {len(each.answering)},
      "missing_ranks_count": {len(each.missing)},
      "ranks": [
{ranks}
      ],
      "missing_ranks": [
{missing}
      ]
    }}"""
        )
    version = ".".join(map(str, job.version))
    communicators = ",\n".join(parts)
    return f"""{{
  "nccl_version": "{version}",
  "cuda_runtime_version": 13000,
  "cuda_driver_version": 13000,
  "timestamp": "2025-12-19 13:06:53",
  "communicators_count": {len(parts)},
  "communicators": [
{communicators}
  ],
  "ras": {{
    "collection_time_sec": 0.000,
    "timeouts_count": 0
  }}
}}
"""


def _render_counts(rank: Rank) -> str:
    pairs = zip(OPERATIONS, rank.counts, strict=True)
    return ",\n".join(f'            "{name}": {count}' for name, count in pairs)


def is_outlier(count: int, total: int | None = None) -> bool:
    """Of a verbose report."""
    return count == 1 or total is None or count < total * 0.5


def render_text(job: Job) -> str:
    return "".join(_render_text(job))


def _render_text(job: Job) -> Iterator[str]:
    processes = job.processes
    yield f"NCCL version {'.'.join(map(str, job.version))}+cuda12.8 compiled with CUDA 12.8\n"
    yield "CUDA runtime version 12080, driver version 12080\n\n"
    yield "Job summary\n===========\n\n"
    nodes = Counter(each.host for each in processes)
    if len(set(nodes.values())) <= 1:
        yield "  Nodes  Processes         GPUs  Processes     GPUs\n"
        yield "(total)   per node  per process    (total)  (total)\n"
        per_node = max(nodes.values(), default=0)
        yield f"{len(nodes):7}  {per_node:9}  {1:11}  {len(processes):9}  {len(processes):7}\n"
    else:
        yield "  Nodes  Processes         GPUs\n          per node  per process\n"
        for per_node, count in Counter(nodes.values()).most_common():
            yield f"{count:7}  {per_node:9}  {1:11}\n"
        yield "\n  Nodes  Processes         GPUs\n(total)    (total)      (total)\n"
        yield f"{len(nodes):7}  {len(processes):9}  {len(processes):11}\n"
    yield "\nCommunicators... (0.00s)\n=============\n\n"
    if job.communicators:
        yield "Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors\n"
        yield "    #  in group  per comm  per node  per comm  in group\n"
    else:
        yield "No communicator data collected!\n"
    for number, each in enumerate(job.communicators):
        size, answering = len(each.ranks), len(each.answering)
        status = max(
            (rank.status for rank in each.answering), key=("INIT", "RUNNING", "FINALIZE").index, default="NOCOMM"
        )
        errors = ",".join(_list_errors(job, each)) or "OK"
        yield f"{number:5}  {1:8}  {1:8}  {size:>8}  {size:8}  {answering:8}  {status:>8}  {errors:>6}\n"
    yield "\nErrors\n======\n\n"
    silent = [each for each in processes if each.lost == "silent"]
    dead = [each for each in processes if each.lost == "dead"]
    if silent:
        yield f"INCOMPLETE\n  Missing communicator data from {len(silent)} job process{'es' * (len(silent) > 1)}\n"
        yield from _list_processes(silent)
    if dead:
        are = "es are" if len(dead) > 1 else " is"
        yield f"DEAD\n  {len(dead)} job process{are} considered dead (unreachable via the RAS network)\n"
        yield from _list_processes(dead)
    for number, each in enumerate(job.communicators):
        yield from _render_errors(job, number, each)
    yield "Warnings\n========\n\n"
    for number, each in enumerate(job.communicators):
        yield from _render_mismatch(job, number, each)


def _list_processes(lost: Sequence[Rank]) -> Iterator[str]:
    for each in lost:
        yield f"  Process {each.pid} on node {each.host} managing GPU {each.gpu}\n"
    yield "\n"


def _list_errors(job: Job, each: Communicator) -> Iterator[str]:
    if any(rank.lost in ("silent", "dead") for rank in each.ranks):
        yield "INCOMPLETE"
    if any(rank.async_error for rank in each.answering):
        yield "ERROR"
    if _differs(each) or len({rank.status for rank in each.answering}) > 1 or any(r.lost == "left" for r in each.ranks):
        yield "MISMATCH"


def _differs(each: Communicator) -> bool:
    return len({rank.counts for rank in each.answering}) > 1


def _render_errors(job: Job, number: int, each: Communicator) -> Iterator[str]:
    lost = [rank for rank in each.missing if rank.lost != "left"]
    if lost:
        yield f"#{number}-0 ({each.name}) INCOMPLETE\n"
        yield f"  Missing communicator data from {len(lost)} rank{'s' * (len(lost) > 1)}\n"
        if job.version < (2, 26, 0):
            yield f"  The missing rank{'s' * (len(lost) > 1)}: {','.join(str(rank.number) for rank in lost)}\n"
        else:
            for rank in lost:
                yield f"  Rank {rank.number} -- {rank.place}\n"
        yield "\n"
    failed = [rank for rank in each.answering if rank.async_error]
    if failed:
        yield f"#{number}-0 ({each.name}) ERROR\n"
        plural = "s" * (len(failed) > 1)
        yield f"  Asynchronous error{plural} on {len(failed)} rank{plural}\n"
        for code, count in Counter(rank.async_error for rank in failed).most_common():
            if count > 1:
                yield f"  {count} ranks reported {ERRORS[code]}\n"
            for rank in failed:
                if rank.async_error == code:
                    reported = "" if count > 1 else f" reported {ERRORS[code]}"
                    yield f"  Rank {rank.number}{reported} -- {rank.place}\n"
        yield "\n"


def _render_mismatch(job: Job, number: int, each: Communicator) -> Iterator[str]:
    if "MISMATCH" not in _list_errors(job, each):
        return
    yield f"#{number}-0 ({each.name}) MISMATCH\n"
    yield from _render_statuses(job, each)
    if not _differs(each):
        return
    tables = {name: [rank.counts[place] for rank in each.answering] for place, name in enumerate(OPERATIONS)}
    if job.version < (2, 26, 0):
        tables = {"collective": [sum(rank.counts) for rank in each.answering]}
    for name, counts in tables.items():
        if len(set(counts)) > 1:
            yield f"  Communicator ranks have different {name} operation counts\n"
            yield from _render_sets(each, counts)


def _render_statuses(job: Job, each: Communicator) -> Iterator[str]:
    unknown = "UNKNOWN" if job.version < (2, 26, 0) else "NOCOMM"
    statuses = {rank.number: unknown if rank.lost else rank.status for rank in each.ranks if rank.lost in ("", "left")}
    if len(set(statuses.values())) < 2:
        return
    yield "  Communicator ranks have different status\n"
    for status, count in Counter(statuses.values()).most_common():
        if count > 1:
            yield f"  {count} ranks have status {status}\n"
        if is_outlier(count, len(each.ranks)) and (status != "UNKNOWN" or count == 1):
            for rank in each.ranks:
                if statuses.get(rank.number) == status:
                    has = "" if count > 1 else f" has status {status}"
                    yield f"  Rank {rank.number}{has}" + ("\n" if status == "UNKNOWN" else f" -- {rank.place}\n")
    yield "\n"


def _render_sets(each: Communicator, counts: Sequence[int]) -> Iterator[str]:
    for value, count in sorted(Counter(counts).items(), key=lambda item: (-item[1], -item[0])):
        launched = f"launched up to operation {value}" if value else "not launched any operations"
        if count > 1:
            yield f"  {count} ranks have {launched}\n"
        if is_outlier(count, len(each.ranks)):
            for rank, own in zip(each.answering, counts, strict=True):
                if own == value:
                    yield f"  Rank {rank.number}{'' if count > 1 else f' has {launched}'} -- {rank.place}\n"
    yield "\n"


def keep(text: bytes) -> bytes:
    """No damage."""
    return text


@dataclass
class Server:
    """Serves `read` on an address, as each process of a job does; several may share one."""

    read: Callable[[], Job]
    address: str = "127.0.0.1:0"
    delay_s: float = 0.0
    """Before each report."""
    is_silent: bool = False
    is_closed: bool = False
    damage: Callable[[bytes], bytes] = keep
    asked: int = 0
    """Reports so far."""
    listeners: list[socket.socket] = field(default_factory=list)
    """Connections to which events are sent."""
    _threads: list[threading.Thread] = field(default_factory=list)
    _socket: socket.socket = field(default_factory=lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM))

    def __enter__(self) -> Self:
        host, _, port = self.address.rpartition(":")
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._socket.bind((host, int(port)))
        self._socket.listen(64)
        self.address = "{}:{}".format(*self._socket.getsockname())
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self.is_silent = self.is_closed = True
        for thread in self._threads:
            thread.join(5.0)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._serve, args=(connection,), daemon=True))
            self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(0.05)
            job, is_json, unread = self.read(), False, b""
            while not self.is_closed:
                try:
                    part = b"" if self.is_silent else connection.recv(1024)
                except TimeoutError:
                    continue
                if not part:
                    if not self.is_silent:
                        return
                    time.sleep(0.05)
                *lines, unread = (unread + part).split(b"\n")
                for line in lines:
                    command = line.decode().rstrip("\r").lower()
                    if command.startswith("client protocol "):
                        answer = "SERVER PROTOCOL 2\n"
                    elif command.startswith("timeout "):
                        answer = "OK\n" if command[8:].isdecimal() else f"ERROR: Invalid timeout value {command[8:]}\n"
                    elif command in ("set format json", "set format text") and job.version >= (2, 28, 7):
                        answer, is_json = "OK\n", command.endswith("json")
                    elif command == "monitor" and job.version >= (2, 29, 0):
                        answer = "OK\n"
                        self.listeners.append(connection)
                    elif command == "verbose status":
                        self._wait(self.delay_s)
                        self.asked += 1
                        report = render_json(job) if is_json else render_text(job)
                        connection.settimeout(5.0)
                        connection.sendall(self.damage(report.encode()))
                        return
                    else:
                        answer = f"ERROR: Unknown command {line.decode()}\n"
                    connection.sendall(answer.encode())

    def _wait(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while not self.is_closed and time.monotonic() < until_s:
            time.sleep(0.02)

    def tell_death(self, rank: Rank) -> None:
        """As the text of an event has it."""
        for each in self.listeners:
            text = f"Process {rank.pid} on node {rank.host} managing GPU {rank.gpu}"
            each.sendall(f"[2025-12-19 13:07:07] PEER_DEAD: {text} \n".encode())
