"""Where `--event-log-handler` sends the agent's event records, by torchrun's names.

Source: torch/distributed/elastic/events/handlers.py of torch 2.13, which knows null, console and dynamic_rendezvous (a
handler that drops what it gets) and no entry points.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import TextIO

from muster.agent.runtime.event_log import EventRecord, EventSink


class ConsoleSink:
    """One JSON object per record and line, on stderr."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream: TextIO | None = stream or sys.stderr

    def write(self, record: EventRecord) -> None:
        """See `EventSink`. A closed console ends the sink, not the job."""
        if self._stream is None:
            return
        try:
            self._stream.write(json.dumps(asdict(record), default=str) + "\n")
            self._stream.flush()
        except (OSError, ValueError):  # ValueError: the stream has been closed
            self._stream = None

    def close(self) -> None:
        """See `EventSink`. The console is not ours to close."""
        self._stream = None


class NullSink:
    """Drops what it gets."""

    def write(self, record: EventRecord) -> None:
        """See `EventSink`."""

    def close(self) -> None:
        """See `EventSink`."""


_SINKS: dict[str, Callable[[], EventSink]] = {
    "null": NullSink,
    "console": ConsoleSink,
    "dynamic_rendezvous": NullSink,
}

NAMES = tuple(_SINKS)
"""What `--event-log-handler` takes."""


def open_sink(name: str) -> EventSink:
    """The sink of one of `NAMES`."""
    return _SINKS[name]()
