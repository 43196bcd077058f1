"""Finds and parses the event records of a job: of an app, through its scheduler, or below a folder."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeGuard

from torchx.specs import Role

from muster._shared.contract import FORMAT, Env, FormatError, LogNames, check_format
from muster._shared.control import CommandExit, ControlError
from muster._shared.foreign_files import parse_json, read_regular, walk_files
from muster._shared.reports import Report
from muster.cli.answers import say
from muster.cli.operations import choose_agent_role, describe, open_scheduler
from muster.schedulers.adapter.status import parse_status
from muster.schedulers.errors import EngineError
from muster.schedulers.failure_report import parse_report
from muster.schedulers.wording.job_line import format_line
from muster.schedulers.wording.reasons import Reasons

_LIMIT_BYTES: Final = 256 << 20
"""The limit for a file of records. A longer one is read from its end."""
_LINE_BYTES: Final = 1 << 20
_REPORT_BYTES: Final = 64 << 20
_MOST_NUMBER: Final = 1e15
_MOST_NODES: Final = 1 << 16
_MOST_NAMED: Final = 8
_MOST_FAILURES: Final = 30
"""The number of failures whose reports are read."""
_TRACEBACK_CHARS: Final = 6000


@dataclass(frozen=True, kw_only=True)
class Event:
    """One record, as an agent has written it."""

    agent: str
    """Names the process that wrote it."""
    time_s: float
    monotonic_s: float
    node: int | None
    node_index: int | None
    round: int
    attempt: int
    what: str
    ranks: tuple[int, ...] = ()
    duration_s: float | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    def to_json(self) -> dict[str, object]:
        """Return it as it was written."""
        return {**self.__dict__, "ranks": list(self.ranks), "detail": dict(self.detail)}


@dataclass(frozen=True, kw_only=True)
class RankProcess:
    """The process of a rank in one attempt."""

    global_rank: int
    node_index: int
    local_rank: int
    attempt: int

    def list_paths(self, name: str) -> list[str]:
        """Return where its file may be, below the run's folder: with several nodes each has a folder of its own."""
        path = f"{LogNames.ATTEMPT_DIR.format(attempt=self.attempt)}/{self.local_rank}/{name}"
        return [f"node_{self.node_index}/{path}", path]


def list_processes(events: Iterable[Event]) -> list[RankProcess]:
    """Return all ranks that were started, in the order of their starts."""
    return [
        RankProcess(global_rank=rank, node_index=event.node_index or 0, local_rank=local_rank, attempt=event.attempt)
        for event in events
        if event.what == "workers_started"
        for local_rank, rank in enumerate(event.ranks)
    ]


@dataclass(frozen=True, kw_only=True)
class JobRecords:
    """What the agents of one job have written."""

    name: str
    """The name of the app, or of the run."""
    events: tuple[Event, ...]
    """In the order of each agent's file."""
    report: Report | None = None
    """`report.json` of a job that has failed for good."""
    tracebacks: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """What ranks that failed have left, by attempt and global rank."""
    missing: str = ""
    """How many nodes' records are missing, and how to keep them. "": all are here."""
    begins_late: bool = False
    """All records of the job's beginning are missing."""
    restarts: int = 0
    """As counted by the scheduler."""
    scheduler_state: str = ""
    """TorchX's name of the app's state. "": these are the records of a folder."""
    scheduler_reasons: Reasons = ()


def load(word: str, role: str | None = None) -> JobRecords:
    """Read the records of a job.

    Args:
        word: an app (see `handles.find_app`), or a folder with logs: of several runs the newest counts.
        role: of an app with several.

    Raises:
        ControlError: there is no such app, role or folder, or no records can be read.
    """
    if "://" not in word and is_log_folder(word):
        if role is not None:
            raise ControlError("--role is for an app, not for a folder", CommandExit.USAGE)
        return _load_folder(Path(word))
    return _load_app(word, role)


def is_log_folder(word: str) -> bool:
    """Return whether a folder is meant, and no app: it has a slash, or it has records."""
    return os.path.isdir(word) and (os.sep in word or word == "." or next(_list_files(Path(word)), None) is not None)


def _list_files(folder: Path) -> Iterator[Path]:
    found = (Path(each.path) for each in walk_files(folder) if each.name == LogNames.EVENTS and each.is_file())
    return iter(sorted(found))


def _load_folder(folder: Path) -> JobRecords:
    runs: dict[str, list[Path]] = {}
    try:
        for path in _list_files(folder):
            runs.setdefault(path.resolve().parent.name, []).append(path)
        if not runs:
            raise ControlError(f"{folder} has no {LogNames.EVENTS}", CommandExit.REFUSED)
        name, *others = sorted(runs, key=lambda name: find_last_write(runs[name]), reverse=True)
        paths = runs[name]
        if others:
            more = ", ".join(str(runs[each][0].parent) for each in others[:_MOST_NAMED])
            more += ", ..." if len(others) > _MOST_NAMED else ""
            say(f"{folder} has the logs of {len(runs)} runs; this is the newest, {name}; others are in {more}")
        events = parse_files((str(path), read_events(path)) for path in paths)
        reports = [path.parent / LogNames.REPORT for path in paths]
        report = next((parse_report(read_regular(path, _REPORT_BYTES)) for path in reports if path.is_file()), None)
        folders = [path.parent for path in paths]
        tracebacks = _read_tracebacks(events, lambda _, name: _read_first(folders, name))
    except OSError as error:
        raise ControlError(f"{error.filename or folder}: {error.strerror}", CommandExit.LOST) from error
    if not events:
        why = "the job has just begun, or its agents could not write, for example to a full disk"
        raise ControlError(f"{paths[0]} has no records: {why}", CommandExit.REFUSED)
    missing, begins_late = _describe_missing(events)
    return JobRecords(
        name=name, events=events, report=report, tracebacks=tracebacks, missing=missing, begins_late=begins_late
    )


def read_events(path: Path) -> bytes:
    """Return the records of a file, or the last of them if it is longer than any of ours.

    Raises:
        OSError: see `read_regular`.
    """
    return read_regular(path, _LIMIT_BYTES, -_LIMIT_BYTES)


def find_last_write(paths: Iterable[Path]) -> float:
    """Return when one of the files was written last, of those that are there."""
    return max(path.stat().st_mtime for path in paths if path.is_file())


def _describe_missing(events: Iterable[Event]) -> tuple[str, bool]:
    """Say of how many nodes there are no records, by the rounds that others have recorded. "": of all there are.

    Args:
        events: of all agents. Spares have no part in a round.

    Returns:
        The sentence, and whether all records of the job's beginning are missing.
    """
    sizes: dict[int, int] = {}
    seen: dict[int, set[int]] = {}
    for event in events:
        if event.node is not None:
            seen.setdefault(event.round, set()).add(event.node)
        nodes = event.detail.get("nodes") if event.what == "round_formed" else None
        if isinstance(nodes, int) and nodes <= _MOST_NODES:
            sizes[event.round] = max(nodes, sizes.get(event.round, 0))
    absent = {number: set(range(size)) - seen[number] for number, size in sizes.items() if number in seen}
    absent = {number: nodes for number, nodes in absent.items() if nodes}
    first = min(sizes, default=1)
    parts = [f"all nodes before round {first}"] if first > 1 else []
    if absent:
        most = max(sizes[number] for number in absent)
        rounds = f"rounds {min(absent)} to {max(absent)}" if len(absent) > 1 else f"round {min(absent)}"
        parts.append(f"{len(set().union(*absent.values()))} of {most} node{'s'[: most != 1]} in {rounds}")
    if not parts:
        return "", False
    return f"Records are missing of {' and of '.join(parts)}: what happened there is not shown.", first != 1


def _read_first(folders: Sequence[Path], name: str) -> bytes:
    found = (folder / name for folder in folders if (folder / name).is_file())
    path = next(found, None)
    return b"" if path is None else read_regular(str(path), _REPORT_BYTES)


def _load_app(word: str, role: str | None) -> JobRecords:
    with open_scheduler(word) as (scheduler, app_id):
        response = describe(scheduler, app_id)
        chosen = choose_agent_role(app_id, response.roles, role)
        role = str(chosen.name)

        failed: dict[str, str] = {}

        def read(index: int, name: str, limit_bytes: int) -> bytes:
            try:
                return scheduler.read_run_file(app_id, role, index, name, limit_bytes) or b""
            except EngineError as error:
                failed.setdefault(str(error), f"{name} of node {index} cannot be read: {error}")
                return b""

        files = [
            (f"{role}/{index}", read(index, LogNames.EVENTS, _LIMIT_BYTES)) for index in range(chosen.num_replicas)
        ]
        while files[-1][1] and files[-1][1] != files[0][1]:  # nodes that a resize removed
            files.append((f"{role}/{len(files)}", read(len(files), LogNames.EVENTS, _LIMIT_BYTES)))
        report = parse_report(read(0, LogNames.REPORT, _REPORT_BYTES))
        events = parse_files(iter(files))
        tracebacks = _read_tracebacks(events, lambda index, name: read(index, name, _REPORT_BYTES))
        is_here = scheduler.find_run_dir(app_id, role) is not None
        loses_files = scheduler.properties.loses_files
    for line in failed.values():
        say(line)
    if not events:
        line = f"no node has records of {app_id}, which is {format_line(parse_status(response))}"
        keeping = f". {_describe_keeping(chosen)}" if loses_files else ""
        raise ControlError(f"{line}{keeping}", CommandExit.REFUSED)
    name = app_id if len(response.roles) == 1 else f"{app_id}, {role}"
    missing, begins_late = _describe_missing(events)
    if missing and not is_here and not failed:
        missing += f" They were lost with their pods or containers. {_describe_keeping(chosen)}"
    return JobRecords(
        name=name,
        events=events,
        report=report,
        tracebacks=tracebacks,
        missing=missing,
        begins_late=begins_late,
        restarts=max(0, response.num_restarts),
        scheduler_state=response.state.name,
        scheduler_reasons=parse_status(response).reasons,
    )


def describe_keeping(role: Role) -> str:
    """Say where the files of a role's agents may still be, or how to keep those of the next job."""
    folder = role.env.get(Env.LOG_DIR)
    if folder:
        return f"if {folder} ({Env.LOG_DIR}) is on a volume, they are still there"
    return f"to keep them next time, add `--env {Env.LOG_DIR}=FOLDER`, on a volume"


def _describe_keeping(role: Role) -> str:
    advice = describe_keeping(role)
    return f"{advice[0].upper()}{advice[1:]}: `muster timeline` and `muster events` take the folder of the job there."


def _read_tracebacks(events: Sequence[Event], read: Callable[[int, str], bytes]) -> dict[tuple[int, int], str]:
    """Read the error files of ranks that failed. `read` gets the node's index and a name in the run's folder."""
    failed = [each for each in events if each.what == "worker_failed"][-_MOST_FAILURES:]
    attempts = {each.attempt for each in failed}
    started = (each for each in events if each.attempt in attempts)
    places = {(each.attempt, each.global_rank): each for each in list_processes(started)}
    found: dict[tuple[int, int], str] = {}
    for event in failed:
        for place in (places[key] for key in ((event.attempt, rank) for rank in event.ranks) if key in places):
            contents = (read(place.node_index, path) for path in place.list_paths(LogNames.ERROR))
            text = read_traceback(next((each for each in contents if each), b""))
            if text:
                found[event.attempt, place.global_rank] = text
    return found


def read_traceback(content: bytes) -> str:
    """Return the traceback of an error file in torch's format, or "" if it has none."""
    try:
        data: Any = parse_json(content)
    except ValueError:
        return ""
    message = data.get("message") if isinstance(data, dict) else None
    extra = message.get("extraInfo") if isinstance(message, dict) else None
    text = extra.get("py_callstack") if isinstance(extra, dict) else message
    return text[-_TRACEBACK_CHARS:] if isinstance(text, str) else ""


def parse_files(files: Iterator[tuple[str, bytes]]) -> tuple[Event, ...]:
    """Parse the records of each file once, by its content: nodes of one machine share a file.

    Args:
        files: where each was found, and its lines. What is no record is left out.

    Raises:
        ControlError: records have another format.
    """
    seen: set[bytes] = set()
    found: list[Event] = []
    for source, content in files:
        digest = hashlib.sha256(content).digest()
        if digest not in seen:
            seen.add(digest)
            found += [
                each for line in content.split(b"\n") if len(line) < _LINE_BYTES and (each := _parse(line, source))
            ]
    indices = {event.agent: event.node_index for event in found if event.node_index is not None}
    return tuple(
        replace(event, node_index=indices[event.agent])
        if event.node_index is None and event.agent in indices
        else event
        for event in found
    )


def _parse(line: bytes, source: str) -> Event | None:
    try:
        data = parse_json(line)
    except ValueError:
        return None
    if not isinstance(data, dict) or "format" not in data:
        return None
    try:
        check_format(data["format"], source)
    except FormatError as error:
        raise ControlError(str(error), CommandExit.REFUSED) from error
    detail: Mapping[str, Any] = data["detail"] if isinstance(data.get("detail"), dict) else {}
    ranks: Sequence[object] = data["ranks"] if isinstance(data.get("ranks"), list) else ()
    time_s, monotonic_s, number, attempt = map(data.get, ("time_s", "monotonic_s", "round", "attempt"))
    if not (is_number(time_s) and is_number(monotonic_s) and isinstance(number, int) and isinstance(attempt, int)):
        return None
    node, node_index = _read_index(data.get("node")), _read_index(data.get("node_index"))
    took_s = data.get("duration_s")
    return Event(
        agent=str(data.get("agent")),
        time_s=float(time_s),
        monotonic_s=float(monotonic_s),
        node=node,
        node_index=node_index if node_index is not None else _read_index(detail.get("node_index")),
        round=number,
        attempt=attempt,
        what=str(data.get("what")),
        ranks=tuple(each for each in ranks if isinstance(each, int)),
        duration_s=float(took_s) if is_number(took_s) else None,
        detail=detail,
        format=data["format"],
    )


def is_number(value: object) -> TypeGuard[float]:
    """Return whether it is one that can be reckoned with: files may say anything."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MOST_NUMBER


def _read_index(value: object) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None
