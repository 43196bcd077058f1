"""The hangs of `test_hangs` again, with NCCL's own monitor as the only recorder: a stand-in, in all its formats."""

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from doubles.nccl_monitor import Communicator, Job, Rank, Server
from harness import Outcome, run_tree

from muster._shared import processes

HANGS = Path(__file__).parents[2] / "programs" / "hangs"
WORLD, PAIR = "NCCL communicator aa (2 ranks)", "NCCL communicator bb (2 ranks)"
BEHIND = f"rank 1 did not launch AllReduce #6 of {WORLD}; rank 0 has launched it; last seen at hang.py:#"
ROWS = {
    "sleeps": BEHIND,
    "skips": f"ranks 0-1 launched the same operations of {WORLD}, and none since: the network or a device hangs",
    "other": f"rank 1 launched Broadcast #1 of {WORLD} where rank 0 has launched AllReduce #6; last seen at hang.py:#",
    # gloo lets rank 1 go on, which its own line tells
    "size": f"rank 0 did not launch AllReduce #7 of {WORLD}; rank 1 has launched it; last seen at hang.py:#, in all_r",
    "leaves": f"rank 0 hung: rank 1 has ended; it is in {WORLD} with rank 0",
    "spins": BEHIND,
    "native": BEHIND,
    "init": "rank 1 did not call init_process_group, in which rank 0 waits",  # there is no communicator
    "loads": f"{BEHIND}, waiting for its DataLoader",
    "group": f"rank 1 did not launch AllReduce #1 of {PAIR}; rank 0 has launched it; last seen at hang.py:#",
    "receives": "rank 1 is elsewhere while rank 0 waits in recv (hang.py:#)",  # send and recv are not counted
    "stops": f"rank 1 is stopped (SIGSTOP); it is in {WORLD} with rank 0",
}
"""By what the program does: how the report begins."""
SHORT = {"spins", "stops"}
"""Rows of `make test`; the rest is in `make soak`."""


class World:
    """What the ranks have launched: the files that `launch_counts.py` writes."""

    def __init__(self, folder: Path, version: tuple[int, int, int]) -> None:
        self.folder = folder
        self.version = version

    def read(self) -> Job:
        ranks = {int(path.name): json.loads(path.read_text()) for path in self.folder.glob("[0-9]")}
        names = sorted({name for each in ranks.values() for name in each["counts"]})
        return Job(
            version=self.version,
            communicators=tuple(
                Communicator(
                    name=name,
                    ranks=tuple(
                        Rank(
                            number=number,
                            pid=each["pid"],
                            counts=tuple(each["counts"][name]),
                            lost=self.find(each["pid"]),
                        )
                        for number, each in sorted(ranks.items())
                        if name in each["counts"]
                    ),
                )
                for name in names
            ),
        )

    def find(self, pid: int) -> str:
        stat = processes.read_stat(pid)
        return "silent" if stat is None or stat[0] in "TZX" else ""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "counts"
    made.mkdir()
    return made


def run(folder: Path, server: Server, *program: str, flags: tuple[str, ...] = ()) -> Outcome:
    agent = [sys.executable, "-m", "muster.agent", "--standalone", "--nproc-per-node", "2", "--rdzv-id", "hang"]
    limits = ["--hang-timeout", "4", "--shutdown-timeout", "2", "--log-dir", str(folder.parent / "logs"), *flags]
    env = {**os.environ, "NCCL_RAS_ADDR": server.address, "COUNTS": str(folder)}
    return run_tree([*agent, *limits, *program], env=env)


def read_reason(folder: Path, outcome: Outcome) -> str:
    report = folder.parent / "logs" / "hang" / "report.json"
    assert report.exists(), outcome.explain()
    reason: str = json.loads(report.read_text())["reason"]
    return re.sub(r"\b\w+\.py:\d+", "hang.py:#", reason)


def list_rows() -> Iterator[object]:
    for how in ROWS:
        for version in [(2, 29, 3)] if how != "spins" else [(2, 24, 3), (2, 27, 7), (2, 28, 9), (2, 29, 3)]:
            is_short = how in SHORT and version == (2, 29, 3)
            name = f"{how}-{'.'.join(map(str, version))}"
            yield pytest.param(how, version, id=name, marks=() if is_short else pytest.mark.long)


@pytest.mark.parametrize(("how", "version"), list(list_rows()))
def test_the_guilty_rank_is_named(how: str, version: tuple[int, int, int], folder: Path) -> None:
    with Server(World(folder, version).read) as server:
        outcome = run(folder, server, str(HANGS / "launch_counts.py"), how, "1")
    assert (outcome.exit_code, outcome.leftovers) == (1, ()), outcome.explain()
    expected = ROWS[how].replace("AllReduce #6", "operation #6") if version < (2, 26, 0) else ROWS[how]
    reason = read_reason(folder, outcome)
    assert reason.startswith(expected), f"{reason}\n{outcome.explain()}"
    assert server.asked >= 2, "one report is no verdict"


SPIN = """\
case $RANK in 0) own=6;; *) own=5;; esac
echo "{\\"pid\\": $$, \\"counts\\": {\\"aa\\": [0, 0, 0, 0, $own]}}" > $COUNTS/$RANK.new
mv $COUNTS/$RANK.new $COUNTS/$RANK
while :; do :; done
"""


@pytest.mark.parametrize(
    "version", [pytest.param((2, 27, 7), id="text", marks=pytest.mark.long), pytest.param((2, 29, 3), id="json")]
)
def test_programs_that_are_not_python_and_wait_with_the_cpu(version: tuple[int, int, int], folder: Path) -> None:
    """Before any step, as with a captured graph: nothing but the monitor tells anything."""
    script = folder.parent / "spin.sh"
    script.write_text(SPIN)
    with Server(World(folder, version).read) as server:
        outcome = run(folder, server, "sh", str(script), flags=("--no-python",))
    assert (outcome.exit_code, outcome.leftovers) == (1, ()), outcome.explain()
    expected = f"rank 1 did not launch AllReduce #6 of {WORLD}; rank 0 has launched it"
    assert read_reason(folder, outcome).startswith(expected), outcome.explain()


@pytest.mark.parametrize("given", ["", "localhost:28028"])
def test_the_workers_of_a_node_with_devices_get_an_address_of_their_own(given: str, tmp_path: Path) -> None:
    """Only where the user has given none; and on a machine without devices nothing is given or reserved."""
    env = {name: value for name, value in os.environ.items() if name != "NCCL_RAS_ADDR"}
    env |= {"MUSTER_NVML": str(tmp_path / "none.so"), **({"NCCL_RAS_ADDR": given} if given else {})}
    argv = [sys.executable, "-m", "muster.agent", "--standalone", "--nproc-per-node", "2", "--preflight", "off"]
    argv += ["--no-python", "sh", "-c", "echo at=$NCCL_RAS_ADDR"]
    outcome = run_tree(argv, env=env)
    found = set(re.findall(r"at=(.*)", outcome.stdout))
    assert len(found) == 1, outcome.explain()
    assert found == {given} if given else re.fullmatch(r"127\.0\.0\.1:\d+", found.pop())
    if not any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg"))):
        del env["MUSTER_NVML"]
        assert re.findall(r"at=(.*)", run_tree(argv, env=env).stdout) == [given] * 2
