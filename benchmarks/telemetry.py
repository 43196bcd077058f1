"""What the telemetry plane costs: an agent of 8 ranks, the leader of thousands of nodes, the network.

    python benchmarks/telemetry.py [--count N] [--nodes 4096]

All times are CPU time of the process, not by the clock, so that a loaded machine changes little. "agent" looks at the
pages of 8 ranks whose processes are alive, that do 1,000 steps a second, show two values and print a new line between
two looks; it has the status written each time, and reads GPUs if the machine has any. "leader" takes the frames of all
nodes of a job, with a token, for as long as one interval lasts (16 s of 4,096 nodes), and merges and writes the status
once. What the kernel needs to receive the frames is not in it. "memory" is what a fresh process has resident more
after a minute of looks than before the plane was imported, with the modules of an agent that runs and of the doubles.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _launching import clean_env
from _sampling import build_parser, sample_in_turn, show

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

LOOKS = 60
RANKS = 8
STEPS_A_SECOND = 1000
FIGURES = {
    "agent": ("telemetry of an agent of 8 ranks", "% of a core", 0.5),
    "memory": ("telemetry of an agent of 8 ranks, memory", "MB", 1.5),
    "bytes": ("telemetry: what a node sends", "B/s", 1000.0),
    "leader": ("telemetry of the leader", "% of a core", 2.0),
}


def read_resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def measure_agent(folder):
    import muster.agent.features.hangs.servers
    import muster.agent.launch
    import muster.agent.node.evidence
    import muster.agent.node.supervisor
    import muster.agent.rendezvous.member.member
    import muster.agent.workers.status_page
    import muster.schedulers.failure_report  # noqa: F401
    from muster._shared.layouts import StatusPageLayout

    workers = [
        subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
        for _ in range(RANKS)
    ]
    before = read_resident()
    from doubles.telemetry_nodes import FakeLeader, Node

    node = Node(folder, nproc=RANKS)
    node.pids = {rank: worker.pid for rank, worker in enumerate(workers)}
    names = [b"loss", b"lr"]
    for rank in range(RANKS):
        for index, name in enumerate(names):
            word = StatusPageLayout.VALUE_TABLE + index * StatusPageLayout.VALUE_ENTRY_WORDS
            node.set_text(rank, word, name)
        node.set_word(rank, StatusPageLayout.VALUES, len(names))
    spent = 0.0
    for look in range(LOOKS):
        done = look * STEPS_A_SECOND
        node.step(*[done] * RANKS, total=10**6)
        node.arrivals = {rank: look * rank % 7 / 1000 for rank in range(RANKS)}
        node.lines = {
            rank: f"epoch 1 step {done + rank}: loss {1 / (look + rank + 1):.6f}".encode() for rank in range(RANKS)
        }
        began = time.process_time()
        node.loop.run(1.0)
        node.told.clear()
        spent += time.process_time() - began
    memory = read_resident() - before
    sent_bytes = measure_sent(folder, FakeLeader, Node)
    for worker in workers:
        worker.communicate()
    return {"agent": 100 * spent / LOOKS, "memory": memory, "bytes": sent_bytes}


def measure_sent(folder, leader_class, node_class):
    (folder / "other").mkdir()
    leader = leader_class(2)
    node = node_class(folder / "other", nproc=RANKS, leader=leader, rank=1)
    for look in range(LOOKS):
        done = look * STEPS_A_SECOND
        node.step(*[done + rank for rank in range(RANKS)], total=10**6)
        node.lines = {
            rank: f"epoch 1 step {done + rank}: loss {1 / (look + rank + 1):.6f}".encode() for rank in range(RANKS)
        }
        node.loop.run(1.0)
    return leader.sent_bytes / LOOKS


def measure_leader(folder, nodes):
    from doubles.telemetry_nodes import FakeLoop, Node

    from muster._shared.job_view import NodeStatus, RankStatus
    from muster.agent.rendezvous.interface import JobMembers, MemberStatus, Summary
    from muster.agent.rendezvous.protocol.handshake import Codec
    from muster.agent.rendezvous.protocol.messages import MEMBER_MESSAGES
    from muster.agent.telemetry.sampling import NodeSummary, pack

    wire = bytearray()
    client = Codec("token", is_server=False, write=wire.extend)
    answers = bytearray()
    server = Codec("token", is_server=True, write=answers.extend)
    client.start()
    while not (client.open and server.open):
        data, wire[:] = bytes(wire), b""
        list(server.receive(data))
        data, answers[:] = bytes(answers), b""
        list(client.receive(data))
    server.trust()

    def build(rank, step):
        first = rank * RANKS
        slowest = RankStatus(
            global_rank=first,
            node=rank,
            local_rank=0,
            step=step,
            total=10**6,
            rate=7.9,
            cpu=0.9,
            values=(("loss", 0.31), ("lr", 1e-05)),
            last_line=f"epoch 1 step {step}: loss 0.31",
        )
        status = NodeStatus(
            node_index=rank,
            node=rank,
            host=f"host-{rank}",
            ranks=RANKS,
            first_rank=first,
            step=step,
            most_step=step + 1,
            cpu=7.9,
            memory_bytes=1 << 35,
            slowest=slowest,
        )
        text = pack(NodeSummary(node=status, peak_bytes=1 << 32, peak_rank=first))
        return Summary(round_number=1, step=step, most_step=step + 1, text=text)

    loop = FakeLoop()
    node = Node(folder, nproc=RANKS, loop=loop)
    node.round = node.round.__class__(**{**node.round.__dict__, "group_world_size": nodes, "world_size": nodes * RANKS})
    summaries = {}

    def read_members():
        return JobMembers(
            members=tuple(
                MemberStatus(
                    index=rank,
                    host=f"host-{rank}",
                    nproc=RANKS,
                    group_rank=rank,
                    is_leader=rank == 0,
                    summary=summaries.get(rank),
                    age_s=1.0,
                )
                for rank in range(nodes)
            ),
            max_nodes=nodes,
        )

    node.read_members = read_members
    interval_s = max(1.0, nodes / 256)
    loop.run(interval_s)
    spent, size = 0.0, 0
    for turn in range(3):
        frames = [client.encode(build(rank, 100 * turn + rank % 7)) for rank in range(1, nodes)]
        size += sum(map(len, frames))
        began = time.process_time()
        for rank, frame in enumerate(frames, start=1):
            for message in server.receive(frame):
                summaries[rank] = MEMBER_MESSAGES.read(message)
        node.step(*[100 * turn] * RANKS)
        loop.run(interval_s)
        spent += time.process_time() - began
    listed = len(json.loads(node.path.read_text())["nodes"])
    assert listed == min(nodes, 256), listed
    return {"leader": 100 * spent / (3 * interval_s)}


def sample(nodes):
    """Return one sample of all figures, in a process of its own."""
    words = [sys.executable, __file__, "--inner", "--nodes", str(nodes)]
    found = subprocess.run(words, env=clean_env(), capture_output=True, text=True, check=True)
    return json.loads(found.stdout)


def main():
    parser = build_parser(__doc__)
    parser.add_argument("--nodes", type=int, default=4096, help="of the leader's job")
    parser.add_argument("--inner", action="store_true", help="print one sample as JSON")
    args = parser.parse_args()
    if args.inner:
        with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
            print(json.dumps({**measure_agent(Path(first)), **measure_leader(Path(second), args.nodes)}))
        return
    samples = sample_in_turn(args.count, {"muster": lambda: sample(args.nodes)})["muster"]
    for figure, (name, unit, goal) in FIGURES.items():
        series = samples.of(lambda values, figure=figure: values[figure])
        name = f"{name} of {args.nodes:,} nodes" if figure == "leader" else name
        show(name, {"muster": series}, unit=unit, limit=goal)


if __name__ == "__main__":
    main()
