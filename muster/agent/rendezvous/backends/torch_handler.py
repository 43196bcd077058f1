"""Any rendezvous of torch's registry behind our protocol: `c10d-torch`, `etcd`, `etcd-v2`, third-party ones.

torch's handlers block, so one thread owns the handler, does what the loop asks of it and hands results back through
a pipe. What the handler cannot do, we do not pretend: the budget is each agent's own, a vanished node is noticed only
when torch notices it, and a failure is reported by the node it happened on.

The only module of the agent, apart from workers and their template, that imports torch; it does so in the thread.

Source: torch/distributed/elastic/agent/server/api.py (`_rendezvous`, `_invoke_run`, `_exit_barrier`; behaviour only).
"""

import json
import os
import queue
import socket
import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from muster.agent.config import RendezvousConfig
from muster.agent.diagnosis.report import Failure, Stack
from muster.agent.rendezvous.backends.restart_policy import LocalRestartPolicy
from muster.agent.rendezvous.interface import BreakKind, RendezvousFailed, RoundFormed
from muster.agent.round import Round
from muster.agent.runtime.loop import Loop
from muster.agent.runtime.ports import PortReservation

POLL_S = 0.1
"""torch's agent asks its handler for waiting nodes this often."""
EXIT_BARRIER_S = 300.0
"""torch's agent waits this long for the others when its own workers are done."""
TORCHS_OWN = {"c10d-torch": "c10d", "etcd": "etcd", "etcd-v2": "etcd-v2"}
"""Our names for torch's own backends -> torch's names."""
DEFAULT_TIMEOUT_S = 900


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """Where everybody is; written by rank 0's agent, read by all."""

    offsets: list[int]
    role_offsets: list[int]
    role_sizes: list[int]
    world_size: int
    master_addr: str
    master_port: int


class TorchRendezvous:
    """Implements `Rendezvous` with a handler of torch's."""

    def __init__(self, config: RendezvousConfig, *, nproc: int, role: str, loop: Loop) -> None:
        self._config = config
        self._loop = loop
        self._trial = LocalRestartPolicy(loop, run_id=config.run_id, max_restarts=config.max_restarts)
        self._closed = False
        self._results: deque[Callable[[], None]] = deque()
        self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        loop.watch_readable(self._read_fd, self._take_results)
        self._worker = _HandlerThread(config, nproc, role, self)

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

    def on_formed(self, rank: int, size: int, layout: _Layout, *, use_agent_store: bool) -> None:
        """A round of torch's handler is complete."""
        if self._trial.over:
            return
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

    def on_all_done(self) -> None:
        """Every node's workers have succeeded."""
        if self._trial.broken is None and not self._trial.over:
            self._worker.ask("shutdown")
            self._trial.end(succeeded=True)

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

    def prepared(self) -> None:
        """See `Rendezvous`. torch's handlers make a round at once of whoever comes."""

    def started(self, round_number: int) -> None:
        """See `Rendezvous`. torch's handlers are not told."""

    def failed(self, round_number: int, failures: tuple[Failure, ...]) -> None:
        """See `Rendezvous`."""
        if self._trial.take_failures(round_number, failures):
            self._worker.ask("pause")

    def idle(self, round_number: int, failures: tuple[Failure, ...]) -> None:
        """See `Rendezvous`. Nobody can be asked whether other nodes still work: an idle node has failed."""
        if failures:
            self.failed(round_number, failures)

    def succeeded(self, round_number: int) -> None:
        """See `Rendezvous`."""
        if round_number == self._trial.number and self._trial.broken is None:
            self._worker.ask("done")

    def stopped(self, round_number: int, failures: tuple[Failure, ...] = (), stacks: tuple[Stack, ...] = ()) -> None:
        """See `Rendezvous`."""
        was_over = self._trial.over
        if self._trial.take_stopped(round_number, failures, stacks):
            self._worker.ask("next")
        elif self._trial.over and not was_over:
            self._worker.ask("shutdown")

    def leave(self, reason: str) -> None:
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


class _HandlerThread(threading.Thread):
    """Owns torch's handler: nothing else touches it."""

    def __init__(self, config: RendezvousConfig, nproc: int, role: str, owner: TorchRendezvous) -> None:
        super().__init__(daemon=True, name="rendezvous")
        self._config = config
        self._nproc = nproc
        self._role = role
        self._owner = owner
        self._orders: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._handler: Any = None
        self._store: Any = None
        self._rank = self._size = 0
        self._port: PortReservation | None = None

    def ask(self, order: str) -> None:
        """`next`, `pause`, `done` or `shutdown`; carried out one after the other."""
        self._orders.put(order)

    def finish(self) -> None:
        """Let it end; at most a second is spent on waiting. A handler that blocks ends with the process."""
        self._orders.put("quit")
        if self.is_alive():
            self.join(1.0)
        if self._port is not None:
            self._port.close()

    def run(self) -> None:
        """Carry out orders; between them, watch for nodes that wait."""
        try:
            from torch.distributed.elastic.rendezvous.api import (
                RendezvousClosedError,
                RendezvousError,
                RendezvousTimeoutError,
            )
        except ImportError as error:
            why = f"--rdzv-backend {self._config.backend} needs torch in the agent's Python: {error}"
            self._report_loss(why, usage=True)
            return
        try:
            try:
                self._handler = self._create_handler()
            except (ValueError, KeyError) as error:
                self._report_loss(f"--rdzv-backend {self._config.backend}: {error}", usage=True)
                return
            self._serve()
        except RendezvousClosedError:
            self._report_loss(f"run {self._config.run_id!r} is closed: another node has ended it", usage=False)
        except RendezvousTimeoutError as error:
            self._report_loss(f"the nodes did not come together in time: {error}", usage=False)
        except (RendezvousError, OSError, RuntimeError) as error:
            # What torch's stores raise for faults of the network (DistNetworkError, ...) are RuntimeErrors.
            self._report_loss(f"torch's {self._config.backend} rendezvous failed: {error}", usage=False)
        except Exception as error:  # noqa: BLE001  # a handler is a plug-in: with this thread alone, the agent would hang
            kind = type(error)
            if kind.__module__ == "builtins":  # nobody raises these on purpose
                traceback.print_exc()
            self._report_loss(f"rendezvous {self._config.backend} failed: {kind.__name__}: {error}", usage=False)

    def _report_loss(self, reason: str, *, usage: bool) -> None:
        line = " ".join(reason.split())[:500]
        self._owner.hand_over(lambda: self._owner.on_lost(line, usage=usage))

    def _create_handler(self) -> Any:
        from torch.distributed.elastic.rendezvous import RendezvousParameters, registry

        config = self._config
        name = TORCHS_OWN.get(config.backend, config.backend)
        if name not in TORCHS_OWN.values():
            registry._register_out_of_tree_handlers()  # noqa: SLF001 - torchrun does the same; there is no other way
        conf: dict[str, Any] = {"timeout": DEFAULT_TIMEOUT_S, **config.conf}
        parameters = RendezvousParameters(
            backend=name,
            endpoint=config.endpoint,
            run_id=config.run_id,
            min_nodes=config.min_nodes,
            max_nodes=config.max_nodes,
            local_addr=config.local_addr,
            **conf,
        )
        return registry.get_rendezvous_handler(parameters)

    def _serve(self) -> None:
        watching = done = False
        done_for_s = 0.0
        while True:
            try:
                order = self._orders.get(timeout=POLL_S if watching else None)
            except queue.Empty:
                done_for_s += POLL_S if done else 0.0
                if done and (self._is_everybody_done() or done_for_s >= EXIT_BARRIER_S):
                    watching = done = False
                    self._owner.hand_over(self._owner.on_all_done)
                elif (count := self._handler.num_nodes_waiting()) > 0:
                    watching = done = False
                    self._owner.hand_over(lambda c=count: self._owner.on_waiting(c))  # type: ignore[misc]
                continue
            if order == "next":
                self._next_round()
                watching, done, done_for_s = True, False, 0.0
            elif order == "pause":
                watching = done = False
            elif order == "done":
                self._store.add("muster/done", 1)
                done = True
            elif order == "shutdown":
                watching = False
                self._handler.shutdown()
            elif order == "quit":
                return

    def _is_everybody_done(self) -> bool:
        return int(self._store.add("muster/done", 0)) >= self._size

    def _next_round(self) -> None:
        info = self._handler.next_rendezvous()
        self._store, self._rank, self._size = info.store, info.rank, info.world_size
        layout = self._agree_layout(info)
        shared = self._keeps_bootstrap() and bool(self._handler.use_agent_store)
        rank, size = self._rank, self._size
        self._owner.hand_over(lambda: self._owner.on_formed(rank, size, layout, use_agent_store=shared))

    def _keeps_bootstrap(self) -> bool:
        """Third-party handlers say where the workers' store is.

        torch's own would reuse one store for all rounds, which breaks restarts (stale keys under one port): those get a
        fresh port every round, as with our own rendezvous.
        """
        return self._config.backend not in TORCHS_OWN

    def _agree_layout(self, info: Any) -> _Layout:
        """Every node writes its size, rank 0 adds up and says where the workers meet."""
        self._store.set(f"muster/node/{self._rank}", json.dumps([self._nproc, self._role]))
        if self._rank == 0:
            nodes = [json.loads(self._store.get(f"muster/node/{rank}")) for rank in range(self._size)]
            addr, port = self._find_master(info)
            self._store.set("muster/layout", json.dumps({"nodes": _add_up(nodes), "addr": addr, "port": port}))
        layout = json.loads(self._store.get("muster/layout"))
        return _Layout(**layout["nodes"], master_addr=layout["addr"], master_port=layout["port"])

    def _find_master(self, info: Any) -> tuple[str, int]:
        bootstrap = info.bootstrap_store_info
        if self._keeps_bootstrap() and bootstrap is not None:
            return str(bootstrap.master_addr), int(bootstrap.master_port)
        old, self._port = self._port, PortReservation()
        if old is not None:
            old.close()
        return self._config.local_addr or find_own_address(self._config.endpoint), self._port.port


def _add_up(nodes: list[tuple[int, str]]) -> dict[str, Any]:
    offsets, role_offsets, total = [], [], 0
    role_sizes: dict[str, int] = {}
    for nproc, role in nodes:
        offsets.append(total)
        role_offsets.append(role_sizes.get(role, 0))
        total += nproc
        role_sizes[role] = role_sizes.get(role, 0) + nproc
    sizes = [role_sizes[role] for _, role in nodes]
    return {"offsets": offsets, "role_offsets": role_offsets, "role_sizes": sizes, "world_size": total}


def find_own_address(endpoint: str) -> str:
    """The address this machine would use to reach the endpoint: what others can reach it under. Sends nothing."""
    host, _, port = endpoint.rpartition(":")
    host = (host or port or "localhost").strip("[]")
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return "127.0.0.1"
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(address)
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return "127.0.0.1"
