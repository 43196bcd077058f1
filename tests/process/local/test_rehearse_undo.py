"""What faults of `muster rehearse` have made, and what is left of it when the rehearsal is killed: by the library."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import wait_until
from memory_cgroup import list_rehearsal_cgroups

from muster._shared import processes
from muster.cli.rehearse.faults import FAULTS, NotPossibleError
from muster.cli.rehearse.journal import undo_dead

PLACES = """\
import os, subprocess, sys
from pathlib import Path
from muster.cli.rehearse.faults import NodeSetting
from muster.cli.rehearse.journal import Journal, Undo
from muster.cli.rehearse.world import make_world
folder, setting = Path(sys.argv[1]), NodeSetting(sys.argv[2])
with Journal(folder / "journals") as journal, make_world(setting, folder, nodes=2, journal=journal) as world:
    if setting is NodeSetting.OWN_DISK:
        with journal.keep(Undo("thaw", (str(world.folder),))):
            subprocess.run(["fsfreeze", "--freeze", str(world.folder)], check=True)
            print("made", flush=True)
            sys.stdin.read()
    print("made", flush=True)
    sys.stdin.read()
"""
MEMORY = """\
import subprocess, sys
from pathlib import Path
from muster.cli.rehearse.faults import FAULTS
from muster.cli.rehearse.journal import Journal
class Scene:
    rank, journal = 0, Journal(Path(sys.argv[1]) / "journals")
    def find_worker(self, rank):
        return int(sys.argv[2])
course = FAULTS["out-of-memory"].cause(Scene())
next(course)
print("made", flush=True)
sys.stdin.read()
"""
STARTS = """\
import multiprocessing, sys, time
if __name__ == "__main__":
    process = multiprocessing.get_context(sys.argv[1]).Process(target=time.sleep, args=(100,))
    process.start()
    print(process.pid, flush=True)
    process.join()
    print(process.exitcode, flush=True)
    time.sleep(100)
"""


def list_leftovers(folder: Path, pid: int) -> list[str]:
    """Of the rehearsal of this process in this folder: others may run beside it."""
    mounts = [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(folder) in line]
    return [*mounts, *map(str, Path("/run/netns").glob(f"muster-rehearsal-{pid}-*"))]


@contextlib.contextmanager
def start(program: str, *words: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", program, *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def need_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")


@pytest.mark.netns
@pytest.mark.parametrize("place", ["namespaces", "small disk", "own disk"])
def test_the_next_rehearsal_undoes_what_a_killed_one_has_made(place: str, tmp_path: Path) -> None:
    """The own disk is frozen, too: until it is thawed, each process that writes to it waits."""
    need_root()
    folder = tmp_path / "rehearsal"
    folder.mkdir()
    with start(PLACES, str(folder), place) as process:
        assert process.stdout is not None
        if process.stdout.readline() != "made\n":
            pytest.skip("it cannot be made here")
        assert undo_dead(folder / "journals") == [], "it runs"
        process.kill()
        process.wait()
    assert list_leftovers(folder, process.pid)
    (line,) = undo_dead(folder / "journals")
    assert "was killed; undone: " in line, line
    assert list_leftovers(folder, process.pid) == []
    assert list((folder / "journals").iterdir()) == []
    assert undo_dead(folder / "journals") == []


@pytest.mark.netns
def test_a_killed_rehearsal_leaves_no_process_that_takes_memory(tmp_path: Path) -> None:
    need_root()
    with subprocess.Popen(["sleep", "100"]) as rank:
        with start(MEMORY, str(tmp_path), str(rank.pid)) as process:
            assert process.stdout is not None
            if process.stdout.readline() != "made\n":
                rank.kill()
                pytest.skip("no cgroup with a limit of memory")
            (eater,) = processes.list_descendants(process.pid)
            process.kill()
            process.wait()
        (line,) = undo_dead(tmp_path / "journals")
        rank.kill()
    assert "cgroup" in line
    assert not [each for each in list_rehearsal_cgroups() if each.endswith(f"-{process.pid}")]
    wait_until(lambda: (processes.read_stat(eater) or "Z")[0] == "Z", what="what takes the memory ends")


class Ranks:
    """A `Scene`: the ranks are these processes."""

    rank = 0

    def __init__(self, *pids: int) -> None:
        self._pids = pids

    def find_worker(self, rank: int) -> int:
        if rank >= len(self._pids):
            raise NotPossibleError(f"rank {rank} did not run")
        return self._pids[rank]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_process_that_loads_data_is_killed_however_it_was_started(method: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(STARTS)
    with subprocess.Popen([sys.executable, str(script), method], stdout=subprocess.PIPE, text=True) as worker:
        try:
            assert worker.stdout is not None
            loader = int(worker.stdout.readline())
            others = [pid for pid in processes.list_descendants(worker.pid) if pid != loader]
            time.sleep(0.2)  # a spawned process takes its command line at its exec
            scene = Ranks(os.getpid() if method == "fork" else worker.pid, worker.pid)
            assert list(FAULTS["loader-killed"].cause(scene)) == []  # type: ignore[arg-type]
            assert worker.stdout.readline() == f"{-signal.SIGKILL}\n"
            assert all(processes.read_stat(pid) is not None for pid in (*others, worker.pid))
            with pytest.raises(NotPossibleError, match="DataLoader with num_workers"):
                list(FAULTS["loader-killed"].cause(scene))  # type: ignore[arg-type]
        finally:
            worker.kill()
