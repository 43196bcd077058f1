"""Manages the snapshots of one node: looks at the ranks' slots, does what the leader says, and sends and takes copies.

All decisions are made on the loop; threads only move bytes (`exchange`).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from muster._shared.records import assert_never
from muster.agent.features.snapshots.memory import (
    LOOK_S,
    MARK_LOOK_S,
    Key,
    SnapshotFiles,
    SnapshotMemory,
    SnapshotRound,
)
from muster.agent.features.snapshots.messages import (
    CopiesEnded,
    CopySnapshot,
    Generation,
    Holding,
    KeepSnapshot,
    Order,
    Report,
    SnapshotCopied,
    SnapshotFound,
    SnapshotKept,
    SnapshotSought,
    Source,
)
from muster.agent.runtime.loop import Loop, Timer

if TYPE_CHECKING:
    from muster.agent.features.snapshots.exchange import Exchange, OpenStream
    from muster.agent.features.snapshots.ranges import RangeServer
    from muster.agent.rendezvous.interface import Stream

COPY_TRIES = 3
COPY_RETRY_S = 1.0


class NodeSnapshots:
    """The snapshots of one agent. Close it."""

    def __init__(
        self,
        loop: Loop,
        files: SnapshotFiles,
        open_stream: "OpenStream",
        send: Callable[[int, Report], None],
        print_line: Callable[[str], None],
    ) -> None:
        self.memory = SnapshotMemory(files)
        self._loop = loop
        self._open_stream = open_stream
        self._send = send
        self._print_line = print_line
        self._round: SnapshotRound | None = None
        self._timer: Timer | None = None
        self._exchange: Exchange | None = None
        self._has_told_failure = False
        self.confirmed: tuple[int, float] | None = None
        """The step of the newest snapshot that all ranks have, and the wall-clock time since which that is known."""
        self._confirmed_s = 0.0
        """The time of the confirmation, by the monotonic clock."""
        self._ranges: RangeServer | None = None
        """Set once a round has continued a snapshot."""
        self._sought: dict[int, list[Callable[[Source | None], None]]] = {}
        """Callbacks that wait to hear where a rank's state is."""
        self._next: Callable[[], None] | None = None
        """Begins the round that waits for the end of a transfer."""

    @property
    def is_idle(self) -> bool:
        """Whether it handles no round's snapshots, but only serves a connection."""
        return self._round is None

    # -- rounds -----------------------------------------------------------------------------------------------------

    def continue_round(self, formed: SnapshotRound) -> None:
        """Handle the snapshots of a round whose workers run or have ended, after their first saves."""
        self._round = formed
        self.memory.note_round(formed)
        self._plan_look(0.0)

    def begin_round(
        self, formed: SnapshotRound, on_ready: Callable[[], None], on_missing: Callable[[str], None]
    ) -> None:
        """Have the workers of a round continue its snapshot.

        Args:
            formed: the round. No worker of another one runs.
            on_ready: called once this node has its part of the snapshot.
            on_missing: called instead if the part cannot be had, with the reason.
        """
        fetching = None if self._exchange is None else self._exchange.fetching
        if fetching is not None:  # of an ended round, but still writing
            fetching.cancel("its round is over")
            self._next = lambda: self.begin_round(formed, on_ready, on_missing)
            self._round = None
            return
        self._round = formed
        base = formed.snapshot
        if base is None or self.confirmed is None or self.confirmed[0] != base.step:
            self.confirmed = None if base is None else (base.step, self._loop.clock.wall_s())
        self.memory.begin_round(formed)
        if self._exchange is not None:
            self._exchange.begin_round(formed)
        self._plan_look(LOOK_S)
        self._sought.clear()
        if formed.snapshot is not None and max(formed.snapshot.size, formed.group_world_size) > 1:
            self._serve_ranges()  # one node's workers open each other's files
        if formed.snapshot is None or formed.source is None:
            self._copy_base(formed)
            on_ready()
            return

        def end(problem: str | None, does_not_fit: bool) -> None:
            following, self._next = self._next, None
            if following is not None:
                following()
            elif self._round is not formed:
                return
            elif problem is None:
                self._copy_base(formed)
                on_ready()
            elif does_not_fit:
                self._print_line(f"this node keeps no snapshots: {problem}. Its workers read step {step} from {host}")
                on_ready()
            else:
                on_missing(f"cannot get the snapshot of step {step} from {host}: {problem}")

        step, host = formed.snapshot.step, formed.source.host
        self._print_line(f"getting this node's part of the snapshot of step {step} from {host}")
        self._load_exchange().fetch(formed.snapshot, formed.source, end, self._print_line)

    def list_holdings(self) -> tuple[Holding, ...]:
        """Return what this node has of snapshots, once its workers have ended."""
        copies = () if self._exchange is None else self._exchange.copies.list_holdings()
        return (*self.memory.list_holdings(), *copies)

    def take_stream(self, stream: "Stream") -> None:
        """Take a connection of another node for a part of a snapshot."""
        self._load_exchange().serve(stream)

    def _load_exchange(self) -> "Exchange":
        if self._exchange is None:
            from muster.agent.features.snapshots.exchange import Exchange

            self._exchange = Exchange(self._loop, self.memory, self._open_stream, self._seek)
        return self._exchange

    def _serve_ranges(self) -> None:
        """Let workers read from now on what other ranks have saved of the base."""
        if self._ranges is None:
            from muster.agent.features.snapshots.ranges import RangeServer

            try:
                self._ranges = RangeServer(self.memory, self._load_exchange().read_range)
            except (OSError, RuntimeError) as error:
                self._print_line(f"workers cannot read other ranks' snapshots: {error}")

    def _seek(self, rank: int, give: Callable[[Source | None], None]) -> None:
        """Ask the leader which node has what a rank has saved of the base."""
        if self._round is not None:
            self._sought.setdefault(rank, []).append(give)
            self._send(self._round.number, SnapshotSought(rank=rank))

    # -- while workers run ------------------------------------------------------------------------------------------

    def confirm(self, round_number: int, snapshot: Generation) -> None:
        """Note that all ranks have a snapshot of the round."""
        if self._round is None or round_number != self._round.number:
            return
        self.memory.confirm(snapshot)
        self.confirmed = snapshot.step, self._loop.clock.wall_s()
        self._confirmed_s = self._loop.clock.now_s()
        self._plan_look(LOOK_S)

    def obey(self, round_number: int, order: Order) -> None:
        """Do what the leader says. An order about another round changes nothing."""
        if self._round is None or round_number != self._round.number:
            return
        match order:
            case KeepSnapshot():
                self.memory.hold(order.step)
                self._look()
            case SnapshotFound():
                for give in self._sought.pop(order.rank, []):
                    give(order.source)
            case CopySnapshot():
                self.memory.is_copying = True
                key = order.lineage, order.step
                if self._round.sends_copies:
                    self._copy(self._round, key, order.neighbour, self._report_copied, COPY_TRIES)
                else:
                    self._report_copied(self._round, key, "this node sends no copies (--snapshot-copies 0)")
            case CopiesEnded():
                self.memory.end_copy(is_over=order.is_over)
                # Due now if the copy delayed it.
                self._plan_look(max(0.0, self._confirmed_s + LOOK_S - self._loop.clock.now_s()))
            case _:
                assert_never(order)

    def _look(self) -> None:
        formed, found = self._round, self.memory.look()
        if formed is not None and found is not None:
            step, advance, is_replicated, is_split = found
            kept = SnapshotKept(step=step, advance=advance, is_replicated=is_replicated, is_split=is_split)
            self._send(formed.number, kept)
        self._plan_look(MARK_LOOK_S if self.memory.is_waiting else LOOK_S)

    def _plan_look(self, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(delay_s, self._look)

    def _copy(
        self,
        formed: SnapshotRound,
        key: Key,
        neighbour: Source,
        on_end: Callable[[SnapshotRound, Key, str | None], None],
        tries: int,
    ) -> None:
        """Send a confirmed snapshot to the neighbour. It stays until this is over, because no newer one is kept."""
        if self._round is not formed:
            return

        def end(problem: str | None) -> None:
            if self._round is not formed:
                return
            if problem is not None and tries > 1:
                self._loop.call_later(COPY_RETRY_S, lambda: self._copy(formed, key, neighbour, on_end, tries - 1))
                return
            if problem is not None and not self._has_told_failure:
                self._has_told_failure = True
                self._print_line(f"no other node has a copy of this node's snapshots: {problem}")
            on_end(formed, key, problem)

        self._load_exchange().send(key, neighbour, end)

    def _copy_base(self, formed: SnapshotRound) -> None:
        """Send what the round continues to the neighbour, which may be a new one, or have nothing."""
        if formed.snapshot is not None and formed.neighbour is not None and formed.sends_copies:
            self.memory.is_copying = True
            self._copy(formed, formed.snapshot.key, formed.neighbour, self._end_copy_of_base, COPY_TRIES)

    def _end_copy_of_base(self, _formed: SnapshotRound, _key: Key, _problem: str | None) -> None:
        self.memory.is_copying = False

    def _report_copied(self, formed: SnapshotRound, key: Key, problem: str | None) -> None:
        """Report a copy. The leader answers with `CopiesEnded`."""
        copied = SnapshotCopied(lineage=key[0], step=key[1], has_failed=problem is not None)
        self._send(formed.number, copied)

    def close(self) -> None:
        """Stop looking, and drop all copies. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        self._round = None
        if self._ranges is not None:
            self._ranges.close()
        if self._exchange is not None:
            self._exchange.close()
