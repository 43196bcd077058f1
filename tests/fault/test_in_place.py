"""Ranks in place stay when others are lost, join or leave; the job ends with the bits of an undisturbed one.

MUSTER_IN_PLACE_RUNS=0:200 python -m pytest -n 4 tests/fault/test_in_place.py   # seeds 0 to 199, under load
MUSTER_IN_PLACE_RUNS=17:1 python -m pytest tests/fault/test_in_place.py         # seed 17 again
RESTARTED=1 ...                                                                 # the same without `worker.in_place`
"""

import contextlib
import functools
import itertools
import os
import random
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
from harness import AGENT, PROGRAMS, Outcome, Tree, find_free_port, run_tree, wait_until

PROGRAM = PROGRAMS / "snapshots" / "in_place.py"
FIRST, COUNT = map(int, os.environ.get("MUSTER_IN_PLACE_RUNS", "0:12").split(":"))
RESTARTED = bool(os.environ.get("RESTARTED"))
LAST = 120
PLACES = ("backward", "reduce", "save", "loader")
AT_START = ("init", "load", "group")
KINDS = ("places", "start", "moment", "two", "node", "stop", "spare", "leader", "agent", "join", "shrink")

SHORT = KINDS.index("moment")
"""The seed that `make test` plays; all are long."""

pytestmark = [
    pytest.mark.torch,
    pytest.mark.timeout(400),
    pytest.mark.skipif(sys.platform != "linux", reason="workers stay on Linux only"),
]


class Run:
    """One job of four ranks, on one or two nodes, and what a seed does to it."""

    def __init__(self, folder: Path, seed: int, *program: str) -> None:
        self.folder = folder
        self.program = program
        self.kind = KINDS[seed % len(KINDS)]
        self.draw = random.Random(seed)
        self.nodes = 2 if self.kind in ("node", "leader", "agent", "join", "shrink") else 1
        self.port = find_free_port()
        self.trees: list[Tree] = []
        self.outcomes: list[Outcome] = []

    def plant(self, place: str, rank: int, step: int, name: str = "SIGKILL") -> None:
        (self.folder / "faults").touch()
        (self.folder / f"{place} {rank} {step} {name}").touch()

    def start(self, index: int = 0) -> None:
        least = 1 if self.kind in ("join", "shrink") else 2
        place = ["--nnodes", f"{least}:2", "--node-rank", str(index), "--rdzv-backend", "c10d", "--rdzv-id", "in-place"]
        place += ["--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-conf", "last_call_timeout=0.5"]
        flags = place if self.nodes == 2 else ["--standalone"]
        flags += ["--nproc-per-node", str(4 // self.nodes), "--max-restarts", "20"]
        # A rank's exit is no step: at a high load it takes seconds.
        flags += ["--hang-timeout", "6"] if self.kind == "stop" else []
        flags += ["--spare-workers", "1"] if self.kind == "spare" else []
        env = {**os.environ, "PYTHONWARNINGS": "ignore", "MUSTER_TOKEN": "0123456789abcdef" * 3}
        program, *words = self.program or (str(PROGRAM), str(LAST), *(["4"] if self.kind == "join" else []))
        command = [*AGENT, *flags, "--restart-backoff", "0", program, str(self.folder), *words]
        self.trees.insert(index, Tree(command, env=env, cwd=self.folder).__enter__())

    def read_begins(self) -> list[tuple[int, ...]]:
        """Rank, process, first step and size of each call of `main`, in their order."""
        with contextlib.suppress(FileNotFoundError):
            lines = (self.folder / "begins").read_text().splitlines()
            return [tuple(map(int, line.split()[:4])) for line in lines]
        return []

    def wait_for_step(self, step: int) -> None:
        path = self.folder / "progress"
        wait_until(lambda: path.exists() and int(path.read_text() or 0) >= step, what=f"step {step}")

    def wait_for_rounds(self, count: int) -> None:
        wait_until(lambda: len(self.read_rounds()) >= count, what=f"{count} rounds")

    def read_rounds(self) -> list[dict[int, int]]:
        """The processes by rank, of each round that all of its ranks have begun."""
        rounds, begun = [], {}
        for rank, pid, _, size in self.read_begins():
            begun = {} if rank in begun else begun
            begun[rank] = pid
            if len(begun) == size:
                rounds.append(begun)
                begun = {}
        return rounds

    def go(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: [tree.__exit__(None, None, None) for tree in self.trees])
            try:
                getattr(self, f"play_{self.kind}")()
                self.outcomes += [tree.wait(120) for tree in self.trees]
                self.check()
            except AssertionError as error:
                for tree in self.trees:
                    with contextlib.suppress(Exception):
                        self.outcomes.append(tree.wait(0.1))
                shown = "\n".join(each.explain() for each in self.outcomes)
                raise AssertionError(f"{self.kind}: {error}\n{self.read_rounds()}\n{shown}") from error

    # -- what happens ------------------------------------------------------------------------------------------------

    def play_places(self) -> None:
        for step in sorted(self.draw.sample(range(5, 100), 2)):
            self.plant(self.draw.choice(PLACES), self.draw.randrange(4), step)
        self.start()

    def play_start(self) -> None:
        self.plant("backward", self.draw.randrange(4), self.draw.randrange(20, 90))
        self.start()
        self.wait_for_step(5)
        self.plant(self.draw.choice(AT_START), self.draw.randrange(4), -1)

    def play_stop(self) -> None:
        self.plant(self.draw.choice(PLACES), self.draw.randrange(4), self.draw.randrange(5, 100), "SIGSTOP")
        self.start()

    def play_spare(self) -> None:
        self.play_moment()

    def play_moment(self) -> None:
        self.start()
        for step in (self.draw.randrange(20, 50), self.draw.randrange(70, 100)):
            self.wait_for_step(step)
            self.kill_rank(self.draw.randrange(4))
            self.wait_for_step(step + 10)

    def kill_rank(self, rank: int) -> None:
        time.sleep(self.draw.random() * 0.03)
        os.kill(self.read_rounds()[-1][rank], signal.SIGKILL)

    def play_two(self) -> None:
        self.start()
        self.wait_for_step(self.draw.randrange(20, 90))
        first, second = self.draw.sample(range(4), 2)
        os.kill(self.read_rounds()[-1][first], signal.SIGKILL)
        time.sleep(self.draw.random() * 0.1)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.read_rounds()[0][second], signal.SIGKILL)

    def start_both(self) -> None:
        self.start(0)
        self.start(1)
        self.wait_for_step(self.draw.randrange(20, 90))

    def lose_node(self, index: int) -> None:
        self.start_both()
        self.outcomes.append(self.trees.pop(index).kill_all())
        self.start(index)

    def play_node(self) -> None:
        self.lose_node(1)

    def play_leader(self) -> None:
        self.lose_node(0)

    def play_agent(self) -> None:
        self.start_both()
        tree = self.trees.pop(1)
        os.kill(tree.pid, signal.SIGKILL)
        self.outcomes.append(tree.wait(60))
        self.start(1)

    def play_join(self) -> None:
        if self.draw.random() < 0.5:
            (self.folder / "asks").touch()  # should_stop
        self.start(0)
        self.wait_for_step(self.draw.randrange(10, 60))
        self.start(1)

    def play_shrink(self) -> None:
        self.start_both()
        tree = self.trees.pop(1)
        tree.send(signal.SIGTERM)
        self.outcomes.append(tree.wait(60))

    # -- what must be true -------------------------------------------------------------------------------------------

    def check(self) -> None:
        ended = self.outcomes[-len(self.trees) :]
        assert [each.exit_code for each in ended] == [0] * len(ended), "not all agents ended well"
        assert not any(each.leftovers for each in self.outcomes), "processes were left"
        assert not list(self.folder.glob("*SIG*")), "a fault did not happen"
        rounds = self.read_rounds()
        sizes = [len(each) for each in rounds]
        digests = {digest for each in ended for digest in re.findall(r"rank \d done (\w+)", each.stdout)}
        assert len(digests) == 1, f"the ranks differ: {digests}"
        if self.kind in ("join", "shrink"):
            assert sizes == ([2, 4] if self.kind == "join" else [4, 2])
        else:
            assert len(rounds) > 1, "nothing happened"
            assert set(sizes) == {4}
            assert digests == {compute_undisturbed()}, "other bits than those of an undisturbed job"
        if self.kind in ("moment", "spare") and not RESTARTED:
            assert ended[0].stderr.count("1 of 4 processes was replaced, and the others kept running") == 2
        for before, after in itertools.pairwise(rounds):
            stayed = {rank for rank in before if before[rank] == after.get(rank)}
            assert len(stayed) >= self.count_survivors(before, after), f"only {stayed} stayed"

    def count_survivors(self, before: dict[int, int], after: dict[int, int]) -> int:
        """How many processes must have stayed at least."""
        if RESTARTED:
            return 0
        if self.kind in ("node", "agent", "join", "shrink"):
            return 2
        if self.kind == "leader":  # its loss fences the other node
            return 0
        if self.kind == "start":  # two faults; and gloo, while it connects, may not wake one of the others in time
            return 1
        if self.kind == "two":
            return 2
        return min(len(before), len(after)) - 1


@functools.cache
def compute_undisturbed() -> str:
    """The bits of a job that nothing disturbs."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*AGENT, "--standalone", "--nproc-per-node", "4", str(PROGRAM), folder, str(LAST)]
        outcome = run_tree(command, env={**os.environ, "PYTHONWARNINGS": "ignore"}, cwd=Path(folder)).check()
    (found,) = set(re.findall(r"rank \d done (\w+)", outcome.stdout))
    return found


def list_seeds() -> list[object]:
    seeds = range(FIRST, FIRST + COUNT)
    marks = {SHORT: ()}
    return [
        pytest.param(seed, id=f"{seed}-{KINDS[seed % len(KINDS)]}", marks=marks.get(seed, pytest.mark.long))
        for seed in seeds
    ]


@pytest.mark.parametrize("seed", list_seeds())
def test_those_that_are_not_lost_stay(seed: int, tmp_path: Path) -> None:
    Run(tmp_path, seed).go()


@pytest.mark.long
def test_shards_are_copied_at_another_number_of_ranks(tmp_path: Path) -> None:
    """FSDP2 goes from 4 ranks to 2 and back, with a new module and mesh. Kept groups and meshes are refused."""
    run = Run(tmp_path, KINDS.index("shrink"), str(PROGRAM.with_name("in_place_shards.py")), "4,2,4", "kept")
    run.start_both()
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [tree.__exit__(None, None, None) for tree in run.trees])
        run.trees[1].send(signal.SIGTERM)
        run.trees.pop(1).wait(60)
        run.wait_for_rounds(2)
        run.wait_for_step(max(each[2] for each in run.read_begins()) + 10)
        run.start(1)
        for tree in run.trees:
            tree.wait(120).check()
    rounds = run.read_rounds()
    assert [len(each) for each in rounds] == [4, 2, 4]
    assert rounds[1].items() <= rounds[0].items(), "a survivor was started again"
    assert rounds[1].items() <= rounds[2].items(), "a survivor was started again"
    loaded = [line.split() for line in (tmp_path / "loaded").read_text().splitlines()]
    assert len(loaded) == 2 + 4
    assert all((tmp_path / f"step-{step}").read_text() == bits for step, bits in loaded), "other bits than were saved"
    told = (tmp_path / "kept").read_text()
    assert told.count("group: ValueError: Process group ") == 4, told
    assert told.count("mesh: RuntimeError: DeviceMesh was made for rank ") == 4, told


@pytest.mark.long
def test_fifty_rounds_leave_nothing_in_a_process(tmp_path: Path) -> None:
    """Threads, descriptors, memory and torch's globals are after them as after the second."""
    command = [*AGENT, "--standalone", "--nproc-per-node", "2", "--max-restarts", "99", "--restart-backoff", "0"]
    env = {**os.environ, "PYTHONWARNINGS": "ignore"}

    def read_rounds() -> list[list[int]]:
        """The processes of each round that both ranks have begun, by rank."""
        path = tmp_path / "begins"
        begins = [line.split()[:2] for line in path.read_text().splitlines()] if path.exists() else []
        pairs = [sorted(begins[at : at + 2]) for at in range(0, len(begins) - 1, 2)]
        return [[int(pid) for _, pid in pair] for pair in pairs]

    def can_stay(pid: int) -> bool:
        """The agent has connected to it, and there are steps to go on from."""
        links = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
        is_connected = any(link[5] == "03" and link[-1] == f"@muster-{pid}" for link in links)
        return is_connected and int((tmp_path / "progress").read_text() or "0") > 5

    def measure(pid: int) -> tuple[int, int, int]:
        folder = Path(f"/proc/{pid}")
        resident = next(line for line in (folder / "status").read_text().splitlines() if line.startswith("VmRSS"))
        return len(list((folder / "fd").iterdir())), len(list((folder / "task").iterdir())), int(resident.split()[1])

    with Tree([*command, str(PROGRAM), str(tmp_path), str(1 << 20)], env=env, cwd=tmp_path) as job:
        sizes = []
        for number in range(1, 51):
            wait_until(lambda number=number: len(read_rounds()) >= number, what=f"round {number}")
            progress = (tmp_path / "progress").read_text() if number > 1 else ""
            wait_until(
                lambda progress=progress: (
                    (tmp_path / "progress").exists() and (tmp_path / "progress").read_text() not in ("", progress)
                ),
                what="a step",
            )
            stayed, lost = read_rounds()[-1]
            if number == 1:  # it looks only now and then
                wait_until(lambda: all(map(can_stay, read_rounds()[0])), what="both can stay")
            sizes.append(measure(stayed))
            os.kill(lost, signal.SIGKILL)
        assert len({stayed for stayed, _ in read_rounds()}) == 1, "the survivor was started again"
        begins = [line.split() for line in (tmp_path / "begins").read_text().splitlines()]
        assert len({known for rank, _, _, _, known in begins[2:] if rank == "0"}) == 1, (
            "torch knows groups of old rounds"
        )
        job.kill_all()
    # What a group has left ends a moment later: the least of ten rounds counts.
    (fds, threads, kib), last = (tuple(map(min, zip(*some, strict=True))) for some in (sizes[2:12], sizes[-10:]))
    assert last[0] <= fds + 2, sizes
    assert last[1] <= threads + 1, sizes
    assert last[2] <= kib + 30_000, sizes
