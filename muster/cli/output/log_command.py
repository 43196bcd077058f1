"""`muster log`: the output of a job, of its replicas or of single ranks, while it runs and afterwards.

Lines of replicas come through the seam's `read_log`. Those of a rank come from the files of the run's folder, which
keep attempts apart, if these can be read on this machine or in a node that runs. Elsewhere they are found in the
replicas' output, by the prefix that agents give each rank's lines.
"""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torchx.schedulers.api import DescribeAppResponse, Stream
from torchx.specs import AppState, is_terminal
from torchx.specs.api import NONE

from muster._shared.contract import LogNames
from muster._shared.control import ControlError, ExitCode
from muster._shared.foreign_files import parse_json
from muster._shared.reports import Report, name_ranks
from muster.cli.operations import open_scheduler
from muster.cli.output import rank_logs
from muster.cli.output.rank_logs import STDERR, STDOUT, RankPlace
from muster.cli.output.streaming import LinePrinter, say
from muster.schedulers.adapter.scheduler import LogRequest, PluginScheduler
from muster.schedulers.agent_command import is_agent_role
from muster.schedulers.errors import EngineError
from muster.schedulers.failure_report import find_root_cause, parse_report
from muster.schedulers.lines import LineSplitter
from muster.schedulers.runner.shown.job_console import PREFIX, find_local_ranks

_LIMIT_BYTES: Final = 16 << 20
"""The limit for a file. A longer one is read from its end."""
_LOOK_S: Final = 0.5


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
    def streams(self) -> tuple[str, ...]:
        """The files of a rank, in the order in which they are printed."""
        return (STDOUT, STDERR) if self.stream == "combined" else (self.stream,)

    def build_request(self, role: str, index: int) -> LogRequest:
        """Return the same for one replica."""
        return LogRequest(
            role=role,
            index=index,
            pattern=None if self.wants_ranks else self.grep,
            since=None,
            until=None,
            follow=self.follow,
            stream=Stream(self.stream),
        )


def print_log(word: str, query: LogQuery) -> int:
    """Print it, and return the exit code.

    Args:
        word: names an app, see `handles.find_app`.
        query: which lines.

    Raises:
        ControlError: there is no such app, role, node, rank or attempt, or its lines cannot be read.
    """
    with open_scheduler(word) as (scheduler, app_id):
        response = scheduler.describe_app(app_id)
        if response is None:
            raise ControlError(f"{scheduler.backend} knows no app {app_id!r}", ExitCode.UNKNOWN)
        log = _Log(scheduler, app_id, response, query)
        if query.wants_ranks:
            log.print_ranks()
        else:
            log.print_replicas()
    return ExitCode.DONE


class _Log:
    def __init__(self, scheduler: PluginScheduler, app_id: str, response: DescribeAppResponse, query: LogQuery) -> None:
        self._scheduler = scheduler
        self._app_id = app_id
        self._response = response
        self._query = query
        self._records: dict[tuple[str, int], bytes] = {}
        self._told: set[str] = set()

    # -- replicas -------------------------------------------------------------------------------------------------

    def print_replicas(self) -> None:
        """Print the lines of all replicas that are wanted: as they come if followed, else in the order of time."""
        replicas = self._list_replicas()
        self._print_lines(replicas, self._read_replica)

    def _list_replicas(self) -> list[tuple[str, int]]:
        counts = {role.name: role.num_replicas for role in self._response.roles}
        role, node = self._query.role, self._query.node
        if role is not None and role not in counts:
            raise ControlError(f"{self._app_id} has no role {role!r}; it has: {', '.join(counts)}", ExitCode.USAGE)
        wanted = {name: count for name, count in counts.items() if role in (None, name)}
        found = [(name, index) for name, count in wanted.items() for index in range(count) if node in (None, index)]
        if not found:
            most = max(wanted.values(), default=0)
            raise ControlError(f"{self._app_id} has nodes 0 to {most - 1}, not {node}", ExitCode.USAGE)
        return found

    def _read_replica(self, role: str, index: int) -> Iterable[str]:
        return self._scheduler.read_log(self._app_id, self._query.build_request(role, index))

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
        if role is None and len(roles) > 1:
            raise ControlError(f"name the --role: {', '.join(roles)}", ExitCode.USAGE)
        role = role or next(iter(roles))
        if self._query.follow:
            self._follow_rank(role, rank, attempt)
            return
        places = self._find_places(role, roles[role], rank, attempt)
        shown = [self._print_place(role, index, place, alone=rank is not None) for index, place in places]
        if any(shown):
            return
        self._check_known(rank, attempt)
        if rank is None or (attempt is not None and not self._query.failed):
            line = f"the files of attempt {attempt} cannot be read: they are not on this machine, and no node has them"
            raise ControlError(line, ExitCode.REFUSED)
        self._print_from_console(role, rank)

    def _check_known(self, rank: int | None, attempt: int | None) -> None:
        """Refuse a rank or an attempt that the job's agents have not recorded, if they have recorded any."""
        all_records = b"\n".join(self._records.values())
        known = rank_logs.list_places(all_records)
        ranks, attempts = ({place.global_rank for place in known}, {place.attempt for place in known})
        ranks.update(range(rank_logs.find_world_size(all_records)))  # some records may not be here yet
        if rank is not None and ranks and rank not in ranks:
            raise ControlError(f"there is no rank {rank}; there are {name_ranks(ranks)}", ExitCode.REFUSED)
        if attempt is not None and attempts and attempt not in attempts:
            there = ", ".join(map(str, sorted(attempts)))
            raise ControlError(f"there is no attempt {attempt}; there are: {there}", ExitCode.REFUSED)

    def _list_agent_roles(self) -> dict[str, int]:
        wanted = [role for role in self._response.roles if self._query.role in (None, role.name)]
        found = {role.name: role.num_replicas for role in wanted if is_agent_role(role)}
        if not found:
            name = self._query.role or self._app_id
            raise ControlError(f"{name} runs no agents of muster, which number ranks", ExitCode.USAGE)
        return found

    def _find_failed(self, roles: Mapping[str, int]) -> tuple[str, int, int]:
        """Return the role, rank and attempt of the root cause.

        It is that of the job's report, or else of what its agents have recorded.
        """
        for role in roles:
            content = self._read_file(role, 0, LogNames.REPORT)
            report = parse_report(content) if content is not None else None
            if report is None and len(roles) == 1:
                report = _parse_error(self._response.structured_error_msg)
            root = None if report is None else find_root_cause(report)
            if root is not None:
                return role, root.global_rank, root.attempt
        for role, count in roles.items():
            all_records = [self._read_records(role, index) for index in range(count)]
            failures = [found for each in all_records if (found := rank_logs.find_first_failure(each)) is not None]
            failures += [found for each in all_records if (found := rank_logs.find_waited_for(each)) is not None]
            if failures:
                rank, attempt = max(failures, key=lambda failure: failure[1])  # of the same attempt the first
                return role, rank, attempt
        state, why = self._response.state, self._response.msg
        ended = f"; it is {state.name}: {why}" if state is AppState.FAILED and why not in ("", NONE) else ""
        raise ControlError(f"no rank of {self._app_id} is known to have failed{ended}", ExitCode.REFUSED)

    def _read_file(self, role: str, index: int, name: str) -> bytes | None:
        try:
            return self._scheduler.read_run_file(self._app_id, role, index, name, _LIMIT_BYTES)
        except EngineError as error:
            if str(error) not in self._told:
                self._told.add(str(error))
                say(f"{name} of node {index} cannot be read: {error}")
            return None

    def _read_records(self, role: str, index: int) -> bytes:
        key = role, index
        if key not in self._records:
            self._records[key] = self._read_file(role, index, LogNames.EVENTS) or b""
        return self._records[key]

    def _find_places(self, role: str, count: int, rank: int | None, attempt: int | None) -> list[tuple[int, RankPlace]]:
        """Return the replica to ask, and the place. Without a rank, return all of an attempt in their order."""
        found: dict[int, tuple[int, RankPlace]] = {}
        for index in range(count):
            for place in rank_logs.list_places(self._read_records(role, index)):
                if rank in (None, place.global_rank) and attempt in (None, place.attempt):
                    before = found.get(place.global_rank)
                    if before is None or before[1].attempt <= place.attempt:
                        found[place.global_rank] = index, place
            if rank is not None and found:
                break
        return [found[each] for each in sorted(found)]

    def _print_place(self, role: str, index: int, place: RankPlace, *, alone: bool) -> bool:
        """Print the files of a rank, and return whether one could be read."""
        has_read = False
        for stream in self._query.streams:
            contents = (self._read_file(role, index, path) for path in place.list_paths(stream))
            content = next((each for each in contents if each is not None), None)
            has_read |= content is not None
            for line in (content or b"").decode(errors="replace").splitlines(keepends=True):
                self._print_line(line if alone else f"[r{place.global_rank}]:{line}")
        return has_read

    def _print_line(self, line: str) -> None:
        if self._query.grep is None or self._query.grep.search(line):
            sys.stdout.write(line if line.endswith("\n") else f"{line}\n")

    def _print_from_console(self, role: str, rank: int) -> None:
        say(f"the files of rank {rank} are gone or out of reach; these are its lines in the output of its node")
        seen = False
        for replica in self._list_replicas():
            if replica[0] != role:
                continue
            for line in select_rank(self._read_replica(*replica), role, rank):
                seen = True
                self._print_line(line)
        if not seen:
            why = "does its agent have --tee 3, as with the components?"
            raise ControlError(f"no line is marked as rank {rank}'s, and it has no file: {why}", ExitCode.REFUSED)

    def _follow_rank(self, role: str, rank: int | None, attempt: int | None) -> None:
        if rank is None:
            raise ControlError("-f with --attempt needs a --rank", ExitCode.USAGE)
        folder = self._scheduler.find_run_dir(self._app_id, role)
        if folder is None:
            replicas = [replica for replica in self._list_replicas() if replica[0] == role]
            self._print_lines(
                replicas, lambda *replica: self._filter(select_rank(self._read_replica(*replica), role, rank))
            )
            return
        for line in follow_files(folder, rank, attempt, self._query.streams, self._has_ended):
            self._print_line(line)
            sys.stdout.flush()

    def _filter(self, lines: Iterable[str]) -> Iterator[str]:
        return (line for line in lines if self._query.grep is None or self._query.grep.search(line))

    def _has_ended(self) -> bool:
        response = self._scheduler.describe_app(self._app_id)
        return response is None or is_terminal(response.state) or response.state is AppState.UNKNOWN


def follow_files(
    folder: Path,
    rank: int,
    attempt: int | None,
    streams: Sequence[str],
    has_ended: Callable[[], bool],
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[str]:
    """Return the lines of a rank as its files grow, over all its attempts from the newest on.

    They end with the job.

    Args:
        folder: of the run.
        rank: the rank.
        attempt: only this one. None: the newest, and those that follow.
        streams: which files.
        has_ended: whether the job has, and its files are complete.
        sleep: waits between two looks.
    """
    offsets: dict[str, int] = {}
    splitters: dict[str, LineSplitter] = {}
    places: list[RankPlace] = []
    while True:
        is_last = has_ended()
        newest = rank_logs.find_rank(_read_from(folder / LogNames.EVENTS, 0), rank, attempt)
        if newest is not None and newest not in places:
            places.append(newest)  # its last lines may still come
        for path in (path for place in places for stream in streams for path in place.list_paths(stream)):
            content = _read_from(folder / path, offsets.get(path, 0))
            offsets[path] = offsets.get(path, 0) + len(content)
            splitter = splitters.setdefault(path, LineSplitter())
            yield from (line.decode(errors="replace") for line in splitter.feed(content))
            if is_last and splitter.has_rest():
                yield splitter.take_rest().decode(errors="replace")
        if is_last:
            return
        sleep(_LOOK_S)


def _read_from(path: Path, offset: int) -> bytes:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            file.seek(offset)
            return file.read()
    except OSError:
        return b""


def select_rank(lines: Iterable[str], role: str, rank: int) -> Iterator[str]:
    """Return the lines of one rank in the output of a node, without their prefix."""
    for line in lines:
        found = PREFIX.match(line)
        if found is not None and names_rank(found["rank"] or find_local_ranks(found, role), rank):
            yield line[found.end() :]


def names_rank(text: str, rank: int) -> bool:
    """Return whether a prefix is of this rank: "3", or "0-2,5" of several that have said the same."""
    spans = (part.partition("-") for part in text.split(","))
    return any(int(first) <= rank <= int(last or first) for first, _, last in spans)


def _parse_error(text: str) -> Report | None:
    """Return the report in an error in torch's format, where an adapter has it there."""
    try:
        data = parse_json(text)
    except ValueError:  # TorchX's text for none
        return None
    report = data.get("report") if isinstance(data, dict) else None
    return parse_report(json.dumps(report)) if isinstance(report, dict) else None
