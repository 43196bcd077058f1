"""Hangs with NCCL's own monitor as the only recorder: a stand-in. What it says: `unit/diagnosis/test_nccl_monitor`."""

import json
import os
import re
from pathlib import Path

import pytest
from doubles.nccl_monitor import Communicator, Job, Rank, Server
from harness import AGENT, Outcome, run_tree

WORLD = "NCCL communicator aa (2 ranks)"


class World:
    """What the ranks have launched: they write files of JSON with the process and its number of AllReduces."""

    def __init__(self, folder: Path, version: tuple[int, int, int]) -> None:
        self.folder = folder
        self.version = version

    def read(self) -> Job:
        ranks = {int(path.name): json.loads(path.read_text()) for path in self.folder.glob("[0-9]")}
        listed = [
            Rank(number=number, pid=each["pid"], counts=(0, 0, 0, 0, each["count"]))
            for number, each in sorted(ranks.items())
        ]
        found = (Communicator(name="aa", ranks=tuple(listed)),) if listed else ()
        return Job(version=self.version, communicators=found)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "counts"
    made.mkdir()
    return made


def run(folder: Path, server: Server, *program: str, flags: tuple[str, ...] = ()) -> Outcome:
    agent = [*AGENT, "--standalone", "--nproc-per-node", "2", "--rdzv-id", "hang"]
    limits = ["--hang-timeout", "4", "--shutdown-timeout", "2", "--log-dir", str(folder.parent / "logs"), *flags]
    env = {**os.environ, "NCCL_RAS_ADDR": server.address, "COUNTS": str(folder)}
    return run_tree([*agent, *limits, *program], env=env)


def read_reason(folder: Path, outcome: Outcome) -> str:
    report = folder.parent / "logs" / "hang" / "report.json"
    assert report.exists(), outcome.explain()
    reason: str = json.loads(report.read_text())["reason"]
    return re.sub(r"\b\w+\.py:\d+", "hang.py:#", reason)


SPIN = """\
case $RANK in 0) own=6;; *) own=5;; esac
echo "{\\"pid\\": $$, \\"count\\": $own}" > $COUNTS/$RANK.new
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
        outcome = run(folder, server, "sh", str(script), flags=("--no-python",)).check(1)
    assert f"AllReduce #6 of {WORLD}; rank 0" in read_reason(folder, outcome), outcome.explain()


@pytest.mark.parametrize("given", ["", "localhost:28028"])
def test_the_workers_of_a_node_with_devices_get_an_address_of_their_own(given: str, tmp_path: Path) -> None:
    """Only where the user has given none; and on a machine without devices nothing is given or reserved."""
    env = {name: value for name, value in os.environ.items() if name != "NCCL_RAS_ADDR"}
    env |= {"MUSTER_NVML": str(tmp_path / "none.so"), **({"NCCL_RAS_ADDR": given} if given else {})}
    argv = [*AGENT, "--standalone", "--nproc-per-node", "2", "--preflight", "off"]
    argv += ["--no-python", "sh", "-c", "echo at=$NCCL_RAS_ADDR"]
    outcome = run_tree(argv, env=env)
    found = set(re.findall(r"at=(.*)", outcome.stdout))
    assert len(found) == 1, outcome.explain()
    assert found == {given} if given else re.fullmatch(r"127\.0\.0\.1:\d+", found.pop())
    if not any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg"))):
        del env["MUSTER_NVML"]
        assert re.findall(r"at=(.*)", run_tree(argv, env=env).stdout) == [given] * 2
