"""Saves a state of each step, is killed once, and says whether what it finds then is what it had saved.

    states.py shapes       rank 0 has tensors that change, rank 1 those of all kinds
    states.py BIG SMALL    numbers of bytes: ten steps with one, and then with the other
    states.py BYTES once   one step only
    states.py BYTES stay   three steps; then it stays until there is a file `go`
"""

import os
import signal
import sys
import time

import torch

from muster import snapshots
from muster._shared.snapshot_file import find_files, open_files

STEPS, FAILS_AT = 20, 15


def make_shapes(step: int) -> dict:
    """Another number of tensors of other shapes at each step."""
    layers = {f"layer{n}": torch.full((step % 7 + n, 3), float(step)) for n in range(step % 4)}
    return {"layers": layers, "values": list(range(step % 5)), "text": "x" * (step % 3 * 100_000)}


def make_kinds(step: int) -> dict:
    tied = torch.full((3, 4), float(step))
    numbers = torch.arange(12.0).reshape(3, 4) + step
    return {
        "none": torch.empty(0, 5),
        "scalar": torch.tensor(step),
        "tied": [tied, tied],
        "view": tied.t(),
        "complex": torch.complex(numbers, -numbers),
        "conjugate": torch.complex(numbers, -numbers).conj(),
        "float8": numbers.to(torch.float8_e4m3fn),
        "half": [numbers.to(torch.bfloat16), numbers.half()],
        "truth": numbers > step,
        "coo": numbers.to_sparse(),
        "csr": numbers.to_sparse_csr(),
        "rng": torch.Generator().manual_seed(step).get_state(),
    }


def make(step: int) -> dict:
    if sys.argv[1] == "shapes":
        return make_kinds(step) if os.environ["RANK"] == "1" else make_shapes(step)
    size = int(sys.argv[1] if step < STEPS / 2 else sys.argv[2])
    state = torch.full((size,), step, dtype=torch.uint8)
    state[:: 1 << 20] = 255 - step
    return {"x": state}


def is_same(found: object, wanted: object) -> bool:
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(is_same(found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(is_same, found, wanted))
    if not isinstance(wanted, torch.Tensor):
        return found == wanted
    facts = [(one.dtype, one.shape, one.layout) for one in (found, wanted)]
    if facts[0] != facts[1]:
        return False
    found, wanted = (one.to_dense() if one.layout != torch.strided else one.resolve_conj() for one in (found, wanted))
    return torch.equal(*(one.reshape(-1).view(torch.uint8) for one in (found, wanted)))


def is_right(state: dict, step: int) -> bool:
    """As `is_same`, and takes no memory as large as the state."""
    x = state["x"]
    if not torch.equal(x[:: 1 << 20], torch.full_like(x[:: 1 << 20], 255 - step)):
        return False
    x[:: 1 << 20] = step
    return all(bool((part == step).all()) for part in x.split(1 << 25))


def wait_for_save(step: int) -> None:
    """Until the step is in memory whole: a large state is when a thread has computed its sums."""
    control = open_files(find_files(os.environ)).control
    while control.find_slot(int(os.environ["LOCAL_RANK"]), (control.lineage, step)) is None:
        time.sleep(0.01)


def keep_step(step: int) -> None:
    """Go on when all ranks of the round have done the step before."""
    os.pwrite(common, step.to_bytes(8, "little"), 8 * int(os.environ["RANK"]))
    others = range(int(os.environ["WORLD_SIZE"]))
    while any(int.from_bytes(os.pread(common, 8, 8 * other), "little") < step for other in others):
        time.sleep(0.001)


first, attempt = 0, int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if snapshot := snapshots.load():
    first = snapshot.step + 1
    is_large = sys.argv[1] != "shapes"
    same = is_right(snapshot.state, first - 1) if is_large else is_same(snapshot.state, make(first - 1))
    if "tied" in snapshot.state:
        one, other = snapshot.state["tied"]
        same &= one.data_ptr() == other.data_ptr() == snapshot.state["view"].data_ptr()
    print(f"rank {os.environ['RANK']} continues {snapshot.step} {'right' if same else 'WRONG'}\n", end="", flush=True)


last = {"once": 1, "stay": 3}.get(sys.argv[-1], STEPS)
common = os.open(f"steps-{os.environ['MASTER_PORT']}", os.O_RDWR | os.O_CREAT)
for step in range(first, last):
    keep_step(step)
    snapshots.save(step, make(step))
    if step == min(FAILS_AT, last - 1) and not attempt and sys.argv[-1] != "stay":
        wait_for_save(step)
        os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[-1] == "stay":
    print(f"rank {os.environ['RANK']} stays\n", end="", flush=True)
    while not os.path.exists("go"):
        time.sleep(0.05)
print(f"rank {os.environ['RANK']} done\n", end="", flush=True)
