"""Any rendezvous of torch's registry behind our protocol: `c10d-torch`, `etcd`, `etcd-v2`, third-party ones.

torch's handlers block, so one thread owns the handler, does what the loop asks of it and hands results back through
a pipe. What the handler cannot do, we do not pretend: the budget is each agent's own, and a failure is reported by the
node it happened on. That the job has ended, well or for good, and that a node is lost, the agents tell one another
through the round's store (`torch_watch`); torch's agent instead takes 300 s of waiting for success.
"""

import os
from collections import deque
from collections.abc import Callable

from muster.agent.config import RendezvousConfig
from muster.agent.diagnosis.report import Failure, Stack
from muster.agent.rendezvous.backends.restart_policy import LocalRestartPolicy, Next
from muster.agent.rendezvous.backends.torch_thread import HandlerThread, Layout
from muster.agent.rendezvous.backends.torch_watch import FailedElsewhere
from muster.agent.rendezvous.interface import BreakKind, Notice, RendezvousFailed, RoundFormed
from muster.agent.round import Round
from muster.agent.runtime.loop import Loop


class TorchRendezvous:
    """Implements `Rendezvous` with a handler of torch's."""

    def __init__(self, config: RendezvousConfig, *, nproc: int, role: str, loop: Loop) -> None:
        self._config = config
        self._loop = loop
        self._trial = LocalRestartPolicy(loop, run_id=config.run_id, max_restarts=config.max_restarts)
        self._closed = False
        self._awaits_round = False
        """No worker is left, and the next round has not formed."""
        self._results: deque[Callable[[], None]] = deque()
        self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        loop.watch_readable(self._read_fd, self._take_results)
        self._worker = HandlerThread(config, nproc, role, self)

    # -- from the thread --------------------------------------------------------------------------------------------

    def hand_over(self, result: Callable[[], None]) -> None:
        """Called by the thread: run `result` on the loop."""
        self._results.append(result)
        try:
            os.write(self._write_fd, b"\0")
        except (OSError, ValueError):
            self._results.clear()  # closed meanwhile: nobody waits

    def _take_results(self) -> None:
        try:
            os.read(self._read_fd, 4096)
        except BlockingIOError:
            return
        while self._results:
            self._results.popleft()()

    def on_formed(self, rank: int, size: int, layout: Layout, *, use_agent_store: bool) -> None:
        """A round of torch's handler is complete."""
        if self._trial.over:
            return
        self._awaits_round = False
        self._trial.begin_round()
        self._loop.post(
            RoundFormed(
                round=Round(
                    number=self._trial.number,
                    attempt=self._trial.attempt,
                    restarts_left=self._trial.restarts_left,
                    group_rank=rank,
                    group_world_size=size,
                    rank_offset=layout.offsets[rank],
                    world_size=layout.world_size,
                    role_rank_offset=layout.role_offsets[rank],
                    role_world_size=layout.role_sizes[rank],
                    master_addr=layout.master_addr,
                    master_port=layout.master_port,
                    use_agent_store=use_agent_store,
                    node_index=self._config.node_index or 0,
                )
            )
        )

    def on_waiting(self, count: int) -> None:
        """Nodes wait to get in: all agents go to the next round."""
        if not self._trial.over and self._trial.broken is None:
            self._worker.ask("pause")
            self._trial.break_round(BreakKind.MEMBERSHIP, f"{count} node{'s' if count > 1 else ''} waiting to join")

    def on_node_lost(self, rank: int, silence_s: float) -> None:
        """A node that still had work shows no life: all agents go to the next round."""
        if not self._trial.over and self._trial.broken is None:
            self._worker.ask("pause")
            self._trial.break_round(BreakKind.MEMBERSHIP, f"node {rank} was lost: no sign of life for {silence_s:g} s")

    def on_failed_elsewhere(self, found: FailedElsewhere) -> None:
        """The job has failed for good on another node."""
        if self._trial.over:
            return
        self._trial.take_verdict(found.reason, found.root)
        if self._awaits_round:
            self._trial.end(succeeded=False)

    def tell(self, text: str) -> None:
        """One line for the console."""
        self._loop.post(Notice(text=text))

    def on_end_told(self, *, succeeded: bool) -> None:
        """Every node that can know the job's end knows it."""
        self._trial.end(succeeded=succeeded)

    def on_lost(self, reason: str, *, usage: bool) -> None:
        """The handler gave up."""
        if not self._trial.over:
            self._trial.over = True
            self._loop.post(RendezvousFailed(reason=reason, usage=usage))

    # -- what the supervisor says -----------------------------------------------------------------------------------

    def join(self, *, is_prepared: bool = True) -> None:  # noqa: ARG002
        """See `Rendezvous`."""
        self._worker.start()
        self._worker.ask("next")

    def report_prepared(self) -> None:
        """See `Rendezvous`. torch's handlers make a round at once of whoever comes."""

    def report_started(self, round_number: int) -> None:
        """See `Rendezvous`. torch's handlers are not told."""

    def report_failures(self, round_number: int, failures: tuple[Failure, ...]) -> None:
        """See `Rendezvous`."""
        if self._trial.take_failures(round_number, failures):
            final, root = self._trial.final, self._trial.find_root()
            self._worker.ask("pause" if final is None else "fail", final or "", root)

    def report_idle(self, round_number: int, failures: tuple[Failure, ...]) -> None:
        """See `Rendezvous`. Nobody can be asked whether other nodes still work: an idle node has failed."""
        if failures:
            self.report_failures(round_number, failures)

    def report_succeeded(self, round_number: int) -> None:
        """See `Rendezvous`."""
        if round_number == self._trial.number and self._trial.broken is None:
            self._worker.ask("done")

    def report_stopped(
        self, round_number: int, failures: tuple[Failure, ...] = (), stacks: tuple[Stack, ...] = ()
    ) -> None:
        """See `Rendezvous`."""
        following = self._trial.take_stopped(round_number, failures, stacks)
        if following is Next.ROUND:
            self._awaits_round = True
            self._worker.ask("next")
        elif following is Next.END:
            self._worker.ask("tell")

    def report_leaving(self, reason: str) -> None:
        """See `Rendezvous`. torch's handlers know no leaving: the others notice when its keep-alive stops."""

    def close(self) -> None:
        """See `Rendezvous`."""
        if self._closed:
            return
        self._closed = self._trial.over = True
        self._worker.finish()
        self._loop.unwatch(self._read_fd)
        os.close(self._read_fd)
        os.close(self._write_fd)
