"""How rendezvous grows with the number of members: ours over real sockets, and torch's c10d handler.

    python benchmarks/rendezvous_scale.py [--count N] --members 128 1024 4096 --torch-members 16 32 64 128

One leader process; the members share a few processes, each with its own connection. Times are from the moment the last
member process starts its members' joins until every member has its round ("form"), and from one worker's failure until
every member has the next one ("restart", no workers to stop). Message counts are the leader's, heartbeats left out.
"cpu" is the leader's own time for one member and one of these rounds: it grows with the job, while the members use
most of a busy machine.

Every member reserves its MASTER_PORT on its own loopback address, as it would on its own node: with some 7,000
wildcard ports reserved on one machine, Linux needs 2 ms to find the next free one, most of the measured time.
"""

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import time
from functools import partial

from _launching import clean_env
from _sampling import SampleFailed, Samples, build_parser, sample_in_turn, show

MEMBER_PROCESSES = 2
FIGURES = {
    "form_s": ("form a round", "s"),
    "restarts_s": ("restart", "s"),
    "form_cpu_us": ("leader's CPU for each, form", "us"),
    "restart_cpu_us": ("leader's CPU for each, restart", "us"),
    "kib_per_member": ("leader's memory for each", "KiB"),
    "messages_form": ("messages for each, form", "messages"),
    "messages_restart": ("messages for each, restart", "messages"),
}


def build_config(index, members, port):
    from muster.agent.config import RendezvousConfig

    return RendezvousConfig(
        backend="muster",
        run_id="scale",
        host="127.0.0.1",
        port=port,
        node_index=index,
        min_nodes=members,
        max_nodes=members,
        max_restarts=100,
        join_timeout_s=300.0,
        keep_alive_interval_s=5.0,
        keep_alive_max_attempt=6,
    )


def create_member(index, config, loop, post):
    from muster.agent.rendezvous.member.member import Member
    from muster.agent.rendezvous.transport.tcp_network import TcpNetwork

    return Member(
        config,
        nproc=1,
        role="default",
        loop=loop,
        post=post,
        lease=None,
        node_name="h",
        network=TcpNetwork(loop, None),
        reserve=lambda: Reservation(f"127.{1 + index // 2**16}.{index // 256 % 256}.{index % 256}"),
    )


class Reservation:
    """`runtime.ports.PortReservation` on one address."""

    def __init__(self, host):
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((host, 0))
        self.port = self._socket.getsockname()[1]

    def close(self):
        self._socket.close()


class Host:
    """Some members on one loop."""

    def __init__(self, indices, members, port):
        from muster.agent.runtime.loop import Loop

        self.loops = []
        self.members = []
        self.loop = Loop()
        self.formed = 0
        for index in indices:
            post = partial(self.post, len(self.members))
            self.members.append(create_member(index, build_config(index, members, port), self.loop, post))

    def join(self):
        for member in self.members:
            member.join()

    def post(self, place, event):
        self.loop.call_soon(lambda: self.handle(place, event))

    def handle(self, place, event):
        kind = type(event).__name__
        if kind == "RoundFormed":
            self.formed += 1
            self.number = event.round.number
        elif kind == "RoundBroken":
            from muster.agent.rendezvous.report_messages import Stopped

            self.members[place].send(Stopped(round_number=event.round_number))
        elif kind == "RendezvousFailed":
            raise SystemExit(event.reason)

    def wait_formed(self, rounds):
        while self.formed < rounds * len(self.members):
            self.loop.turn(0.1)
        return time.monotonic()

    def close(self):
        for member in self.members:
            member.close()


def run_members(first, last, members, port, rounds):
    host = Host(range(first, last), members, port)
    print("ready", flush=True)
    sys.stdin.readline()
    host.join()
    for number in range(1, rounds + 1):
        print(json.dumps(host.wait_formed(number)), flush=True)
    os.set_blocking(0, False)
    while True:
        host.loop.turn(0.05)
        if os.read(0, 100) if _readable() else False:
            break
    host.close()


def _readable():
    import select

    return bool(select.select([0], [], [], 0)[0])


def rss_kib():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


def count_messages(counter):
    """Count what the leader sends and receives over sockets."""
    from muster.agent.rendezvous.transport.tcp_link import TcpLink

    send, deliver = TcpLink.send, TcpLink._deliver  # noqa: SLF001 what no owner would count: all that arrives

    def counting_send(self, message):
        counter["sent"] += type(message).__name__ != "HeartbeatReply"
        send(self, message)

    def counting_deliver(self, message):
        counter["received"] += message.get("type") != "Heartbeat"
        deliver(self, message)

    TcpLink.send, TcpLink._deliver = counting_send, counting_deliver  # noqa: SLF001


def measure(members, port, rounds):
    counter = {"sent": 0, "received": 0}
    count_messages(counter)
    host = Host([0], members, port)
    host.loop.turn(0.01)
    before_kib = rss_kib()
    step = -(-(members - 1) // MEMBER_PROCESSES)
    spans = [(a, min(a + step, members)) for a in range(1, members, step)]
    children = [
        subprocess.Popen(
            [sys.executable, __file__, "--span", f"{a}:{b}:{members}:{port}:{rounds}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for a, b in spans
    ]
    begin = release_members(children)
    host.join()
    times, cpu = [], [time.process_time()]
    for number in range(1, rounds + 1):
        mine = host.wait_formed(number)
        os.set_blocking(children[0].stdout.fileno(), True)
        last = mine
        for child in children:
            last = max(last, json.loads(read_line(child, host)))
        times.append(last - begin)
        cpu.append(time.process_time())
        if number == 1:
            first_counts = dict(counter)
            after_kib = rss_kib()
        if number < rounds:
            from muster.agent.rendezvous.report_messages import Failed

            begin = time.monotonic()
            host.members[0].send(Failed(round_number=host.number, failures=(build_failure(number),)))
    total = counter["sent"] + counter["received"]
    for child in children:
        child.stdin.write("end\n")
        child.stdin.close()
        child.wait()
    host.close()
    first = first_counts["sent"] + first_counts["received"]
    return {
        "form_s": [times[0]],
        "restarts_s": times[1:],
        "form_cpu_us": [(cpu[1] - cpu[0]) / members * 1e6],
        "restart_cpu_us": [(cpu[-1] - cpu[1]) / members / max(1, rounds - 1) * 1e6],
        "kib_per_member": [(after_kib - before_kib) / members],
        "messages_form": [first / members],
        "messages_restart": [(total - first) / members / max(1, rounds - 1)],
    }


def release_members(children):
    """Wait until all children are ready, then start their joins; the time just before that."""
    for child in children:
        assert child.stdout.readline() == "ready\n"
    begin = time.monotonic()
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    return begin


def read_line(child, host):
    """Read a line of a child, while the leader's loop keeps running."""
    import select

    while not select.select([child.stdout], [], [], 0)[0]:
        host.loop.turn(0.005)
    return child.stdout.readline()


def build_failure(attempt):
    from muster._shared.reports import Failure

    return Failure(
        node=0,
        node_index=0,
        host="h",
        local_rank=0,
        global_rank=0,
        attempt=attempt,
        round=attempt,
        pid=1,
        time_s=0.0,
        exit_code=1,
    )


TORCH_MEMBER = """
import sys, time, threading
from torch.distributed.elastic.rendezvous import RendezvousParameters, registry
first, last, members, port = map(int, sys.argv[1:5])
done = []
def work(index):
    handler = registry.get_rendezvous_handler(RendezvousParameters(
        "c10d", f"127.0.0.1:{port}", "scale", members, members,
        is_host=str(index == 0).lower(), join_timeout="300", read_timeout="300", timeout=300))
    handler.next_rendezvous()
    done.append(time.monotonic())
    keep.append(handler)
keep = []
print("ready", flush=True); sys.stdin.readline()
threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(first, last)]
[t.start() for t in threads]; [t.join() for t in threads]
print(max(done), flush=True); sys.stdin.readline()
import os; os._exit(0)
"""


def measure_torch(members, port, limit_s):
    step = -(-members // MEMBER_PROCESSES)
    spans = [(a, min(a + step, members)) for a in range(0, members, step)]
    children = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", TORCH_MEMBER, str(a), str(b), str(members), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for a, b in spans
    ]
    import select

    try:
        begin = release_members(children)
        last = begin
        for child in children:
            if not select.select([child.stdout], [], [], max(0.0, begin + limit_s - time.monotonic()))[0]:
                raise SampleFailed
            last = max(last, float(child.stdout.readline() or "inf"))
        return last - begin
    finally:
        for child in children:
            child.kill()
            child.wait()


def main():
    parser = build_parser(__doc__)
    parser.add_argument("--members", type=int, nargs="*", default=[16, 128, 1024, 4096])
    parser.add_argument("--torch-members", type=int, nargs="*", default=[16, 32, 64, 128])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--span", help=argparse.SUPPRESS)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    if args.span:
        run_members(*map(int, args.span.split(":")))
        return
    if args.one:
        print(json.dumps(measure(args.one, 20000 + os.getpid() % 10000, args.rounds)))
        return
    for members in args.members:
        command = [sys.executable, __file__, "--one", str(members), "--rounds", str(args.rounds)]
        sampled = sample_in_turn(args.count, {"muster": partial(measure_apart, command)}, warmups=0)["muster"]
        for key, (figure, unit) in FIGURES.items():
            series = Samples(values=[value for each in sampled.values for value in each[key]], loads=sampled.loads)
            show(f"{members:,} members, {figure}", {"muster": series}, unit=unit)
    for members in args.torch_members:
        ports = iter(range(20000 + os.getpid() % 10000, 65536))
        samplers = {"c10d": lambda members=members, ports=ports: measure_torch(members, next(ports), 120.0)}
        show(f"{members:,} members, form a round", sample_in_turn(args.count, samplers, warmups=0))


def measure_apart(command):
    done = subprocess.run(command, env=clean_env(), stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


if __name__ == "__main__":
    main()
