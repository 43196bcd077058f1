"""Reads what the agents of a role leave in their log folder: the job's report, and their records."""

import contextlib
from collections.abc import Sequence
from pathlib import Path

from muster._shared.contract import LogNames
from muster._shared.foreign_files import read_regular
from muster._shared.reports import Report
from muster.schedulers.failure_report import parse_report

_TAIL_BYTES = 64 << 10
_REPORT_LIMIT_BYTES = 64 << 20


def read_report(log_dir: Path) -> Report | None:
    """The newest report of the agents; None when there is none that can be read.

    Args:
        log_dir: of a role; it has one folder per run id.
    """
    for path in _list_newest(log_dir, LogNames.REPORT):
        with contextlib.suppress(OSError):
            report = parse_report(read_regular(str(path), _REPORT_LIMIT_BYTES))
            if report is not None:
                return report
    return None


def read_records(log_dir: Path, names: Sequence[str]) -> list[bytes]:
    """The ends of files of the newest run that has them; a `records.ReadBytes` with `log_dir` bound."""
    return [_read_end(log_dir, name) for name in names]


def _read_end(log_dir: Path, name: str) -> bytes:
    for path in _list_newest(log_dir, name):
        with contextlib.suppress(OSError):
            return read_regular(str(path), _TAIL_BYTES, -_TAIL_BYTES)
    return b""


def _list_newest(log_dir: Path, name: str) -> list[Path]:
    found: list[tuple[float, Path]] = []
    for path in log_dir.glob(f"*/{name}"):
        with contextlib.suppress(OSError):
            found.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(found, reverse=True)]
