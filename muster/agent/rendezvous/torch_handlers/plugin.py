"""muster's rendezvous inside torchrun: `torchrun --rdzv-backend muster --rdzv-endpoint HOST[:PORT]`.

torch's agent calls a handler from one thread and blocks in `next_rendezvous`, while a member must send and answer
heartbeats at any time: a thread of the handler runs the loop. torchrun sets the workers' store up as with any handler
(`RendezvousStoreInfo`), through a TCPStore that the agent of rank 0 hosts on the round's MASTER_PORT.

Named in `pyproject.toml` under `torchrun.handlers`. torch calls the named function without arguments and registers
what it returns (Source: torch/distributed/elastic/rendezvous/registry.py).
"""

import math
import os
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from muster._shared.contract import DEFAULT_RDZV_PORT
from muster._shared.records import assert_never
from muster.agent.config import RendezvousConfig, read_token
from muster.agent.errors import InternalError
from muster.agent.rendezvous.interface import (
    CheckpointCompleted,
    DrainBegun,
    DrainCommitted,
    DrainWithdrawn,
    GlobalRank0Started,
    JobEnded,
    Notice,
    RendezvousEvent,
    RendezvousFailed,
    RequestAnswered,
    RoundBroken,
    RoundFormed,
    StacksWanted,
)
from muster.agent.rendezvous.member.member import Member
from muster.agent.rendezvous.transport.tcp_network import TcpNetwork
from muster.agent.round import Round
from muster.agent.runtime.loop import Loop
from muster.agent.runtime.ports import PortReservation

STORE_TIMEOUT = timedelta(seconds=60)
_PORT_LIMIT = 65535


def create_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """What torch's registry wants: a function that makes handlers."""
    return build_handler


def build_handler(params: RendezvousParameters) -> RendezvousHandler:
    """A handler for one torchrun agent.

    Raises:
        ValueError: the endpoint or a value of --rdzv-conf cannot be used; it is named.
        UsageError: MUSTER_TOKEN can be guessed.
    """
    host, port = parse_endpoint(params.endpoint)
    config = RendezvousConfig(
        backend="muster",
        run_id=params.run_id,
        host=host,
        port=port,
        node_index=params.get_as_int("rank"),
        min_nodes=params.min_nodes,
        max_nodes=params.max_nodes,
        local_addr=params.local_addr,
        token=read_token(os.environ),
        join_timeout_s=_read_number(params, "join_timeout", 600),
        last_call_timeout_s=_read_number(params, "last_call_timeout", 3, is_zero_allowed=True),
        keep_alive_interval_s=_read_number(params, "keep_alive_interval", 1),
        keep_alive_max_attempt=math.ceil(_read_number(params, "keep_alive_max_attempt", 5)),
    )
    return MusterHandler(config)


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """`HOST`, `HOST:PORT` or `[IPv6]:PORT`; empty means this machine.

    Raises:
        ValueError: the port is not a number up to 65535.
    """
    if not endpoint:
        return "localhost", DEFAULT_RDZV_PORT
    host, colon, port = endpoint.rpartition(":")
    if not colon or endpoint.endswith("]") or (":" in host and not host.startswith("[")):
        return endpoint.strip("[]"), DEFAULT_RDZV_PORT
    if not port.isascii() or not port.isdigit() or int(port) > _PORT_LIMIT:
        raise ValueError(f"--rdzv-endpoint {endpoint!r}: {port!r} is not a port; write HOST:PORT")
    return host.strip("[]"), int(port)


def _read_number(params: RendezvousParameters, key: str, default: float, *, is_zero_allowed: bool = False) -> float:
    """A value of --rdzv-conf: text, or a number where a program made the parameters."""
    value = params.get(key, default)
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or number < 0 or (number == 0 and not is_zero_allowed):
        raise ValueError(f"--rdzv-conf {key}={value}: must be a number {'from 0 on' if is_zero_allowed else 'above 0'}")
    return number


class _LoopThread(threading.Thread):
    """Runs the member's loop, and keeps results for torch's agent, which asks from another thread."""

    def __init__(self, config: RendezvousConfig) -> None:
        super().__init__(daemon=True, name="muster-rendezvous")
        self._loop = Loop()
        self._events: deque[RendezvousEvent] = deque()
        self.results: queue.SimpleQueue[Round | JobEnded | RendezvousFailed | InternalError] = queue.SimpleQueue()
        self.waiting = 0
        """What `num_nodes_waiting` returns: above 0 once the round is broken."""
        self.ended: JobEnded | RendezvousFailed | None = None
        self._quit = False
        self.member = Member(
            config,
            nproc=1,
            role="default",
            loop=self._loop,
            post=self._events.append,
            lease=None,
            node_name=socket.gethostname(),
            network=TcpNetwork(self._loop, config.token),
            reserve=PortReservation,
        )

    def call(self, callback: Callable[[], None]) -> None:
        """Run something on the loop's thread. Does nothing when it has ended."""
        self._loop.call_from_thread(callback)

    def run(self) -> None:
        """Turn the loop until `stop`."""
        try:
            while not self._quit:
                self._loop.turn()
                while self._events:
                    self._handle_event(self._events.popleft())
        finally:
            if not self._quit:  # a bug of ours: torch's agent must not wait for a round that never comes
                self.waiting = 1
                self.results.put(InternalError("muster's rendezvous thread has ended with an error, see above"))
            self._close()

    def _close(self) -> None:
        self.member.close()
        self._loop.close()

    def _handle_event(self, event: RendezvousEvent) -> None:
        match event:
            case RoundFormed():
                self.waiting = 0
                self.results.put(event.round)
            case RoundBroken():
                self.waiting = 1
            case JobEnded() | RendezvousFailed():
                self.ended = event
                self.waiting = 1
                self.results.put(event)
            case Notice():
                import logging

                logging.getLogger(__name__).info(event.text)
            case (
                GlobalRank0Started()
                | DrainBegun()
                | DrainCommitted()
                | DrainWithdrawn()
                | CheckpointCompleted()
                | RequestAnswered()
                | StacksWanted()
            ):
                pass  # torch's agent starts its workers by itself, asks for no drain, and reads no status page
            case _:
                assert_never(event)

    def stop(self) -> None:
        """End the thread, which closes its descriptors. Idempotent."""

        def quit_loop() -> None:
            self._quit = True

        if self.ident is not None:
            self.call(quit_loop)
            self.join(2.0)
        elif not self._quit:  # it was never started
            self._quit = True
            self._close()


class MusterHandler(RendezvousHandler):  # type: ignore[misc] # torch's types are not read
    """torch's `RendezvousHandler` over one of our members."""

    def __init__(self, config: RendezvousConfig) -> None:
        self._config = config
        self._thread = _LoopThread(config)
        self._round: Round | None = None
        self._store: TCPStore | None = None
        self._closed = False

    def get_backend(self) -> str:
        """See torch's class."""
        return "muster"

    @property
    def use_agent_store(self) -> bool:
        """The agent of rank 0 hosts the round's TCPStore, a fresh one every round."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """See torch's class."""
        if self._closed:
            raise RendezvousClosedError("the rendezvous is closed")
        if self._thread.ident is None:
            self._thread.start()
            self._thread.call(self._thread.member.join)
        elif self._round is not None:
            # torch's agent comes back because the round broke or because its own workers failed. Either way they are
            # stopped; it counts its restarts itself, so for us both are a change of membership.
            number = self._round.number
            self._thread.call(lambda: self._thread.member.report_stopped(number))
        result = self._thread.results.get()
        if not isinstance(result, Round):
            self._thread.results.put(result)  # for a later call, too
        if isinstance(result, InternalError):
            raise result
        if isinstance(result, RendezvousFailed):
            raise RendezvousTimeoutError(result.reason)
        if isinstance(result, JobEnded):
            raise RendezvousClosedError("the job has ended")
        self._round = result
        return self._build_info(result)

    def _build_info(self, round_: Round) -> RendezvousInfo:
        is_host = round_.group_rank == 0
        self._store = TCPStore(
            round_.master_addr,
            round_.master_port,
            is_master=is_host,
            timeout=STORE_TIMEOUT,
            wait_for_workers=False,
            multi_tenant=True,
        )
        # Keys of torch's agent and of the workers share one store, as with torch's c10d: the prefix keeps them apart.
        store = PrefixStore(f"muster.agent/{round_.number}", self._store)
        info = RendezvousStoreInfo(round_.master_addr, round_.master_port)
        return RendezvousInfo(store, round_.group_rank, round_.group_world_size, info)

    def is_closed(self) -> bool:
        """See torch's class."""
        return self._closed or self._thread.ended is not None

    def set_closed(self) -> None:
        """See torch's class."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """See torch's class."""
        return self._thread.waiting

    def get_run_id(self) -> str:
        """See torch's class."""
        return self._config.run_id

    def shutdown(self) -> bool:
        """See torch's class."""
        self._closed = True
        self._thread.call(lambda: self._thread.member.report_leaving("its torchrun agent has ended"))
        self._thread.stop()
        self._store = None
        return True
