"""Nodes whose telemetry runs on a clock of its own: pages that a test writes, a leader in memory, and files."""

import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from doubles.samples import make_round

from muster._shared.job_view import JobStatus, RankState
from muster._shared.layouts import StatusPageLayout as Layout
from muster.agent.rendezvous.interface import JobMembers, LeaderClock, MemberStatus, Summary
from muster.agent.runtime.event_log import EventLog
from muster.agent.telemetry import Observed, Pause, StatusFile, Telemetry
from muster.agent.telemetry.sampling import OpenCollective
from muster.agent.workers.status_page import StatusPage
from muster.schedulers.failure_report import parse_status


class FakeTimer:
    def __init__(self) -> None:
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class FakeLoop:
    """Time passes in `run`; threads are calls."""

    def __init__(self) -> None:
        self.at_s = 100.0
        self.clock = self
        self._timers: list[tuple[float, FakeTimer, Callable[[], None]]] = []

    def now_s(self) -> float:
        return self.at_s

    def boottime_s(self) -> float:
        return self.at_s

    def wall_s(self) -> float:
        return 1_800_000_000.0 + self.at_s

    def call_later(self, delay_s: float, call: Callable[[], None]) -> FakeTimer:
        timer = FakeTimer()
        self._timers.append((self.at_s + delay_s, timer, call))
        return timer

    def call_in_thread(self, read: Callable[[], Any], then: Callable[[Any], None], without: Any = None) -> None:
        then(read())

    def run(self, for_s: float) -> None:
        until_s = self.at_s + for_s
        while due := [each for each in self._timers if each[0] <= until_s]:
            first = min(due, key=lambda each: each[0])
            self._timers.remove(first)
            self.at_s = max(self.at_s, first[0])
            if not first[1].is_cancelled:
                first[2]()
        self.at_s = until_s


class FakeLeader:
    """What all nodes share."""

    def __init__(self, max_nodes: int = 1) -> None:
        self.max_nodes = max_nodes
        self.leads = 0
        """The group rank of the node that leads."""
        self.summaries: dict[int, Summary] = {}
        self.told_s: dict[int, float] = {}
        self.knows_ages = False
        """Of the summaries; else each counts as told now."""
        self.present: list[int | None] = list(range(max_nodes))
        """Group ranks of the members; None: a spare."""
        self.sent_bytes = 0
        self.is_busy = False
        self.storm_s = 0.0


class Node:
    """One node with its own log folder, and what it has written."""

    def __init__(
        self,
        folder: Path,
        *,
        nproc: int = 2,
        loop: FakeLoop | None = None,
        leader: FakeLeader | None = None,
        rank: int = 0,
    ) -> None:
        self.loop, self.leader, self.rank, self.nproc = loop or FakeLoop(), leader, rank, nproc
        self.path = folder / "status.json"
        self.writes = 0
        self.told: list[JobStatus] = []
        self.troubles: list[str] = []
        self.on_look: Callable[..., None] = lambda *_: None
        self.pause: Pause | None = None
        self.clock: LeaderClock | None = None
        self.pids = dict.fromkeys(range(nproc), os.getpid())
        self.lines: dict[int, bytes] = {}
        self.collectives: dict[int, OpenCollective] = {}
        self.looked_s: float | None = None
        """When workers were asked for their collectives; None: just now."""
        self.arrivals: dict[int, float] = {}
        self.are_grouped = True
        self.states = dict.fromkeys(range(nproc), RankState.RUNNING)
        self.is_page_open = True
        self.holds_disk = False
        self.held: list[Callable[[], None]] = []
        self.form(1)
        self.log = EventLog(self.loop)  # type: ignore[arg-type]
        self.used_s = 0.0
        """CPU time of the agent's thread."""
        self.log.find_round = lambda: self.round
        self.log.write("agent_started")
        self.write_round()
        self._folder = folder
        self.begin_plane()

    def begin_plane(self) -> None:
        """A second after the workers were started, as an agent does it."""
        self.plane = Telemetry(
            self.loop,  # type: ignore[arg-type]
            self,
            self,  # type: ignore[arg-type]
            nproc=self.nproc,
            host=f"host-{self.rank}",
            run_id="run",
            status_file=StatusFile(str(self._folder), self._submit),
            on_status=self.told.append,
            on_look=self._show_look,
            on_trouble=self.troubles.append,
            read_used_s=lambda: self.used_s,
        )
        self.plane.watch(self.log)

    def _show_look(self, *look: Any) -> None:
        self.on_look(*look)

    def form(self, number: int, attempt: int = 0) -> None:
        """A new round, whose workers have done nothing."""
        nodes = self.leader.max_nodes if self.leader is not None else 1
        self.round = make_round(
            self.nproc,
            number=number,
            attempt=attempt,
            restarts_left=3 - attempt,
            group_rank=self.rank,
            group_world_size=nodes,
            rank_offset=self.rank * self.nproc,
            world_size=nodes * self.nproc,
            node_index=self.rank,
        )
        self.page = StatusPage(nproc=self.nproc, round_number=number, attempt=attempt)

    def write_round(self) -> None:
        formed = self.round
        self.log.write(
            "round_formed",
            world_size=formed.world_size,
            nodes=formed.group_world_size,
            restarts_left=3 - formed.attempt,
        )
        self.log.write("workers_started", ranks=(0, 1))

    def restart(self, reason: str, number: int, kind: str = "failure") -> None:
        """Workers fail, and start again at once."""
        self.log.write("round_broken", kind=kind, reason=reason)
        self.log.write("workers_stopped")
        self.form(number, number - 1)
        self.write_round()

    # -- what the plane asks ----------------------------------------------------------------------------------------

    def observe(self) -> Observed | None:
        if not self.is_page_open:
            return None
        return Observed(
            formed=self.round,
            page=self.page,
            states=self.states,
            pids=self.pids,
            read_last_line=lambda local_rank: self.lines.get(local_rank, b""),
            collectives=self.collectives,
            arrivals=self.arrivals,
            arrived_s=self.loop.at_s if self.looked_s is None else self.looked_s,
            are_grouped=self.are_grouped,
            pause=self.pause,
        )

    def send_summary(self, summary: Summary) -> None:
        if not self.leader.is_busy:
            self.leader.summaries[self.rank] = summary
            self.leader.told_s[self.rank] = self.loop.at_s
            self.leader.sent_bytes += len(json.dumps(summary.__dict__))

    def read_clock(self) -> LeaderClock | None:
        return self.clock

    def read_members(self) -> JobMembers | None:
        leader = self.leader
        if leader is None or leader.leads != self.rank:
            return None
        members = tuple(
            MemberStatus(
                index=rank,
                host=f"host-{rank}",
                nproc=self.nproc,
                group_rank=rank,
                is_leader=rank == self.rank,
                summary=None if rank is None else leader.summaries.get(rank),
                age_s=self.loop.at_s - leader.told_s[rank] if leader.knows_ages and rank in leader.told_s else 0.0,
            )
            for rank in leader.present
        )
        return JobMembers(members=members, max_nodes=leader.max_nodes, storm_s=leader.storm_s)

    def _submit(self, call: Callable[[], None]) -> None:
        if self.holds_disk:
            self.held.append(call)
        else:
            self.writes += 1
            call()

    # -- what workers do --------------------------------------------------------------------------------------------

    def set_word(self, rank: int, word: int, value: int) -> None:
        self.page._words[(rank + 1) * Layout.WORDS + word] = value

    def set_text(self, rank: int, word: int, text: bytes) -> None:
        """As workers write names: length and checksum, then the bytes."""
        self.set_word(rank, word, len(text) << 32 | zlib.crc32(text))
        start = (rank + 1) * Layout.BLOCK_BYTES + 8 * (word + 1)
        self.page._memory[start : start + len(text)] = text

    def step(self, *steps: int, total: int = 1000) -> None:
        """Each rank has done its step just now."""
        for rank, step in enumerate(steps):
            if not self.page._words[(rank + 1) * Layout.WORDS + Layout.FIRST_NS]:
                self.set_word(rank, Layout.FIRST, step + 1)
                self.set_word(rank, Layout.FIRST_NS, int(self.loop.at_s * 1e9))
            self.set_word(rank, Layout.STEP, step + 1)
            self.set_word(rank, Layout.TOTAL, total)
            self.set_word(rank, Layout.CHANGED_NS, int(self.loop.at_s * 1e9))

    def read(self) -> JobStatus | None:
        """What is in its file."""
        return parse_status(self.path.read_bytes()) if self.path.exists() else None

    def look(self, after_s: float = 1.0) -> JobStatus:
        """What is in its file some seconds later."""
        self.loop.run(after_s)
        found = self.read()
        assert found is not None
        return found
