"""The thread that owns one of torch's handlers and watches the rounds that it forms.

Apart from workers and their template, only this module of the agent imports torch; it does so in the thread.

Source: torch/distributed/elastic/agent/server/api.py (`_rendezvous`, `_invoke_run`, `_exit_barrier`; behaviour only).
"""

import json
import os
import queue
import socket
import threading
import time
import traceback
from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from muster._shared.codec import decode
from muster._shared.programs import add_installed
from muster._shared.records import assert_never
from muster._shared.reports import Failure
from muster.agent.config import RendezvousConfig
from muster.agent.rendezvous.interface import Notice, RendezvousFailed
from muster.agent.rendezvous.torch_handlers.messages import (
    AllStandStill,
    Command,
    EndKnown,
    HandlerFormedRound,
    NodesWaiting,
    Order,
    ThreadFinding,
)
from muster.agent.rendezvous.torch_handlers.watch import AllDone, FailedElsewhere, RoundWatch
from muster.agent.runtime.ports import PortReservation

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo

POLL_S = 0.1
"""How often the handler is asked for waiting nodes, as by torch's agent."""
END_WAIT_LIMIT_S = 5.0
"""How long a node that has failed for good waits until the others know, because one of them may be gone already."""
TORCH_NAMES = {"c10d-torch": "c10d", "etcd": "etcd", "etcd-v2": "etcd-v2"}
"""Our names for torch's own backends -> torch's names."""
DEFAULT_TIMEOUT_S = 900
_LINE_CHARACTERS = 500
TORCH_KEEP_ALIVE_INTERVAL_S = 5.0
TORCH_KEEP_ALIVE_ATTEMPTS = 3
"""torch's own defaults for its c10d."""


class Owner(Protocol):
    """Receives what the thread finds."""

    def post_finding(self, finding: ThreadFinding) -> None:
        """Take a finding of the thread, and return soon."""
        ...


class _Stage(Enum):
    """What the thread does between commands."""

    PAUSED = "paused"
    """There is no round, or it is broken. The thread only sends heartbeats."""
    RUNNING = "running"
    """The thread watches the other nodes."""
    STOPPING = "stopping"
    """The thread does nothing: the job has failed for good, the others know it, and this node's workers are being
    stopped."""
    SUCCEEDED = "succeeded"
    """The job has succeeded. The thread waits until the others know it."""
    FAILED = "failed"
    """The job has failed for good and no worker is left here. The thread waits until the others know it."""


class HandlerThread(threading.Thread):
    """Owns torch's handler, which nothing else touches."""

    _handler: "RendezvousHandler"
    """Made in the thread, unless it was given."""

    def __init__(
        self,
        config: RendezvousConfig,
        nproc: int,
        role: str,
        owner: Owner,
        *,
        handler: "RendezvousHandler | None" = None,
    ) -> None:
        """Keep `handler`, which a program made (see `muster.elastic`).

        If it is None, the thread makes what `config` names.
        """
        super().__init__(daemon=True, name="rendezvous")
        self._config = config
        self._nproc = nproc
        self._role = role
        self._owner = owner
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._given = handler
        self._port: PortReservation | None = None
        self._watch: RoundWatch | None = None
        """The watch of the current round; None before the first."""
        self._silence_s = 0.0
        self._stage = _Stage.PAUSED
        self._wait_until_s = 0.0

    def send_command(self, command: Command) -> None:
        """Have the thread carry out a command, after the earlier ones."""
        self._commands.put(command)

    def stop(self) -> None:
        """End the thread, waiting at most 1 s. A handler that blocks ends with the process."""
        self.send_command(Command(order=Order.QUIT))
        if self.is_alive():
            self.join(1.0)
        if self._port is not None:
            self._port.close()

    def run(self) -> None:
        """Carry out commands, and watch the round in between."""
        try:
            add_installed()
            from torch.distributed.elastic.rendezvous.api import (
                RendezvousClosedError,
                RendezvousError,
                RendezvousTimeoutError,
            )
        except ImportError as error:
            why = f"--rdzv-backend {self._config.backend} needs torch in the agent's Python: {error}"
            self._report_failure(why, usage=True)
            return
        try:
            try:
                self._silence_s = find_torch_silence_s(self._config)
                self._handler = self._given or self._create_handler()
            except (ValueError, KeyError) as error:
                self._report_failure(f"--rdzv-backend {self._config.backend}: {error}", usage=True)
                return
            self._run_commands()
        except RendezvousClosedError:
            if (found := self._find_failure()) is not None:
                self._owner.post_finding(found)
                return
            self._report_failure(f"run {self._config.run_id!r} is closed: another node has ended it", usage=False)
        except RendezvousTimeoutError as error:
            self._report_failure(f"the nodes did not join in time: {error}", usage=False)
        except (RendezvousError, OSError, RuntimeError) as error:
            # torch's stores raise network faults (DistNetworkError, ...) as RuntimeErrors.
            self._report_failure(f"torch's {self._config.backend} rendezvous failed: {error}", usage=False)
        except Exception as error:  # noqa: BLE001  # a handler is a plug-in: with this thread alone, the agent would hang
            kind = type(error)
            if kind.__module__ == "builtins":  # never on purpose
                traceback.print_exc()
            self._report_failure(f"rendezvous {self._config.backend} failed: {kind.__name__}: {error}", usage=False)

    def _report_failure(self, reason: str, *, usage: bool) -> None:
        self._owner.post_finding(RendezvousFailed(reason=_build_line(reason), usage=usage))

    def _create_handler(self) -> "RendezvousHandler":
        from torch.distributed.elastic.rendezvous import RendezvousParameters, registry

        config = self._config
        if config.backend in TORCH_NAMES:
            # We do not use the store that torch's agents share, and a new agent among old ones would wait for its
            # address until a failure. Only this process: workers have their own environment.
            os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        name = TORCH_NAMES.get(config.backend, config.backend)
        if name not in TORCH_NAMES.values():
            registry._register_out_of_tree_handlers()  # noqa: SLF001 - torchrun does the same; there is no other way
        conf: dict[str, object] = {"timeout": DEFAULT_TIMEOUT_S, **config.conf}
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

    def _run_commands(self) -> None:
        while True:
            try:
                command = self._commands.get(timeout=None if self._watch is None else POLL_S)
            except queue.Empty:
                self._poll()
                continue
            if command.order is Order.QUIT:
                return
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        match command.order:
            case Order.NEXT:
                self._next_round()
            case Order.PAUSE:
                self._stage = _Stage.PAUSED
            case Order.DONE:
                if self._watch is not None:
                    self._watch.post_done()
            case Order.FAIL:
                self._stage = _Stage.STOPPING
                self._post_failure(command.reason, command.root)
            case Order.AWAIT_END:
                self._stage = _Stage.FAILED
                self._wait_until_s = time.monotonic() + END_WAIT_LIMIT_S
            case Order.STAND_STILL | Order.MOVE:
                if self._watch is not None:
                    self._watch.post_still(is_still=command.order is Order.STAND_STILL)
            case Order.QUIT:
                return
            case _:
                assert_never(command.order)

    def _poll(self) -> None:
        """Send a heartbeat, and check the other nodes."""
        watch = self._watch
        if watch is None or self._stage is _Stage.STOPPING:
            return
        if self._stage in (_Stage.SUCCEEDED, _Stage.FAILED):
            self._poll_end(watch)
            return
        watch.send_heartbeat()
        if self._stage is _Stage.RUNNING:
            self._check_round(watch)

    def _check_round(self, watch: RoundWatch) -> None:
        owner = self._owner
        found = watch.check()
        if isinstance(found, AllDone):
            self._stage = _Stage.SUCCEEDED
            self._shut_down_handler(watch)
        elif isinstance(found, FailedElsewhere):
            self._stage = _Stage.STOPPING
            watch.post_seen()
            owner.post_finding(found)
        elif (count := self._handler.num_nodes_waiting()) > 0:
            self._stage = _Stage.PAUSED
            owner.post_finding(NodesWaiting(count=count))
        elif found is not None:
            self._stage = _Stage.PAUSED
            owner.post_finding(found)
        elif watch.find_all_still():
            owner.post_finding(AllStandStill())

    def _shut_down_handler(self, watch: RoundWatch) -> None:
        """Shut down the handler before writing `seen`, because the store exists only until all have written that."""
        self._wait_until_s = time.monotonic()
        with suppress(Exception):  # anything, once the store's host is gone
            self._handler.shutdown()
            watch.post_seen()
            self._wait_until_s += self._silence_s

    def _poll_end(self, watch: RoundWatch) -> None:
        """End when the others know the end too, because this process may hold the store."""
        is_seen = True
        with suppress(Exception):  # as above
            watch.send_heartbeat()
            is_seen = watch.is_end_seen_by_all()
        if is_seen or time.monotonic() >= self._wait_until_s:
            succeeded, self._stage = self._stage is _Stage.SUCCEEDED, _Stage.STOPPING
            self._owner.post_finding(EndKnown(succeeded=succeeded))

    def _post_failure(self, reason: str, root: Failure | None) -> None:
        """Write the failure to the store for the other nodes. This node's own report does not depend on it."""
        try:
            if self._watch is not None:
                self._watch.post_failed(reason, root)
                self._watch.post_seen()
            self._handler.shutdown()
        except Exception as error:  # noqa: BLE001  # as above
            line = _build_line(f"cannot report the failure to the other nodes: {error}")
            self._owner.post_finding(Notice(text=line))

    def _find_failure(self) -> FailedElsewhere | None:
        """Return what a node wrote when the job failed for good in the last round, if the store can still be read."""
        with suppress(Exception):  # as above
            return None if self._watch is None else self._watch.read_failed()
        return None

    def _next_round(self) -> None:
        found = self._find_failure()
        if found is not None:
            self._owner.post_finding(found)
            return
        info = self._handler.next_rendezvous()
        formed, nonce = self._agree_place(info)
        self._watch = RoundWatch(
            info.store,
            f"muster/{nonce}",
            rank=formed.group_rank,
            size=formed.group_world_size,
            silence_s=self._silence_s,
            now_s=time.monotonic,
        )
        self._stage = _Stage.RUNNING
        self._owner.post_finding(formed)

    def _keeps_bootstrap(self) -> bool:
        """Return True for third-party handlers, which name the workers' store themselves.

        torch's own handlers would reuse one store for all rounds, which breaks restarts (stale keys under one port). So
        they get a fresh port every round, as with our own rendezvous.
        """
        is_of_torch = type(self._handler).__module__.startswith("torch.")
        return self._config.backend not in TORCH_NAMES and not is_of_torch

    def _agree_place(self, info: "RendezvousInfo") -> tuple[HandlerFormedRound, str]:
        """Agree on ranks: every node writes its size; rank 0 computes all ranks and chooses MASTER_ADDR:PORT.

        Returns:
            This node's place, and a name that no other round has.
        """
        rank, size = info.rank, info.world_size
        info.store.set(f"muster/node/{rank}", json.dumps([self._nproc, self._role]))
        if rank == 0:
            nodes = [json.loads(info.store.get(f"muster/node/{each}")) for each in range(size)]
            addr, port = self._find_master(info)
            agreed = {"nodes": _sum_sizes(nodes), "addr": addr, "port": port, "nonce": os.urandom(8).hex()}
            info.store.set("muster/layout", json.dumps(agreed))
        layout = json.loads(info.store.get("muster/layout"))
        sizes = layout["nodes"]
        place = {
            "group_rank": rank,
            "group_world_size": size,
            "rank_offset": sizes["offsets"][rank],
            "world_size": sizes["world_size"],
            "role_rank_offset": sizes["role_offsets"][rank],
            "role_world_size": sizes["role_sizes"][rank],
            "master_addr": layout["addr"],
            "master_port": layout["port"],
            "use_agent_store": self._keeps_bootstrap() and bool(self._handler.use_agent_store),
        }
        return decode(HandlerFormedRound, place), layout["nonce"]

    def _find_master(self, info: "RendezvousInfo") -> tuple[str, int]:
        bootstrap = info.bootstrap_store_info
        if self._keeps_bootstrap() and bootstrap is not None:
            return str(bootstrap.master_addr), int(bootstrap.master_port)
        old, self._port = self._port, PortReservation()
        if old is not None:
            old.close()
        return self._config.local_addr or find_own_address(self._config.endpoint), self._port.port


def _build_line(text: str) -> str:
    """Return one line. Errors of torch's stores end with the frames of their C++ functions."""
    return " ".join(text.split())[:_LINE_CHARACTERS]


def find_torch_silence_s(config: RendezvousConfig) -> float:
    """Return how long a node may send no heartbeat, from the keys of --rdzv-conf that set it for torch's own c10d.

    Raises:
        ValueError: the values are not numbers above 0.
    """
    interval_s = float(config.conf.get("keep_alive_interval", TORCH_KEEP_ALIVE_INTERVAL_S))
    attempts = int(config.conf.get("keep_alive_max_attempt", TORCH_KEEP_ALIVE_ATTEMPTS))
    if not (interval_s > 0 and attempts > 0):
        raise ValueError(f"keep_alive_interval {interval_s:g} and keep_alive_max_attempt {attempts} must be above 0")
    return interval_s * attempts


def _sum_sizes(nodes: list[tuple[int, str]]) -> dict[str, object]:
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
    """Return the address that this machine would use to reach the endpoint, where others can reach it. Send nothing."""
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
