"""`muster log`: the output of a job, of its replicas or of single ranks, while it runs and afterwards.

Lines of replicas come through the seam's `read_log`. Those of a rank come from the files of the run's folder, which
keep attempts apart, if these can be read on this machine or in a node that runs. Elsewhere they are found in the
replicas' output, by the prefix that agents give each rank's lines. A job that was started by hand has only its folder.
"""

import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torchx.schedulers.api import DescribeAppResponse, Stream
from torchx.specs import AppState, Role, is_terminal
from torchx.specs.api import NONE

from muster._shared.contract import LogNames, show_controls
from muster._shared.control import CommandExit, ControlError
from muster._shared.foreign_files import read_regular
from muster._shared.reports import Failure, Report, name_ranks
from muster.cli.answers import say
from muster.cli.history.log_folder import RunFolder
from muster.cli.history.sources import Event, RankProcess, describe_keeping, list_processes, parse_files
from muster.cli.operations import choose_agent_role, list_agent_roles
from muster.cli.overview import open_job
from muster.cli.streaming import LinePrinter, list_stderr
from muster.schedulers.adapter.scheduler import LogRequest, PluginScheduler
from muster.schedulers.adapter.status import count_replicas
from muster.schedulers.adapter.waiting_line import WAITS
from muster.schedulers.errors import EngineError, SchedulerError, UnknownAppError
from muster.schedulers.failure_report import describe_report, find_root_cause, parse_report
from muster.schedulers.lines import LineSplitter
from muster.schedulers.runner.job_console import PREFIX

FILES: Final[Mapping[str, str]] = {"stdout": LogNames.STDOUT, "stderr": LogNames.STDERR}
"""The files of a rank, by stream."""
_LIMIT_BYTES: Final = 16 << 20
"""The limit for a file. A longer one is read from its end."""
_LOOK_S: Final = 0.5
_BAD_ENDS: Final = (AppState.FAILED, AppState.CANCELLED, AppState.UNKNOWN)
_PIECE_BYTES: Final = 16 << 20
_EVENTS_LIMIT_BYTES: Final = 256 << 20
_FAILURES: Final = ("worker_failed", "hang_explained")
_WAITS: Final = ("hang_named", "stood_still")
_GOES_ON: Final = ("hang_ended", "moved_again", "round_formed")
_NO_OUTPUT: Final = (
    "muster-agent writes it to files only with `--tee 3` or `-r 3`, and each node to its own `--log-dir`"
)


@dataclass(frozen=True, kw_only=True)
class LogQuery:
    """What is wanted."""

    role: str | None = None
    node: int | None = None
    """The replica's number."""
    rank: int | None = None
    attempt: int | None = None
    failed: bool = False
    """The rank of the root cause."""
    follow: bool = False
    grep: re.Pattern[str] | None = None
    stream: str = "combined"

    @property
    def wants_ranks(self) -> bool:
        """Whether single ranks are wanted, and not replicas."""
        return self.rank is not None or self.attempt is not None or self.failed

    @property
    def files(self) -> tuple[str, ...]:
        """The files of a rank, in the order in which they are printed."""
        return tuple(name for stream, name in FILES.items() if self.stream in ("combined", stream))

    def build_request(self, role: str, index: int) -> LogRequest:
        """Return the same for one replica."""
        pattern = None if self.wants_ranks else self.grep
        return LogRequest(role=role, index=index, pattern=pattern, follow=self.follow, stream=Stream(self.stream))


def print_log(handle: str, **wanted: Any) -> int:
    """Print it, and return the exit code.

    Args:
        handle: names an app, see `handles.find_app`, or a folder with logs.
        wanted: which lines, see `LogQuery`.

    Raises:
        ControlError: there is no such app, role, node, rank or attempt, or its lines cannot be read.
    """
    query = LogQuery(**wanted)
    with open_job(handle) as (scheduler, app_id):
        response = scheduler.describe_app(app_id)
        if response is None:
            raise UnknownAppError(app_id)
        log = _Log(scheduler, app_id, response, query)
        if not scheduler.backend:
            _check_folder(query)
        elif query.follow and response.state in WAITS:
            say(log.describe_state())
        if query.wants_ranks:
            log.print_ranks()
        else:
            log.print_replicas()
    return CommandExit.DONE


def _check_folder(query: LogQuery) -> None:
    """Refuse what the folder of a job that was started by hand does not have."""
    if query.role is not None or query.node is not None:
        raise ControlError(
            "--role and --node are for an app, not for a folder; use --failed, --rank N or --attempt N",
            CommandExit.USAGE,
        )
    if not query.wants_ranks:
        where = "the agents' own output is on the console on which they were started"
        line = f"{where}; `--failed`, `--rank N` and `--attempt N` print the output of ranks"
        raise ControlError(line, CommandExit.USAGE)


class _Log:
    def __init__(
        self, scheduler: PluginScheduler | RunFolder, app_id: str, response: DescribeAppResponse, query: LogQuery
    ) -> None:
        self._scheduler = scheduler
        self._app_id = app_id
        self._response = response
        self._query = query
        self._records: dict[tuple[str, int], tuple[Event, ...]] = {}
        self._reports: dict[str, Report | None] = {}
        """By role."""
        self._written: set[str] = set()
        self._has_lines = False

    def describe_state(self) -> str:
        """Say how the job is, and why."""
        state, why = self._response.state, self._response.msg
        none = f"no node of {self._app_id} runs, it is" if state in WAITS else f"{self._app_id} is"
        return f"{none} {state.name}" + ("" if why in ("", NONE) else f": {why}")

    # -- replicas -------------------------------------------------------------------------------------------------

    def print_replicas(self) -> None:
        """Print the lines of all replicas that are wanted: as they come if followed, else in the order of time.

        Raises:
            ControlError: a job that waits, or has ended badly, has no line. It says why.
        """
        replicas = self._list_replicas()
        self._print_lines(replicas, self._read_replica)
        query, state = self._query, self._response.state
        if self._has_lines or query.follow or query.grep or query.stream != "combined":
            return
        if state in WAITS:
            raise ControlError(self.describe_state(), CommandExit.REFUSED)
        if state not in (AppState.RUNNING, AppState.SUCCEEDED):
            raise ControlError(f"there is no line to print; {self.describe_state()}", CommandExit.REFUSED)

    def _list_replicas(self) -> list[tuple[str, int]]:
        counts = count_replicas(self._response)
        role, node = self._query.role, self._query.node
        if role is not None and role not in counts:
            raise ControlError(f"{self._app_id} has no role {role!r}; it has: {', '.join(counts)}", CommandExit.USAGE)
        wanted = {name: count for name, count in counts.items() if role in (None, name)}
        found = [(name, index) for name, count in wanted.items() for index in range(count) if node in (None, index)]
        if not found:
            most = max(wanted.values(), default=0)
            raise ControlError(f"{self._app_id} has nodes 0 to {most - 1}, not {node}", CommandExit.USAGE)
        return found

    def _read_replica(self, role: str, index: int) -> Iterator[str]:
        for line in self._scheduler.read_log(self._app_id, self._query.build_request(role, index)):
            self._has_lines = True
            yield line

    def _print_lines(self, replicas: Sequence[tuple[str, int]], read: Callable[[str, int], Iterable[str]]) -> None:
        printer = LinePrinter(sys.stdout, holds_reports=False)
        printer.start(
            replicas,
            read,
            lambda role: self._scheduler.count_merged_ranks(self._app_id, role),
            by_time=not self._query.follow,
        )
        printer.wait()
        printer.close()

    # -- ranks ----------------------------------------------------------------------------------------------------

    def print_ranks(self) -> None:
        """Print the lines of a rank, or of all ranks of an attempt."""
        role, rank, attempt = self._query.role, self._query.rank, self._query.attempt
        roles = self._list_agent_roles()
        if self._query.failed:
            role, rank, failed_in = self._find_failed(roles)
            attempt = failed_in if attempt is None else attempt
            where = f" of role {role}" if len(roles) > 1 else ""
            say(f"the root cause: rank {rank}{where}, attempt {attempt}")
        role = str(choose_agent_role(self._app_id, self._response.roles, role).name)
        if self._query.follow:
            self._follow_rank(role, rank, attempt)
            return
        places = self._locate(role, roles[role], rank, attempt)
        shown = [self._print_place(role, index, place, alone=rank is not None) for index, place in places]
        if any(shown):
            if rank is not None and not self._has_lines:
                report = self._read_report(role) if self._query.failed else None
                say(f"rank {rank} printed nothing" + ("" if report is None else f"; {describe_report(report)}"))
            return
        self._print_without_files(role, rank, attempt)

    def _print_without_files(self, role: str, rank: int | None, attempt: int | None) -> None:
        """Print what else there is of ranks: their lines in the output of their node, or what the job's report has.

        Args:
            role: of the ranks.
            rank: one. None: all of the attempt.
            attempt: that was asked for, or that of the failure. None: the last.

        Raises:
            ControlError: there is no such rank or attempt, or nothing is known of it.
        """
        self._check_known(rank, attempt, self._read_world_size(role))
        state, failed = self._response.state, self._query.failed
        if rank is not None and (attempt is None or failed) and self._print_from_console(role, rank):
            return
        if state in WAITS:
            raise ControlError(self.describe_state(), CommandExit.REFUSED)
        what = f"attempt {attempt}" if rank is None else f"rank {rank}"
        why = f"the files and lines of {what} are gone with the {self._scheduler.properties.node_word}, or out of reach"
        if not self._scheduler.backend:
            why = f"{self._app_id} has no output of {what}: {_NO_OUTPUT}"
        if rank is not None and self._print_from_report(role, rank, attempt, why):
            return
        report = self._read_report(role) if failed else None
        known = "" if report is None else f"this is known of the failure: {describe_report(report)}"
        rest = self._describe_rest(role) if self._scheduler.backend else ""
        raise ControlError("; ".join(filter(None, (why, known, rest))), CommandExit.REFUSED)

    def _check_known(self, rank: int | None, attempt: int | None, world_size: int) -> None:
        """Refuse a rank or an attempt that the job's agents have not recorded, if they have recorded any.

        Args:
            rank: the rank.
            attempt: the attempt.
            world_size: what they have reported. 0: it is not known.
        """
        all_records = [event for events in self._records.values() for event in events]
        known = list_processes(all_records)
        ranks, attempts = ({place.global_rank for place in known}, {place.attempt for place in known})
        ranks.update(range(max(find_world_size(all_records), world_size)))  # some records may not be here yet
        if rank is not None and ranks and rank not in ranks:
            raise ControlError(f"there is no rank {rank}; there are {name_ranks(ranks)}", CommandExit.REFUSED)
        if attempt is not None and attempts and attempt not in attempts:
            there = ", ".join(map(str, sorted(attempts)))
            raise ControlError(f"there is no attempt {attempt}; there are: {there}", CommandExit.REFUSED)

    def _read_world_size(self, role: str) -> int:
        """Return it as the agents of a role have reported it last. 0: it is not known."""
        try:
            facts = self._scheduler.read_facts(self._app_id)
        except (EngineError, SchedulerError):  # the rest is known without them
            return 0
        job = None if facts is None else facts.jobs.get(role)
        return 0 if job is None or job.status is None else int(job.status.world_size)

    def _list_agent_roles(self) -> dict[str, int]:
        counts = count_replicas(self._response)
        found = list_agent_roles(self._app_id, self._response.roles, self._query.role)
        return {role.name: counts[role.name] for role in found}

    def _find_failed(self, roles: Mapping[str, int]) -> tuple[str, int, int]:
        """Return the role, rank and attempt of the root cause.

        It is that of the job's report, or else of what its agents have recorded.
        """
        for role in roles:
            report = self._read_report(role)
            root = None if report is None else find_root_cause(report)
            if root is not None:
                return role, root.global_rank, root.attempt
        for role, count in roles.items():
            all_records = [self._read_records(role, index) for index in range(count)]
            failures = [found for each in all_records if (found := find_first_failure(each)) is not None]
            failures += [found for each in all_records if (found := find_waited_for(each)) is not None]
            if failures:
                rank, attempt = max(failures, key=lambda failure: failure[1])  # of the same attempt the first
                return role, rank, attempt
        state, why = self._response.state, self._response.msg
        ended = f"; it is {state.name}" if state is not AppState.SUCCEEDED else ""
        ended += f": {why}" if state is AppState.FAILED and why not in ("", NONE) else ""
        ended += f"; {self._describe_rest(next(iter(roles)))}" if state in _BAD_ENDS else ""
        raise ControlError(f"no rank of {self._app_id} is known to have failed{ended}", CommandExit.REFUSED)

    def _describe_rest(self, role: str) -> str:
        """Say which command prints what is left of the output, and how to keep what ends with its node."""
        if not self._scheduler.backend:
            return f"`muster log {self._app_id} --attempt N` prints the output of all ranks in attempt N"
        keeping = f"; {describe_keeping(self._find_role(role))}" if self._scheduler.properties.loses_files else ""
        return f"`muster log {self._app_id}` prints what is left of the job's output{keeping}"

    def _read_report(self, role: str) -> Report | None:
        if role not in self._reports:
            content = self._read_file(role, 0, LogNames.REPORT)
            report = parse_report(content) if content is not None else None
            if report is None:
                facts = self._scheduler.read_facts(self._app_id)
                report = None if facts is None else facts.reports.get(role)
            self._reports[role] = report
        return self._reports[role]

    def _read_file(self, role: str, index: int, name: str) -> bytes | None:
        try:
            return self._scheduler.read_run_file(self._app_id, role, index, name, _LIMIT_BYTES)
        except EngineError as error:
            if str(error) not in self._written:
                self._written.add(str(error))
                say(f"{name} of node {index} cannot be read: {error}")
            return None

    def _read_records(self, role: str, index: int) -> tuple[Event, ...]:
        key = role, index
        if key not in self._records:
            content = self._read_file(role, index, LogNames.EVENTS) or b""
            self._records[key] = parse_files(iter([(f"{role}/{index}", content)]))
        return self._records[key]

    def _locate(self, role: str, count: int, rank: int | None, attempt: int | None) -> list[tuple[int, RankProcess]]:
        """Return the replica to ask, and the place. Without a rank, return all of an attempt in their order."""
        found: dict[int, tuple[int, RankProcess]] = {}
        for index in range(count):
            for place in list_processes(self._read_records(role, index)):
                if rank in (None, place.global_rank) and attempt in (None, place.attempt):
                    before = found.get(place.global_rank)
                    if before is None or before[1].attempt <= place.attempt:
                        found[place.global_rank] = index, place
            if rank is not None and found:
                break
        return [found[each] for each in sorted(found)]

    def _print_place(self, role: str, index: int, place: RankProcess, *, alone: bool) -> bool:
        """Print the files of a rank, and return whether one could be read."""
        has_read = False
        for name in self._query.files:
            contents = (self._read_file(role, index, path) for path in place.list_paths(name))
            content = next((each for each in contents if each is not None), None)
            has_read |= content is not None
            self._has_lines |= bool(content)
            for line in (content or b"").decode(errors="replace").splitlines(keepends=True):
                self._print_line(line if alone else f"[r{place.global_rank}]:{line}")
        return has_read

    def _print_line(self, line: str) -> None:
        if self._query.grep is None or self._query.grep.search(line):
            sys.stdout.write(line if line.endswith("\n") else f"{line}\n")

    def _print_from_console(self, role: str, rank: int) -> bool:
        """Print the lines of a rank in the output of its node. Return whether there are any."""
        is_found = False
        for replica in self._list_replicas():
            for line in select_rank(self._read_replica(*replica), rank) if replica[0] == role else ():
                if not is_found:
                    is_found = True
                    where = "these are its lines in the output of its node"
                    say(f"the files of rank {rank} are gone or out of reach; {where}")
                self._print_line(line)
        return is_found

    def _find_role(self, name: str) -> Role:
        return next(role for role in self._response.roles if role.name == name)

    def _print_from_report(self, role: str, rank: int, attempt: int | None, why: str) -> bool:
        """Print `why` the report is asked, and the lines of a rank that it has. Return False if it has none."""
        report = self._read_report(role) if LogNames.STDERR in self._query.files else None
        failure = None if report is None else find_failure(report, rank, attempt)
        lines = [] if failure is None else list(list_stderr(failure))
        if lines:
            say(f"{why}; the job's report has these lines of the rank")
        for line in lines:
            self._print_line(show_controls(line))
        return bool(lines)

    def _follow_rank(self, role: str, rank: int | None, attempt: int | None) -> None:
        if rank is None:
            raise ControlError("-f with --attempt needs a --rank", CommandExit.USAGE)
        folder = self._scheduler.find_run_dir(self._app_id, role)
        if folder is None:
            replicas = [replica for replica in self._list_replicas() if replica[0] == role]
            self._print_lines(replicas, lambda *replica: self._filter(select_rank(self._read_replica(*replica), rank)))
            return
        for line in follow_files(folder, rank, attempt, self._query.files, self._has_ended):
            self._print_line(line)
            sys.stdout.flush()

    def _filter(self, lines: Iterable[str]) -> Iterator[str]:
        return (line for line in lines if self._query.grep is None or self._query.grep.search(line))

    def _has_ended(self) -> bool:
        return has_ended(self._scheduler, self._app_id)


def has_ended(scheduler: PluginScheduler | RunFolder, app_id: str) -> bool:
    """Return whether no more lines come of a job."""
    response = scheduler.describe_app(app_id)
    return response is None or is_terminal(response.state) or response.state is AppState.UNKNOWN


def follow_files(
    folder: Path,
    rank: int,
    attempt: int | None,
    files: Sequence[str],
    is_over: Callable[[], bool],
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[str]:
    """Return the lines of a rank as its files grow, over all its attempts from the newest on.

    They end with the job.

    Args:
        folder: of the run.
        rank: the rank.
        attempt: only this one. None: the newest, and those that follow.
        files: which of each attempt, see `FILES`.
        is_over: whether the job has ended, and its files are complete.
        sleep: waits between two looks.
    """
    offsets: dict[str, int] = {}
    splitters: dict[str, LineSplitter] = {}
    places: list[RankProcess] = []
    while True:
        is_last = is_over()
        content = _read_from(folder / LogNames.EVENTS, -_EVENTS_LIMIT_BYTES)
        newest = find_rank(parse_files(iter([(str(folder), content)])), rank, attempt)
        if newest is not None and newest not in places:
            places.append(newest)  # its last lines may still come
        for path in (path for place in places for name in files for path in place.list_paths(name)):
            splitter = splitters.setdefault(path, LineSplitter())
            while content := _read_from(folder / path, offsets.get(path, 0)):
                offsets[path] = offsets.get(path, 0) + len(content)
                yield from (line.decode(errors="replace") for line in splitter.feed(content))
                if not is_last:
                    break  # it grows, and so do the others
            if is_last and splitter.has_rest():
                yield splitter.take_rest().decode(errors="replace")
        if is_last:
            return
        sleep(_LOOK_S)


def _read_from(path: Path, offset: int) -> bytes:
    try:
        return read_regular(path, _EVENTS_LIMIT_BYTES if offset < 0 else _PIECE_BYTES, offset, follows=False)
    except OSError:
        return b""


def select_rank(lines: Iterable[str], rank: int) -> Iterator[str]:
    """Return the lines of one rank in the output of a node, without their prefix."""
    for line in lines:
        found = PREFIX.match(line)
        if found is not None and names_rank(found["rank"] or found["local"], rank):
            yield line[found.end() :]


def names_rank(text: str, rank: int) -> bool:
    """Return whether a prefix is of this rank: "3", or "0-2,5" of several that have said the same."""
    spans = (part.partition("-") for part in text.split(","))
    return any(int(first) <= rank <= int(last or first) for first, _, last in spans)


def find_rank(events: Iterable[Event], rank: int, attempt: int | None = None) -> RankProcess | None:
    """Return the last process of a rank, of this attempt if one is given. None: the records have none."""
    found = [each for each in list_processes(events) if each.global_rank == rank and attempt in (None, each.attempt)]
    return found[-1] if found else None


def find_first_failure(events: Iterable[Event]) -> tuple[int, int] | None:
    """Return the rank that failed first in the last attempt that a rank has failed in, and the attempt. None: none has.

    In a hang it is the first of the ranks that have kept the others waiting.
    """
    failed = [(each.attempt, -each.time_s, each.ranks[0]) for each in events if each.what in _FAILURES and each.ranks]
    if not failed:
        return None
    attempt, _, rank = max(failed)
    return rank, attempt


def find_waited_for(events: Iterable[Event]) -> tuple[int, int] | None:
    """Return the first of the ranks that keep the others waiting in a job that stands still or hangs, and the attempt.

    None: it went on since, or nothing is known. Such a job may be stopped by a person before any rank has failed.
    """
    found = None
    for event in events:
        if event.what in _GOES_ON:
            found = None
        elif event.what in _WAITS and event.ranks:
            found = event.ranks[0], event.attempt
    return found


def find_world_size(events: Iterable[Event]) -> int:
    """Return the size of the largest round that any node has recorded. 0: the records have none."""
    sizes = (event.detail.get("world_size") for event in events if event.what == "round_formed")
    return max((size for size in sizes if isinstance(size, int)), default=0)


def find_failure(report: Report, rank: int, attempt: int | None) -> Failure | None:
    """Return how a rank has failed, in this attempt or else in its last. None: the report does not have it."""
    found = [each for each in report.failures if each.global_rank == rank and attempt in (None, each.attempt)]
    return max(found, key=lambda each: each.attempt, default=None)
