"""Rendezvous of one node with itself: `static` with a MASTER_PORT that was named, and `--standalone`.

Neither needs torch nor a connection, nor the import of leader and member, which costs more than all the rest here.
With more than one node `static` is a `member`'s: whether the job has ended well, no node can know by itself.
"""

from muster.agent.config import RendezvousConfig
from muster.agent.diagnosis.report import Failure, Stack
from muster.agent.rendezvous.backends.restart_policy import LocalRestartPolicy, Next
from muster.agent.rendezvous.interface import RoundFormed
from muster.agent.round import Round
from muster.agent.runtime.loop import Loop
from muster.agent.runtime.ports import PortReservation


class StaticRendezvous:
    """Implements `Rendezvous` for a job of one node, at an address that never changes."""

    def __init__(self, config: RendezvousConfig, *, nproc: int, loop: Loop) -> None:
        self._config = config
        self._nproc = nproc
        self._loop = loop
        self._trial = LocalRestartPolicy(loop, run_id=config.run_id, max_restarts=config.max_restarts)

    def join(self, *, is_prepared: bool = True) -> None:  # noqa: ARG002
        """See `Rendezvous`."""
        self._form()

    def report_prepared(self) -> None:
        """See `Rendezvous`. Nobody else is there to be told."""

    def _find_master(self) -> tuple[str, int]:
        return self._config.master_addr, self._config.master_port

    def _form(self) -> None:
        self._trial.begin_round()
        master_addr, master_port = self._find_master()
        self._loop.post(
            RoundFormed(
                round=Round(
                    number=self._trial.number,
                    attempt=self._trial.attempt,
                    restarts_left=self._trial.restarts_left,
                    group_rank=0,
                    group_world_size=1,
                    rank_offset=0,
                    world_size=self._nproc,
                    role_rank_offset=0,
                    role_world_size=self._nproc,
                    master_addr=master_addr,
                    master_port=master_port,
                )
            )
        )

    def report_started(self, round_number: int) -> None:
        """See `Rendezvous`. Nobody else is there to be told."""

    def report_failures(self, round_number: int, failures: tuple[Failure, ...]) -> None:
        """See `Rendezvous`."""
        self._trial.take_failures(round_number, failures)

    def report_idle(self, round_number: int, failures: tuple[Failure, ...]) -> None:
        """See `Rendezvous`. No other node works: an idle node is a job that hangs."""
        if failures:
            self.report_failures(round_number, failures)

    def report_succeeded(self, round_number: int) -> None:
        """See `Rendezvous`."""
        if round_number == self._trial.number and self._trial.broken is None:
            self._trial.end(succeeded=True)

    def report_stopped(
        self, round_number: int, failures: tuple[Failure, ...] = (), stacks: tuple[Stack, ...] = ()
    ) -> None:
        """See `Rendezvous`."""
        following = self._trial.take_stopped(round_number, failures, stacks)
        if following is Next.ROUND:
            self._form()
        elif following is Next.END:
            self._trial.end(succeeded=False)

    def report_leaving(self, reason: str) -> None:
        """See `Rendezvous`. Nobody else is there to be told."""

    def close(self) -> None:
        """See `Rendezvous`."""
        self._trial.over = True


class StandaloneRendezvous(StaticRendezvous):
    """A fresh MASTER_PORT for every round, held while the round lasts."""

    def __init__(self, config: RendezvousConfig, *, nproc: int, loop: Loop) -> None:
        super().__init__(config, nproc=nproc, loop=loop)
        self._port: PortReservation | None = None

    def _find_master(self) -> tuple[str, int]:
        old, self._port = self._port, PortReservation()
        if old is not None:
            old.close()
        return self._config.local_addr or "127.0.0.1", self._port.port

    def close(self) -> None:
        """See `Rendezvous`."""
        super().close()
        if self._port is not None:
            self._port.close()
