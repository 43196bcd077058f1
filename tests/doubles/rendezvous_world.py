"""A whole job in memory: nodes, their agents' loops, guards, workers, and a network that delays, splits and heals.

The rendezvous code that runs here is the real one, from `Member` down; time, TCP, the supervisor and the guard are
replaced. All randomness comes from one seeded generator, so a seed is a history.

The network behaves like TCP: what is sent on a connection arrives in order or not at all, late when packets are lost;
a process that ends closes its connections, a machine that vanishes does not.
"""

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from doubles.samples import make_failure

from muster._shared.records import replace
from muster._shared.reports import Failure
from muster.agent.config import RendezvousConfig
from muster.agent.rendezvous.interface import (
    AllStarted,
    AllSucceeded,
    BreakKind,
    DrainBegun,
    DrainReport,
    DrainReported,
    JobEnded,
    Leaving,
    Prepared,
    RendezvousFailed,
    RoundBroken,
    RoundFormed,
)
from muster.agent.rendezvous.member.member import Member
from muster.agent.rendezvous.protocol.messages import Message
from muster.agent.rendezvous.report_messages import Failed, Idle, Stopped
from muster.agent.rendezvous.transport.links import LinkEnd
from muster.agent.round import Round

EPHEMERAL = 40000
TICK_S = 1e-9
STOP_LIMIT_S = 21.0
"""After this an agent gives up workers that do not end."""
IDLE_S = 3.0
"""Between two reports of workers that hang."""
Instance = tuple[int, int, int]
"""Identifies a round among rounds of the same number: number, MASTER_PORT, size."""


class Violation(AssertionError):
    """An invariant does not hold."""


class SimTimer:
    """A call of one process's loop at a time of its clock."""

    __slots__ = ("callback", "cancelled", "due_s", "loop")

    def __init__(self, loop: "SimLoop", due_s: float, callback: Callable[[], None]) -> None:
        self.loop, self.due_s, self.callback, self.cancelled = loop, due_s, callback, False

    def cancel(self) -> None:
        self.cancelled = True

    def arm(self, now_s: float) -> None:
        left_s = self.due_s - now_s
        wait_s = max(left_s, TICK_S) if left_s > 0.0 else 0.0  # less would not move the clock: sums of floats differ
        loop = self.loop
        loop.world.schedule(wait_s + loop.world.draw_lateness_s(), loop.process, self.fire)

    def fire(self) -> None:
        if self.cancelled:
            return
        now_s = self.loop.clock.now_s()
        if now_s < self.due_s:
            self.arm(now_s)  # the machine slept meanwhile
            return
        self.cancelled = True
        self.callback()


class SimClock:
    def __init__(self, machine: "Machine") -> None:
        self.machine = machine
        self.world = machine.world
        self.boot_offset_s = machine.offset_s * 7

    def now_s(self) -> float:
        machine = self.machine
        until_s = machine.asleep_since_s if machine.is_asleep else self.world.now_s
        return until_s - machine.asleep_total_s + machine.offset_s

    def boottime_s(self) -> float:
        return self.world.now_s + self.boot_offset_s

    def wall_s(self) -> float:
        return self.machine.world.now_s * 1.0


class SimLoop:
    """`Loop` on the world's time. One process's."""

    def __init__(self, process: "Process") -> None:
        self.clock = SimClock(process.machine)
        self.process = process
        self.world = process.world
        self.events: deque[Any] = deque()

    def post(self, event: Any) -> None:
        self.events.append(event)

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.world.schedule(0.0, self.process, callback)

    def call_at(self, due_s: float, callback: Callable[[], None]) -> SimTimer:
        timer = SimTimer(self, due_s, callback)
        timer.arm(self.clock.now_s())
        return timer

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> SimTimer:
        now_s = self.clock.now_s()
        timer = SimTimer(self, now_s + delay_s, callback)
        timer.arm(now_s)
        return timer


class SimLink:
    """One end of a connection."""

    def __init__(self, process: "Process", peer_host: str) -> None:
        self.process = process
        self.world = process.world
        self.owner: Any = None
        self.local_host = process.machine.host
        self.is_proved = True
        self.is_busy = False
        self.peer_host = peer_host
        self.silent_host = ""
        self.other: SimLink | None = None
        self.on_link: Callable[[SimLink, Message], None] | None = None
        self.closed = False
        self.arrives_s = 0.0

    def send(self, message: Message) -> None:
        if not self.closed and self.other is not None:
            self.world.sent += 1
            self.transmit(partial(self.other.receive, message))

    def trust(self) -> None:
        pass

    def transmit(self, deliver: Callable[[], None]) -> None:
        """Call it at the other end: in order, after the delay, not before a partition heals."""
        world = self.world
        at_s = self.arrives_s = max(self.arrives_s, world.now_s + world.draw_delay_s())
        world.schedule(at_s - world.now_s, None, partial(self.arrive, deliver))

    def arrive(self, deliver: Callable[[], None]) -> None:
        world, source, target = self.world, self.process.machine, self.other.process
        if world.is_cut(source, target.machine):
            world.delayed.append((source, target.machine, partial(self.arrive, deliver)))
        else:
            world.schedule(0.0, target, deliver)

    def receive(self, message: Message) -> None:
        if self.closed:
            return
        if self.on_link is not None:
            on_link, self.on_link = self.on_link, None
            on_link(self, message)
        elif self.owner is not None:
            self.owner.on_message(self, message)

    def receive_close(self) -> None:
        if not self.closed:
            self.closed = True
            self.process.links.pop(self, None)
            if self.owner is not None:
                self.owner.on_closed(self, LinkEnd(reason="connection closed"))

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.process.links.pop(self, None)
            if self.other is not None:
                self.transmit(self.other.receive_close)


@dataclass
class SimListener:
    process: "Process"
    port: int
    on_link: Callable[[SimLink, Message], None]

    def close(self) -> None:
        self.process.machine.ports.pop(self.port, None)


@dataclass(eq=False)
class SimDial:
    over: bool = False
    link: SimLink | None = None

    def close(self) -> None:
        self.over = True


class SimNetwork:
    """`Network` of one process."""

    def __init__(self, process: "Process") -> None:
        self.process = process
        self.world = process.machine.world

    def connect(self, host: str, port: int, on_open: Any, on_failed: Any, timeout_s: float) -> SimDial:
        dial = SimDial()
        self._dial(dial, host, port, timeout_s, on_open, lambda why, _refused: on_failed(LinkEnd(reason=why)))
        return dial

    def probe(self, host: str, port: int, on_result: Callable[[bool], None]) -> SimDial:
        dial = SimDial()

        def on_open(link: SimLink) -> None:
            link.close()
            on_result(False)

        self._dial(dial, host, port, 2.0, on_open, lambda _why, refused: on_result(refused))
        return dial

    def _dial(self, dial: SimDial, host: str, port: int, timeout_s: float, on_open: Any, on_failed: Any) -> None:
        world, mine = self.world, self.process.machine
        theirs = world.hosts.get(host)
        # Never lost: an acting leader must be able to reach a returning node 0 in time (see the test's docstring).
        trip_s = world.random.uniform(0.0001, world.slow)

        def fail(why: str, refused: bool) -> None:
            if not dial.over:
                dial.over = True
                on_failed(why, refused)

        def arrive() -> None:
            if theirs is None or not theirs.is_up or world.is_cut(mine, theirs) or world.is_cut(theirs, mine):
                world.schedule(max(0.0, timeout_s - trip_s), self.process, lambda: fail("no answer", False))
                return
            listener = theirs.ports.get(port)
            if listener is None or not listener.process.is_alive:
                world.schedule(trip_s, self.process, lambda: fail("connection refused", True))
                return
            near, far = SimLink(self.process, host), SimLink(listener.process, mine.host)
            near.other, far.other = far, near
            far.on_link = listener.on_link
            listener.process.links[far] = None
            world.schedule(trip_s, self.process, lambda: opened(near))

        def opened(near: SimLink) -> None:
            self.process.links[near] = None
            if dial.over:
                near.close()
                return
            dial.over = True
            on_open(near)

        world.schedule(trip_s, None, arrive)

    def listen(self, host: str | None, port: int, on_link: Any, on_refused: Any = None) -> SimListener:
        machine = self.process.machine
        if port == 0:
            port = next(self.world.ports)
        if port in machine.ports:
            raise OSError(98, "Address already in use")
        listener = SimListener(self.process, port, on_link)
        machine.ports[port] = listener
        return listener

    def reserve(self) -> "SimReservation":
        return SimReservation(next(self.world.ports))

    def check_local(self, host: str, on_result: Callable[[bool], None]) -> None:
        local = self.world.hosts.get(host) is self.process.machine
        self.world.schedule(0.0, self.process, lambda: on_result(local))

    def close(self) -> None:
        pass


@dataclass
class SimReservation:
    port: int

    def close(self) -> None:
        pass


class SimLease:
    """The guard's: kills the workers when it ends, whatever the agent does."""

    def __init__(self, process: "Process") -> None:
        self.process = process
        self.clock = process.loop.clock
        self.until_s: float | None = None
        self.next_check_s = math.inf

    def renew(self, until_boottime_s: float) -> None:
        self.until_s = until_boottime_s
        if until_boottime_s < self.next_check_s:
            self.check_at(until_boottime_s)

    def check_at(self, due_s: float) -> None:
        self.next_check_s = due_s
        wait_s = max(0.0, due_s - self.clock.boottime_s()) + 1e-6
        self.process.world.schedule(wait_s, None, lambda: self.end_wait(due_s))

    def end_wait(self, due_s: float) -> None:
        if due_s == self.next_check_s:
            self.next_check_s = math.inf
            if self.until_s is not None and self.clock.boottime_s() < self.until_s:
                self.check_at(self.until_s)  # it has been renewed
        self.check()

    def release(self) -> None:
        self.until_s = None

    def check(self) -> None:
        process = self.process
        if self.until_s is None or process.machine.is_asleep or not process.is_alive:
            return
        if self.clock.boottime_s() >= self.until_s and process.workers_alive:
            process.kill_workers()
            process.report_kill()


class Process:
    """One agent with its guard and its workers. This class acts as the supervisor."""

    def __init__(self, machine: "Machine", config: RendezvousConfig) -> None:
        self.machine = machine
        self.world = machine.world
        self.config = config
        self.is_alive = True
        self.is_stopped = False
        """SIGSTOP to the agent: guard and workers go on."""
        self.backlog: deque[Callable[[], None]] = deque()
        self.links: dict[SimLink, None] = {}
        self.loop = SimLoop(self)
        self.lease = SimLease(self)
        self.round: Round | None = None
        self.instance: Instance | None = None
        self.workers_alive = False
        self.workers_done = False
        self.numbers: list[int] = []
        self.breaking = False
        self.stuck_until_s = 0.0
        """Until then its workers, though killed, do not end: uninterruptible sleep."""
        self.outcome: JobEnded | RendezvousFailed | None = None
        self.prepared_s = 0.0
        """When its workers could start."""
        self.member_id = f"{machine.host}.{next(self.world.ids)}"
        self.member = Member(
            config,
            nproc=self.world.nproc,
            role="default",
            loop=self.loop,  # type: ignore[arg-type]
            post=self.loop.post,
            lease=self.lease,
            node_name=machine.host,
            network=SimNetwork(self),  # type: ignore[arg-type]
            reserve=lambda: SimReservation(next(self.world.ports)),
            member_id=self.member_id,
        )

    def begin(self, imports_s: float) -> None:
        """Join the job; workers could start so much later."""
        self.world.schedule(0.0, self, lambda: self.member.join(is_prepared=not imports_s))
        self.prepared_s = self.world.now_s + imports_s
        self.world.schedule(imports_s, self, lambda: self.member.send(Prepared()))

    @property
    def can_run(self) -> bool:
        return self.is_alive and not self.is_stopped and not self.machine.is_asleep

    def run(self, callback: Callable[[], None]) -> None:
        if not self.is_alive:
            return
        if self.is_stopped or self.machine.is_asleep:
            self.backlog.append(callback)
            return
        callback()
        events = self.loop.events
        while events and self.is_alive:
            self.handle(events.popleft())

    def wake(self) -> None:
        while self.backlog and self.can_run:
            self.run(self.backlog.popleft())

    def handle(self, event: Any) -> None:
        world = self.world
        if isinstance(event, RoundFormed):
            self.start_workers(event.round)
        elif isinstance(event, DrainBegun):  # for nodes that join
            report = DrainReport(ceiling=0, refusal="no rank asks")
            self.member.send(DrainReported(round_number=event.round_number, drain=event.drain, report=report))
        elif isinstance(event, RoundBroken):
            if event.leaves and event.kind is BreakKind.FAILURE:
                self.member.send(Leaving(reason="it is at fault"))
                world.schedule(world.random.choice(world.stops_s), self, self.leave)
            elif self.round is not None and event.round_number == self.round.number:
                if not self.breaking and world.draw_stuck():
                    self.stuck_until_s = world.now_s + world.stuck_s
                    if world.random.random() < 0.5:
                        world.schedule(STOP_LIMIT_S, self, self.give_up)
                self.breaking = True
                if event.is_hang and self.round.group_world_size > 1:
                    self.report_idle()
                if event.kind is BreakKind.FENCED:
                    delay_s = world.random.uniform(0.0, 0.25)
                else:
                    delay_s = world.random.choice(world.stops_s)
                number = event.round_number
                world.schedule(delay_s, self, lambda: self.finish_stop(number))
        elif isinstance(event, JobEnded | RendezvousFailed):
            self.outcome = event
            self.exit()

    def start_workers(self, round_: Round) -> None:
        if self.numbers and round_.number <= self.numbers[-1]:
            raise Violation(f"{self.machine.host}: round {round_.number} after {self.numbers[-1]}")
        if self.workers_alive:
            raise Violation(f"{self.machine.host}: round {round_.number} formed while its workers of another one live")
        self.numbers.append(round_.number)
        self.round = round_
        self.instance = (round_.number, round_.master_port, round_.group_world_size)
        self.workers_alive, self.workers_done, self.breaking = True, False, False
        self.world.record_start(self)
        self.member.send(AllStarted(round_number=round_.number))

    def finish_stop(self, number: int) -> None:
        if self.round is None or self.round.number != number:
            return
        self.kill_workers()
        if self.world.now_s < self.stuck_until_s:
            self.world.schedule(self.stuck_until_s - self.world.now_s, self, lambda: self.finish_stop(number))
        else:
            self.member.send(Stopped(round_number=number))

    def leave(self) -> None:
        """End as a node that is at fault: another may be started in its place."""
        self.world.left += 1
        self.kill_workers()
        self.exit()
        self.world.on_given_up(self)

    def give_up(self) -> None:
        """Leave the job without the workers that do not end."""
        if self.world.now_s < self.stuck_until_s:
            self.member.send(Leaving(reason="its workers do not end"))
            self.exit()
            self.world.on_given_up(self)

    def kill_workers(self) -> None:
        self.workers_alive = False

    def report_kill(self) -> None:
        """Report workers that the guard has killed: the supervisor does not know why they ended."""
        failure = self.build_failure()
        if failure is not None and not self.workers_done:
            self.run(lambda: self.member.send(Failed(round_number=failure.round, failures=(failure,))))

    def fail_worker(self) -> None:
        """A worker of the running round fails by itself."""
        failure = self.build_failure()
        if failure is not None and self.can_run and self.workers_alive and not self.workers_done:
            if not self.breaking:  # else it was asked to end
                self.world.failures.append((self.world.now_s, self.instance))
            self.run(lambda: self.member.send(Failed(round_number=failure.round, failures=(failure,))))

    def report_idle(self, *, is_urgent: bool = False) -> None:
        """Report that the workers of the running round hang."""
        failure = self.build_failure()
        if failure is not None and self.workers_alive and not self.workers_done:
            idle = replace(failure, exit_code=None, hung=True, reason="why")
            self.member.send(Idle(round_number=failure.round, failures=(idle,), is_urgent=is_urgent))

    def report_idle_again(self, instance: Instance, *, is_urgent: bool) -> None:
        """Report it as long as this round runs here."""
        if self.instance == instance and self.workers_alive and not self.breaking:
            self.report_idle(is_urgent=is_urgent)
            self.world.schedule(IDLE_S, self, lambda: self.report_idle_again(instance, is_urgent=is_urgent))

    def build_failure(self) -> Failure | None:
        if self.round is None:
            return None
        formed = self.round
        return make_failure(
            node=formed.group_rank,
            node_index=self.config.node_index or 0,
            host=self.machine.host,
            global_rank=formed.rank_offset,
            attempt=formed.attempt,
            round=formed.number,
            exit_code=1,
            cause=self.world.cause,
        )

    def finish_work(self, instance: Instance) -> None:
        is_hung = instance in self.world.hung
        if self.workers_alive and not self.workers_done and not is_hung and self.instance == instance:
            self.workers_done = True
            self.run(lambda: self.member.send(AllSucceeded(round_number=instance[0])))

    def exit(self) -> None:
        self.member.close()
        self.kill_workers()
        self._end()

    def crash(self) -> None:
        """SIGKILL of the agent: its connections close, its guard kills the workers in a moment."""
        if not self.is_alive:
            return
        for link in list(self.links):
            link.close()
        self._end()
        self.world.schedule(self.world.random.uniform(0.0, 0.2), None, self.kill_workers)

    def vanish(self) -> None:
        """The machine loses power: nothing is closed."""
        self.kill_workers()
        self._end()

    def _end(self) -> None:
        self.is_alive = False
        for port in [p for p, listener in self.machine.ports.items() if listener.process is self]:
            del self.machine.ports[port]


@dataclass
class Machine:
    world: "World"
    host: str
    offset_s: float
    is_up: bool = True
    is_asleep: bool = False
    asleep_total_s: float = 0.0
    asleep_since_s: float = 0.0
    ports: dict[int, SimListener] = field(default_factory=dict)
    process: Process | None = None
    boots: int = 0

    def sleep(self) -> None:
        self.is_asleep, self.asleep_since_s = True, self.world.now_s

    def wake(self) -> None:
        if self.is_asleep:
            self.is_asleep = False
            self.asleep_total_s += self.world.now_s - self.asleep_since_s
            if self.process is not None:
                self.process.lease.check()  # the guard wakes as well, and is the first to act
                self.process.wake()


@dataclass(frozen=True)
class Trained:
    """A round whose workers all ran at once."""

    when_s: float
    instance: Instance
    attempt: int
    nodes: list[Process] = field(repr=False)

    def is_remembered_by(self, last: "Trained") -> bool:
        """True when a member of this round takes part in the later one."""
        return any(process in last.nodes for process in self.nodes)


class World:
    """All machines, the network between them, and the time."""

    process_class: type[Process] = Process
    nproc = 1
    """Workers on each node."""

    def __init__(
        self, seed: int, *, nodes: int, min_nodes: int, max_restarts: int, work_s: float = 6.0, spares: int = 0
    ) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.sent = 0
        self.work_s = work_s
        self.stops_s: tuple[float, ...] = (0.01, 0.1, 1.5)
        """How long workers take to end when they are asked to."""
        self.lateness_s = 0.0
        """How late timers run at most: messages overtake them."""
        self.cause = ""
        """The class of workers' failures: of a device, a node leaves if there is a spare."""
        self.left = 0
        """How many nodes have left because of that."""
        self.stuck_s = 0.0
        """How long workers may stay that cannot be killed; 0: all can be."""
        self.stuck_left = 3
        """How many times this still happens: with many nodes it would never end."""
        self.on_given_up: Callable[[Process], None] = lambda _process: None
        """Called when an agent has left because its workers did not end."""
        self.imports_s: tuple[float, ...] = ()
        """How long nodes may take until their workers could start."""
        self._heap: list[tuple[float, int, Process | None, Callable[[], None]]] = []
        self._order = itertools.count()
        self.ports = itertools.count(EPHEMERAL)
        self.ids = itertools.count()
        self.cuts: set[tuple[str, str]] = set()
        self.delayed: list[tuple[Machine, Machine, Callable[[], None]]] = []
        self.slow = self.random.choice((0.001, 0.02, 0.1))
        self.loss = self.random.choice((0.0, 0.0, 0.02))
        self.max_restarts = max_restarts
        self.min_nodes, self.max_nodes = min_nodes, nodes
        self.failures: list[tuple[float, Instance | None]] = []
        self.hung: set[Instance | None] = set()
        """Rounds whose workers will not end their work."""
        self.trained: list[Trained] = []
        self.processes: list[Process] = []
        self.machines = [Machine(self, f"n{i}", self.random.uniform(0, 1000)) for i in range(nodes + spares)]
        self.hosts = {machine.host: machine for machine in self.machines}

    def schedule(self, delay_s: float, process: Process | None, callback: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now_s + delay_s, next(self._order), process, callback))

    def at(self, due_s: float, callback: Callable[[], None]) -> None:
        self.schedule(max(0.0, due_s - self.now_s), None, callback)

    def run_until(self, end_s: float, is_over: Callable[[], bool] | None = None) -> None:
        heap = self._heap
        while heap and heap[0][0] <= end_s and not (is_over is not None and is_over()):
            self.now_s, _, process, callback = heapq.heappop(heap)
            if process is None:
                callback()
            else:
                process.run(callback)

    # -- the network ------------------------------------------------------------------------------------------------

    def draw_lateness_s(self) -> float:
        return self.random.uniform(0.0, self.lateness_s) if self.lateness_s else 0.0

    def draw_stuck(self) -> bool:
        if not self.stuck_s or not self.stuck_left or self.random.random() >= 0.2:
            return False
        self.stuck_left -= 1
        return True

    def draw_delay_s(self) -> float:
        delay_s = 0.0001 + (self.slow - 0.0001) * self.random.random()  # `uniform`, whose call costs more
        if self.loss and self.random.random() < self.loss:
            delay_s += self.random.choice((0.2, 0.6, 1.4))
        return delay_s

    def is_cut(self, source: Machine, target: Machine) -> bool:
        return not source.is_up or not target.is_up or (source.host, target.host) in self.cuts

    def cut(self, pairs: set[tuple[str, str]]) -> None:
        self.cuts |= pairs

    def heal(self) -> None:
        self.cuts.clear()
        delayed, self.delayed = self.delayed, []
        for source, target, arrive in delayed:
            if source.is_up and target.is_up:
                self.schedule(0.0, None, arrive)  # in the order sent, and before anything sent now

    # -- nodes ------------------------------------------------------------------------------------------------------

    def boot(self, index: int, **changes: Any) -> Process:
        """Start an agent on machine `index`, which comes up when it was down."""
        machine = self.machines[index]
        machine.is_up = True
        settings: dict[str, Any] = {
            "backend": "muster",
            "run_id": "sim",
            "host": "n0",
            "port": 29400,
            "node_index": index,
            "min_nodes": self.min_nodes,
            "max_nodes": self.max_nodes,
            "max_restarts": self.max_restarts,
            "join_timeout_s": 120.0,
            "stop_limit_s": STOP_LIMIT_S,
            "incarnation": machine.boots,
        }
        process = self.process_class(machine, RendezvousConfig(**{**settings, **changes}))
        machine.boots += 1
        machine.process = process
        self.processes.append(process)
        process.begin(self.random.choice((0.0, *self.imports_s)) if self.imports_s else 0.0)
        return process

    def vanish(self, machine: Machine) -> None:
        machine.is_up = False
        if machine.process is not None:
            machine.process.vanish()

    def hang(self, process: Process, *, is_urgent: bool) -> None:
        """A worker of its round hangs, and all others of it wait. With `is_urgent` only this node says so."""
        instance = process.instance
        if instance is None or not process.workers_alive or process.workers_done or process.breaking:
            return
        self.hung.add(instance)
        self.failures.append((self.now_s, instance))
        for each in [process] if is_urgent else self.alive():
            delay_s = IDLE_S + self.draw_lateness_s()
            self.schedule(delay_s, each, lambda each=each: each.report_idle_again(instance, is_urgent=is_urgent))  # type: ignore[misc]

    def alive(self) -> list[Process]:
        return [process for process in self.processes if process.is_alive]

    # -- invariants -------------------------------------------------------------------------------------------------

    def record_start(self, process: Process) -> None:
        """Workers start: no worker of another round may live and run anywhere."""
        for other in self.processes:
            if other.workers_alive and other.instance != process.instance and not other.machine.is_asleep:
                raise Violation(
                    f"{self.now_s:.3f}: {process.machine.host} starts {process.instance} while "
                    f"{other.machine.host} still runs {other.instance}"
                )
        nodes = [p for p in self.processes if p.workers_alive and p.instance == process.instance]
        if len(nodes) == process.instance[2]:
            self._record_complete(process.instance, process.round.attempt, nodes)

    def _record_complete(self, instance: Instance, attempt: int, nodes: list[Process]) -> None:
        ranks = sorted(p.round.group_rank for p in nodes if p.round)
        if ranks != list(range(len(nodes))):
            raise Violation(f"ranks {ranks} of {instance}")
        by_rank = sorted(nodes, key=lambda p: p.round.group_rank if p.round else 0)
        indices = [p.config.node_index for p in by_rank]
        if None not in indices and indices != sorted(indices):  # type: ignore[type-var]
            raise Violation(f"rank order {indices} of {instance} is not the order of node indices")
        for last in self.trained:
            is_known = any(process in last.nodes for process in nodes)
            if is_known and attempt < last.attempt:
                raise Violation(f"attempt {attempt} in {instance} after {last}: an attempt was forgotten")
        # Nodes that all started just before the job's end cannot know of it: see the test's docstring.
        is_informed = any(len(process.numbers) > 1 for process in nodes)
        if is_informed and any(isinstance(p.outcome, JobEnded) and p.outcome.succeeded for p in self.processes):
            raise Violation(f"{self.now_s:.3f}: {instance} trains after the job's end")
        if attempt > len({i for _, i in self.failures}):
            raise Violation(f"attempt {attempt} in {instance} after only {len(self.failures)} failures")
        self.trained.append(Trained(self.now_s, instance, attempt, nodes))
        for process in nodes:
            skew_s = self.random.uniform(0.0, 2.0)
            self.schedule(self.work_s + skew_s, None, lambda p=process: p.finish_work(instance))  # type: ignore[misc]
