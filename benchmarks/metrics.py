"""What metrics and traces cost an agent of 8 ranks that do 1,000 steps a second.

    python benchmarks/metrics.py [--count N]

A fresh process looks at the pages of 8 ranks once in each of 60 seconds of a clock of its own (as `telemetry.py`), and
has a round fail and start again in each tenth. In turn it does only that, or it also serves `/metrics`, which another
process reads once in each of these seconds, and sends spans and metrics to a collector in that process, as often. The
figure is the difference of the medians of the process's CPU time, all its threads, and of its resident memory.
"""

import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

from _launching import clean_env
from _sampling import Samples, build_parser, sample_in_turn, show

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

PACE_S = 0.1
"""A second takes so long: the exporter goes by the real clock, and sends its metrics as often."""
LOOKS, RANKS, STEPS_A_SECOND = 60, 8, 1000
GOALS = {"cpu": ("% of a core", 0.5), "memory": ("MB", 1.5)}


def read_resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


class Collector(BaseHTTPRequestHandler):
    """Takes everything."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append(self.path)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


def watch():
    """Run the other process: a collector, and a reader that reads when it gets a line with an address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        server.got = []
        threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True).start()
        print(server.server_port, flush=True)
        size = 0
        for line in sys.stdin:
            connection = http.client.HTTPConnection(line.strip(), timeout=10)
            connection.request("GET", "/metrics", headers={"Accept": "application/openmetrics-text"})
            size = len(connection.getresponse().read())
            connection.close()
            print(size, len(server.got), flush=True)
        server.shutdown()


def run_agent(folder, *, is_watched):
    from doubles.telemetry_nodes import Node

    import muster.agent.features.hangs.servers
    import muster.agent.launch
    import muster.agent.node.evidence
    import muster.agent.node.supervisor
    import muster.agent.rendezvous.member.member  # noqa: F401

    node = Node(folder, nproc=RANKS)
    other = source = None
    if is_watched:
        other, source, ask = connect(node)
    spent = 0.0
    for look in range(LOOKS):
        done = look * STEPS_A_SECOND
        node.step(*[done] * RANKS, total=10**6)
        node.lines = {rank: f"step {done + rank}: loss {1 / (look + rank + 1):.6f}".encode() for rank in range(RANKS)}
        began = time.process_time()
        if look % 10 == 9:
            node.log.write("worker_failed", ranks=[3], reason="rank 3 exited with code 1")
            node.log.write("round_broken", kind="failure", reason="rank 3 exited with code 1", hang=False)
            node.log.write("workers_stopped")
            node.form(node.round.number + 1, node.round.attempt + 1)
            node.write_round()
            node.log.write("workers_started", ranks=list(range(RANKS)))
        node.loop.run(1.0)
        node.told.clear()
        if is_watched:
            ask()
        time.sleep(PACE_S)
        spent += time.process_time() - began
    result = {"cpu": 100 * spent / LOOKS, "memory": read_resident()}
    if is_watched:
        source_counts = source.view.counts
        result["told"] = [ask(), dict(source_counts.exported), dict(source_counts.lost)]
        node.log.close()
        other.stdin.close()
        other.wait()
    return result


def connect(node):
    from muster._shared.records import replace
    from muster.agent.cli.arguments import parse_args
    from muster.agent.features.export.sink import connect as connect_agent
    from muster.agent.features.sink import SinkContext

    words = [sys.executable, __file__, "--watch"]
    other = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    port = int(other.stdout.readline())
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}", "OTEL_METRIC_EXPORT_INTERVAL": "100"}
    config = parse_args(["--standalone", "--metrics-port", "0", "x.py"], {})
    node.loop.call_from_thread = lambda call: call()
    connect_agent(
        SinkContext(
            config=replace(config, nproc=RANKS),
            environ=environ,
            loop=node.loop,
            logs=SimpleNamespace(print_line=sys.exit),
            children=None,
            event_log=node.log,
            add_witness=sys.exit,
        )
    )
    node.on_look = node.log.on_look
    source = node.log.on_look.__self__

    def ask():
        other.stdin.write(f"{node.log.node_facts['metrics']}\n")
        other.stdin.flush()
        return other.stdout.readline().split()

    return other, source, ask


def sample(kind):
    """Return one sample, in a process of its own."""
    words = [sys.executable, __file__, "--inner", kind]
    found = subprocess.run(words, env=clean_env(), capture_output=True, text=True, check=True)
    values = json.loads(found.stdout)
    if "told" in values:
        print(f"  bytes and requests, taken, lost: {values['told']}", file=sys.stderr)
    return values


def main():
    parser = build_parser(__doc__)
    parser.add_argument("--inner", choices=["alone", "watched"], help="print one sample as JSON")
    parser.add_argument("--watch", action="store_true", help="be the other process")
    args = parser.parse_args()
    if args.watch:
        watch()
        return
    if args.inner:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(run_agent(Path(folder), is_watched=args.inner == "watched")))
        return
    sampled = sample_in_turn(args.count, {kind: lambda kind=kind: sample(kind) for kind in ("watched", "alone")})
    for figure, (unit, goal) in GOALS.items():
        series = {kind: each.of(lambda values, figure=figure: values[figure]) for kind, each in sampled.items()}
        show(f"an agent of 8 ranks with metrics and spans, {figure}", series, unit=unit)
        pairs = zip(series["watched"].values, series["alone"].values, strict=False)
        more = Samples(values=[watched - alone for watched, alone in pairs])
        show(f"  what metrics and spans take more, {figure}", {"watched": more}, unit=unit, limit=goal)


if __name__ == "__main__":
    main()
