"""Jobs that keep snapshots, each disturbed by what a seed chooses, and what must be true of each afterwards.

    run = Run(folder, choose_plan(17))
    run.go()                                  # raises AssertionError, with all that was written

A job trains `programs/snapshots/learner.py` in real agents and workers. It must end with the bits of an undisturbed
job where its size stayed the same, and else with those of one that was resized at the same steps through `torch.save`,
which the test computes itself. What each rank has in its slots when it dies follows from its log; so does which step
the next round must continue from.
"""

import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import AGENT, PROGRAMS, Outcome, Tree, find_free_port, run_tree, wait_until
from netns_world import Net

PROGRAMS = PROGRAMS / "snapshots"
sys.path.append(str(PROGRAMS))

Key = tuple[int, int]
ONE_NODE = ("rank", "all ranks", "saving", "loading", "skew", "fall-back")
THREE_NODES = ("node", "leader", "copy", "report", "overwrite", "rank of three", "resize")
KINDS = ("ddp", *ONE_NODE, *THREE_NODES, "shards")
PROGRAMS_OF = {"ddp": "ddp.py", "shards": "shards.py"}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What happens to one job."""

    seed: int
    kind: str
    nodes: int = 1
    nproc: int = 2
    faults: tuple[dict[str, Any], ...] = ()
    lost: tuple[tuple[int, int], ...] = ()
    """Nodes (of the kind `ddp`, ranks) that are killed: index, and the step that rank 0 has done then."""
    wait_s: float = 0.0
    steps_after: int = 40
    """How many are done after the last fault."""
    is_quiet: bool = False
    """A node that is lost loses its link first: nothing tells the others."""
    settings: dict[str, Any] = field(default_factory=dict)


def choose_plan(seed: int) -> Plan:
    """Kinds take turns; all else is drawn."""
    draw = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    if kind == "shards":
        return Plan(seed=seed, kind=kind, nodes=2, lost=((draw.randrange(2), draw.randrange(100, 250)),))
    if kind == "ddp":
        lost = ((draw.randrange(4), draw.randrange(20, 150)), (draw.randrange(4), draw.randrange(150, 250)))
        return Plan(seed=seed, kind=kind, nproc=4, lost=lost)
    settings = {
        "every": 1,
        "delay_s": draw.choice([0.002, 0.005, 0.01]),
        "replicated": draw.random() < 0.5,
        "into": draw.random() < 0.5,
        "ballast_bytes": draw.choice([0, 0, 100_000, 5_000_000]),
    }
    return (_choose_for_one if kind in ONE_NODE else _choose_for_three)(seed, kind, settings, draw)


def _choose_for_one(seed: int, kind: str, settings: dict[str, Any], draw: random.Random) -> Plan:
    nproc, first, whole = draw.choice([2, 3]), draw.randrange(3, 250), ["before", "after"]
    one, other = draw.randrange(nproc), draw.randrange(nproc)
    after_s = draw.random() * draw.choice([0.0005, 0.005])
    faults: list[dict[str, Any]]
    if kind == "all ranks":
        faults = [{"what": "all", "rank": one, "step": first}]
    elif kind == "saving":
        faults = [{"what": "saving", "rank": one, "step": first, "after_s": after_s}]
        faults += [{"what": "saving", "rank": other, "step": first + 9, "after_s": after_s / 2}]
    elif kind == "loading":
        faults = [{"what": "after", "rank": one, "step": first}]
        faults += [{"what": "loading", "rank": other, "step": None, "after_s": after_s}]
    elif kind == "fall-back":
        keeper = 0 if settings["replicated"] else other
        faults = [{"what": "after", "rank": one, "step": first}, {"what": "damage", "rank": keeper, "step": None}]
        faults += [{"what": draw.choice(whole), "rank": one, "step": first + draw.randrange(1, 20)}]
    else:
        steps = sorted(draw.sample(range(first, first + 60), 2))
        what = draw.choice(whole)
        faults = [{"what": what, "rank": draw.randrange(nproc), "step": step} for step in steps]
        if kind == "skew":
            settings.update(every=8, replicated=False)
    return Plan(seed=seed, kind=kind, nproc=nproc, faults=tuple(faults), settings=settings)


def _choose_for_three(seed: int, kind: str, settings: dict[str, Any], draw: random.Random) -> Plan:
    settings["delay_s"] = max(settings["delay_s"], 0.005)
    lost, first, is_quiet = draw.randrange(3), draw.randrange(100, 500), draw.random() < 0.3
    known: dict[str, Any] = {"seed": seed, "kind": kind, "nodes": 3, "nproc": 1, "settings": settings}
    if kind == "leader":
        lost = 0
    elif kind == "copy":
        settings["ballast_bytes"] = 24_000_000
    elif kind == "overwrite":
        settings.update(ballast_bytes=12_000_000, delay_s=0.0)
    elif kind == "resize":
        settings["replicated"] = True
    elif kind in ("report", "rank of three"):
        fault = {"what": draw.choice(["before", "after"]), "rank": draw.randrange(3), "step": first}
        if kind == "rank of three":
            return Plan(faults=(fault, {**fault, "step": first + 30, "rank": lost}), **known)
        return Plan(faults=(fault,), lost=((lost, first),), wait_s=draw.random() * 0.1, **known)
    return Plan(lost=((lost, first),), is_quiet=is_quiet, **known)


# -- a job -------------------------------------------------------------------------------------------------------------


class Run:
    """One job, from its start to what it has left."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder, self.plan = folder, plan
        self.trees: list[Tree] = []
        self.outcomes: list[Outcome] = []
        self.net: Net | None = None
        self.port = find_free_port()
        self._stack = contextlib.ExitStack()
        settings = {**plan.settings, "faults": list(plan.faults)}
        (folder / "settings.json").write_text(json.dumps(settings))
        for number in range(len(plan.faults)):
            (folder / f"fault-{number}").touch()

    def go(self) -> None:
        """Run it, and check it.

        Raises:
            AssertionError: something is not as it must be; says all that is known.
        """
        plan = self.plan
        with self._stack:
            try:
                if plan.nodes > 1 and os.geteuid() == 0 and shutil.which("ip"):
                    self.net = self._stack.enter_context(Net(self.folder))
                for index in range(plan.nodes):
                    self.trees.append(self._start(index))
                self._disturb()
                self._finish()
                self._check()
            except (AssertionError, LookupError, ValueError) as error:
                raise AssertionError(f"{error}\n{self._explain()}") from error
            finally:
                for tree in self.trees:
                    tree.__exit__(None, None, None)

    def _start(self, index: int) -> Tree:
        plan = self.plan
        env = {**os.environ, "MUSTER_TOKEN": "0123456789abcdef" * 3, "PYTHONWARNINGS": "ignore"}
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "0"
        agent = [*AGENT, "--max-restarts", "20", "--nproc-per-node", str(plan.nproc)]
        host = "127.0.0.1"
        if plan.nodes == 1:
            agent += ["--standalone"]
        else:
            least = {"resize": 2, "shards": 1}.get(plan.kind, plan.nodes)
            if self.net is not None:
                while len(self.net.spaces) <= index:
                    self.net.add_node()
                host, env["GLOO_SOCKET_IFNAME"] = "10.77.0.1", "eth0"
                agent = ["ip", "netns", "exec", self.net.spaces[index], *agent]
            agent += ["--nnodes", f"{least}:{plan.nodes}", "--node-rank", str(index), "--rdzv-backend", "c10d"]
            agent += ["--rdzv-id", "snapshots", "--rdzv-endpoint", f"{host}:{self.port}"]
            conf = "join_timeout=80,last_call_timeout=1"
            agent += ["--rdzv-conf", conf + (",keep_alive_interval=0.5" if plan.is_quiet else "")]
        program = PROGRAMS / PROGRAMS_OF.get(plan.kind, "train.py")
        return Tree([*agent, str(program), str(self.folder)], env=env, cwd=self.folder)

    # -- what happens ------------------------------------------------------------------------------------------------

    def _disturb(self) -> None:
        plan = self.plan
        for index, step in plan.lost:
            if plan.kind == "report":
                self._wait(lambda: self._list_left() == [], "the first fault")
                threading.Event().wait(plan.wait_s)
            else:
                self._wait(lambda step=step: self._read_progress() >= step, f"step {step}")
            if plan.kind == "copy":
                self._wait_for_copy()
            if plan.kind == "ddp":
                self._lose_rank(index)
            else:
                self._lose(index)
        if plan.kind == "ddp":
            return
        if plan.kind == "shards":
            del self.trees[plan.lost[0][0]]
            self._wait(lambda: [size for size, _ in read_starts(self.folder)] == [4, 2], "a round of two ranks")
            return
        if plan.faults and plan.kind != "report":
            self._wait(lambda: self._list_left() == [], "all faults")
        if plan.lost and plan.kind != "resize":
            self._wait(self._is_whole, "the next round")
        if plan.kind == "resize":
            self._wait(lambda: self._read_sizes()[-1:] == [2], "a round of two")
            done = self._read_progress()
            self._wait(lambda: self._read_progress() >= done + 20, "20 more steps")
            index = plan.lost[0][0]
            self.trees[index] = self._start(index)
            self._wait(lambda: self._read_sizes()[-1:] == [3], "a round of three")

    def _is_whole(self) -> bool:
        """The last round has all ranks, and each has loaded."""
        return any(each.is_whole for each in self._read_rounds()[-1:])

    def _wait(self, holds: Callable[[], object], what: str) -> None:
        def check() -> object:
            ended = [tree for tree in self.trees if not tree.descendants()]
            assert not ended or self.plan.lost, "the job ended early"
            return holds()

        wait_until(check, what=what)

    def _list_left(self) -> list[str]:
        return [path.name for path in self.folder.glob("fault-*")]

    def _read_progress(self) -> int:
        """The last step that rank 0 has saved, in the last round."""
        try:
            return int.from_bytes((self.folder / "progress").read_bytes(), "little")
        except FileNotFoundError:
            return 0

    def _lose_rank(self, rank: int) -> None:
        """Kill a rank, and wait until the next round has loaded."""
        path = self.folder / f"worker-{rank}"
        pid = path.read_text()
        os.kill(int(pid), signal.SIGKILL)
        self._wait(lambda: path.read_text() not in ("", pid), "the next round")

    def _lose(self, index: int) -> None:
        """Kill all processes of a node at once; another agent takes its place."""
        tree = self.trees[index]
        is_quiet = self.plan.is_quiet and self.net is not None
        if is_quiet:
            self.net.set_link(index, "down")
        self.outcomes.append(tree.kill_all())
        if is_quiet:
            threading.Event().wait(3)  # longer than the silence that is a loss
            self.net.set_link(index, "up")
        if self.plan.kind not in ("resize", "shards"):
            self.trees[index] = self._start(index)

    def _wait_for_copy(self) -> None:
        """Until a node is receiving a copy: some of its bytes are there."""
        agents = [pid for tree in self.trees for pid in tree.descendants() if find_files(pid, "muster-snapshots")]
        total = self.plan.settings["ballast_bytes"]

        def is_arriving() -> bool:
            sizes = [size for pid in agents for size in find_files(pid, "muster-snapshot-copy").values()]
            return any(0 < size < total for size in sizes)

        self._wait(is_arriving, "a copy that is being sent")

    def _finish(self) -> None:
        (self.folder / "asked.new").write_text(str(self._find_last() + self.plan.steps_after))
        (self.folder / "asked.new").rename(self.folder / "asked")  # rank 0 decides: see `programs/snapshots/ends.py`
        self.outcomes += [tree.wait() for tree in self.trees]

    def _find_last(self) -> int:
        if self.plan.kind in PROGRAMS_OF:
            return self._read_progress()
        last = self._read_rounds()[-1]
        return max([self._read_progress(), *(rank.begun for rank in last.ranks.values())]) + 12

    # -- what must be true -------------------------------------------------------------------------------------------

    def _check(self) -> None:
        plan = self.plan
        ended = self.outcomes[-len(self.trees) :]
        assert [outcome.exit_code for outcome in ended] == [0] * len(ended), "not all agents ended well"
        assert all(not outcome.leftovers for outcome in self.outcomes), "processes were left"
        assert self._list_left() == [], "a fault did not happen"
        if plan.kind == "shards":
            self._check_shards(ended[-1].stdout)
            return
        if plan.kind == "ddp":
            self._check_ddp(ended[0])
            return
        rounds = self._read_rounds()
        done = [re.findall(r"rank (\d+) of (\d+) done (\d+) (\w+)", outcome.stdout) for outcome in ended]
        ends = {int(rank): (int(size), int(step), digest) for found in done for rank, size, step, digest in found}
        size, step, _ = ends[0]
        assert len(ends) == size == plan.nodes * plan.nproc
        wanted = self._compute_end(rounds, step)
        assert {rank: digest for rank, (_, _, digest) in ends.items()} == wanted, "other bits than they must be"
        if plan.kind != "resize":
            assert wanted == self._compute_undisturbed(size, step), "other bits than those of an undisturbed job"
        for before, after in itertools.pairwise(rounds):
            check_base(before, after, is_same_memory=not plan.lost)
            if plan.lost and before.confirmed and len(before.confirmed) > 1:
                # all neighbours had it: else none would have been confirmed after it
                assert after.base is not None, "a round began anew"
                assert after.base >= before.confirmed[-2], "a step was lost of which the neighbours had copies"

    def _check_shards(self, stdout: str) -> None:
        """Compare with four ranks up to the step that was continued, and two from there on, through `torch.save`."""
        ((_, _), (_, base)) = read_starts(self.folder)
        end = int((self.folder / "end").read_text())
        for nproc, words in ((4, ["-", str(base)]), (2, [str(self.folder / f"{base}.pt") if base else "-", str(end)])):
            command = [*AGENT, "--standalone", "--nproc-per-node", str(nproc), str(PROGRAMS / "shards.py")]
            outcome = run_tree([*command, str(self.folder), *words], cwd=self.folder).check()
        (wanted,) = re.findall(r"all of 2 done .*", outcome.stdout)
        assert wanted in stdout, f"other bits than those of a job resized through torch.save: {wanted}"

    def _check_ddp(self, ended: Outcome) -> None:
        """Compare with a job that nothing disturbed."""
        end = (self.folder / "end").read_text()
        command = [*AGENT, "--standalone", "--nproc-per-node", "4", str(PROGRAMS / "ddp.py"), str(self.folder), end]
        outcome = run_tree(command, cwd=self.folder).check()
        found, wanted = (sorted(re.findall(r"rank \d done .*", text)) for text in (ended.stdout, outcome.stdout))
        assert len(wanted) == 4
        assert found == wanted, f"other bits than those of an undisturbed job: {wanted}"
        assert ended.stderr.count("muster.snapshots: continues from step") == 2, "a round began anew"

    def _compute_undisturbed(self, size: int, step: int) -> dict[int, str]:
        from learner import Learner, train

        ranks = [Learner(rank) for rank in range(size)]
        train(ranks, step, self.plan.settings["every"])
        return {number: rank.compute_digest() for number, rank in enumerate(ranks)}

    def _compute_end(self, rounds: "Sequence[Round]", last: int) -> dict[int, str]:
        """Train in this process what the rounds continued one after the other, through `torch.save`."""
        from learner import Learner, resume, train

        by_lineage = {each.lineage: each for each in rounds}

        def compute(each: Round, step: int) -> list[Learner]:
            if each.base is None:
                ranks = [Learner(rank) for rank in range(each.size)]
            else:
                lineage, base = each.base
                old = compute(by_lineage[lineage], base)
                sources = [each.ranks[number].source for number in range(each.size)]
                for number, source in enumerate(sources):
                    wanted = number % len(old)  # the node of the first round's rank of the same number may be gone
                    is_lost = lineage == rounds[0].lineage and (wanted,) in [lost[:1] for lost in self.plan.lost]
                    assert source == wanted or is_lost, f"rank {number} continues rank {source}"
                ranks = resume(old, sources, is_replicated=self.plan.settings["replicated"])
            train(ranks, step, self.plan.settings["every"])
            return ranks

        return {number: rank.compute_digest() for number, rank in enumerate(compute(rounds[-1], last))}

    def _read_rounds(self) -> "list[Round]":
        return read_rounds(self.folder)

    def _read_sizes(self) -> list[int]:
        return [
            each.size for each in self._read_rounds() if all(rank.source is not None for rank in each.ranks.values())
        ]

    def _explain(self) -> str:
        for tree in self.trees:
            with contextlib.suppress(Exception):
                self.outcomes.append(tree.wait(0.1))
        rounds = "" if self.plan.kind in PROGRAMS_OF else "\n".join(each.describe() for each in self._read_rounds())
        ends = "\n".join(outcome.explain() for outcome in self.outcomes)
        return f"{self.plan}\n{rounds}\n{ends}"


def find_files(pid: int, name: str) -> dict[int, int]:
    """The memory files of this name that a process has open: bytes by inode."""
    found = {}
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(link) == f"/memfd:{name} (deleted)":
                    stat = os.stat(link)
                    found[stat.st_ino] = stat.st_blocks * 512
    return found


# -- what the ranks have written ---------------------------------------------------------------------------------------


@dataclass
class Rank:
    """What one worker has done in one round."""

    sure: dict[int, Key] = field(default_factory=dict)
    """What its slots have for certain, by slot: those that it has written itself."""
    maybe: dict[int, Key] = field(default_factory=dict)
    """What they may have besides: it died at the moment of writing the word."""
    begun: int = 0
    """The last step that it has begun to save."""
    is_open: bool = False
    """It died where it chooses a slot: which one is not known."""
    confirmed: list[Key] = field(default_factory=list)
    source: int | None = None
    """The rank of the round before whose random numbers it continues; None: it has not loaded."""
    damaged: bool = False


@dataclass
class Round:
    """One round, by what its workers have written."""

    lineage: int
    size: int
    base: Key | None
    ranks: dict[int, Rank] = field(default_factory=dict)

    @property
    def confirmed(self) -> list[Key]:
        """What any rank has seen confirmed, rising."""
        return sorted({key for rank in self.ranks.values() for key in rank.confirmed})

    @property
    def is_whole(self) -> bool:
        """All its ranks have loaded."""
        return len(self.ranks) == self.size and all(rank.source is not None for rank in self.ranks.values())

    def describe(self) -> str:
        lines = [f"round {self.lineage} of {self.size} from {self.base}, confirmed {self.confirmed[-3:]}"]
        lines += [f"  rank {number}: {rank.sure} maybe {rank.maybe}" for number, rank in sorted(self.ranks.items())]
        return "\n".join(lines)


def read_rounds(folder: Path) -> list[Round]:
    """The rounds of a job in their order."""
    rounds: dict[int, Round] = {}
    for path in folder.glob("log-*"):
        text = path.read_text()
        records = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        if not records:
            continue
        what, size, lineage, base = records[0]
        assert what == "start"
        found = rounds.setdefault(lineage, Round(lineage, size, None if base is None else (base[0], base[1])))
        found.ranks[int(path.name.split("-")[1])] = read_rank(records[1:])
    return [rounds[lineage] for lineage in sorted(rounds)]


def read_starts(folder: Path) -> list[tuple[int, int]]:
    """Sizes of the rounds of `shards.py`, and the steps from which they began."""
    found = set()
    for path in folder.glob("log-*"):
        text = path.read_text()
        if text.endswith("\n"):
            found.add(tuple(json.loads(text)[1:]))
    return sorted(found, key=lambda start: start[1])


def read_rank(records: Sequence[list[Any]]) -> Rank:
    rank = Rank()
    for what, *words in records:
        rank.is_open = what == "beginning"
        if what == "begin" and words[0] is not None:
            rank.sure.pop(words[0], None)
            rank.maybe.pop(words[0], None)
        elif what == "ending":
            rank.begun = words[2]
            rank.maybe[words[0]] = (words[1], words[2])
        elif what == "end":
            rank.sure[words[0]] = rank.maybe.pop(words[0])
        elif what == "confirmed":
            rank.confirmed.append((words[0], words[1]))
        elif what == "loaded":
            rank.source = words[0]
        elif what == "damaged":
            rank.damaged = True
    return rank


def check_base(before: Round, after: Round, *, is_same_memory: bool) -> None:
    """Check which step a round continues.

    Args:
        before: the round before it.
        after: itself.
        is_same_memory: no node was lost: what the ranks had is all there.

    Raises:
        AssertionError: an older one than it could have, or one that not all ranks had.
    """
    if not is_same_memory or len(before.ranks) < before.size or any(rank.damaged for rank in before.ranks.values()):
        return
    assert after.base is not None or not before.confirmed, "a round began anew"
    if before.confirmed:
        assert after.base >= before.confirmed[-1], f"{after.base}: {before.confirmed[-1]} was confirmed, and is lost"
    sure = [set() if rank.is_open else set(rank.sure.values()) for rank in before.ranks.values()]
    maybe = [{*rank.sure.values(), *rank.maybe.values()} for rank in before.ranks.values()]
    newest = max(set.intersection(*sure), default=before.base)
    assert newest is None or (after.base is not None and after.base >= newest), f"all ranks had {newest}"
    if after.base != before.base:
        assert all(after.base in each for each in maybe), f"not all ranks had {after.base}"
