"""Writes `status.json` in the run's folder: how far the job is, for `torchx status`. One line.

Node 0 writes it, of its own ranks, every few seconds while something changes. What cannot be written is left out: the
next one says the same.
"""

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Mapping

from muster._shared.codec import encode
from muster._shared.contract import LogNames
from muster._shared.records import record, replace
from muster._shared.reports import JobState, JobStatus
from muster.agent.logs import open_own
from muster.agent.round import Round
from muster.agent.runtime.clock import Clock
from muster.agent.workers.status_page import SlotStatus, StatusPage

EVERY_S = 5.0
_LIMIT_BYTES = 1 << 16


@record
class Pause:
    """The job is paused."""

    step: int
    since_s: float
    """By the wall clock."""


class StatusFile:
    """Of one node, in all of its rounds."""

    def __init__(
        self,
        run_dir: str,
        clock: Clock,
        submit: Callable[[Callable[[], None]], None],
        on_status: Callable[[JobStatus], None] | None = None,
    ) -> None:
        """Write nothing yet.

        Args:
            run_dir: where it is.
            clock: the agent's.
            submit: runs a call in the thread that writes files.
            on_status: gets it too.
        """
        self._path = os.path.join(run_dir, LogNames.STATUS)
        self._clock = clock
        self._submit = submit
        self._on_status = on_status
        self._last: JobStatus | None = None
        """But for the time. None: nothing was worth writing yet."""
        self._written_s = -math.inf
        self._seen: tuple[int, int, float] = (0, 0, 0.0)
        """The round, its steps, and when they were seen."""

    def update(self, formed: Round, page: StatusPage, nproc: int, pause: Pause | None) -> None:
        """Write it if it is time to, and something has changed. A pause is written at once.

        Args:
            formed: the round that runs.
            page: of the round.
            nproc: number of its slots.
            pause: None: the job is not paused.
        """
        now_s = self._clock.now_s()
        was_paused = self._last is not None and self._last.state is JobState.PAUSED
        is_new = (pause is not None) != was_paused
        if not is_new and now_s - self._written_s < EVERY_S:
            return
        self._written_s = now_s
        local_rank, slot = _find_slowest(map(page.read_slot, range(nproc)))
        status = self._build(formed, slot, page.read_values(local_rank), pause, now_s)
        if status == self._last or (self._last is None and slot.step is None and slot.optimizer_steps is None):
            return
        self._last = status
        text = encode(replace(status, time_s=round(self._clock.wall_s(), 3)), _LIMIT_BYTES)
        self._submit(lambda: _write(self._path, f"{text}\n"))
        if self._on_status is not None:
            self._on_status(status)

    def _build(
        self, formed: Round, slot: SlotStatus, values: Mapping[str, float], pause: Pause | None, now_s: float
    ) -> JobStatus:
        number, steps, since_s = self._seen
        done = (slot.optimizer_steps or 0) if slot.step is None else slot.step + 1
        rate = (done - steps) / max(0.001, now_s - since_s) if number == formed.number and done > steps > 0 else 0.0
        self._seen = (formed.number, done, now_s)
        return JobStatus(
            round=formed.number,
            attempt=formed.attempt,
            state=JobState.RUNNING if pause is None else JobState.PAUSED,
            paused_since_s=None if pause is None else round(pause.since_s, 3),
            step=slot.step if pause is None else pause.step,
            total=slot.total,
            optimizer_steps=slot.optimizer_steps if slot.step is None else None,
            rate=float(f"{rate:.3g}"),
            values=tuple((name, each if math.isfinite(each) else str(each)) for name, each in values.items()),
        )


def _find_slowest(slots: Iterable[SlotStatus]) -> tuple[int, SlotStatus]:
    """The local rank that has done the fewest steps, of those that have done any."""

    def find_place(each: tuple[int, SlotStatus]) -> tuple[bool, int, bool, int]:
        slot = each[1]
        return slot.step is None, slot.step or 0, slot.optimizer_steps is None, slot.optimizer_steps or 0

    return min(enumerate(slots), key=find_place)


def _write(path: str, text: str) -> None:
    temporary = f"{path}.{os.getpid()}"
    with contextlib.suppress(OSError):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with open(open_own(temporary, flags), "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
