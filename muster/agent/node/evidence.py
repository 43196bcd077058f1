"""Collects what failures and stops leave behind: reports of failures, and stacks of live workers.

It is loaded when first needed.
"""

from collections.abc import Callable, Mapping

from muster._shared.records import replace
from muster._shared.reports import ENDED, Failure, RankProgress, RankView, Stack
from muster.agent.config import AgentConfig
from muster.agent.diagnosis.failures import FailedWorker, FailureBuilder, OomWatch, find_advice, read_files
from muster.agent.diagnosis.kernel_log import KernelLog
from muster.agent.diagnosis.stacks import StackCollector, StackTarget, find_python
from muster.agent.logs import LogRouter
from muster.agent.node.actions import LocalFailure
from muster.agent.node.events import WorkerStack
from muster.agent.node.round_workers import RoundWorkers
from muster.agent.rendezvous.interface import Rendezvous
from muster.agent.rendezvous.report_messages import StacksTaken
from muster.agent.round import Round
from muster.agent.runtime.loop import Loop
from muster.agent.workers.spec import ProgramKind

TEXTS_LIMIT_S = 2.5
"""How long stacks may take. This is more than `StackCollector` allows, unless its files are on a disk that hangs."""

OTHERS_S = 0.5
"""The least time that a hang's stop takes if there are several nodes.

All nodes read their workers at about the same time. The first worker that is stopped breaks the connections to the
others, which then no longer wait in their collective.
"""


class Evidence:
    """Reads evidence about the workers of a round, and changes nothing."""

    def __init__(self, config: AgentConfig, loop: Loop, logs: LogRouter, workers: RoundWorkers) -> None:
        self._host = config.node_name
        self._is_command = config.program.kind is ProgramKind.COMMAND
        self._loop = loop
        self._clock = loop.clock
        self._logs = logs
        self._workers = workers
        self._kernel = KernelLog()
        self._builder = FailureBuilder(
            host=config.node_name, clock=loop.clock, oom=OomWatch(workers.memory), kernel=self._kernel
        )
        self._has_reported_disk = False
        self._thread = logs.files.thread
        """The stack files may be on a disk that hangs, but a stop limits its wait for stacks."""
        self._stacks = StackCollector(self._thread.loop)  # shared, like the dumps of overlapping requests

    def skip_kernel_log(self) -> None:
        """Skip the kernel's log so far, and read only what comes from now on."""
        self._kernel.skip()

    def collect_failures(self, round: Round, failures: tuple[LocalFailure, ...]) -> tuple[Failure, ...]:  # noqa: A002
        """Collect why these workers failed, from their files as far as a disk that hangs allows."""
        return tuple(self._collect(round, each) for each in failures)

    def collect_idle(self, round: Round, local_ranks: tuple[int, ...], reason: str) -> tuple[Failure, ...]:  # noqa: A002
        """Collect how these workers are idle; omit those that have ended by then."""
        pids = {worker.local_rank: worker.pid for worker in self._workers.live}
        return tuple(
            self._collect(round, LocalFailure(local_rank=each, reason=reason), hung_pid=pids[each])
            for each in local_ranks
            if each in pids
        )

    def _collect(self, round: Round, failure: LocalFailure, *, hung_pid: int | None = None) -> Failure:  # noqa: A002
        workers, local_rank = self._workers, failure.local_rank
        page, is_alone = workers.page, round.group_world_size == 1
        worker = FailedWorker(
            round=round,
            local_rank=local_rank,
            end=workers.ends.get(local_rank),
            hung_pid=hung_pid,
            spawn_errno=failure.errno,
            reason=failure.reason,
            check=failure.check,
            streams=workers.streams.get(local_rank),
            stderr_text=self._logs.read_stderr_text(local_rank),
            stderr_tail=self._logs.read_stderr_tail(local_rank),
            slot=None if page is None else page.read_shown(local_rank) if is_alone else page.read_slot(local_rank),
            values={} if page is None else page.read_values(local_rank),
            ended_ranks=tuple(round.rank_offset + rank for rank in workers.early_exits),
            requested_verdict=None if page is None else page.read_verdict(local_rank),
        )
        # Only what reads them runs in the thread: it may go on for as long as the disk hangs.
        files = self._logs.files.call(lambda: read_files(worker))
        if files is None:
            self._report_hanging_disk()
            files = read_files(replace(worker, streams=None))
        return self._builder.build(worker, files, self._advise)

    def _advise(self, failure: Failure) -> str:
        if failure.error_file is None:  # no file system is asked
            return find_advice(failure)
        return self._logs.files.call(lambda: find_advice(failure)) or ""

    def _report_hanging_disk(self) -> None:
        if not self._has_reported_disk:
            self._has_reported_disk = True
            self._logs.print_line("reading a failed worker's error file hangs: its failure is described without it")

    def collect_stacks(
        self,
        round: Round,  # noqa: A002
        on_done: Callable[[dict[int, WorkerStack]], None],
        *,
        is_hang: bool = False,
        always: bool = False,
    ) -> None:
        """Request the stacks of all live workers, and in a hang their flight recorders.

        Call back with them by local rank.

        Args:
            round: the workers'.
            on_done: called once.
            is_hang: the job hangs, whatever this node's workers do.
            always: also read the recorders if no hang is known, twice, because what moves does not hang. For a failure,
                the recorders are not worth the time.
        """
        if always:
            self._workers.parts.read_progress(
                round, self._host, lambda seen: self._collect_texts(lambda texts: on_done(_join_seen(texts, seen)))
            )
            return
        if not (is_hang or self._workers.parts.is_idle):
            self._collect_texts(lambda texts: on_done(_join(texts, {})))
            return
        until_s = 0.0 if round.group_world_size == 1 else self._clock.now_s() + OTHERS_S

        def finish(stacks: dict[int, WorkerStack]) -> None:
            wait_s = until_s - self._clock.now_s() if until_s else 0.0
            if wait_s > 0.0:
                self._loop.call_later(wait_s, lambda: on_done(stacks))
            else:
                on_done(stacks)

        # Recorders first: the stacks' signal may end a hang in a native sleep.
        self._workers.parts.read_views(
            round, self._host, lambda views: self._collect_texts(lambda texts: finish(_join(texts, views)))
        )

    def _collect_texts(self, on_done: Callable[[dict[int, str]], None]) -> None:
        """Request the stacks of all live workers; call back once with texts by local rank, within `TEXTS_LIMIT_S`."""
        is_done = False

        def finish(texts: dict[int, str]) -> None:
            nonlocal is_done
            if not is_done:
                is_done = True
                limit.cancel()
                on_done(texts)

        limit = self._loop.call_later(TEXTS_LIMIT_S, lambda: finish({}))
        targets: dict[int, StackTarget] = {}
        for worker in self._workers.live:
            stack_file = self._workers.streams[worker.local_rank].stack_file
            if stack_file is not None:
                targets[worker.local_rank] = StackTarget(pid=worker.pid, stack_file=stack_file)

        def collect() -> None:
            found = find_python(targets) if self._is_command else targets
            self._stacks.collect(found, lambda texts: self._thread.reply(lambda: finish(texts)))

        self._thread.submit(collect)

    def print_stacks(self, round: Round) -> None:  # noqa: A002
        """Print the stacks of all live workers on the console, and equal stacks only once. The workers keep running."""
        self.collect_stacks(round, lambda stacks: self.print_page(round, stacks), always=True)

    def print_page(self, round: Round, stacks: Mapping[int, WorkerStack]) -> None:  # noqa: A002
        """Print who blocks the others, as far as this node knows, and the stacks, equal stacks only once."""
        from muster.agent.diagnosis.hangs import load_judge
        from muster.agent.diagnosis.report_text import format_stacks

        known = (*build_stacks(round, stacks), *self.list_ended(round))
        for line in load_judge().describe_ranks(known):
            self._logs.print_line(line)
        for line in format_stacks(known, missing=self._count_missing(stacks)):
            self._logs.print_line(line)

    def send_stacks(self, round: Round, number: int, rendezvous: Rendezvous) -> None:  # noqa: A002
        """Report the stacks of all live workers to the leader."""

        def send_them(stacks: dict[int, WorkerStack]) -> None:
            missing = self._count_missing(stacks)
            known = (*build_stacks(round, stacks), *self.list_ended(round))
            rendezvous.send(StacksTaken(round_number=round.number, number=number, stacks=known, missing=missing))

        self.collect_stacks(round, send_them, always=True)

    def list_ended(self, round: Round) -> tuple[Stack, ...]:  # noqa: A002
        """Return a stack without text for each worker that has succeeded, because the others may wait for it."""
        return tuple(
            Stack(
                global_rank=round.rank_offset + rank,
                node=round.group_rank,
                local_rank=rank,
                text="",
                view=RankView(
                    global_rank=round.rank_offset + rank, node=round.group_rank, host=self._host, state=ENDED
                ),
            )
            for rank in self._workers.early_exits
        )

    def _count_missing(self, stacks: Mapping[int, WorkerStack]) -> int:
        """Return how many live workers have given no stack; some of the others may have ended since."""
        return max(0, len(self._workers.live) - sum(1 for stack in stacks.values() if stack.text))


def _join(texts: Mapping[int, str], views: Mapping[int, RankView]) -> dict[int, WorkerStack]:
    return {rank: WorkerStack(text=texts.get(rank, ""), view=views.get(rank)) for rank in sorted({*texts, *views})}


def _join_seen(texts: Mapping[int, str], seen: Mapping[int, tuple[RankView, RankProgress]]) -> dict[int, WorkerStack]:
    joined = _join(texts, {rank: view for rank, (view, _) in seen.items()})
    return {rank: replace(stack, progress=seen[rank][1]) if rank in seen else stack for rank, stack in joined.items()}


def build_stacks(round: Round, found: Mapping[int, WorkerStack]) -> tuple[Stack, ...]:  # noqa: A002
    """Name the workers of these stacks, by local rank."""
    from muster.agent.diagnosis.tracebacks import put_program_first

    return tuple(
        Stack(
            global_rank=round.rank_offset + rank,
            node=round.group_rank,
            local_rank=rank,
            text=put_program_first(stack.text),
            view=stack.view,
            progress=stack.progress,
        )
        for rank, stack in found.items()
    )
