"""The part: serves a round's debuggers once a worker has asked for the terminal."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from muster._shared import processes
from muster._shared.guard import GuardLease
from muster._shared.layouts import StatusPageLayout as Layout
from muster.agent.logs import LogRouter
from muster.agent.node.round_parts import PartContext, RoundPart, Start
from muster.agent.runtime.loop import Loop, Timer

if TYPE_CHECKING:
    from muster.agent.round import Round
    from muster.agent.workers.pool import WorkerEnd
    from muster.agent.workers.status_page import StatusPage


_LOOK_S = 0.1
_TERMINAL_FD = 0


class TerminalLoan:
    """Lends this node's terminal to one worker's debugger at a time, until the round's end. Close it.

    A worker asks in its slot of the status page, and is answered there once all earlier output is printed. Then the
    console is held back until the worker has continued or ended.
    """

    def __init__(
        self,
        loop: Loop,
        lease: GuardLease,
        logs: LogRouter,
        page: "StatusPage",
        *,
        nproc: int,
        on_quit: Callable[[], None],
    ) -> None:
        """Answer workers from now on.

        Args:
            loop: the agent's.
            lease: tells the guard that a debugger has the terminal. The guard restores the terminal if the agent is
                killed.
            logs: has the console.
            page: the round's.
            nproc: number of its slots.
            on_quit: called when a debugger's user has ended the job.
        """
        self._loop = loop
        self._lease = lease
        self._logs = logs
        self._page = page
        self._nproc = nproc
        self._on_quit = on_quit
        self._settings: processes.TerminalSettings | None = None
        """The terminal's settings before the loan."""
        self._timer: Timer | None = None
        self.local_rank: int | None = None
        """The rank that has the terminal, or gets it as soon as all earlier output is printed."""
        self._look()

    @property
    def debugged(self) -> int | None:
        """The local rank whose debugger has the terminal; None also between its `continue` and the next look at it."""
        rank = self.local_rank
        return rank if rank is not None and self._page.read_debugger(rank) == Layout.DEBUGGER_WANTS else None

    def _look(self) -> None:
        if self.local_rank is not None:
            self._look_at_borrower(self.local_rank)
        for local_rank in range(self._nproc):
            if local_rank != self.local_rank and self._page.read_debugger(local_rank) == Layout.DEBUGGER_WANTS:
                self._page.write_terminal(local_rank, Layout.TERMINAL_QUEUED)
                if self.local_rank is None:
                    self._answer(local_rank)
        self._timer = self._loop.call_later(_LOOK_S, self._look)

    def _answer(self, local_rank: int) -> None:
        if not os.isatty(_TERMINAL_FD):
            self._page.write_terminal(local_rank, Layout.TERMINAL_NONE)
            return
        self.local_rank = local_rank
        self._logs.hold_console()

    def _look_at_borrower(self, local_rank: int) -> None:
        asked = self._page.read_debugger(local_rank)
        if asked == Layout.DEBUGGER_WANTS:
            if self._settings is None and self._logs.is_console_held:
                self._settings = processes.read_terminal_settings(_TERMINAL_FD)
                self._lease.record_terminal(is_lent=True)
                self._page.write_terminal(local_rank, Layout.TERMINAL_LENT)
            return
        self.end(local_rank)
        if asked == Layout.DEBUGGER_QUIT:
            self._on_quit()

    def end(self, local_rank: int) -> None:
        """Print again, with the terminal restored, once the worker continues or ends. Ignore another rank's end."""
        if local_rank != self.local_rank:
            return
        self.local_rank = None
        self._page.write_terminal(local_rank, 0)
        if self._settings is not None:
            processes.restore_terminal(_TERMINAL_FD, self._settings)
            self._settings = None
            self._lease.record_terminal(is_lent=False)
        self._logs.release_console()

    def close(self) -> None:
        """End the loan with the round."""
        if self.local_rank is not None:
            self.end(self.local_rank)
        if self._timer is not None:
            self._timer.cancel()


class DebuggerPart(RoundPart):
    """The terminal's loan in a round, if any."""

    def __init__(self, context: PartContext) -> None:
        self._context = context
        self._loan: TerminalLoan | None = None

    @property
    def foreground(self) -> int | None:  # type: ignore[override]
        """The local rank whose debugger has the terminal."""
        return None if self._loan is None else self._loan.debugged

    def begin_round(self, formed: "Round", start: Start | None) -> None:
        """See `RoundPart`."""
        del formed
        if start is None:
            self.look()

    def look(self) -> None:
        """See `RoundPart`."""
        context, page = self._context, self._context.get_page()
        nproc = context.config.nproc
        if self._loan is None and page is not None and any(map(page.read_debugger, range(nproc))):
            self._loan = TerminalLoan(context.loop, context.lease, context.logs, page, nproc=nproc, on_quit=self._quit)

    def _quit(self) -> None:
        self._context.quit_job("the debugger of one of its ranks was quit")

    def end_worker(self, end: "WorkerEnd") -> None:
        """See `RoundPart`."""
        if self._loan is not None:
            self._loan.end(end.worker.local_rank)

    def end_round(self) -> None:
        """See `RoundPart`."""
        if self._loan is not None:
            self._loan.close()
            self._loan = None


def create_part(context: PartContext) -> DebuggerPart:
    """Create the part of one agent."""
    return DebuggerPart(context)
