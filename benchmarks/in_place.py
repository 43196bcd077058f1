"""From the kill of one of four ranks to the first new step of all: in place, restarted, and with torchrun.

    python benchmarks/in_place.py [--count N] [--setup-s 3] [--skip-torchrun]

The script trains a small model with DDP and gloo, and keeps snapshots. Each kind is measured without a setup of its own
and with one (`--setup-s`), in place also with a spare. torchrun's ranks begin anew, since it keeps no state.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import _launching
from _launching import MUSTER, TORCHRUN, Command
from _sampling import SampleFailed, build_parser, sample_in_turn, show

RANKS = 4
LIMIT_S = 60.0

TRAIN = """
import json, os, sys, time
time.sleep(float(os.environ["SETUP_S"]))
import torch, torch.distributed as dist
from muster import snapshots, worker
torch.set_num_threads(1)
torch.manual_seed(0)
layers = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
optimizer = torch.optim.Adam(layers.parameters())
fd = os.open(os.environ["MARKS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def read_state():
    return {"model": layers.state_dict(), "optimizer": optimizer.state_dict()}

def main():
    dist.init_process_group("gloo")
    first = 0
    if found := snapshots.load(into=read_state()):
        layers.load_state_dict(found.state["model"])
        optimizer.load_state_dict(found.state["optimizer"])
        first = found.step + 1
    model = torch.nn.parallel.DistributedDataParallel(layers)
    for step in range(first, 1 << 20):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        worker.step(step)
        snapshots.save(step, read_state(), replicated=True)
        if step in (first, first + 20):
            mark = {"t": time.monotonic(), "rank": dist.get_rank(), "pid": os.getpid(), "is_first": step == first}
            os.write(fd, (json.dumps(mark) + "\\n").encode())
        time.sleep(0.01)

(worker.in_place(main) if os.environ["IN_PLACE"] == "1" else main)()
"""


def measure(
    launcher: Command, folder: Path, *, setup_s: float = 0.0, is_in_place: bool = False, spares: int = 0
) -> float:
    """Kill rank 2 once all ranks have done 20 steps (and the spare its setup); measure until each has done another."""
    marks = folder / "marks"
    marks.unlink(missing_ok=True)
    script = folder / "train.py"
    script.write_text(TRAIN)
    flags = [*_launching.build_standalone_flags(RANKS), "--max-restarts", "3"]
    flags += ["--spare-workers", str(spares)] if spares else []
    env = {"MARKS": str(marks), "SETUP_S": str(setup_s), "IN_PLACE": str(int(is_in_place))}
    job = _launching.start([*launcher, *flags, str(script)], **env)

    def find(*, is_first: bool, after_s: float = 0.0) -> dict[int, "_launching.Mark"]:
        found = _launching.read_marks(marks)
        return {mark["rank"]: mark for mark in found if mark["is_first"] is is_first and mark["t"] > after_s}

    try:
        _launching.wait_for(lambda: len(find(is_first=False)) == RANKS, LIMIT_S)
        time.sleep(1.0 + (setup_s + 2.0 if spares else 0.0))
        at_s = time.monotonic()
        os.kill(find(is_first=False)[2]["pid"], signal.SIGKILL)
        _launching.wait_for(lambda: len(find(is_first=True, after_s=at_s)) == RANKS, LIMIT_S)
        return max(mark["t"] for mark in find(is_first=True, after_s=at_s).values()) - at_s
    except (TimeoutError, ProcessLookupError) as error:
        raise SampleFailed from error
    finally:
        _launching.stop(job, limit_s=5.0)


def main(count: int, setup_s: float, *, with_torchrun: bool) -> None:
    with _launching.scratch() as folder:
        for seconds in (0.0, setup_s):
            samplers: dict[str, Callable[[], float]] = {
                "in place": lambda s=seconds: measure(MUSTER, folder, setup_s=s, is_in_place=True),
                "restarted": lambda s=seconds: measure(MUSTER, folder, setup_s=s),
                "in place, spare": lambda s=seconds: measure(MUSTER, folder, setup_s=s, is_in_place=True, spares=1),
            }
            series = sample_in_turn(count, samplers)
            what = f"a rank of {RANKS} is killed, setup of {seconds:g} s"
            show(what, {name: series[name] for name in ("in place", "restarted")}, limit=0.6 if not seconds else None)
            show(
                f"{what}, with a spare",
                {name: series[name] for name in ("in place, spare", "restarted")},
                limit=0.1 if seconds else None,
            )
            if with_torchrun:
                show(
                    "  torchrun",
                    sample_in_turn(2, {"torchrun": lambda s=seconds: measure(TORCHRUN, folder, setup_s=s)}, warmups=0),
                )


if __name__ == "__main__":
    parser = build_parser(__doc__)
    parser.add_argument("--setup-s", type=float, default=3.0, metavar="S", help="a script's own setup; default 3")
    parser.add_argument("--skip-torchrun", action="store_true", help="muster's rows only")
    options = parser.parse_args()
    main(options.count, options.setup_s, with_torchrun=not options.skip_torchrun)
