"""Reads what the agents of a role write about their job, from any source of bytes. Standard library only."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TypeAlias

from muster._shared.contract import FormatError, LogNames
from muster.schedulers.failure_report import find_trouble, parse_attempt, parse_status
from muster.schedulers.timestamps import parse_timestamp
from muster.schedulers.wording.job_facts import JobFacts
from muster.schedulers.wording.reasons import Code, Reason

ReadBytes: TypeAlias = Callable[[Sequence[str]], Sequence[bytes]]
"""(names of files, of `LogNames`) -> the last 64 KiB or more of each file in the role's newest run; b"" if it is
missing.

An agent knows the whole job, so files of node 0, or of any node whose agent runs, will do.
"""


class RecordReader:
    """Reads what the agents of one role say of their job. It reads once, when it is first asked.

    Args:
        read_bytes: reads files that the role's agents write. See `ReadBytes`. What it raises is passed on.
        since: when the node whose files are read was made, as RFC 3339. What is older is of an earlier incarnation, in
            a folder that outlived it, and nothing is known of this one. "": not known.
    """

    def __init__(self, read_bytes: ReadBytes, since: str = "") -> None:
        self._read_bytes = read_bytes
        self._since = since

    @cached_property
    def _files(self) -> tuple[bytes, bytes]:
        events, status = self._read_bytes((LogNames.EVENTS, LogNames.STATUS))
        return events, status

    @property
    def restarts(self) -> int:
        """How often workers were restarted in place because one failed."""
        return parse_attempt(self._files[0])

    @property
    def job(self) -> JobFacts:
        """What is known of a job that runs."""
        records, status = self._files
        try:
            told = parse_status(status)
        except FormatError as error:
            return JobFacts(trouble=(Reason(code=Code.OTHER_FORMAT, text=str(error)),))
        if told is not None and self._is_older(told.time_s):
            return JobFacts()
        attempt = max(self.restarts, 0 if told is None else told.attempt)
        return JobFacts(trouble=find_trouble(records), attempt=attempt, status=told)

    def _is_older(self, written_s: float) -> bool:
        try:
            return 0 < written_s < parse_timestamp(self._since)[0]
        except ValueError:
            return False
