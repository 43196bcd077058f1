"""Reads the reports of NCCL's own monitor (RAS), text and JSON. Pure; it omits what it does not know.

NCCL before 2.28.7 writes only text. If the ranks of a communicator have launched different numbers of operations, the
text lists only the ranks of small sets. If they agree, it has only the communicator's size. JSON has all ranks. NCCL
counts launches instead of completions, and neither send nor recv. 2.24 and 2.25 do not distinguish operations.

Source: NCCL 2.24.3, 2.27.7, 2.28.9, 2.29.3 and 2.30.7, src/ras/client_support.cc: `rasClientRunInit`,
`rasClientRunComms`, `rasDumpCommsToJSON`. No GPU was available: this module reads what those functions print.
"""

import re
from collections.abc import Iterator, Mapping

from muster._shared.foreign_files import parse_json
from muster._shared.records import record
from muster._shared.reports import LaunchCount
from muster.agent.features.hangs.nccl_launches import DEAD, ENDING, INITIALISING, LEFT, RUNNING, SILENT, UNNAMED
from muster.agent.features.hangs.reading import to_dict, to_int, to_list

_STATES = {"INIT": INITIALISING, "FINALIZE": ENDING, "ABORT": ENDING, "NOCOMM": LEFT, "UNKNOWN": LEFT}
_ERRORS = {1: "Unhandled CUDA error", 2: "System error", 3: "Internal error", 4: "Invalid argument"}
_ERRORS |= {5: "Invalid usage", 6: "Remote process error"}
_IN_PROGRESS = 7
_MOST_RANKS = 65536

_MISSING_COMMA = re.compile(rb'(\d)(\s*\n\s*"status")')
"""2.28.7 and 2.28.9 omit the comma after the last number of a missing rank."""
_VERSION = re.compile(r"NCCL version (\S+)")
_TABLE = re.compile(r"\s*(\d+)\s+\d+\s+\d+\s+[\d-]+\s+(\d+)\s+\d+\s+([A-Z]+)\s+([A-Z,]+)")
_TOTALS = re.compile(r"\(total\)")
_HEADING = re.compile(r"#(\d+)-\d+ \(([0-9a-f]+)\) ([A-Z]+)")
_COUNTED = re.compile(r"  Communicator ranks have different (?:(\w+) operation counts|(status))")
_SET = re.compile(
    r"  (\d+) ranks (?:have (?:launched up to operation (\d+)|(not) launched any|status (\w+))|reported (.+))"
)
_RANK = re.compile(
    r"  Rank (\d+)"
    r"(?: has (?:launched up to operation (\d+)|(not) launched any operations|status (\w+))| reported (.+?))?"
    r" -- (?:GPU .+? managed by process (\d+) on node (\S+)|\[)"
)
_PROCESS = re.compile(r"  Process (\d+) on node (\S+) managing GPU")


@record
class Member:
    """A rank of a communicator. Host and pid identify its process."""

    communicator: str
    """The communicator's hash."""
    size: int
    rank: int
    """The rank in the communicator."""
    host: str
    """The host's address."""
    pid: int
    state: str = RUNNING
    """One of those above, or what NCCL calls an error."""
    counts: tuple[LaunchCount, ...] = ()
    """Operations that the ranks have launched differently often, or all operations if the report has them."""


@record
class MonitorReport:
    """One answer of the monitor."""

    version: str
    """NCCL's version: "2.28.9"."""
    members: tuple[Member, ...] = ()
    processes: int = 0
    """The number of the job's processes; 0 if the report does not say."""
    unlisted: tuple[Member, ...] = ()
    """What is true of the ranks that are not listed, for each communicator of a text, whichever ranks they are."""


def read_report(text: bytes) -> MonitorReport | None:
    """Read the monitor's answer to `VERBOSE STATUS`; None if it is not understood, or incomplete."""
    start = text.find(b"{\n")
    if start >= 0:
        return _read_json(text[start:])
    found = _VERSION.search(decoded := text.decode("utf-8", "replace"))
    # Without this line, which begins the last part, the connection ended early.
    if found is None or "\nWarnings\n" not in decoded:
        return None
    return _TextReader(found[1]).read(decoded.splitlines())


def _read_json(text: bytes) -> MonitorReport | None:
    try:
        data = to_dict(parse_json(_MISSING_COMMA.sub(rb"\1,\2", text)))
    except ValueError:
        return None
    if "communicators" not in data:
        return None
    members = [member for each in to_list(data["communicators"]) for member in _read_communicator(to_dict(each))]
    return MonitorReport(version=str(data.get("nccl_version"))[:40], members=tuple(members))


def _read_communicator(data: Mapping[str, object]) -> Iterator[Member]:
    name = f"{str(data.get('hash')).removeprefix('0x')[:40]}"
    size = to_int(data.get("size"))
    ranks = [to_dict(each) for each in to_list(data.get("ranks"))[:_MOST_RANKS]]
    counts = [
        {str(operation)[:40]: to_int(count) for operation, count in to_dict(each.get("collective_counts")).items()}
        for each in ranks
    ]
    operations = list(dict.fromkeys(operation for each in counts for operation in each))[:16]
    least = {each: min(own.get(each, 0) for own in counts) for each in operations}
    most = {each: max(own.get(each, 0) for own in counts) for each in operations}

    def build(each: Mapping[str, object], state: str, counts: tuple[LaunchCount, ...] = ()) -> Member:
        return Member(
            communicator=name,
            size=size,
            rank=to_int(each.get("rank")),
            host=str(each.get("host")),
            pid=to_int(each.get("pid")),
            state=state,
            counts=counts,
        )

    for each, own in zip(ranks, counts, strict=True):
        launched = (
            LaunchCount(operation=name, by_rank=own.get(name, 0), least=least[name], most=most[name])
            for name in operations
        )
        yield build(each, _read_state(to_dict(each.get("status"))), tuple(launched))
    for each in map(to_dict, to_list(data.get("missing_ranks"))[:_MOST_RANKS]):
        status = to_dict(each.get("status"))
        yield build(each, DEAD if status.get("considered_dead") else SILENT if status.get("unresponsive") else LEFT)


def _read_state(status: Mapping[str, object]) -> str:
    if status.get("abort_flag") or status.get("finalize_called") or status.get("destroy_flag"):
        return ENDING
    for code in (to_int(status.get("init_state")), to_int(status.get("async_error"))):
        if code not in (0, _IN_PROGRESS):
            return _ERRORS.get(code, "Unexpected error")
    return INITIALISING if status.get("init_state") == _IN_PROGRESS else RUNNING


class _TextReader:
    """Reads a text line by line, because the meaning of a line depends on the headings above it."""

    def __init__(self, version: str) -> None:
        self._version = version.partition("+")[0][:40]
        self._sizes: dict[str, int] = {}
        """Number of ranks of a communicator, by group."""
        self._agreed = self._processes = 0
        self._communicator, self._kind, self._size = "", "", 0
        self._operation: str | None = None
        """The operation whose counts follow; None if none follow."""
        self._value: int | str | None = None
        """Launches or a state, for the set of ranks that follows."""
        self._sets: dict[tuple[str, str], list[list[int]]] = {}
        """Ranks, launches and listed ranks of each set, by communicator and operation."""
        self._places: dict[tuple[str, int], tuple[int, str]] = {}
        """Pid and host, by communicator and rank."""
        self._states: dict[tuple[str, int], str] = {}
        self._own: dict[tuple[str, int], dict[str, int]] = {}
        """Launches by operation."""
        self._members: dict[str, int] = {}
        """Communicators with their sizes, in order."""
        self._lost: list[Member] = []

    def read(self, lines: list[str]) -> MonitorReport:
        before = ""
        for line in lines[:_MOST_RANKS]:
            self._read_totals(before, line)
            self._read_line(line)
            before = line
        listed = tuple(self._build_member(*key) for key in self._places)
        named = {(member.pid, member.host) for member in listed}
        return MonitorReport(
            version=self._version,
            members=(*listed, *(each for each in self._lost if (each.pid, each.host) not in named)),
            processes=self._processes,
            unlisted=tuple(self._list_unlisted()),
        )

    def _list_unlisted(self) -> Iterator[Member]:
        for communicator, size in self._members.items():
            counts, state = [], RUNNING
            for (name, operation), sets in self._sets.items():
                launches = [each for _, each, _ in sets]
                rest = [each for _, each, listed in sets if not listed]
                if name == communicator and rest:
                    counts.append(
                        LaunchCount(operation=operation, by_rank=min(rest), least=min(launches), most=max(launches))
                    )
                    state = UNNAMED if len(rest) > 1 else state
            yield Member(
                communicator=communicator, size=size, rank=0, host="", pid=0, state=state, counts=tuple(counts)
            )
        if self._agreed:
            yield Member(communicator="", size=self._agreed, rank=0, host="", pid=0)

    def _read_totals(self, before: str, line: str) -> None:
        """Read the job summary, where the last columns of totals are processes and GPUs."""
        numbers = line.split()
        if _TOTALS.search(before) and len(numbers) > 2 and all(map(str.isdecimal, numbers)):
            self._processes = int(numbers[-2])

    def _read_line(self, line: str) -> None:
        if (found := _HEADING.match(line)) is not None:
            group, self._communicator, self._kind = found.groups()
            self._size = self._sizes.get(group, 0)
            self._members.setdefault(self._communicator, self._size)
            self._operation = self._value = None
        elif line in ("INCOMPLETE", "DEAD"):
            self._communicator, self._kind = "", line
        elif (found := _COUNTED.match(line)) is not None:
            # 2.24 counts all operations together: "different collective operation counts".
            self._operation = None if found[2] else "" if found[1] == "collective" else found[1]
            self._value = None
        elif (found := _SET.match(line)) is not None:
            self._begin_set(found)
        elif (found := _RANK.match(line)) is not None and self._communicator:
            self._read_rank(found)
        elif (found := _PROCESS.match(line)) is not None:
            state = DEAD if self._kind == "DEAD" else SILENT
            self._lost.append(Member(communicator="", size=0, rank=0, host=found[2], pid=to_int(found[1]), state=state))
        elif (found := _TABLE.match(line)) is not None:
            group, size, status, errors = found.groups()
            self._sizes[group] = to_int(size)
            if (status, errors) == ("RUNNING", "OK"):
                self._agreed = max(self._agreed, to_int(size))

    def _begin_set(self, found: "re.Match[str]") -> None:
        count, launches, none, state, error = found.groups()
        if launches or none:
            self._value = to_int(launches)
            sets = self._sets.setdefault((self._communicator, self._operation or ""), [])
            sets.append([to_int(count), self._value, 0])
        else:
            self._value = error or _STATES.get(state, RUNNING)

    def _read_rank(self, found: "re.Match[str]") -> None:
        rank, launches, none, state, error, pid, host = found.groups()
        key = self._communicator, to_int(rank)
        if pid is not None:
            self._places[key] = to_int(pid), host
        value = self._value
        if launches or none:
            value = to_int(launches)
            self._sets.setdefault((self._communicator, self._operation or ""), []).append([1, value, 1])
        elif state or error:
            value = error or _STATES.get(state, RUNNING)
        elif isinstance(value, int):
            self._sets[self._communicator, self._operation or ""][-1][2] += 1
        if self._kind == "INCOMPLETE":
            self._states[key] = SILENT
        elif isinstance(value, int):
            self._own.setdefault(key, {})[self._operation or ""] = value
        elif value is not None:
            self._states[key] = value

    def _build_member(self, communicator: str, rank: int) -> Member:
        pid, host = self._places[communicator, rank]
        counts = []
        for (name, operation), sets in self._sets.items():
            own = self._own.get((communicator, rank), {}).get(operation)
            rest = [launches for _, launches, listed in sets if not listed]
            if own is None and len(rest) == 1:  # listed for another operation
                own = rest[0]
            if name == communicator and own is not None:
                launches = [each for _, each, _ in sets]
                counts.append(LaunchCount(operation=operation, by_rank=own, least=min(launches), most=max(launches)))
        dead = {(each.pid, each.host) for each in self._lost if each.state == DEAD}
        state = self._states.get((communicator, rank), RUNNING)
        return Member(
            communicator=communicator,
            size=self._members[communicator],
            rank=rank,
            host=host,
            pid=pid,
            state=DEAD if state == SILENT and (pid, host) in dead else state,
            counts=() if state in (SILENT, LEFT) else tuple(counts),
        )
