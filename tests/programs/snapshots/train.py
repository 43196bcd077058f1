"""A worker that trains a `learner.Learner` with gloo, saves every step by `muster.snapshots`, and dies where it is told to.

    train.py FOLDER

`FOLDER/settings.json` has how it trains, and the faults: each is done once, by who removes `FOLDER/fault-NUMBER` first.
A job ends where `ends` says. `FOLDER/log-RANK-PID` has what the rank has done, and when in its order: what a
killed process has written stays.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import learner
import torch
import torch.distributed as dist
from ends import find_end

from muster import snapshots, worker
from muster._shared.snapshot_file import SLOT_SPACE, Control, find_files, open_files

folder = Path(sys.argv[1])
settings = json.loads((folder / "settings.json").read_text())
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
log_fd = os.open(folder / f"log-{rank}-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
progress_fd = os.open(folder / "progress", os.O_WRONLY | os.O_CREAT)


def log(*words: object) -> None:
    os.write(log_fd, (json.dumps(words) + "\n").encode())


def find_fault(what: str, step: int) -> dict | None:
    """The fault that this rank is to have now, if there is one."""
    for number, fault in enumerate(settings["faults"]):
        if (fault["what"], fault["rank"]) == (what, rank) and fault["step"] in (step, None):
            try:
                (folder / f"fault-{number}").unlink()
            except FileNotFoundError:
                continue
            log("fault", what, step)
            return fault
    return None


def kill_self(after_s: float = 0.0) -> None:
    def kill() -> None:
        time.sleep(after_s)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start() if after_s else kill()


def watch_saves() -> None:
    """Write down when a slot is given up, and when it is whole."""
    begin, end = Control.begin_save, Control.end_save

    def begin_save(control, local_rank):
        log("beginning")
        slot = begin(control, local_rank)
        log("begin", slot)
        if fault := find_fault("saving", model.step):
            kill_self(fault["after_s"])
        return slot

    def end_save(control, local_rank, slot, saved):
        log("ending", slot, saved.lineage, saved.step)
        end(control, local_rank, slot, saved)
        log("end", slot, saved.lineage, saved.step)

    Control.begin_save, Control.end_save = begin_save, end_save


def damage(files) -> None:
    """Change one bit of what this rank is about to load."""
    slot = files.control.find_slot(files.local_rank, files.control.base)
    fd = files.open_content(files.local_rank)
    at = slot * SLOT_SPACE + files.control.read_slots(files.local_rank)[slot].bytes // 2
    os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 1]), at)
    os.close(fd)
    log("damaged", slot)


def load(files) -> None:
    if files is not None and files.control.base is not None:
        if find_fault("damage", files.control.base[1]):
            damage(files)
        if fault := find_fault("loading", files.control.base[1]):
            kill_self(fault["after_s"])
    found = snapshots.load(into=model.read_state() if settings["into"] else None)
    if found is not None:
        model.restore(found.state)
        assert model.step == found.step
    log("loaded", rank if found is None else found.state["saved_by"])


def kill_all() -> None:
    """All workers of this node, this one last."""
    for path in folder.glob("log-*"):
        pid = int(path.name.split("-")[2])
        if pid != os.getpid() and read_parent(pid) == os.getppid():
            os.kill(pid, signal.SIGKILL)
    kill_self()


def read_parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


model = learner.Learner(rank, settings["ballast_bytes"])
where = find_files(os.environ)
files = open_files(where) if where else None
control = None if files is None else files.control
log("start", size, None if control is None else control.lineage, None if control is None else control.base)
watch_saves()
load(files)
dist.init_process_group("gloo")
gathered = [torch.zeros(learner.SIZE) for _ in range(size)]
draw = random.Random(rank)
confirmed = None
while model.step < find_end(folder, rank, model.step, settings["every"]):
    model.accumulate()
    if settings["every"] > 1:
        time.sleep(draw.random() * 2 * settings["delay_s"])  # ranks drift apart between two exchanges
    else:
        time.sleep(settings["delay_s"])
    if model.step % settings["every"] == 0:
        dist.all_gather(gathered, model.gradient)
        model.apply(gathered)
    worker.step(model.step)
    if find_fault("before", model.step):
        kill_self()
    snapshots.save(model.step, {**model.read_state(), "saved_by": rank}, replicated=settings["replicated"])
    if control is not None and control.confirmed != confirmed:
        confirmed = control.confirmed
        log("confirmed", *confirmed)
    if rank == 0:
        os.pwrite(progress_fd, model.step.to_bytes(8, "little"), 0)
    if find_fault("after", model.step):
        kill_self()
    if find_fault("all", model.step):
        kill_all()
dist.barrier()
print(f"rank {rank} of {size} done {model.step} {model.compute_digest()}\n", end="", flush=True)  # in one piece
dist.destroy_process_group()
