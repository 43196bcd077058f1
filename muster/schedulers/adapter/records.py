"""Reads what the agents of a role write about their job, from any source of bytes. Standard library only."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TypeAlias

from muster._shared.contract import LogNames
from muster.schedulers.failure_report import describe_running, join_roles, parse_attempt

ReadBytes: TypeAlias = Callable[[Sequence[str]], Sequence[bytes]]
"""(names, of `LogNames`) -> the end of each of these files of the role's newest run, some 64 KiB or more; b"" for none.

An agent knows the whole job: files of node 0, or of any node whose agent runs, will do.
"""


class RecordReader:
    """What the agents of one role say of their job. It reads once, when it is first asked.

    Args:
        read_bytes: reads files that the role's agents write; see `ReadBytes`. What it raises is passed on.
    """

    def __init__(self, read_bytes: ReadBytes) -> None:
        self._read_bytes = read_bytes

    @cached_property
    def _files(self) -> tuple[bytes, bytes]:
        events, status = self._read_bytes((LogNames.EVENTS, LogNames.STATUS))
        return events, status

    @property
    def restarts(self) -> int:
        """How often workers were restarted in place because one failed."""
        return parse_attempt(self._files[0])

    @property
    def running(self) -> str:
        """What is known of a job that runs, in one line: a hang, a new round, how far it is; "": nothing."""
        return describe_running(*self._files)


def describe_roles(readers: Mapping[str, RecordReader]) -> str:
    """Return what is known of an app that runs, in one line.

    Args:
        readers: one for each role that runs agents, by the role's name.
    """
    return join_roles({role: reader.running for role, reader in readers.items()})
