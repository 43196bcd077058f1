"""Rendezvous of a node with itself: `static`, where all is given beforehand, and `--standalone`, where it is alone.

Neither needs torch nor a connection, nor the import of leader and member, which costs more than all the rest here.

Under `static`, as with torchrun, every agent keeps its own budget and restarts only its own workers; where the ranks
are and where the store listens never changes, so it is only as elastic as the user's program.

Source: torch/distributed/elastic/rendezvous/static_tcp_rendezvous.py and agent/server/api.py (behaviour only).
"""

from dataclasses import replace

from muster.agent.config import RendezvousConfig
from muster.agent.loop import Loop
from muster.agent.rendezvous import BreakKind, JobEnded, Round, RoundBroken, RoundFormed
from muster.agent.rendezvous.addresses import PortReservation
from muster.agent.rendezvous.verdict import (
    Seen,
    build_report,
    choose_root,
    describe_failure,
    find_signature,
)
from muster.agent.report import Failure, Stack


class StaticRendezvous:
    """Implements `Rendezvous` for one node on its own."""

    def __init__(self, config: RendezvousConfig, *, nproc: int, loop: Loop) -> None:
        self._config = config
        self._nproc = nproc
        self._loop = loop
        self._number = 0
        self._attempt = 0
        self._early: str | None = None
        self._final: str | None = None
        self._broken = False
        self._seen: list[Seen] = []
        self._stacks: list[Stack] = []
        self._over = False

    def join(self) -> None:
        """See `Rendezvous`."""
        self._form()

    def _find_index(self) -> int:
        return self._config.node_index or 0

    def _find_master(self) -> tuple[str, int]:
        return self._config.master_addr, self._config.master_port

    def _form(self) -> None:
        self._number += 1
        self._broken = False
        self._seen, self._stacks = [], []
        config, index = self._config, self._find_index()
        master_addr, master_port = self._find_master()
        self._loop.post(
            RoundFormed(
                round=Round(
                    number=self._number,
                    attempt=self._attempt,
                    restarts_left=config.max_restarts - self._attempt,
                    group_rank=index,
                    group_world_size=config.max_nodes,
                    rank_offset=index * self._nproc,
                    world_size=config.max_nodes * self._nproc,
                    role_rank_offset=index * self._nproc,
                    role_world_size=config.max_nodes * self._nproc,
                    master_addr=master_addr,
                    master_port=master_port,
                    node_index=index,
                )
            )
        )

    def started(self, round_number: int) -> None:
        """See `Rendezvous`. Nobody else is there to be told."""

    def failed(self, round_number: int, failures: tuple[Failure, ...]) -> None:
        """See `Rendezvous`."""
        if round_number != self._number or self._over:
            return
        self._note(failures)
        if self._broken:
            return
        self._broken = True
        root = choose_root(self._seen)
        signature = find_signature(root)
        self._final = self._explain_end(root, signature)
        self._early = signature
        kind = BreakKind.FINAL if self._final else BreakKind.FAILURE
        reason = self._final or describe_failure(root)
        self._loop.post(RoundBroken(number=self._number, kind=kind, reason=reason, want_stacks=True))

    def idle(self, round_number: int, failures: tuple[Failure, ...]) -> None:
        """See `Rendezvous`. Nobody can be asked whether other nodes still work: an idle node has failed."""
        if failures:
            self.failed(round_number, failures)

    def _explain_end(self, root: Failure | None, signature: str | None) -> str | None:
        if signature is not None and signature == self._early:
            return f"{describe_failure(root)}; it failed the same way right after the start twice in a row: not retried"
        allowed = self._config.max_restarts
        if self._attempt >= allowed:
            used = f"all {allowed} restarts are used" if allowed else "no restarts are allowed (--max-restarts 0)"
            return f"{describe_failure(root)}; {used}"
        return None

    def _note(self, failures: tuple[Failure, ...]) -> None:
        now_s = self._loop.clock.now_s()
        self._seen += [Seen(when_s=now_s - failure.age_s, failure=failure) for failure in failures]

    def succeeded(self, round_number: int) -> None:
        """See `Rendezvous`. The other nodes are not known, so this one's success is all there is to wait for."""
        if round_number == self._number and not self._broken:
            self._end(succeeded=True)

    def stopped(self, round_number: int, failures: tuple[Failure, ...] = (), stacks: tuple[Stack, ...] = ()) -> None:
        """See `Rendezvous`."""
        if round_number != self._number or not self._broken or self._over:
            return
        self._note(failures)
        self._stacks += stacks
        if self._final is not None:
            self._end(succeeded=False)
        else:
            self._attempt += 1
            self._form()

    def _end(self, *, succeeded: bool) -> None:
        if self._over:
            return
        self._over = True
        report = None
        if not succeeded:
            report = build_report(
                self._config.run_id,
                self._final or "",
                self._attempt,
                self._config.max_restarts,
                self._seen,
                tuple(self._stacks),
            )
        self._loop.post(JobEnded(succeeded=succeeded, report=report, prints_report=not succeeded))

    def leave(self, reason: str) -> None:
        """See `Rendezvous`. Nobody else is there to be told."""

    def close(self) -> None:
        """See `Rendezvous`."""
        self._over = True


class StandaloneRendezvous(StaticRendezvous):
    """One node, and a fresh MASTER_PORT for every round, held while the round lasts."""

    def __init__(self, config: RendezvousConfig, *, nproc: int, loop: Loop) -> None:
        super().__init__(replace(config, max_nodes=1), nproc=nproc, loop=loop)
        self._port: PortReservation | None = None

    def _find_index(self) -> int:
        return 0

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
