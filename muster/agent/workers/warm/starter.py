"""Warm workers, which are forked from a template that has already imported the program's modules.

This is the agent's side; `template` is the other side and describes the protocol. Every warm worker is first *parked*:
it is forked, is the agent's child, and waits on its own socket. One message starts it. Workers are parked when the
template is ready and while older ones are being stopped, so that a restart waits for no fork.

If forking is not safe, or the template has died, the cold starter starts the workers and one notice says why. The same
happens if the template stands still while it owes an answer (`stall_watch`): then it is killed, and no other follows.
"""

import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Container, Sequence
from enum import Enum
from typing import TYPE_CHECKING

from muster._shared import processes
from muster._shared.contract import describe_end
from muster._shared.records import assert_never, record
from muster.agent.errors import SpawnError
from muster.agent.runtime.loop import Loop, Timer
from muster.agent.runtime.signals import ChildWatch
from muster.agent.workers.spec import ProgramKind, WorkerSpec, WorkerStarter
from muster.agent.workers.warm.fork_safety import find_early_difference
from muster.agent.workers.warm.template_handle import TemplateHandle, TemplateOptions, release_worker

if TYPE_CHECKING:
    from muster.agent.workers.stall_watch import StallWatch
    from muster.agent.workers.warm.forking import Forked, Imported, TemplateMessage
    from muster.agent.workers.warm.store_handle import StoreHandle

_IN_TIME_S = 1.0
"""An answer within this time after a request is not late."""
_SESSION = 3
"""Index of the session in `_shared.processes.read_stat`."""


class TemplatePhase(Enum):
    """The state of the template."""

    ABSENT = "absent"
    """Not started yet."""
    IMPORTING = "importing"
    READY = "ready"
    GONE = "gone"
    """There is no template any more, or none is possible; `TemplateStarter.cold_reason` says why."""


@record
class _OwnPids:
    """Known processes, and those in the template's session: a worker leads its own session only after its release.

    A sweep lists processes after it has asked what to keep, and more may be forked in between. So each process is
    checked when the sweep asks for it.
    """

    known: frozenset[int]
    session: int
    released: frozenset[int]

    def __contains__(self, pid: object) -> bool:
        if pid in self.known:
            return True
        if not isinstance(pid, int) or pid in self.released:
            return False
        stat = processes.read_stat(pid)
        return stat is not None and stat[_SESSION] == str(self.session)


@record
class _Parked:
    pid: int
    socket: socket.socket


@record
class _Start:
    """A requested start of a worker that does not exist yet."""

    spec: WorkerSpec
    on_started: Callable[[int, int], None]
    on_failed: Callable[[int, SpawnError], None]


class TemplateStarter(WorkerStarter):
    """Starts workers by forking a template (see `spec.WorkerStarter`)."""

    max_template_ends = 3
    """After this many ends of a template no new one is started."""
    imports = True
    """Whether a template that is not ready imports something."""

    def __init__(
        self,
        loop: Loop,
        children: ChildWatch,
        cold: WorkerStarter,
        options: TemplateOptions,
        *,
        on_notice: Callable[[str], None],
        on_record: Callable[..., None],
        early: TemplateHandle | None = None,
        refused: str = "",
    ) -> None:
        """Keep the settings; `prepare` starts the template.

        Args:
            loop: the agent's.
            children: reports the ends of the template and of parked workers.
            cold: starts workers that cannot be started warm. `close` closes it.
            options: what the template is started with.
            on_notice: called with a line for the console, once for each different line.
            on_record: `EventLog.write`, or a function with its arguments.
            early: a template that was started already; `close` closes it. If None, `prepare` starts one.
            refused: why the hold's template is not used; "" if it is, or if there is no hold.
        """
        self._loop = loop
        self._children = children
        self._early = early
        self._cold = cold
        self._options = options
        self._on_notice = on_notice
        self._on_record = on_record
        self._on_read: Callable[[], None] | None = None
        self._on_prepared: Callable[[], None] | None = None
        self._notices: set[str] = set()
        self._phase = TemplatePhase.ABSENT
        self._template: TemplateHandle | None = None
        self._template_ends = 0
        self._parked: deque[_Parked] = deque()
        self._released: set[int] = set()
        self._waiting: deque[_Start] = deque()
        self._brings_torch = False
        self._store: StoreHandle | None = None
        self._kept_store: deque[_Parked] = deque()
        """The process that served the last round's store, if it serves none now."""
        self._late: Timer | None = None
        self._watch: StallWatch | None = None
        self._importing = ""
        self._spec_fd: int | None = None
        """The file with which local rank 0 was released; `muster exec` reads its variables there."""
        self._refused = refused
        self.cold_reason: str | None = None
        """Why workers start cold from now on; None while they start warm."""

    # -- called by the supervisor -----------------------------------------------------------------------------------

    def prepare(self, on_read: Callable[[], None], on_prepared: Callable[[], None]) -> None:
        """Start the template, which then reads the program's source and imports."""
        self._on_read = on_read
        self._on_prepared = on_prepared
        if self._options.program.kind is ProgramKind.COMMAND:
            self._switch_to_cold(f"{self._options.program.target} is not run by this Python")
        else:
            self._start_template()

    def start(
        self,
        specs: Sequence[WorkerSpec],
        on_started: Callable[[int, int], None],
        on_failed: Callable[[int, SpawnError], None],
    ) -> None:
        """See `spec.WorkerStarter`. While the first template still imports, starts wait for it."""
        self._released.clear()
        reason = self._find_obstacle(specs)
        if reason is not None:
            self._start_cold(specs, on_started, on_failed, reason)
            return
        self._waiting.extend(_Start(spec=spec, on_started=on_started, on_failed=on_failed) for spec in specs)
        self._release_waiting()

    def park(self, count: int) -> None:
        """Have `count` workers forked and parked for a start that will come soon, if the template is ready."""
        self._request_forks(count)

    def _request_forks(self, count: int) -> None:
        if self._template is not None and self._phase is TemplatePhase.READY:
            pending = len(self._template.pending_sockets)
            reason = self._template.request_forks(count - len(self._parked) - pending)
            self._follow_requests()
            if reason is not None:
                self._fail_waiting(reason)  # none waits yet: the start requests again

    def can_host_store(self) -> bool:
        """See `spec.WorkerStarter`.

        The user can switch it off as with torchrun: each process group then has its own store.
        """
        is_shared = self._options.env.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1"
        return self._brings_torch and is_shared and self._phase is not TemplatePhase.GONE

    def start_store(self, addr: str, port: int, on_lost: Callable[[str], None]) -> None:
        """See `spec.WorkerStarter`. A parked worker becomes its process."""
        from muster.agent.workers.warm.store_handle import StoreHandle

        self.end_store()
        try:
            self._store = StoreHandle(
                self._loop,
                self._children,
                addr=addr,
                port=port,
                on_stalled=self._replace_store,
                on_lost=on_lost,
            )
        except OSError as error:
            on_lost(f"has no store: cannot listen on MASTER_PORT {port}: {error.strerror}")
            return
        if self._phase is TemplatePhase.GONE and not self._kept_store:
            self._start_store_cold()
        else:
            self._release_store()

    def end_store(self) -> None:
        """See `spec.WorkerStarter`."""
        store, self._store = self._store, None
        if store is not None and (kept := store.end_round()) is not None:
            self._kept_store.append(_Parked(socket=kept[0], pid=kept[1]))

    def cancel(self) -> None:
        """See `spec.WorkerStarter`. Workers already forked stay parked for the next start."""
        self._waiting = deque(start for start in self._waiting if start.spec.local_rank < 0)

    def list_own_pids(self) -> Container[int]:
        """See `spec.WorkerStarter`: the template, parked workers, processes that are being forked, and the store."""
        known = self._list_known()
        if self._template is None:
            return known
        return _OwnPids(known=known, session=self._template.pid, released=frozenset(self._released))

    def _list_known(self) -> frozenset[int]:
        """List the parked workers, and the store's process if there is one."""
        known = frozenset(one.pid for one in (*self._parked, *self._kept_store))
        return known if self._store is None else known | {self._store.pid}

    def close(self) -> None:
        """Kill the template, all parked workers and the store, which have nothing to clean up."""
        own = self.list_own_pids()
        pids = [pid for pid in processes.list_parents() if pid in own] if self._template or self._parked else []
        self._waiting.clear()
        self.end_store()
        self._parked += self._kept_store
        self._phase = TemplatePhase.GONE
        self._close_template()
        self._close_parked()
        processes.send_signal(pids, signal.SIGKILL)
        if self._spec_fd is not None:
            os.close(self._spec_fd)
            self._spec_fd = None

    # -- the template -----------------------------------------------------------------------------------------------

    def _start_template(self) -> None:
        self._phase = TemplatePhase.IMPORTING
        early, self._early = self._early, None
        try:
            self._template = early or TemplateHandle(self._loop, self._options)
        except SpawnError as error:
            self._switch_to_cold(str(error))
            return
        template, self._importing = self._template, ""
        self._children.watch(template.pid, lambda status: self._handle_template_end(template, status))
        template.watch(self._handle_message)
        self._expect_answer()

    def _handle_message(self, message: "TemplateMessage") -> None:
        if "brings_torch" in message:
            self._brings_torch = message["brings_torch"]
            self._call_on_read()
        elif "importing" in message:
            self._importing = message["importing"]
        elif "ready" in message:
            if self._template is not None:
                self._handle_ready(message["ready"], self._template.started_s)
        elif "forked" in message:
            self._handle_forked(message)
        elif "notice" in message:
            self._notify_once(message["notice"])
        elif "unsafe" in message:
            self._switch_to_cold(message["unsafe"])
        elif "refused" in message:
            self._refused = message["refused"]
            self._close_template()
            self._start_template()
        elif "held" in message:  # read before this starter
            return
        else:
            assert_never(message)

    def _handle_ready(self, about: "Imported", started_s: float) -> None:
        self._phase = TemplatePhase.READY
        self._expect_no_answer()
        import_s = round(self._loop.clock.now_s() - started_s, 4)
        self._on_record("template_ready", modules=about["modules"], import_s=import_s, **about["memory"])
        if self._refused:
            self._notify_once(f"the hold's template is not used: {self._refused}; another one took {import_s:.1f} s")
        if self._waiting:
            self._release_waiting()
        elif self._template_ends == 0:
            self._request_forks(self._options.nproc + self.can_host_store())
        elif self._store is not None:
            self._release_store()
        self._call_on_prepared()

    def _handle_template_end(self, template: TemplateHandle, status: int) -> None:
        """Start the waiting workers cold. Start a new template, unless it would end the same way."""
        if template is not self._template:
            return
        template.receive()  # perhaps its last messages
        if template is not self._template:
            return  # the program was refused
        last_line = template.read_last_line()
        self._close_template()
        if self._phase is TemplatePhase.GONE:
            return
        was_ready = self._phase is TemplatePhase.READY
        reason = f"the template {describe_end(status)}{'' if was_ready else self._say_what_is_imported()}"
        self._on_record("template_ended", status=status, reason=reason, last_line=last_line)
        self._template_ends += 1
        if not was_ready or self._template_ends >= self.max_template_ends:
            self._switch_to_cold(f"{reason}: {last_line}" if last_line else reason)
            return
        self._notify_once(f"{reason}; workers start cold until there is a new one")
        self._start_waiting_cold(reason)
        self._start_template()

    def _expect_answer(self) -> None:
        self._expect_no_answer()
        self._late = self._loop.call_later(_IN_TIME_S, self._watch_template)

    def _expect_no_answer(self) -> None:
        if self._late is not None:
            self._late.cancel()
        if self._watch is not None:
            self._watch.end()
            self._watch = None

    def _watch_template(self) -> None:
        """Watch for a standstill of the template, because its answer is late."""
        from muster.agent.workers import stall_watch

        if self._template is None:
            return
        is_importing = self.imports and self._phase is TemplatePhase.IMPORTING
        limit_s = stall_watch.IMPORT_LIMIT_S if is_importing else stall_watch.ANSWER_LIMIT_S
        self._watch = stall_watch.StallWatch(
            self._loop,
            self._template.pid,
            limit_s,
            lambda pids: self._give_template_up(pids, limit_s),
            list_others=lambda: self._list_known() | self._released,
            on_slow=(lambda: self._say_that_import_is_slow(stall_watch.SLOW_S)) if is_importing else None,
        )

    def _give_template_up(self, pids: list[int], limit_s: float) -> None:
        """Kill a template that stands still, and its unreported forks. A new one would probably do the same."""
        where = " when it was to fork workers" if self._phase is TemplatePhase.READY else self._say_what_is_imported()
        reason = f"the template stood still for {limit_s:.0f} s{where}, and was killed"
        processes.send_signal(pids, signal.SIGKILL)
        self._on_record("template_ended", status=-signal.SIGKILL, reason=reason, last_line="")
        self._close_template()
        self._switch_to_cold(reason)

    def _close_template(self) -> None:
        self._expect_no_answer()
        template, self._template = self._template, None
        if template is not None:
            template.close()
            self._children.hold_orphans(False)

    def _say_what_is_imported(self) -> str:
        return f" while importing {self._importing}".rstrip() if self.imports else ""

    def _say_that_import_is_slow(self, after_s: float) -> None:
        modules = f" {self._importing}" if self._importing else ""
        self._notify_once(
            f"the template has been importing{modules} for {after_s:.0f} s; workers start when it is done "
            "(with --start cold they do not wait for it)"
        )

    def _switch_to_cold(self, reason: str) -> None:
        """Start all workers cold from now on."""
        self._phase = TemplatePhase.GONE
        if self._refused:
            reason += f" (the hold's template is not used: {self._refused})"
        self.cold_reason = reason
        self._close_parked()
        self._start_store_cold()
        self._start_waiting_cold(reason)
        self._call_on_prepared()
        self._call_on_read()

    def _call_on_read(self) -> None:
        on_read, self._on_read = self._on_read, None
        if on_read is not None:
            on_read()

    def _call_on_prepared(self) -> None:
        on_prepared, self._on_prepared = self._on_prepared, None
        if on_prepared is not None:
            on_prepared()

    # -- parking and releasing --------------------------------------------------------------------------------------

    def _follow_requests(self) -> None:
        """Collect no orphans, which may be workers, while forks are requested. Watch for a standstill."""
        template = self._template
        if template is None or not template.pending_sockets:
            self._children.hold_orphans(False)
            self._expect_no_answer()
        else:
            self._children.hold_orphans(True)
            self._expect_answer()

    def _release_waiting(self) -> None:
        """Release a parked worker for each waiting start; request forks if there are too few."""
        while self._waiting and self._parked:
            start, parked = self._waiting.popleft(), self._parked.popleft()
            try:
                spec_fd = release_worker(parked.socket, start.spec)
                if spec_fd is None:
                    self._waiting.appendleft(start)  # it ended while parked
                    continue
            except SpawnError as error:
                self._start_cold([start.spec], start.on_started, start.on_failed, str(error))
                continue
            if start.spec.local_rank == 0:
                spec_fd, self._spec_fd = self._spec_fd, spec_fd
            if spec_fd is not None:
                os.close(spec_fd)
            self._released.add(parked.pid)
            self._on_record("worker_released", how="warm", local_rank=start.spec.local_rank, pid=parked.pid)
            start.on_started(start.spec.local_rank, parked.pid)
        if self._waiting:
            self._request_forks(len(self._waiting) + (self._store is not None and self._store.waits))
        else:
            self._close_parked()

    def _release_store(self) -> None:
        """Find a process for the store: the last round's, or a parked worker. Request a fork if there is none."""
        store = self._store
        while store is not None and store.waits:
            ready = self._kept_store or self._parked
            if not ready:
                self._request_forks(1)
                return
            parked = ready.popleft()
            try:
                store.hand_over(parked.socket, parked.pid)
            except OSError as error:
                store.fail(f"cannot send its socket: {error.strerror}")

    def _replace_store(self) -> None:
        """Replace the store's process, a fork that stood still and was killed; its socket stays open."""
        self._notify_once("the store's process stood still and was killed; another one is started cold")
        self._start_store_cold()

    def _start_store_cold(self) -> None:
        store = self._store
        if store is None or not store.waits:
            return
        try:
            store.start_cold(self._options)
        except (OSError, SpawnError) as error:
            store.fail(str(error))

    def _handle_forked(self, message: "Forked") -> None:
        if self._template is None:
            return
        pids = message["forked"]
        pending, requested = self._template.pending_sockets, message["asked"]
        sockets, self._template.pending_sockets = pending[:requested], pending[requested:]
        for pid, one in zip(pids, sockets, strict=False):
            self._park_worker(_Parked(pid=pid, socket=one))
        self._follow_requests()
        for unused in sockets[len(pids) :]:
            unused.close()
        self._on_record("workers_parked", count=len(pids), duration_s=round(message["duration_s"], 4))
        self._release_store()
        if message["error"]:
            self._fail_waiting(message["error"])
        elif self._waiting:
            self._release_waiting()

    def _park_worker(self, parked: _Parked) -> None:
        def remove(_status: int) -> None:
            if parked in self._parked:
                parked.socket.close()
                self._parked.remove(parked)

        self._parked.append(parked)
        self._children.watch(parked.pid, remove)

    def _fail_waiting(self, reason: str) -> None:
        if self._store is not None and self._store.waits:
            self._store.fail(reason)
        waiting = list(self._waiting)
        self._waiting.clear()
        for start in waiting:
            start.on_failed(start.spec.local_rank, SpawnError(reason))

    def _close_parked(self) -> None:
        while self._parked:
            self._parked.pop().socket.close()

    # -- cold -------------------------------------------------------------------------------------------------------

    def _find_obstacle(self, specs: Sequence[WorkerSpec]) -> str | None:
        if self.cold_reason is not None:
            return self.cold_reason
        if self._phase is TemplatePhase.IMPORTING and self._template_ends > 0:
            return "the template has ended and a new one is not ready yet"
        for spec in specs:
            if spec.command_prefix:
                return f"workers are started through {spec.command_prefix[0]}"
            variable = find_early_difference(self._options.env, spec.env)
            if variable is not None:
                return f"{variable} differs between the workers and the template, and is read only at start"
        return None

    def _start_cold(
        self,
        specs: Sequence[WorkerSpec],
        on_started: Callable[[int, int], None],
        on_failed: Callable[[int, SpawnError], None],
        reason: str,
    ) -> None:
        self._notify_once(f"workers start cold: {reason}")

        def record_start(local_rank: int, pid: int) -> None:
            self._on_record("worker_released", how="cold", local_rank=local_rank, pid=pid, reason=reason)
            on_started(local_rank, pid)

        self._cold.start(specs, record_start, on_failed)

    def _start_waiting_cold(self, reason: str) -> None:
        waiting = list(self._waiting)
        self._waiting.clear()
        for start in waiting:
            self._start_cold([start.spec], start.on_started, start.on_failed, reason)

    def _notify_once(self, line: str) -> None:
        if line not in self._notices:
            self._notices.add(line)
            self._on_notice(line)
