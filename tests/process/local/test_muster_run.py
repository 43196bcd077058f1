"""`muster run`: TorchX's arguments and exit codes, lines as they come, the report at the very end."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from terminal import TerminalProgram

BIN = Path(sys.executable).parent
SLOW = """
import signal, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.exit("saved"))
print("up", flush=True)
time.sleep(600)
"""


@pytest.fixture
def env(tmp_path):
    made = {**os.environ, "TERM": "xterm", "NO_COLOR": "1", "XDG_STATE_HOME": str(tmp_path / "state")}
    made["TORCHX_CONFIG"] = ""
    return made


def run(tmp_path, env, *words):
    command = [str(BIN / "muster"), "run", *words]
    return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.torchx
def test_a_job_that_succeeds(tmp_path, env):
    (tmp_path / "train.py").write_text("import os\nprint('rank', os.environ['RANK'])\n")
    done = run(tmp_path, env, "-s", "local_cwd", "dist.ddp", "-j", "1x2", "--start", "cold", "--script", "train.py")
    assert done.returncode == 0, done
    assert re.fullmatch(r"local_cwd://torchx/train-\w+\n", done.stdout), "only the handle, for programs"
    assert sorted(re.findall(r"^train/0 \[train\d\]:(rank \d)$", done.stderr, re.MULTILINE)) == ["rank 0", "rank 1"], (
        done.stderr
    )
    assert re.search(r"^muster: train-\w+ SUCCEEDED: ", done.stderr.splitlines()[-1]), done.stderr


def test_a_job_that_fails_ends_with_its_report(tmp_path, env):
    (tmp_path / "train.py").write_text("raise ValueError('bad batch')\n")
    done = run(tmp_path, env, "dist.ddp", "-j", "2x1", "--start", "cold", "--script", "train.py")
    assert done.returncode == 1, done
    lines, _, report = done.stderr.partition("=" * 70 + "\nJOB FAILED ")
    assert "ValueError: bad batch" in report, done.stderr
    assert "train/" not in report.replace("/train/train", ""), "nothing comes after it"
    assert lines.count("Traceback") >= 1
    assert "AppStatus" not in done.stderr, "TorchX's dump of the state"


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    """This process runs the command there."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(tmp_path)


@pytest.mark.torchx
@pytest.mark.usefixtures("in_folder")
def test_it_takes_what_torchx_run_takes(tmp_path, muster, torchx):
    """A dry run shows the same to the name's random end and the port."""
    Path("train.py").write_text("")
    words = ["run", "--dryrun", "-s", "local_cwd", "-cfg", f"log_dir={tmp_path}/logs", "--parent_run_id", "p1"]
    words += ["--workspace", f"file://{tmp_path}", "dist.ddp", "-j", "2x2", "--script", "train.py", "--", "--lr", "1"]
    ours, theirs = (command(*words) for command in (muster, torchx))
    assert (ours[0], theirs[0]) == (0, 0), ours
    random = r"train-[a-z0-9]+|[0-9a-f]{8}-[0-9a-f-]{27}"  # the app's name; on the nightly a session, too
    texts = [re.sub(r"port.{0,4}\d+", "", re.sub(random, "X", told)) for _, told, _ in (ours, theirs)]
    assert texts[0] == texts[1]
    assert "SCHEDULER REQUEST" in texts[0]


def test_defaults_of_torchxconfig(tmp_path, env):
    (tmp_path / "train.py").write_text("print('here')\n")
    (tmp_path / ".torchxconfig").write_text(
        "[cli:run]\nscheduler = local_cwd\ncomponent = dist.ddp\n\n[component:dist.ddp]\nj = 1x1\nstart = cold\n"
    )
    del env["TORCHX_CONFIG"]
    done = run(tmp_path, env, "--", "--script", "train.py")
    assert (done.returncode, "]:here\n" in done.stderr) == (0, True), done


def test_ctrl_c_stops_politely(tmp_path, env):
    (tmp_path / "train.py").write_text(SLOW)
    command = [str(BIN / "muster"), "run", "dist.ddp", "-j", "1x1", "--start", "cold", "--script", "train.py"]
    with TerminalProgram(command, env=env, cwd=tmp_path, has_keys=True) as shown:
        shown.read_until("up")
        shown.type("\x03")
        text = shown.finish(128 + signal.SIGINT)
    assert "]:saved" in text, text
    assert "goes on" not in text
    listed = subprocess.run([str(BIN / "muster"), "status", "last"], env=env, capture_output=True, text=True)
    assert (listed.returncode, "CANCELLED" in listed.stdout) == (7, True), listed
