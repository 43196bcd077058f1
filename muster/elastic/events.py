"""`Events`: ice-learn's class, with flags that are set for all ranks of the job at one step.

ice-learn's are multiprocessing events of one node, and its waits have no limit. With more than one node, or with ranks
that differ in how far they are, its workers wait for one another for ever. Here a worker that looks at a flag asks
`muster.worker`, and the program that sets one asks the job's agents, as `muster pause` does.

`IceEvents` is what LocalElasticAgent does with them. There ice-learn's own `Events`, or an object with the same
attributes, works too: workers set `progress_bar_total` and `progress_bar_iter`, and between two steps handle `pause`
(they set `paused` and wait for `resume`), `trigger_save_checkpoint` (they save and set `finished_save_checkpoint`) and
`stop_all_tasks`. Its events are those of one node, and the ranks agree on no step.

Source: ice/llutil/launcher/events.py and ice/core/hypergraph.py of ice-learn 0.4.8.
"""

import multiprocessing
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from muster import worker
from muster._shared.contract import AGENT_ENTRY_NAME, AskKind, AskOutcome, Env, print_line
from muster._shared.control import describe_answer, parse_answer
from muster._shared.reports import Answer
from muster.agent.errors import UsageError
from muster.elastic.tail import Screen

_AGENT = os.path.join(os.path.dirname(os.path.abspath(worker.__file__)), AGENT_ENTRY_NAME)
_LOOK_S = 0.005
_LIMIT_S = 60.0
"""How long the ranks of the job may take to do what is asked for."""

_NAMES = (
    *("pause", "paused", "resume", "stop_all_tasks", "trigger_save_checkpoint", "finished_save_checkpoint"),
    *("progress_bar_iter", "progress_bar_total"),
)
_BAR_CELLS = 30
_SERVING_LOOK_S = 0.1
_PAUSE_LIMIT_S = 30.0
"""How long workers may take to pause. They need one step, or never look."""


class Events:
    """The flags of ice-learn's `Events`, for `LocalElasticAgent(spec, "spawn", 300, log_dir, events)` and its workers.

        for step in range(steps):                       # in every worker, at the same steps
            if local_rank == 0:
                events.progress_bar_iter.value = step
            if events.pause.is_set():                   # True on all ranks at one step
                events.paused.set()
                events.resume.wait()
            if events.trigger_save_checkpoint.is_set():
                save()
                events.finished_save_checkpoint.set()   # in every rank, or `wait()` in those that save nothing
            if events.stop_all_tasks.is_set():
                break

    Pass it to the workers as an argument. A rank asks each flag once per step. Each rank counts its questions, and
    these numbers are the steps on which the ranks agree. The program sets `pause`, `resume`, `trigger_save_checkpoint`
    and `stop_all_tasks`; `set` returns at once. The program waits for `paused` and `finished_save_checkpoint`. No wait
    takes longer than its timeout, 60 s by default.

    Attributes:
        pause: set by the program. A worker asks with `is_set`.
        paused: set when all ranks of the job have paused.
        resume: set by the program. `wait` in a worker returns when the job goes on.
        trigger_save_checkpoint: as `pause`, for a checkpoint.
        finished_save_checkpoint: set when all ranks have saved.
        stop_all_tasks: as `pause`, for the end of the job.
        progress_bar_iter: an object with `value` (-1 at first) and `get_lock`, like a multiprocessing Value.
            LocalElasticAgent draws the bar. A worker sets it to the number of steps that are done, which muster shows
            as it shows `muster.worker.step`.
        progress_bar_total: the same for the number of steps.
        debugger_start: a multiprocessing Event, for programs that use it. `muster.worker.breakpoint` needs none.
        debugger_end: a multiprocessing Event, for programs that use it.
    """

    def __init__(self, start_method: str = "spawn") -> None:
        """Make the flags.

        Args:
            start_method: the job's: "spawn", "forkserver" or "fork".

        Raises:
            ValueError: another one, or one that this system lacks.
        """
        context = multiprocessing.get_context(start_method)
        requests = _Requests()
        self.requests = requests
        self.pause, self.paused = _Flag("pause", requests), _Flag("paused", requests)
        self.resume = _Flag("resume", requests)
        self.stop_all_tasks = _Flag("stop_all_tasks", requests)
        self.trigger_save_checkpoint = _Flag("trigger_save_checkpoint", requests)
        self.finished_save_checkpoint = _Flag("finished_save_checkpoint", requests)
        self.debugger_start, self.debugger_end = context.Event(), context.Event()
        done, total = context.Value("i", -1), context.Value("i", -1)
        self.progress_bar_iter, self.progress_bar_total = _Progress(done, done, total), _Progress(total, done, total)


class _Progress:
    """A number of the progress bar, the same in every process. In a worker it is also the worker's progress."""

    def __init__(self, number: Any, done: Any, total: Any) -> None:
        """Keep three multiprocessing Values: this number, the steps that are done, and how many there will be."""
        self._number, self._done, self._total = number, done, total

    @property
    def value(self) -> int:
        """-1: it has not been set."""
        return int(self._number.value)

    @value.setter
    def value(self, value: int) -> None:
        self._number.value = value
        done, total = self._done.value, self._total.value
        if done > 0:
            worker.step(done - 1, total=total if total > 0 else None)

    def get_lock(self) -> Any:
        """Return the lock that a process holds while it changes the number."""
        return self._number.get_lock()


class _Requests:
    """What the program has asked the job for. In a worker it counts how often each flag was looked at."""

    def __init__(self) -> None:
        self.token = ""
        """The job's token, which LocalElasticAgent sets."""
        self.looks = {"pause": 0, "trigger_save_checkpoint": 0, "stop_all_tasks": 0}
        self.answers: dict[AskKind, Answer] = {}
        self.changed = threading.Condition()

    def __reduce__(self) -> tuple[type["_Requests"], tuple[()]]:
        """Send a copy to a worker that asks nothing of agents, and counts its own looks."""
        return _Requests, ()

    def count(self, name: str) -> int:
        """Count a look, and return its number, from 0."""
        self.looks[name] += 1
        return self.looks[name] - 1

    def get_step(self, name: str) -> int:
        """Return the number of the last look."""
        return max(0, self.looks[name] - 1)

    def forget(self, kind: AskKind) -> None:
        """Forget an earlier answer: it does not answer what is asked for now."""
        with self.changed:
            self.answers.pop(kind, None)

    def begin(self, kind: AskKind) -> None:
        """Ask, in a thread."""
        self.forget(kind)
        threading.Thread(target=self._ask, args=(kind,), name=f"muster-{kind.value}", daemon=True).start()

    def _ask(self, kind: AskKind) -> None:
        answer = self.ask(kind)
        if answer.outcome is not AskOutcome.DONE:
            print_line(f"muster: {kind.value}: {describe_answer(answer)}")
        with self.changed:
            self.answers[kind] = answer
            self.changed.notify_all()

    def ask(self, kind: AskKind) -> Answer:
        """Ask the job's agents, and return what became of it."""
        if not self.token:
            return Answer(outcome=AskOutcome.LOST, line="no job with these events runs: pass them to LocalElasticAgent")
        done = subprocess.run(
            # With `-m` the folder's muster.py would get the token.
            [sys.executable, _AGENT, "ask", "job", kind.value, "--limit", str(_LIMIT_S)],
            env={**os.environ, Env.TOKEN: self.token},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        try:
            return parse_answer(done.stdout)
        except ValueError:
            return Answer(outcome=AskOutcome.LOST, line=done.stderr.strip() or "no agent of the job answers")

    def wait(self, kind: AskKind, limit_s: float) -> bool:
        """Wait for the answer. False: not in time, or it was refused."""
        with self.changed:
            self.changed.wait_for(lambda: kind in self.answers, limit_s)
            found = self.answers.get(kind)
        return found is not None and found.outcome is AskOutcome.DONE


def begin_job(events: object, environ: dict[str, str]) -> None:
    """Connect the flags with the job that starts with this environment. Flags of other objects are their own."""
    if isinstance(events, Events):
        events.requests.token = environ.setdefault(Env.TOKEN, secrets.token_hex(16))


_ASKS = {
    "pause": AskKind.PAUSE,
    "resume": AskKind.RESUME,
    "trigger_save_checkpoint": AskKind.CHECKPOINT,
    "stop_all_tasks": AskKind.STOP,
}
_WAITS = {"paused": AskKind.PAUSE, "finished_save_checkpoint": AskKind.CHECKPOINT, "resume": AskKind.RESUME}


class _Flag:
    """Has the methods of `multiprocessing.Event`."""

    def __init__(self, name: str, requests: _Requests) -> None:
        self._name = name
        self._requests = requests

    def is_set(self) -> bool:
        """Return, in a worker, the answer at the next step, and in the program whether it was done."""
        if not worker.is_managed():
            return self._requests.wait(_ASKS.get(self._name) or _WAITS[self._name], 0.0)
        if self._name == "pause":
            return worker.should_pause(self._requests.count("pause"))
        if self._name == "trigger_save_checkpoint":
            return worker.should_checkpoint(self._requests.count(self._name))
        if self._name == "stop_all_tasks":
            return worker.should_stop(self._requests.count(self._name))
        return True  # a worker is past it

    def set(self) -> None:
        """Ask for it (in the program), or report that this rank has done it (in a worker)."""
        if not worker.is_managed():
            if self._name in _ASKS:
                self._requests.begin(_ASKS[self._name])
        elif self._name == "finished_save_checkpoint":
            worker.saved(self._requests.get_step("trigger_save_checkpoint"))

    def clear(self) -> None:
        """Forget what was done before. In a worker this does nothing, because the agents know."""
        if not worker.is_managed() and self._name in _WAITS:
            self._requests.forget(_WAITS[self._name])

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for at most `timeout` seconds (None: 60), and return whether it was done.

        `resume.wait()` in a worker has no limit of its own: a rank that went on alone would leave the others behind.
        """
        if not worker.is_managed():
            return self._requests.wait(
                _WAITS.get(self._name) or _ASKS[self._name], _LIMIT_S if timeout is None else timeout
            )
        if self._name == "resume":
            until_s = None if timeout is None else time.monotonic() + timeout
            while worker.should_pause(self._requests.get_step("pause")):
                if until_s is not None and time.monotonic() >= until_s:
                    return False
                time.sleep(_LOOK_S)
        self.set()
        return True


# -- the agent's side -------------------------------------------------------------------------------------------------


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
        while not self._closed.wait(_SERVING_LOOK_S):
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
        while not self._closed.is_set() and not event.wait(_SERVING_LOOK_S):
            if left_s is not None and (left_s := left_s - _SERVING_LOOK_S) <= 0:
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
