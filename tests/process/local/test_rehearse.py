"""`muster rehearse` of jobs of this machine: what it says of a right script and of wrong ones, and what it leaves."""

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from harness import PROGRAMS, Outcome, Tree, run_tree, wait_until
from memory_cgroup import list_rehearsal_cgroups

from muster.cli.rehearse import live
from muster.cli.rehearse.faults import FAULTS, NodeSetting
from muster.components import dist
from muster.schedulers.local import create_detached_scheduler

MUSTER = Path(sys.executable).with_name("muster")
PROGRAM = PROGRAMS / "rehearse_steps.py"
QUICK = [name for name, fault in FAULTS.items() if fault.is_quick]
NEEDS_ROOT = ",".join(name for name, fault in FAULTS.items() if fault.setting is not NodeSetting.ORDINARY)
LOADS = """\
import json
import os
import time
from pathlib import Path
from torch.utils.data import DataLoader, Dataset
from muster import worker
class Numbers(Dataset):
    def __len__(self):
        return 50
    def __getitem__(self, i):
        return float(i)
LAST = Path(f"last-{os.environ['RANK']}.json")
first, total = json.loads(LAST.read_text()) if LAST.exists() else (0, 0.0)
for i, value in enumerate(DataLoader(Numbers(), batch_size=1, num_workers=1)):
    if i < first:
        continue
    time.sleep(0.1)
    total += value.item()
    worker.step(i, total=50, sum=total)
    LAST.with_suffix(".tmp").write_text(json.dumps((i + 1, total)))
    LAST.with_suffix(".tmp").replace(LAST)
"""
"""Its loader runs until the end, and each rank saves each step."""
JOB = ("dist.ddp", "-j", "2x1", "--start", "cold", "--script", "train.py", "--")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    work = tmp_path / "work"
    work.mkdir()
    (work / "train.py").write_bytes(PROGRAM.read_bytes())
    return work


@pytest.fixture
def no_other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run beside no other test with this fixture: they look at what all rehearsals of this machine leave."""
    with open(tmp_path_factory.getbasetemp().parent / "rehearsals.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build_env(folder: Path) -> dict[str, str]:
    return {**os.environ, "XDG_STATE_HOME": str(folder.parent / "state")}


def rehearse(folder: Path, *words: str, wrong: str = "right", limit_s: float = 170) -> Outcome:
    command = [str(MUSTER), "rehearse", "--seed", "1", *words, *JOB, wrong]
    return run_tree(command, cwd=folder, env=build_env(folder), timeout_s=limit_s)


def test_a_right_script_survives(folder: Path) -> None:
    outcome = rehearse(folder, "--faults", "node-lost,loader-killed", "--json", "--junit", "junit.xml").check()
    data = json.loads(outcome.stdout)
    verdicts = {row["name"]: (row["verdict"], row["result"]) for row in data["rows"]}
    assert verdicts == {
        "node-lost": ("survived", "equal"),
        "loader-killed": ("not tried", ""),
    }
    assert data["rows"][0]["recovery_s"] > 0
    assert data["advice"] == []
    assert ET.parse(folder / "junit.xml").getroot().get("skipped") == "1"  # our own
    assert (folder / "rehearsal" / "index.html").read_text().count("<svg") == 3
    assert json.loads((folder / "rehearsal" / "rehearsal.json").read_text()) == data
    assert sorted(path.name for path in folder.iterdir()) == ["junit.xml", "rehearsal", "train.py"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("wrong", "fault", "verdict", "advice"),
    [
        ("data", "rank-killed", "result differs", ["data"]),
        ("torn", "rank-killed@checkpoint", "not survived", ["atomic"]),
        ("alone", "preempted", "started over", ["saved", "stop"]),
    ],
)
def test_a_wrong_script_is_told_what_to_change(
    folder: Path, wrong: str, fault: str, verdict: str, advice: list[str]
) -> None:
    outcome = rehearse(folder, "--faults", fault, "--json", wrong=wrong).check(1)
    data = json.loads(outcome.stdout)
    assert [row["verdict"] for row in data["rows"]] == [verdict], outcome.explain()
    assert [each["name"] for each in data["advice"]] == advice


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("wrong", "verdict", "advice"), [("right", "survived", []), ("forgets", "started over", ["resume"])]
)
def test_six_faults(folder: Path, wrong: str, verdict: str, advice: list[str]) -> None:
    outcome = rehearse(folder, "--quick", "--json", wrong=wrong, limit_s=500)
    data = json.loads(outcome.stdout)
    assert {row["name"]: row["verdict"] for row in data["rows"]} == dict.fromkeys(QUICK, verdict), outcome.explain()
    assert {row["result"] for row in data["rows"]} == {"equal"}
    assert [each["name"] for each in data["advice"]] == advice
    assert outcome.leftovers == ()


@pytest.mark.long
@pytest.mark.netns
@pytest.mark.timeout(900)
def test_what_needs_root(folder: Path, no_other: None) -> None:
    """Networks, disks and cgroups of its own; nothing is left of them."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    outcome = rehearse(folder, "--faults", NEEDS_ROOT, "--json")
    rows = {row["name"]: row for row in json.loads(outcome.stdout)["rows"]}
    assert {row["verdict"] for row in rows.values()} <= {"survived", "not tried"}, outcome.explain()
    assert all(row["reason"] for row in rows.values() if row["verdict"] == "not tried"), outcome.explain()
    assert outcome.leftovers == ()
    assert list_leftovers() == []


@pytest.mark.long
def test_without_root_what_needs_it_is_not_tried(folder: Path) -> None:
    """Another user of a namespace of users: the files stay readable."""
    become = ["unshare", "--user", "--map-user=1000", "--map-group=1000"] if os.geteuid() == 0 else []
    if become and subprocess.run([*become, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no namespaces of users")
    command = [*become, str(MUSTER), "rehearse", "--seed", "1", "--json", "--faults", NEEDS_ROOT, *JOB, "right"]
    outcome = run_tree(command, cwd=folder, env=build_env(folder), timeout_s=170).check()
    rows = json.loads(outcome.stdout)["rows"]
    assert {row["verdict"] for row in rows} == {"not tried"}, outcome.explain()
    assert all(row["reason"].startswith("it needs root") for row in rows), outcome.explain()


@pytest.mark.long
def test_a_run_in_which_the_moment_did_not_come_is_done_once_more(folder: Path) -> None:
    """The second run, the first with a fault, ends before its middle."""
    text = (folder / "train.py").read_text()
    ends = f"""\
import os
RUNS = Path({str(folder.parent)!r})
(RUNS / f"run-{{os.environ['MUSTER_JOB_ID']}}").touch()
if len(list(RUNS.glob("run-*"))) == 2:
    raise SystemExit
"""
    (folder / "train.py").write_text(text.replace("\ndef save", f"{ends}\ndef save", 1))
    outcome = rehearse(folder, "--faults", "rank-killed", "--json")
    (row,) = json.loads(outcome.stdout)["rows"]
    assert (row["verdict"], row["result"]) == ("survived", "equal"), outcome.explain()
    assert "once more" in outcome.stderr


@pytest.mark.torch
@pytest.mark.long
def test_a_loader_of_torch_is_killed(folder: Path) -> None:
    (folder / "train.py").write_text(LOADS)
    outcome = rehearse(folder, "--faults", "loader-killed", "--json")
    (row,) = json.loads(outcome.stdout)["rows"]
    assert (row["verdict"], row["result"], row["advice"]) == ("survived", "equal", []), outcome.explain()
    errors = [path.read_text() for path in Path(row["logs"]).rglob("attempt_0/*/stderr.log")]
    # torch's handler of SIGCHLD raises, or the read of a tensor that the dead process was to send fails first
    assert any("DataLoader worker" in text or "/multiprocessing/" in text for text in errors), errors
    assert not any("cannot record" in text for text in errors), errors


def list_leftovers() -> list[str]:
    mounts = [line for line in Path("/proc/self/mounts").read_text().splitlines() if "rehears" in line]
    spaces = [str(path) for path in Path("/run/netns").glob("muster-rehearsal-*")]
    return [*mounts, *spaces, *list_rehearsal_cgroups()]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.long
@pytest.mark.timeout(900)
def test_nothing_is_left_of_a_rehearsal_that_is_ended(folder: Path, no_other: None, signum: int) -> None:
    """While a rank is stopped; `test_rehearse_undo` has the namespaces and the disks."""
    command = [str(MUSTER), "rehearse", "--seed", "1", "--faults", "rank-stopped", *JOB, "right"]
    journals = folder.parent / "state" / "muster" / "rehearsals"
    with Tree(command, cwd=folder, env=build_env(folder), settle_s=40) as tree:
        wait_until(lambda: any("continue" in each.read_text() for each in journals.glob("*.json")), timeout_s=170)
        tree.send(signum)
        outcome = tree.wait()
    assert outcome.leftovers == (), outcome.explain()
    assert outcome.exit_code == (130 if signum == signal.SIGINT else -signum), outcome.explain()
    left = list(journals.glob("*.json"))
    assert bool(left) is (signum == signal.SIGKILL)
    assert ("0 of 1 faults" in outcome.stdout) is (signum != signal.SIGKILL), outcome.explain()
    if left:
        again = rehearse(folder, "--faults", "rank-killed")
        assert "undone: continue" in again.stderr, again.explain()
        assert list(journals.glob("*.json")) == []
    assert list_leftovers() == []


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_running_job_is_disturbed_after_a_question(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "train.py").write_text(
        "import time\nfrom muster import worker\nfor i in range(100000):\n    time.sleep(0.05)\n    worker.step(i)\n"
    )
    monkeypatch.setenv("XDG_STATE_HOME", str(folder.parent / "state"))
    monkeypatch.chdir(folder)
    scheduler = create_detached_scheduler("torchx")
    app_id = scheduler.submit(dist.ddp(script="train.py", j="2x1", start="cold", max_retries=5), {})
    command = [str(MUSTER), "rehearse", "--seed", "3", "--app", app_id, "--json"]
    try:
        wait_until(lambda: "steps_done" in read_events(folder.parent / "state"), what="steps")
        refused = run_tree(command, env=build_env(folder))
        assert (refused.exit_code, json.loads(refused.stdout)["rows"][0]["verdict"]) == (1, "not tried")
        assert read_events(folder.parent / "state").count('"worker_failed"') == 0
        words = ["--yes", "--faults", "rank-killed,agent-killed,preempted"]  # each time all steps are done again
        outcome = run_tree([*command, *words], env=build_env(folder), timeout_s=200).check()
        rows = json.loads(outcome.stdout)["rows"]
        assert [row["verdict"] for row in rows] == ["survived"] * 3, outcome.explain()
        assert all(row["recovery_s"] > 0 for row in rows)
        assert scheduler.describe(app_id).state.name == "RUNNING"
    finally:
        scheduler.delete(app_id)
        scheduler.close()


def read_events(state: Path) -> str:
    return "".join(path.read_text() for path in state.rglob("events.jsonl"))


def test_what_is_not_of_this_app_is_not_touched() -> None:
    """The process that is to be signalled is no agent, and below none, of the app: this test's own."""
    own = str(os.getpid())
    outcome = run_tree([sys.executable, "-c", live._SEND, "train-x7k2", own, own, "9"]).check(1)
    assert f"{own} is no agent" in outcome.stderr
    env = {**os.environ, "MUSTER_APP_ID": "train-x7k2"}
    with Tree([sys.executable, "-c", "import time; time.sleep(60)"], env=env) as tree:
        outcome = run_tree([sys.executable, "-c", live._SEND, "train-x7k2", str(tree.pid), own, "9"])
    assert f"{own} is not below " in outcome.stderr


def test_a_script_that_fails_undisturbed_is_not_disturbed(folder: Path) -> None:
    (folder / "train.py").write_text("raise SystemExit(3)")
    outcome = rehearse(folder, "--faults", "rank-killed")
    assert (outcome.exit_code, outcome.stdout) == (1, ""), outcome.explain()
    assert "did not succeed" in outcome.stderr
