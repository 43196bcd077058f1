"""The part: serves a round's debuggers once a worker has asked for the terminal."""

from typing import TYPE_CHECKING

from muster.agent.features.debugger.terminal_loan import TerminalLoan
from muster.agent.node.round_parts import PartContext, RoundPart, Start

if TYPE_CHECKING:
    from muster.agent.round import Round
    from muster.agent.workers.pool import WorkerEnd


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
