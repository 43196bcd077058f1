"""Warm workers: forked from a template that has imported the program's modules already.

The agent's side. The template's own is `template_process`; the two talk as described there. Every warm worker is first
*parked*: forked, the agent's child, waiting on a socket of its own. Starting it is one message. Workers are parked when
the template is ready and while older ones are being stopped, so that a restart waits for no fork.

When forking is not safe, or the template died, the cold starter does the work and a notice says why, once.
"""

import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from muster import _processes
from muster.agent.errors import SpawnError
from muster.agent.runtime.loop import Loop
from muster.agent.workers.spec import ProgramKind, WorkerSpec, WorkerStarter
from muster.agent.workers.warm.fork_safety import find_early_difference
from muster.agent.workers.warm.template_handle import TemplateHandle, TemplateOptions, read_memory, release_worker

if TYPE_CHECKING:  # only where torch was imported
    from muster.agent.workers.warm.head_start import HeadStart

_MOST_DEATHS = 3
"""A template that dies this often is not started again."""

_SESSION = 3
"""Index of the session in `_processes.read_stat`."""


class TemplatePhase(Enum):
    """Where the template stands."""

    ABSENT = "absent"
    """Not started yet, or never to be (`--no-python`, no Linux)."""
    IMPORTING = "importing"
    READY = "ready"
    GONE = "gone"
    """It gave up or died for good; `TemplateStarter.cold_reason` says why."""


@dataclass(frozen=True, kw_only=True)
class _OwnPids:
    """Known processes, and those in the template's session: workers lead their own from their release on, no sooner.

    Whoever sweeps lists processes after asking what to keep, and more may have been forked in between: so each is
    looked at when it is asked for.
    """

    known: frozenset[int]
    session: int
    released: frozenset[int]

    def __contains__(self, pid: object) -> bool:
        if pid in self.known:
            return True
        if not isinstance(pid, int) or pid in self.released:
            return False
        stat = _processes.read_stat(pid)
        return stat is not None and stat[_SESSION] == str(self.session)


@dataclass(frozen=True, kw_only=True)
class _Parked:
    pid: int
    socket: socket.socket


@dataclass(frozen=True, kw_only=True)
class _Start:
    """A worker asked for that does not exist yet."""

    spec: WorkerSpec
    on_started: Callable[[int, int], None]
    on_failed: Callable[[int, str], None]


class TemplateStarter:
    """Starts workers by forking a template (see `base.WorkerStarter`)."""

    def __init__(
        self,
        loop: Loop,
        cold: WorkerStarter,
        options: TemplateOptions,
        *,
        on_notice: Callable[[str], None],
        on_record: Callable[..., None],
        early: TemplateHandle | None = None,
    ) -> None:
        """Nothing is started before `prepare`.

        Args:
            loop: the agent's.
            cold: starts what cannot be started warm; closed by `close`.
            options: what the template is made for.
            on_notice: gets one line for the console, each different one once.
            on_record: `Journal.write`, or what takes its arguments.
            early: a template that was started already, closed by `close`; None: `prepare` starts one.
        """
        self._loop = loop
        self._early = early
        self._cold = cold
        self._options = options
        self._on_notice = on_notice
        self._on_record = on_record
        self._on_prepared: Callable[[], None] | None = None
        self._said: set[str] = set()
        self._phase = TemplatePhase.ABSENT
        self._link: TemplateHandle | None = None
        self._deaths = 0
        self._parked: deque[_Parked] = deque()
        self._released: set[int] = set()
        self._waiting: deque[_Start] = deque()
        self._has_torch = False
        self._head_start: HeadStart | None = None
        self._when_ahead: list[Callable[[], None]] = []
        self.cold_reason: str | None = None
        """Why workers start cold from now on; None while they start warm."""

    # -- what the supervisor asks -----------------------------------------------------------------------------------

    def prepare(self, on_prepared: Callable[[], None]) -> None:
        """Start the template, which begins to import."""
        self._on_prepared = on_prepared
        if self._options.program.kind is ProgramKind.COMMAND:
            self._give_up(f"{self._options.program.target} is not run by this Python")
        elif not _processes.LINUX:
            self._give_up(f"warm workers need Linux, this is {sys.platform}")
        else:
            self._spawn()

    def start(
        self,
        specs: Sequence[WorkerSpec],
        on_started: Callable[[int, int], None],
        on_failed: Callable[[int, str], None],
    ) -> None:
        """See `base.WorkerStarter`. While the first template still imports, workers wait for it."""
        self._released.clear()
        self._drop_head_start()  # of an older round: with one worker on the node there was no start left to cancel
        reason = self._find_obstacle(specs)
        if reason is not None:
            self._start_cold(specs, on_started, on_failed, reason)
            return
        self._waiting.extend(_Start(spec=spec, on_started=on_started, on_failed=on_failed) for spec in specs)
        self._serve()

    def park(self, count: int) -> None:
        """Have `count` workers forked and waiting for a start that is soon to come, if the template is ready."""
        if self._link is not None and self._phase is TemplatePhase.READY:
            trouble = self._link.ask(count - len(self._parked) - len(self._link.asked))
            if trouble is not None:
                self._fail_waiting(trouble)  # nobody, when it was for later: then the start asks again

    def when_ahead(self, then: Callable[[], None]) -> None:
        """See `base.WorkerStarter`."""
        if self._head_start is None:
            then()
        else:
            self._when_ahead.append(then)

    def cancel(self) -> None:
        """See `base.WorkerStarter`. Workers already forked stay parked for the next start."""
        self._waiting.clear()
        self._drop_head_start()
        self._cold.cancel()

    def reaped(self, pid: int, status: int) -> None:
        """See `base.WorkerStarter`: the template, or a parked worker, has ended.

        Args:
            pid: the process.
            status: as of os.waitstatus_to_exitcode.
        """
        if self._link is not None and pid == self._link.pid:
            self._note_death(self._link, status)
            return
        for one in self._parked:
            if one.pid == pid:
                one.socket.close()
                self._parked.remove(one)
                return
        self._cold.reaped(pid, status)

    def keep_pids(self) -> Container[int]:
        """See `base.WorkerStarter`: the template, parked workers, and those just being forked."""
        known = frozenset(one.pid for one in self._parked)
        if self._link is None:
            return known
        return _OwnPids(known=known, session=self._link.pid, released=frozenset(self._released))

    def close(self) -> None:
        """End the template and all parked workers, at once: they hold nothing that needs a goodbye."""
        own = self.keep_pids()
        pids = [pid for pid in _processes.list_parents() if pid in own] if self._link or self._parked else []
        self._waiting.clear()
        self._drop_head_start()
        self._phase = TemplatePhase.GONE
        if self._link is not None:
            self._link.close()
            self._link = None
        self._drop_parked()
        _processes.send_signal(pids, signal.SIGKILL)
        self._cold.close()

    def template_memory(self) -> dict[str, int]:
        """What the template holds now, see `template_link.read_memory`; empty when there is none."""
        return read_memory(self._link.pid) if self._link is not None else {}

    # -- the template's life ----------------------------------------------------------------------------------------

    def _spawn(self) -> None:
        self._phase = TemplatePhase.IMPORTING
        link, self._early = self._early, None
        try:
            self._link = link or TemplateHandle(self._loop, self._options)
        except SpawnError as error:
            self._give_up(str(error))
            return
        self._link.listen(self._take)

    def _take(self, message: dict[str, Any]) -> None:
        if "ready" in message and self._link is not None:
            self._note_ready(message["ready"], self._link.began_s)
        elif "forked" in message:
            self._note_forked(message)
        elif "notice" in message:
            self._say(message["notice"])
        elif "unsafe" in message:
            self._give_up(message["unsafe"])

    def _note_ready(self, about: dict[str, Any], began_s: float) -> None:
        self._phase = TemplatePhase.READY
        self._has_torch = about["has_torch"]
        import_s = round(self._loop.clock.now_s() - began_s, 4)
        self._on_record("template_ready", modules=about["modules"], import_s=import_s, **self.template_memory())
        if self._waiting:
            self._serve()
        elif self._deaths == 0:
            self.park(self._options.nproc)
        self._tell_prepared()

    def _note_death(self, link: TemplateHandle, status: int) -> None:
        """The template has ended. Workers that waited for it start cold; a new one is made unless that is hopeless."""
        link.read()  # its last words may still be in the socket
        last_line = link.read_last_line()
        link.close()
        self._link = None
        if self._phase is TemplatePhase.GONE:
            return
        was_ready = self._phase is TemplatePhase.READY
        how = signal.Signals(-status).name if status < 0 else f"exit code {status}"
        reason = f"the template ended ({how}){'' if was_ready else ' while importing'}"
        self._on_record("template_ended", status=status, reason=reason, last_line=last_line)
        self._deaths += 1
        if not was_ready or self._deaths >= _MOST_DEATHS:
            self._give_up(f"{reason}: {last_line}" if last_line else reason)
            return
        self._say(f"{reason}; workers start cold until there is a new one")
        self._flush_cold(reason)
        self._spawn()

    def _give_up(self, reason: str) -> None:
        """Cold from now on."""
        self._phase = TemplatePhase.GONE
        self.cold_reason = reason
        self._drop_parked()
        self._flush_cold(reason)
        self._tell_prepared()

    def _tell_prepared(self) -> None:
        on_prepared, self._on_prepared = self._on_prepared, None
        if on_prepared is not None:
            on_prepared()

    # -- parking and releasing --------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Release parked workers to those who wait; ask for more where they are too few."""
        while self._waiting and self._parked and self._head_start is None:
            start, parked = self._waiting.popleft(), self._parked.popleft()
            try:
                if not release_worker(parked.socket, start.spec):
                    self._waiting.appendleft(start)  # it died while it was parked
                    continue
            except SpawnError as error:
                self._start_cold([start.spec], start.on_started, start.on_failed, str(error))
                continue
            self._released.add(parked.pid)
            self._on_record("worker_released", how="warm", local_rank=start.spec.local_rank, pid=parked.pid)
            start.on_started(start.spec.local_rank, parked.pid)
            if start.spec.store_port is not None and self._has_torch:
                from muster.agent.workers.warm.head_start import HeadStart

                self._head_start = HeadStart(self._loop, start.spec.store_port, self._end_head_start)
        if self._waiting:
            self.park(len(self._waiting))
        else:
            self._drop_parked()

    def _end_head_start(self) -> None:
        self._head_start = None
        then, self._when_ahead = self._when_ahead, []
        for call in then:
            call()
        if self._waiting:
            self._serve()

    def _drop_head_start(self) -> None:
        self._when_ahead.clear()
        if self._head_start is not None:
            self._head_start.close()
            self._head_start = None

    def _note_forked(self, message: dict[str, Any]) -> None:
        if self._link is None:
            return
        pids: list[int] = message["forked"]
        sockets, self._link.asked = self._link.asked[: message["asked"]], self._link.asked[message["asked"] :]
        self._parked.extend(_Parked(pid=pid, socket=one) for pid, one in zip(pids, sockets, strict=False))
        for unused in sockets[len(pids) :]:
            unused.close()
        self._on_record("workers_parked", count=len(pids), duration_s=round(message["duration_s"], 4))
        if message["error"]:
            self._fail_waiting(message["error"])
        elif self._waiting:
            self._serve()

    def _fail_waiting(self, reason: str) -> None:
        waiting = list(self._waiting)
        self._waiting.clear()
        for start in waiting:
            start.on_failed(start.spec.local_rank, reason)

    def _drop_parked(self) -> None:
        while self._parked:
            self._parked.pop().socket.close()

    # -- cold -------------------------------------------------------------------------------------------------------

    def _find_obstacle(self, specs: Sequence[WorkerSpec]) -> str | None:
        if self.cold_reason is not None:
            return self.cold_reason
        if self._phase is TemplatePhase.IMPORTING and self._deaths > 0:
            return "the template was lost and a new one is not ready yet"
        for spec in specs:
            if spec.command_prefix:
                return f"workers are run by {spec.command_prefix[0]}"
            variable = find_early_difference(self._options.env, spec.env)
            if variable is not None:
                return f"{variable} is not the same in the workers, and is only read at start"
        return None

    def _start_cold(
        self,
        specs: Sequence[WorkerSpec],
        on_started: Callable[[int, int], None],
        on_failed: Callable[[int, str], None],
        reason: str,
    ) -> None:
        self._say(f"workers start cold: {reason}")

        def note_started(local_rank: int, pid: int) -> None:
            self._on_record("worker_released", how="cold", local_rank=local_rank, pid=pid, reason=reason)
            on_started(local_rank, pid)

        self._cold.start(specs, note_started, on_failed)

    def _flush_cold(self, reason: str) -> None:
        waiting = list(self._waiting)
        self._waiting.clear()
        for start in waiting:
            self._start_cold([start.spec], start.on_started, start.on_failed, reason)

    def _say(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._on_notice(line)
