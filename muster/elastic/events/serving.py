"""What ice-learn's agent does with its `Events`: it draws their progress bar, and asks workers to pause, save and stop.

Workers set `progress_bar_total` and `progress_bar_iter`, and between two steps handle `pause` (they set `paused` and
wait for `resume`), `trigger_save_checkpoint` (they save and set `finished_save_checkpoint`) and `stop_all_tasks`.
"""

import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from muster.agent.errors import UsageError
from muster.elastic.events.flags import Events
from muster.elastic.tail import Screen

_NAMES = (
    *("pause", "paused", "resume", "stop_all_tasks", "trigger_save_checkpoint", "finished_save_checkpoint"),
    *("progress_bar_iter", "progress_bar_total"),
)
_BAR_CELLS = 30
_LOOK_S = 0.1
_PAUSE_LIMIT_S = 30.0
"""How long workers may take to pause. They need one step, or never look."""


class IceEvents:
    """Serves the events of one job. `start` it, and `close` it when the job has ended."""

    def __init__(self, events: Any, screen: Screen) -> None:
        """Start nothing yet.

        Args:
            events: ice-learn's `Events`, or an object with the same attributes.
            screen: draws the bar, on standard error if that is a terminal.

        Raises:
            UsageError: `events` lacks some of these attributes. The message names them.
        """
        missing = [name for name in _NAMES if not hasattr(events, name)]
        if missing:
            raise UsageError(f"events={events!r} has no {', '.join(missing)}: it must be like ice-learn's Events")
        self._events = events
        self._screen = screen
        self._closed = threading.Event()
        self._drawer = threading.Thread(target=self._draw, name="muster-bar", daemon=True)

    def start(self) -> None:
        """Draw the bar from now on."""
        self._drawer.start()

    def close(self) -> None:
        """Draw no more, ask no more. Idempotent."""
        self._closed.set()
        if self._drawer.is_alive():
            self._drawer.join()

    def _draw(self) -> None:
        shown = None
        while not self._closed.wait(_LOOK_S):
            total, done = self._events.progress_bar_total.value, self._events.progress_bar_iter.value
            bar = _format_bar(done, total) if total > 0 and done >= 0 else None
            if bar != shown:
                self._screen.write(sys.stderr, "", file="progress_bar", bar=bar)
                shown = bar
        self._screen.write(sys.stderr, "", file="progress_bar", bar=None)

    def stop_politely(self, signum: int, then: Callable[[], None]) -> None:
        """Let workers pause, save if a person at the terminal wants that (Ctrl-C), and stop. Run it in a thread.

        Args:
            signum: what asks for the stop.
            then: called when workers have been informed.
        """
        threading.Thread(target=self._stop, args=(signum, then), name="muster-stop", daemon=True).start()

    def _stop(self, signum: int, then: Callable[[], None]) -> None:
        events = self._events
        if isinstance(events, Events):
            self._stop_at_one_step(events, signum, then)
            return
        events.resume.clear()
        events.pause.set()
        self._wait(events.paused, _PAUSE_LIMIT_S)
        events.stop_all_tasks.set()
        saves = signum == signal.SIGINT and self._ask()
        if saves:
            events.finished_save_checkpoint.clear()
            events.trigger_save_checkpoint.set()
        events.pause.clear()
        events.resume.set()
        if saves:
            self._wait(events.finished_save_checkpoint, None)  # a second signal ends the job
        then()

    def _stop_at_one_step(self, events: Events, signum: int, then: Callable[[], None]) -> None:
        """Ask for agreements of all ranks, one after the other: the job goes on to the step that is saved."""
        if signum == signal.SIGINT:
            events.pause.set()
            events.paused.wait()
            saves = self._ask()
            events.resume.set()
            events.resume.wait()
            if saves:
                events.trigger_save_checkpoint.set()
                events.finished_save_checkpoint.wait()
        events.stop_all_tasks.set()
        events.stop_all_tasks.wait()
        then()

    def _wait(self, event: Any, limit_s: float | None) -> None:
        left_s = limit_s
        while not self._closed.is_set() and not event.wait(_LOOK_S):
            if left_s is not None and (left_s := left_s - _LOOK_S) <= 0:
                return

    def _ask(self) -> bool:
        while not self._closed.is_set():
            try:
                answer = input("\nShould I save the checkpoint? [Y/n]").strip().lower()
            except (EOFError, OSError):  # no terminal: save what can be saved
                return True
            if answer in ("", "y", "n"):
                return answer != "n"
        return False


def _format_bar(done: int, total: int) -> str:
    """Return a text such as `" 45% [#############.................] 45/100"`."""
    share = min(1.0, done / total)
    cells = int(share * _BAR_CELLS)
    return f"{share:4.0%} [{'#' * cells}{'.' * (_BAR_CELLS - cells)}] {done}/{total}"
