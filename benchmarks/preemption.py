"""One of two nodes gets SIGTERM: do all ranks save the same step, and how long does it take?

python benchmarks/preemption.py [--count N]

Both launchers run the same training loop. Under muster it asks `worker.should_stop`; under torchrun, which has no such
thing, it does what people do: a SIGTERM handler sets a flag, and the loop saves after the step and ends.
"""

import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from _launching import LAUNCHERS, MUSTER, Command, find_port, launched, read_marks, scratch
from _sampling import parse_count, sample_in_turn, show

NODES, NPROC, ENDS_S = 2, 2, 30.0
RANKS = NODES * NPROC
TRAIN = """
import json, os, random, signal, time
import torch, torch.distributed as dist
from muster import worker

flags = []
if not worker.is_managed():
    signal.signal(signal.SIGTERM, lambda *_: flags.append(True))

def mark(**facts):
    facts |= {"t": time.monotonic(), "rank": int(os.environ["RANK"])}
    fd = os.open(os.environ["MARKS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, (json.dumps(facts) + "\\n").encode())
    os.close(fd)

dist.init_process_group("gloo")
for i in range(100_000):
    time.sleep(random.random() * 0.02)
    dist.all_reduce(torch.ones(1))
    if i == 20:
        mark(trains=True)
    if worker.should_stop(i) or flags:
        time.sleep(0.1)
        mark(saved=i)
        break
dist.destroy_process_group()
"""


def preempt(launcher: Command, folder: Path) -> tuple[bool, float]:
    """Return whether all ranks saved the same step, and seconds from the signal to the nodes' end, or the limit."""
    place = ["--nnodes", str(NODES), "--nproc-per-node", str(NPROC), "--rdzv-backend", "c10d", "--rdzv-id", "p"]
    place += ["--rdzv-endpoint", f"127.0.0.1:{find_port()}"]
    with (
        launched(launcher, folder, TRAIN, [*place, "--node-rank", "0"]) as one,
        launched(launcher, folder, TRAIN, [*place, "--node-rank", "1"]) as two,
    ):
        one.wait_marks(RANKS)
        began_s = time.monotonic()
        two.process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            for job in (one, two):
                job.process.wait(max(0.0, began_s + ENDS_S - time.monotonic()))
        took_s = time.monotonic() - began_s
        saved = [mark["saved"] for mark in read_marks(one.marks) if "saved" in mark]
    return len(saved) == RANKS and len(set(saved)) == 1, took_s


def main(count: int) -> None:
    with scratch() as folder:
        samplers = {name: lambda launcher=launcher: preempt(launcher, folder) for name, launcher in LAUNCHERS.items()}
        found = sample_in_turn(count, samplers, warmups=0)
    apart = {name: each.of(lambda sample: float(not sample[0])) for name, each in found.items()}
    show("share of preemptions after which the ranks had not all saved the same step", apart, unit="")
    [name] = [each for each, launcher in LAUNCHERS.items() if launcher == MUSTER]
    took = found[name].of(lambda sample: sample[1])
    show("from the signal until both nodes have ended", {name: took})


if __name__ == "__main__":
    main(parse_count(__doc__))
