"""Reads what the agents of a role leave in their log folder: the job's report, and their records."""

import contextlib
from collections.abc import Sequence
from pathlib import Path

from muster._shared.contract import STATUS_LIMIT_BYTES, FormatError, LogNames
from muster._shared.foreign_files import read_regular
from muster._shared.reports import Report
from muster.schedulers.failure_report import parse_report, parse_status

_REPORT_LIMIT_BYTES = 64 << 20
_SAME_TIME_S = 15.0
"""Two runs are written at the same time: an agent writes its status every 5 s at least."""


def read_report(log_dir: Path) -> Report | None:
    """Return the newest report of the agents. Return None if there is none that can be read.

    Args:
        log_dir: of a role. It has one folder per run id.
    """
    for path in _list_newest(log_dir, LogNames.REPORT):
        with contextlib.suppress(OSError):
            report = parse_report(read_regular(str(path), _REPORT_LIMIT_BYTES))
            if report is not None:
                return report
    return None


def find_newest_run(log_dir: Path) -> Path | None:
    """Return the folder of the newest run. None: there is none.

    Args:
        log_dir: of a role.
    """
    return next((path.parent for path in _list_newest(log_dir, LogNames.EVENTS)), None)


def read_records(log_dir: Path, names: Sequence[str]) -> list[bytes]:
    """Return the ends of files of the newest run that has them. With `log_dir` bound, it is a `records.ReadBytes`.

    A script that starts a job of its own (`muster.elastic`) has two runs at the same time, and both write. Their job's
    status is that of the run that has begun last, not of the one that has written last: they would take turns.
    """
    return [_read_status(log_dir) if name == LogNames.STATUS else _read_end(log_dir, name) for name in names]


def _read_status(log_dir: Path) -> bytes:
    paths = _list_newest(log_dir, LogNames.STATUS)
    if len(paths) < 2:
        return _read_end(log_dir, LogNames.STATUS)
    found: list[tuple[float, bytes]] = []
    newest_s = 0.0
    for path in paths:
        with contextlib.suppress(OSError, FormatError):
            written_s = path.stat().st_mtime
            newest_s = max(newest_s, written_s)
            content = read_regular(path, STATUS_LIMIT_BYTES, -STATUS_LIMIT_BYTES)
            status = parse_status(content)
            if status is not None and newest_s - written_s < _SAME_TIME_S:
                found.append((status.started_s or 0.0, content))
    return max(found, key=lambda each: each[0])[1] if found else _read_end(log_dir, LogNames.STATUS)


def _read_end(log_dir: Path, name: str) -> bytes:
    return next(filter(None, (read_tail(path) for path in _list_newest(log_dir, name))), b"")


def read_tail(path: Path, limit_bytes: int = STATUS_LIMIT_BYTES) -> bytes:
    """Return the end of a file. b"": there is none, or it cannot be read."""
    with contextlib.suppress(OSError):
        return read_regular(path, limit_bytes, -limit_bytes)
    return b""


def _list_newest(log_dir: Path, name: str) -> list[Path]:
    found: list[tuple[float, Path]] = []
    for path in log_dir.glob(f"*/{name}"):
        with contextlib.suppress(OSError):
            found.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(found, reverse=True)]
