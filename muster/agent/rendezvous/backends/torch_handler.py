"""Any rendezvous of torch's registry behind our protocol: `c10d-torch`, `etcd`, `etcd-v2`, third-party ones.

torch's handlers block, so one thread owns the handler, carries out the loop's commands and returns results through a
pipe. What the handler cannot do is not imitated: every agent has its own restart budget, and the node that a failure
happened on reports it. Through the round's store (`torch_watch`) the agents agree on the end of the job and on lost
nodes; torch's agent instead takes 300 s of waiting for success.
"""

import os
from collections import deque
from collections.abc import Callable
from typing import Protocol

from muster.agent.config import RendezvousConfig
from muster.agent.diagnosis.report import Failure, Stack
from muster.agent.rendezvous.backends.restart_policy import LocalRestartPolicy, Next
from muster.agent.rendezvous.backends.torch_thread import Layout
from muster.agent.rendezvous.backends.torch_watch import FailedElsewhere
from muster.agent.rendezvous.interface import (
    BreakKind,
    DrainReport,
    DrainWithdrawn,
    Notice,
    PostEvent,
    RendezvousFailed,
    RoundFormed,
)
from muster.agent.round import Round
from muster.agent.runtime.loop import Loop


class CommandThread(Protocol):
    """`torch_thread.HandlerThread`, or `torch_caller.CallerThread`, which passes all calls on to one."""

    def start(self) -> None:
        """Begin."""
        ...

    def send_command(self, command: str, reason: str = "", root: Failure | None = None) -> None:
        """See `HandlerThread`."""
        ...

    def stop(self) -> None:
        """End."""
        ...


class TorchRendezvous:
    """Implements `Rendezvous` with a handler of torch's."""

    def __init__(
        self,
        config: RendezvousConfig,
        *,
        loop: Loop,
        post: PostEvent,
        make_thread: "Callable[[TorchRendezvous], CommandThread]",
    ) -> None:
        """`make_thread` makes what owns the handler: a thread of this agent, or one of the program that drives it."""
        self._config = config
        self._loop = loop
        self._post = post
        self._policy = LocalRestartPolicy(loop.clock, post, config)
        self._closed = False
        self._awaits_round = False
        """No worker is left, and the next round has not formed."""
        self._results: deque[Callable[[], None]] = deque()
        self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        loop.watch_readable(self._read_fd, self._run_results)
        self._thread = make_thread(self)

    # -- called by the thread ---------------------------------------------------------------------------------------

    def run_on_loop(self, result: Callable[[], None]) -> None:
        """Called by the thread: run `result` on the loop."""
        self._results.append(result)
        try:
            os.write(self._write_fd, b"\0")
        except (OSError, ValueError):
            self._results.clear()  # closed meanwhile: no result is wanted

    def _run_results(self) -> None:
        try:
            os.read(self._read_fd, 4096)
        except BlockingIOError:
            return
        while self._results:
            self._results.popleft()()

    def on_formed(self, rank: int, size: int, layout: Layout, *, use_agent_store: bool) -> None:
        """A round of torch's handler is complete."""
        if self._policy.has_ended:
            return
        self._awaits_round = False
        self._policy.begin_round()
        self._post(
            RoundFormed(
                round=Round(
                    number=self._policy.number,
                    attempt=self._policy.attempt,
                    restarts_left=self._policy.restarts_left,
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
        """Nodes wait to join: all agents go to the next round."""
        if not self._policy.has_ended and self._policy.broken is None:
            self._thread.send_command("pause")
            self._policy.break_round(BreakKind.MEMBERSHIP, f"{count} node{'s' if count > 1 else ''} waiting to join")

    def on_node_lost(self, rank: int, silence_s: float) -> None:
        """A node that had not succeeded sends no heartbeat: all agents go to the next round."""
        if not self._policy.has_ended and self._policy.broken is None:
            self._thread.send_command("pause")
            self._policy.break_round(BreakKind.MEMBERSHIP, f"node {rank} was lost: no heartbeat for {silence_s:g} s")

    def on_failed_elsewhere(self, found: FailedElsewhere) -> None:
        """The job has failed for good on another node."""
        if self._policy.has_ended:
            return
        self._policy.record_failed_elsewhere(found.reason, found.root)
        if self._awaits_round:
            self._policy.end_job(succeeded=False)

    def post_notice(self, text: str) -> None:
        """Post one line for the console."""
        self._post(Notice(text=text))

    def on_end_acknowledged(self, *, succeeded: bool) -> None:
        """Every node that can know the job's end knows it."""
        self._policy.end_job(succeeded=succeeded)

    def on_handler_failed(self, reason: str, *, usage: bool) -> None:
        """The handler has failed."""
        if not self._policy.has_ended:
            self._policy.has_ended = True
            self._post(RendezvousFailed(reason=reason, usage=usage))

    # -- called by the supervisor -----------------------------------------------------------------------------------

    def join(self, *, is_prepared: bool = True, can_host_store: Callable[[], bool] = bool) -> None:  # noqa: ARG002
        """See `Rendezvous`. torch's handlers decide about the store."""
        self._thread.start()
        self._thread.send_command("next")

    def report_prepared(self) -> None:
        """See `Rendezvous`. torch's handlers form a round at once of the nodes that have joined."""

    def report_started(self, round_number: int) -> None:
        """See `Rendezvous`. torch's handlers need no report."""

    def report_failures(self, round_number: int, failures: tuple[Failure, ...]) -> None:
        """See `Rendezvous`."""
        if self._policy.record_failures(round_number, failures):
            final, root = self._policy.final, self._policy.get_root()
            if final is None:
                self._thread.send_command("pause", root=root)
            else:
                self._thread.send_command("fail", final.describe(), root)

    def report_idle(self, round_number: int, failures: tuple[Failure, ...]) -> None:
        """See `Rendezvous`. The other nodes cannot be asked whether they make progress: an idle node has failed."""
        if failures:
            self.report_failures(round_number, failures)

    def report_succeeded(self, round_number: int, drained_rank: int | None = None) -> None:  # noqa: ARG002
        """See `Rendezvous`. No drain begins here."""
        if round_number == self._policy.number and self._policy.broken is None:
            self._thread.send_command("done")

    def report_stopped(
        self, round_number: int, failures: tuple[Failure, ...] = (), stacks: tuple[Stack, ...] = ()
    ) -> None:
        """See `Rendezvous`."""
        following = self._policy.record_stopped(round_number, failures, stacks)
        if following is Next.ROUND:
            self._awaits_round = True
            self._thread.send_command("next")
        elif following is Next.END:
            self._thread.send_command("await_end")

    def report_leaving(self, reason: str) -> None:
        """See `Rendezvous`. torch's handlers have no such call: the others detect that heartbeats stop."""

    def ask_drain(self, round_number: int, reason: str, limit_s: float) -> None:  # noqa: ARG002
        """See `Rendezvous`. torch's handlers carry no such question."""
        why = f"--rdzv-backend {self._config.backend} cannot agree on a step"
        self._post(DrainWithdrawn(round_number=round_number, drain=0, reason=why))

    def report_drain(self, round_number: int, drain: int, report: DrainReport) -> None:
        """See `Rendezvous`. No drain begins here."""

    def close(self) -> None:
        """See `Rendezvous`."""
        if self._closed:
            return
        self._closed = self._policy.has_ended = True
        self._thread.stop()
        self._loop.unwatch(self._read_fd)
        os.close(self._read_fd)
        os.close(self._write_fd)
