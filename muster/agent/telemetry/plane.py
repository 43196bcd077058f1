"""The telemetry plane: once a second each node looks at its workers and reports to the leader, which writes the status.

It runs beside everything else. Nothing waits for it, nothing is decided on it, and what does not arrive is lost. It
begins a second after the first workers and continues between rounds. All nodes look at the same moments of the leader's
clock, and the leader shows its own node as it was when the others looked, so that steps can be compared. Any node that
leads can run it, because every agent keeps the history of the job. A job of more than 256 nodes is looked at less often
in proportion. The time that a look takes of this process delays the next one, so that looks never take more than
`_SHARE`.

Ranks themselves record when they did the first step of an attempt. So the duration of a start or restart is exact,
however late the first look is.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from muster._shared.codec import encode
from muster._shared.contract import STATUS_LIMIT_BYTES, LogNames
from muster._shared.goodput import WAITING_S
from muster._shared.job_history import JobHistory
from muster._shared.job_view import LISTED_RANKS, JobState, JobStatus, SlowRank
from muster._shared.records import NO_ITEMS, replace
from muster.agent.logs import replace_file
from muster.agent.rendezvous.interface import STORM_REASON, JobMembers, LeaderClock, MemberStatus, Rendezvous, Summary
from muster.agent.runtime.event_log import EventLog, EventRecord
from muster.agent.runtime.loop import Loop, Timer
from muster.agent.telemetry.merging import MergedNodes, StepsDone, build_status, find_steps, merge_nodes
from muster.agent.telemetry.sampling import BYTES_PER_S, NodeSampler, NodeSummary, Observed, Usage, pack, read_usage
from muster.agent.telemetry.slow_ranks import JobSlowRanks

if TYPE_CHECKING:
    from muster.agent.runtime.event_log import OnLook
    from muster.agent.telemetry.devices import Devices, DeviceUse


LOOK_S = 1.0
_NODES_A_SECOND = 256
_USAGE_S = 2.0
"""Time between two looks at what the workers use."""
_FRESH_S = 5.0
"""How often an unchanged status is written, so that readers see that it is not old."""
_STEPS_S = 60.0
"""Time between two records of steps for a job that has run for an hour. At first there is one a second."""
_CLOCK_S = 0.002
"""A smaller change of the difference of two clocks, beside its uncertainty, is not worth a record."""
_WITHOUT_STEPS = (JobState.RESTARTING, JobState.WAITING, JobState.ENDED)
"""States in which no worker runs, and the other nodes' reports are older: the last steps were recorded at the round's
end."""
_SHARE = 0.01
_TOLD_S = 0.25
"""How long after the common moment the leader merges what the nodes have sent."""
_OLD_S = 5.0
"""The leader's own node is not shown as it was so long ago."""
_STUCK_S = 10.0
"""A read that takes this long has hung, as a GPU's driver may. Then the last values are no longer shown."""


_ANOTHERS_S = 20.0


class StatusFile:
    """The status file of one node, `status.json` in the run's folder, of one line.

    A status that cannot be written is dropped, because the next one is newer. While the disk does not answer, at most
    one waits.
    """

    def __init__(self, run_dir: str, submit: Callable[[Callable[[], None]], None]) -> None:
        """Write nothing yet.

        Args:
            run_dir: the folder that contains it.
            submit: runs a call in the thread that writes files.
        """
        self._path = os.path.join(run_dir, LogNames.STATUS)
        self._submit = submit
        self._is_writing = False
        """Whether a call waits in the thread."""
        self._own: os.stat_result | None = None
        """The file as the thread last wrote it."""

    def write(self, status: JobStatus, *, is_last: bool = False, gives_way: bool = False) -> None:
        """Replace the file soon. Drop the status while the thread has not written the one before, unless `is_last`.

        Args:
            status: the content.
            is_last: whether it is this agent's last status.
            gives_way: whether another agent knows more and may write into the same folder. While it does, nothing is
                written.
        """
        if self._is_writing and not is_last:
            return
        self._is_writing = True
        text = encode(status, STATUS_LIMIT_BYTES)
        self._submit(lambda: self._replace(f"{text}\n", gives_way=gives_way))

    def _replace(self, text: str, *, gives_way: bool) -> None:
        if not (gives_way and self._is_anothers()):
            with suppress(OSError):
                replace_file(self._path, text.encode())
            self._own = _read_stat(self._path)
        self._is_writing = False

    def _is_anothers(self) -> bool:
        """Return whether another agent has recently replaced the file."""
        found = _read_stat(self._path)
        if found is None or (self._own is not None and found.st_ino == self._own.st_ino):
            return False
        return abs(time.time() - found.st_mtime) < _ANOTHERS_S


def _read_stat(path: str) -> os.stat_result | None:
    with suppress(OSError):
        return os.stat(path)
    return None


class ObservedNode(Protocol):
    """What the plane learns about this node."""

    def observe(self) -> Observed | None:
        """Return the workers of the current or last round; None if there is no status page."""
        ...


class Telemetry:
    """The telemetry of one agent, from the start of its first workers to its end.

    It is an `EventSink`, which closes it.
    """

    def __init__(
        self,
        loop: Loop,
        node: ObservedNode,
        rendezvous: Rendezvous,
        *,
        nproc: int,
        host: str,
        run_id: str,
        devices: "Devices | None" = None,
        status_file: StatusFile | None,
        on_status: Callable[[JobStatus], None] | None,
        on_look: "OnLook | None" = None,
        on_trouble: Callable[[str], None],
        read_used_s: Callable[[], float] = time.thread_time,
    ) -> None:
        """Prepare the first look, which follows soon.

        Args:
            loop: the agent's.
            node: this agent's.
            rendezvous: reaches the leader.
            nproc: the number of workers of this node.
            host: the node's name.
            run_id: the job's.
            devices: the workers'; None if the node has none that can be read.
            status_file: None if there are no files.
            on_status: gets each status that is written.
            on_look: gets each look: at this node, at its ranks, and at the job if this agent leads.
            on_trouble: gets a line once, if there is a fault in this module.
            read_used_s: the CPU time of this thread, in seconds.
        """
        self._loop = loop
        self._node = node
        self._rendezvous = rendezvous
        self._nproc = nproc
        self._run_id = run_id
        self._file = status_file
        self._on_status = on_status
        self._on_look = on_look
        self._on_trouble = on_trouble
        self._read_used_s = read_used_s
        self._history = JobHistory(self._record_steps)
        self._sampler = NodeSampler(host)
        self._devices = devices
        self._slow_ranks = JobSlowRanks()
        self._named_slow: set[int] = set()
        """Ranks that an event has reported."""
        self._members: Mapping[int, MemberStatus] = NO_ITEMS
        """The members of the round when all of them were there."""
        self._at_end: dict[tuple[int | None, int | None], MemberStatus] = {}
        """Those that were there at the job's end or later."""
        self._number = 0
        self._is_reading = False
        self._usage_due_s = self._send_due_s = self._written_s = 0.0
        self._exits = 0
        """The number of the round's workers that have ended."""
        self._unformed_s: float | None = None
        """Since when there has been no round."""
        self._event_log: EventLog | None = None
        self._began_s = loop.clock.now_s()
        self._recorded: tuple[int, int] = (0, 0)
        """Round and steps of the last record of steps."""
        self._record_due_s = 0.0
        self._is_leading = False
        self._ahead_s = 0.0
        """The lead of the leader's clock over this loop's."""
        self._samples: deque[tuple[int, float, NodeSummary]] = deque(maxlen=8)
        """Rounds, moments and results of the last looks at this node."""
        self._compared: tuple[LeaderClock, float] | None = None
        """The last record of the leader's clock, and its lead over this agent's records."""
        self._last: tuple[object, ...] = ()
        """The part of the last status that does not always change."""
        self._closed = False
        self._first_round = 0
        """The last round whose first step was recorded."""
        self._timer: Timer | None = loop.call_later(0.0, self._look)

    def watch(self, event_log: EventLog) -> None:
        """Receive the agent's records, including those before, and show what its sinks know of this node."""
        self._event_log = event_log
        self._sampler.facts = event_log.node_facts
        event_log.add_sink(self, replay=True)

    # -- records ----------------------------------------------------------------------------------------------------

    def write(self, record: EventRecord) -> None:
        """See `EventSink`."""
        if self._closed:
            return
        try:
            self._history.write(record)
            if record.what == "workers_stopped":
                self._unformed_s = record.monotonic_s
            elif record.what == "round_formed":
                self._unformed_s, self._exits = None, 0
            elif record.what == "agent_ended":
                self._look_at_job(is_last=True)
            elif record.what == "worker_exited":
                self._exits += 1
            if record.what == "workers_stopped" or (record.what == "worker_exited" and self._exits == self._nproc):
                self._tell_end()
            if record.what in ("round_broken", "job_ended"):
                self._read_members()
        except Exception as error:  # noqa: BLE001  # as in `_look`
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._on_trouble(f"status.json is no longer written; the job goes on: {type(error).__name__}: {error}")
        self.close()

    def close(self) -> None:
        """See `EventSink`."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._devices is not None and not self._is_reading:
            self._devices.close()

    # -- looks ------------------------------------------------------------------------------------------------------

    def look(self, *, is_stopped: bool = False) -> None:
        """Look once more: the job has ended, and a summary follows. After a fault in this module, do nothing.

        Args:
            is_stopped: whether a signal has ended the job here.
        """
        if self._closed:
            return
        try:
            if is_stopped:
                self._history.record_stop()
            self._look_at_job(is_last=True)
        except Exception as error:  # noqa: BLE001  # as in `_look`
            self._give_up(error)

    def _look_before(self) -> None:
        """Look at this node when all do, before what they send is merged."""
        try:
            observed = self._node.observe()
            if observed is not None:
                self._sample(observed, self._loop.clock.now_s())
        except Exception as error:  # noqa: BLE001  # as in `_look`
            self._give_up(error)
            return
        self._timer = self._loop.call_later(_TOLD_S, self._look)

    def _sample(self, observed: Observed, now_s: float) -> NodeSummary:
        own = self._sampler.sample(observed, self._nproc, now_s)
        self._samples.append((observed.formed.number, now_s, own))
        return own

    def _look(self) -> None:
        began_s = self._read_used_s()
        try:
            nodes = self._look_at_job()
        except Exception as error:  # noqa: BLE001  # a fault of what is only for people must not end a job
            self._give_up(error)
            return
        delay_s = max(LOOK_S, nodes / _NODES_A_SECOND, (self._read_used_s() - began_s) / _SHARE)
        if nodes > 1:
            delay_s -= (self._loop.clock.now_s() + self._ahead_s + delay_s) % LOOK_S
            delay_s += LOOK_S if delay_s < LOOK_S / 2 else 0.0
        if not self._closed:
            look = self._look_before if nodes > 1 and self._is_leading else self._look
            self._timer = self._loop.call_later(delay_s, look)

    def _read_members(self) -> JobMembers | None:
        """Return what the leader knows of all nodes, if this one leads.

        Nodes that leave after the job's end are not lost.
        """
        job = self._rendezvous.read_members()
        if job is None or self._history.state is not JobState.ENDED:
            return job
        self._at_end |= {(each.group_rank, each.index): each for each in job.members}
        return replace(job, members=tuple(self._at_end.values()))

    def _tell_end(self) -> None:
        """Report to the leader at once if no worker is left here, because the job may end now."""
        observed = self._node.observe()
        if observed is not None and not observed.pids and self._rendezvous.read_members() is None:
            self._send_due_s = 0.0
            self._look_at_job()

    def _look_at_job(self, *, is_last: bool = False) -> int:
        """Look at the job, and return the number of nodes."""
        observed = self._node.observe()
        if observed is None:
            return 1
        now_s, formed = self._loop.clock.now_s(), observed.formed
        own = self._sample(observed, now_s)
        if formed.group_world_size > 1:
            self._compare_clocks()
        job = self._read_members()
        if not is_last:
            self._read_usage(observed, now_s)
        if job is None and formed.group_world_size > 1:
            self._send(own, formed.number, now_s)
        if job is None and formed.group_rank > 0:
            self._is_leading = False
            self._record_steps_of(merge_nodes(own, None, NO_ITEMS, 0), formed.number, now_s)
            self._show_look(own, None)
            return formed.group_world_size
        if job is not None:
            self._note_waiting(job, now_s)
        self._is_leading = True
        merged = self._merge(own, job, formed.number, formed.group_world_size, now_s)
        self._record_steps_of(merged, formed.number, now_s, is_last=is_last)
        slow = self._find_slow_ranks(merged, formed.number, now_s)
        status = build_status(
            formed,
            merged,
            self._history,
            observed.pause,
            kept=observed.kept,
            slow_ranks=slow,
            run_id=self._run_id,
            now_s=now_s,
        )
        knows_less = job is None and formed.group_world_size > 1
        self._show_look(own, None if knows_less else status)
        self._write(status, now_s, is_last=is_last, gives_way=knows_less)
        return max(formed.group_world_size, len(merged.nodes))

    def _show_look(self, own: NodeSummary, status: JobStatus | None) -> None:
        if self._on_look is not None:
            self._on_look(own.node, self._sampler.ranks, status)

    def _find_slow_ranks(self, merged: MergedNodes, number: int, now_s: float) -> tuple[SlowRank, ...]:
        if self._history.state is not JobState.RUNNING:
            return self._slow_ranks.repeat()
        reported = [each for summary in merged.summaries for each in summary.slow_ranks]
        hosts = {node.node: node.host for node in merged.nodes if node.node is not None}
        found = self._slow_ranks.find(number, merged.ranks, reported, hosts, now_s, merged.ages_s)
        for each in found:
            if each.is_chronic and each.global_rank not in self._named_slow and len(self._named_slow) < LISTED_RANKS:
                self._named_slow.add(each.global_rank)
                self._history.add_event(self._loop.clock.wall_s(), each.describe())
        return found

    def _merge(self, own: NodeSummary, job: JobMembers | None, number: int, size: int, now_s: float) -> MergedNodes:
        at_s = now_s
        if job is not None:
            members = {each.group_rank: each for each in job.members if each.group_rank is not None}
            if number != self._number or len(members) >= size:
                self._number, self._members = number, members
            if self._history.state is JobState.RUNNING:
                ages_s = [each.age_s for each in job.members if each.summary is not None and each.age_s < _OLD_S]
                told_s = now_s - max(ages_s, default=0.0)
                _, at_s, own = min(
                    (each for each in self._samples if each[0] == number), key=lambda each: abs(each[1] - told_s)
                )
        merged = merge_nodes(own, job, self._members, number, now_s - at_s)
        return merged if job is not None else replace(merged, running=size)

    def _send(self, own: NodeSummary, number: int, now_s: float) -> None:
        """Send to the leader if it is due."""
        if now_s < self._send_due_s:
            return
        text = pack(own)
        summary = Summary(round_number=number, step=own.node.step, most_step=own.node.most_step, text=text)
        self._rendezvous.send_summary(summary)
        self._send_due_s = now_s + (len(text) + 150) / BYTES_PER_S - 0.01

    def _record_steps(self, number: int) -> None:
        """Record the current steps and round for the history. The other nodes' steps are about the same."""
        observed = self._node.observe()
        if observed is not None and observed.formed.number == number:
            now_s = self._loop.clock.now_s()
            self._is_leading = observed.formed.group_rank == 0 or self._rendezvous.read_members() is not None
            own = self._sampler.sample(observed, self._nproc, now_s)
            merged = merge_nodes(own, None, NO_ITEMS, 0)
            self._record_steps_of(merged, number, now_s, is_last=True)

    def _record_steps_of(self, merged: MergedNodes, number: int, now_s: float, *, is_last: bool = False) -> None:
        steps = find_steps(merged, now_s)
        if steps is None or self._history.state in _WITHOUT_STEPS:
            return
        is_first, self._first_round = number != self._first_round, number
        if is_first and steps.first is not None:
            self._history.record_steps(*steps.first, is_counted=steps.is_counted)
        self._history.record_steps(
            steps.done, steps.at_s, is_counted=steps.is_counted, phase=steps.rank.phase, total=steps.rank.total
        )
        position = number, steps.done
        if not self._is_leading or self._event_log is None:
            return
        if is_first and steps.first is not None:
            done, at_s = steps.first
            ago_s = round(now_s - at_s, 3)
            self._event_log.write("steps_done", done=done, is_counted=steps.is_counted, ago_s=ago_s)
        if position == self._recorded:
            return
        is_due = is_last or now_s >= self._record_due_s or position[0] != self._recorded[0]
        if is_due or self._history.is_held:
            self._recorded = position
            self._record_due_s = now_s + min(_STEPS_S, max(LOOK_S, (now_s - self._began_s) / 60)) - 0.01
            self._write_steps(self._event_log, steps, now_s)

    def _write_steps(self, event_log: EventLog, steps: StepsDone, now_s: float) -> None:
        rank = steps.rank
        event_log.write(
            "steps_done",
            done=steps.done,
            is_counted=steps.is_counted,
            ago_s=round(now_s - steps.at_s, 3),
            total=rank.total,
            rate=rank.rate,
            phase=rank.phase,
            values=dict(rank.values),
        )

    def _compare_clocks(self) -> None:
        """Record how far the leader's clock is ahead, if that has changed.

        Both clocks of this machine are read one after the other, so the duration of the look does not matter.
        """
        found, clock = self._rendezvous.read_clock(), self._loop.clock
        if found is None:
            return
        first_s, boottime_s, last_s = clock.now_s(), clock.boottime_s(), clock.now_s()
        found = replace(found, uncertainty_s=found.uncertainty_s + (last_s - first_s) / 2)
        self._ahead_s = ahead_s = found.ahead_s + boottime_s - (first_s + last_s) / 2
        if self._event_log is None:
            return
        if self._compared is not None and self._compared[0].leader_id == found.leader_id:
            before, before_s = self._compared
            if abs(ahead_s - before_s) <= before.uncertainty_s + found.uncertainty_s + _CLOCK_S:
                return
        self._compared = found, ahead_s
        self._event_log.write(
            "clock_compared",
            member=found.own_id,
            leader=found.leader_id,
            ahead_s=round(ahead_s, 6),
            uncertainty_s=round(found.uncertainty_s, 6),
        )

    def _note_waiting(self, job: JobMembers, now_s: float) -> None:
        if self._unformed_s is None or now_s - self._unformed_s < WAITING_S or self._event_log is None:
            return
        reason = STORM_REASON if job.storm_s > 0 else f"{len(job.members)} of {job.max_nodes} nodes are here"
        if self._history.state is not JobState.WAITING or self._history.reason != reason:
            self._event_log.write("nodes_awaited", reason=reason)

    # -- CPU, memory, GPUs ------------------------------------------------------------------------------------------

    def _read_usage(self, observed: Observed, now_s: float) -> None:
        if self._is_reading and now_s - self._usage_due_s > _STUCK_S:
            self._sampler.record_usage(NO_ITEMS, NO_ITEMS, rank_offset=0)
        if self._is_reading or now_s < self._usage_due_s or not observed.pids:
            return
        self._is_reading, self._usage_due_s = True, now_s + _USAGE_S - 0.01
        clock, pids, offset = self._loop.clock, dict(observed.pids), observed.formed.rank_offset

        def read() -> "tuple[Mapping[int, Usage], Mapping[int, DeviceUse]]":
            usage: Mapping[int, Usage] = NO_ITEMS
            devices: Mapping[int, DeviceUse] = NO_ITEMS
            with suppress(Exception):  # no descriptors left
                usage = read_usage(pids, clock.now_s())
            with suppress(Exception):  # an unknown NVML
                devices = NO_ITEMS if self._devices is None else self._devices.read()
            return usage, devices

        def then(found: "tuple[Mapping[int, Usage], Mapping[int, DeviceUse]]") -> None:
            self._is_reading = False
            self._sampler.record_usage(*found, rank_offset=offset)

        self._loop.call_in_thread(read, then, lambda _error: (NO_ITEMS, NO_ITEMS))

    # -- the file ---------------------------------------------------------------------------------------------------

    def _write(self, status: JobStatus, now_s: float, *, is_last: bool, gives_way: bool) -> None:
        lasting = _find_lasting(status)
        is_new = lasting != self._last
        if not (is_new or is_last) and now_s - self._written_s < _FRESH_S:
            return
        self._last, self._written_s = lasting, now_s
        status = replace(status, time_s=round(self._loop.clock.wall_s(), 3))
        if self._file is not None:
            self._file.write(status, is_last=is_last, gives_way=gives_way)
        if self._on_status is not None:
            self._on_status(status)


def _find_lasting(status: JobStatus) -> tuple[object, ...]:
    """Return the part of the status that changes only when something happens."""
    return (
        *(status.round, status.state, status.reason, status.step, status.optimizer_steps, status.values),
        *(status.exit_code, status.events, status.recoveries, status.slow_ranks, status.nodes_spare, status.nodes_lost),
        *((each.node, each.state, each.step) for each in status.nodes),
        *((each.step, each.optimizer_steps, each.state, each.phase, each.last_line) for each in status.ranks),
        status.still_s is None,
    )
