"""muster's rendezvous inside torchrun: `torchrun --rdzv-backend muster --rdzv-endpoint HOST[:PORT]`.

torch's agent calls a handler from one thread and blocks in `next_rendezvous`, but a member must send and answer
heartbeats at any time. So a `LoopThread` runs the member. torchrun sets up the workers' store as with any handler
(`RendezvousStoreInfo`), through a TCPStore that the agent of rank 0 hosts on the round's MASTER_PORT. As with torch's
own backends, that store asks for no token: any process that reaches it can read and change it.

`pyproject.toml` names it under `torchrun.handlers`. torch calls the named function without arguments and registers what
it returns (Source: torch/distributed/elastic/rendezvous/registry.py).
"""

import math
import os
import queue
import socket
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
from muster.agent.config import RendezvousConfig, read_token
from muster.agent.errors import InternalError
from muster.agent.rendezvous.interface import (
    JobEnded,
    Leaving,
    Notice,
    RendezvousEvent,
    RendezvousFailed,
    RoundBroken,
    RoundFormed,
)
from muster.agent.rendezvous.member.member import Member
from muster.agent.rendezvous.report_messages import Stopped
from muster.agent.rendezvous.selection import add_shared_token
from muster.agent.rendezvous.transport.tcp_network import TcpNetwork
from muster.agent.round import Round
from muster.agent.runtime.limits import KEEP_ALIVE_ATTEMPTS, KEEP_ALIVE_INTERVAL_S, LAST_CALL_S
from muster.agent.runtime.loop import Loop, LoopThread
from muster.agent.runtime.ports import PortReservation

STORE_TIMEOUT = timedelta(seconds=60)
_STOP_S = 2.0
"""How long the thread may take to end."""
_PORT_LIMIT = 65535


def create_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return what torch's registry requires: a function that makes handlers."""
    return build_handler


def build_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Return a handler for one torchrun agent.

    Raises:
        ValueError: the endpoint or a value of --rdzv-conf, which the message names, cannot be used.
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
        join_timeout_s=_read_number(params, "join_timeout", RendezvousConfig.join_timeout_s),
        last_call_timeout_s=_read_number(params, "last_call_timeout", LAST_CALL_S, is_zero_allowed=True),
        keep_alive_interval_s=_read_number(params, "keep_alive_interval", KEEP_ALIVE_INTERVAL_S),
        keep_alive_max_attempt=math.ceil(_read_number(params, "keep_alive_max_attempt", KEEP_ALIVE_ATTEMPTS)),
    )
    return MusterHandler(config)


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Parse `HOST`, `HOST:PORT` or `[IPv6]:PORT`; empty means this machine.

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
    """Return a value of --rdzv-conf, which is text, or a number if a program made the parameters."""
    value = params.get(key, default)
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or number < 0 or (number == 0 and not is_zero_allowed):
        raise ValueError(f"--rdzv-conf {key}={value}: must be a number {'from 0 on' if is_zero_allowed else 'above 0'}")
    return number


class MusterHandler(RendezvousHandler):  # type: ignore[misc] # torch's types are not read
    """torch's `RendezvousHandler` over one of our members."""

    _member: Member
    """Made with the thread; afterwards only the thread uses it."""

    def __init__(self, config: RendezvousConfig) -> None:
        self._config = add_shared_token(config, self._handle_event)
        self._thread: LoopThread | None = None
        """Runs the member's loop from the first round that torch's agent asks for."""
        self._results: queue.SimpleQueue[Round | JobEnded | RendezvousFailed | InternalError] = queue.SimpleQueue()
        self._waiting = 0
        """The value that `num_nodes_waiting` returns: above 0 once the round is broken."""
        self._ended: JobEnded | RendezvousFailed | None = None
        self._round: Round | None = None
        self._store: TCPStore | None = None
        self._closed = False

    # -- called by the loop's thread --------------------------------------------------------------------------------

    def _handle_event(self, event: RendezvousEvent) -> None:
        match event:
            case RoundFormed():
                self._waiting = 0
                self._results.put(event.round)
            case RoundBroken():
                self._waiting = 1
            case JobEnded() | RendezvousFailed():
                self._ended = event
                self._waiting = 1
                self._results.put(event)
            case Notice():
                import logging

                logging.getLogger(__name__).info(event.text)
            case _:
                pass  # torch's agent needs none of these

    def _report_bug(self) -> None:
        """Report a bug of ours that ended the thread: torch's agent must not wait for a round that never comes."""
        self._waiting = 1
        self._results.put(InternalError("muster's rendezvous thread has ended with an error, see above"))
        self._member.close()

    # -- called by torch's agent ------------------------------------------------------------------------------------

    def get_backend(self) -> str:
        """See torch's class."""
        return "muster"

    @property
    def use_agent_store(self) -> bool:
        """Whether the agent of rank 0 hosts the round's TCPStore, a fresh one in every round."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """See torch's class."""
        if self._closed:
            raise RendezvousClosedError("the rendezvous is closed")
        if self._thread is None:
            self._thread = self._start_member()
            self._thread.submit(self._member.join)
        elif self._round is not None:
            # torch's agent returns because the round broke or its workers failed. Either way they are stopped. It
            # counts restarts itself, so both are membership changes for us.
            number = self._round.number
            self._thread.submit(lambda: self._member.send(Stopped(round_number=number)))
        result = self._results.get()
        if not isinstance(result, Round):
            self._results.put(result)  # for later calls
        if isinstance(result, InternalError):
            raise result
        if isinstance(result, RendezvousFailed):
            raise RendezvousTimeoutError(result.reason)
        if isinstance(result, JobEnded):
            raise RendezvousClosedError("the job has ended")
        self._round = result
        return self._build_info(result)

    def _start_member(self) -> LoopThread:
        thread = LoopThread(None, "muster-rendezvous", on_failure=self._report_bug)
        try:
            self._member = self._build_member(thread.loop)
        except BaseException:
            thread.close(_STOP_S)
            raise
        return thread

    def _build_member(self, loop: Loop) -> Member:
        return Member(
            self._config,
            nproc=1,
            role="default",
            loop=loop,
            post=self._handle_event,
            lease=None,
            node_name=socket.gethostname(),
            network=TcpNetwork(loop, self._config.token),
            reserve=PortReservation,
        )

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
        # torch's agent and the workers share a store, as with c10d: the prefix separates their keys.
        store = PrefixStore(f"muster.agent/{round_.number}", self._store)
        info = RendezvousStoreInfo(round_.master_addr, round_.master_port)
        return RendezvousInfo(store, round_.group_rank, round_.group_world_size, info)

    def is_closed(self) -> bool:
        """See torch's class."""
        return self._closed or self._ended is not None

    def set_closed(self) -> None:
        """See torch's class."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """See torch's class."""
        return self._waiting

    def get_run_id(self) -> str:
        """See torch's class."""
        return self._config.run_id

    def shutdown(self) -> bool:
        """See torch's class."""
        self._closed = True
        self._store = None
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.submit(lambda: self._member.send(Leaving(reason="its torchrun agent has ended")))
            thread.submit(self._member.close)
            thread.close(_STOP_S)
        return True
