"""A worker whose state is a chain of hashes: step n is right only if every step before was done once, in order.

Usage: chain.py FOLDER STEPS [DELAY_S [BYTES]]

It saves every step by `_shared.snapshot_file` alone. `FOLDER/kill-RANK-STEP` (removed when found) makes the rank kill
itself after that step; with `-saving` at the end, in the middle of its save. While `FOLDER/pause-STEP` exists, all
ranks wait after that step. The last line says whether the state is what all steps lead to.
"""

import hashlib
import mmap
import os
import signal
import sys
import time
from pathlib import Path

from muster import worker
from muster._shared.layouts import SnapshotBlock as Block
from muster._shared.snapshot_file import COMPLETE, SLOT_SPACE, RemoteReader, Slot, find_files, open_files

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
delay_s = float(sys.argv[3]) if len(sys.argv) > 3 else 0.01
size = int(sys.argv[4]) if len(sys.argv) > 4 else 5000
rank, world_size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))


def fill(state: bytes) -> bytes:
    """The state, repeated: so that every byte of what was saved is checked."""
    return (state * (size // len(state) + 1))[:size]


def begin(of: int) -> bytes:
    return hashlib.sha256(f"rank {of}".encode()).digest()


def load(files) -> tuple[int, bytes]:
    base = None if files is None else files.control.base
    if base is None:
        return 0, begin(rank)
    slot = files.control.find_slot(local_rank, base)
    content = bytearray(size)
    if slot is None:
        reader = RemoteReader(files.control)
        assert reader.find_bytes(rank) == size
        reader.read(rank, 0, memoryview(content))
        reader.close()
    else:
        assert files.control.read_slots(local_rank)[slot].global_rank == rank
        fd = files.open_content(local_rank)
        content[:] = os.pread(fd, size, slot * SLOT_SPACE)
        os.close(fd)
    state = bytes(content[:32])
    assert bytes(content) == fill(state), f"rank {rank}: what was saved at step {base[1]} is not whole"
    files.control.write_block(local_rank, Block.LOADED, 1 + base[1])
    print(f"rank {rank} continues at step {base[1]}", flush=True)
    return base[1], state


def takes_kill(name: str) -> bool:
    """Whether it is this process's turn; for a killed worker the file is gone when it starts again."""
    try:
        (folder / name).unlink()
    except FileNotFoundError:
        return False
    return True


def save(files, step: int, state: bytes) -> None:
    slot = files.control.begin_save(local_rank)
    if slot is None:
        return
    with mmap.mmap(contents, size, offset=slot * SLOT_SPACE) as memory:
        memory[: size // 2] = fill(state)[: size // 2]
        if takes_kill(f"kill-{rank}-{step}-saving"):
            os.kill(os.getpid(), signal.SIGKILL)
        memory[:] = fill(state)
    files.control.end_save(local_rank, slot, Slot(COMPLETE, files.control.lineage, step, size, rank, world_size, False))


def keep_step(step: int) -> None:
    """Go on when all ranks have done the step before, as ranks with collectives do."""
    os.pwrite(common, step.to_bytes(8, "little"), 8 * rank)
    while any(int.from_bytes(os.pread(common, 8, 8 * other), "little") < step for other in range(world_size)):
        time.sleep(0.001)


where = find_files(os.environ)
files = open_files(where) if where else None
common = os.open(folder / f"steps-{os.environ['MASTER_PORT']}", os.O_RDWR | os.O_CREAT)
step, state = load(files)
print(f"worker {os.getpid()} of agent {os.environ['MUSTER_STATUS_PAGE'].split('/')[2]}", flush=True)
contents = -1 if files is None else files.open_content(local_rank)
while step < steps:
    step += 1
    keep_step(step)
    state = hashlib.sha256(state + step.to_bytes(8, "big")).digest()
    worker.step(step, total=steps)
    time.sleep(delay_s)
    if files is not None:
        save(files, step, state)
    while (folder / f"pause-{step}").exists():
        time.sleep(0.005)
    if takes_kill(f"kill-{rank}-{step}"):
        os.kill(os.getpid(), signal.SIGKILL)
right = begin(rank)
for number in range(1, steps + 1):
    right = hashlib.sha256(right + number.to_bytes(8, "big")).digest()
sys.stdout.write(f"rank {rank} done {step} {'right' if state == right else 'WRONG'}\n")  # in one piece
