"""Collects what failures and stops leave behind: failures, and the stacks of live workers. Loaded when first needed."""

from collections.abc import Callable, Mapping

from muster.agent.config import AgentConfig
from muster.agent.diagnosis.failures import FailureCollector
from muster.agent.diagnosis.oom import OomWatch
from muster.agent.diagnosis.report import Failure, Stack
from muster.agent.diagnosis.stacks import StackCollector, StackTarget
from muster.agent.logs import LogRouter
from muster.agent.node.actions import LocalFailure
from muster.agent.node.round_workers import RoundWorkers
from muster.agent.round import Round
from muster.agent.runtime.loop import Loop


class Evidence:
    """Reads about the workers of a round; changes nothing."""

    def __init__(self, config: AgentConfig, loop: Loop, logs: LogRouter, workers: RoundWorkers) -> None:
        self._logs = logs
        self._workers = workers
        self._failures = FailureCollector(
            host=config.node_name, clock=loop.clock, logs=logs, oom=OomWatch(workers.memory)
        )
        self._stacks = StackCollector(loop)  # one for all requests: overlapping ones share dumps

    def collect_failures(self, round: Round, failures: tuple[LocalFailure, ...]) -> tuple[Failure, ...]:  # noqa: A002
        """Collect why these workers failed."""
        return tuple(self._collect(round, each) for each in failures)

    def collect_idle(self, round: Round, local_ranks: tuple[int, ...], reason: str) -> tuple[Failure, ...]:  # noqa: A002
        """Collect what these workers do not do; those that have ended meanwhile are left out."""
        pids = {worker.local_rank: worker.pid for worker in self._workers.live}
        return tuple(
            self._collect(round, LocalFailure(local_rank=each, reason=reason), hung_pid=pids[each])
            for each in local_ranks
            if each in pids
        )

    def _collect(self, round: Round, failure: LocalFailure, *, hung_pid: int | None = None) -> Failure:  # noqa: A002
        local_rank = failure.local_rank
        end, streams = self._workers.ends.get(local_rank), self._workers.streams.get(local_rank)
        return self._failures.collect(round, local_rank, end, streams, failure.reason, hung_pid=hung_pid)

    def collect_stacks(self, on_done: Callable[[dict[int, str]], None]) -> None:
        """Request the stacks of all live workers; calls back within the collector's limit, with texts by local rank."""
        targets: dict[int, StackTarget] = {}
        for worker in self._workers.live:
            stack_file = self._workers.streams[worker.local_rank].stack_file
            if stack_file is not None:
                targets[worker.local_rank] = StackTarget(pid=worker.pid, stack_file=stack_file)
        self._stacks.collect(targets, on_done)

    def print_stacks(self, round: Round) -> None:  # noqa: A002
        """Print the stacks of all live workers on the console, equal ones once. The workers keep running."""

        def print_them(texts: dict[int, str]) -> None:
            from muster.agent.diagnosis.report_text import format_stacks  # only this needs it

            ranked = {round.rank_offset + local_rank: text for local_rank, text in texts.items()}
            for line in format_stacks(ranked, missing=len(self._workers.live) - len(ranked)):
                self._logs.print_line(line)

        self.collect_stacks(print_them)


def build_stacks(round: Round, texts: Mapping[int, str]) -> tuple[Stack, ...]:  # noqa: A002
    """Name the workers that the texts are of, by local rank."""
    return tuple(
        Stack(global_rank=round.rank_offset + rank, node=round.group_rank, local_rank=rank, text=text)
        for rank, text in texts.items()
    )
