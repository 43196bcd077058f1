"""`muster run`: TorchX's arguments and exit codes, lines and bars as they come, the report at the very end."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from terminal import TerminalProgram, render

pytestmark = pytest.mark.torchx

BIN = Path(sys.executable).parent
BARS = """
import sys, time
for step in range(20):
    sys.stderr.write(f"\\r{step * 5:3d}%|{'#' * (step // 2):10}|")
    sys.stderr.flush()
    time.sleep(0.1)
sys.stderr.write("\\r100%|##########|\\n")
"""
SLOW = """
import signal, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.exit("saved"))
print("up", flush=True)
time.sleep(600)
"""
DEAF = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(600)\n"


@pytest.fixture
def env(tmp_path):
    made = {**os.environ, "TERM": "xterm", "NO_COLOR": "1", "XDG_STATE_HOME": str(tmp_path / "state")}
    made["TORCHX_CONFIG"] = ""
    return made


def run(tmp_path, env, *words, program="muster"):
    command = [str(BIN / program), "run", *words]
    return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_a_job_that_succeeds(tmp_path, env):
    (tmp_path / "train.py").write_text("import os\nprint('rank', os.environ['RANK'])\n")
    done = run(tmp_path, env, "-s", "local_cwd", "dist.ddp", "-j", "1x2", "--start", "cold", "--script", "train.py")
    assert done.returncode == 0, done
    assert re.fullmatch(r"local_cwd://torchx/train-\w+\n", done.stdout), "only the handle, for programs"
    assert sorted(re.findall(r"^train/0 \[train\d\]:(rank \d)$", done.stderr, re.MULTILINE)) == ["rank 0", "rank 1"], (
        done.stderr
    )
    assert re.search(r"^muster: train-\w+ SUCCEEDED: ended at \d\d:\d\d after ", done.stderr.splitlines()[-1]), (
        done.stderr
    )


def test_a_job_that_fails_ends_with_its_report(tmp_path, env):
    (tmp_path / "train.py").write_text("raise ValueError('bad batch')\n")
    done = run(tmp_path, env, "dist.ddp", "-j", "2x1", "--start", "cold", "--script", "train.py")
    assert done.returncode == 1, done
    lines, _, report = done.stderr.partition("=" * 70 + "\nJOB FAILED ")
    assert "ValueError: bad batch" in report, done.stderr
    assert "train/" not in report.replace("/train/train", ""), "nothing comes after it"
    assert lines.count("Traceback") >= 1
    assert "AppStatus" not in done.stderr, "TorchX's dump of the state"


def test_a_job_that_goes_on_alone_ends_with_its_report_too(tmp_path, env):
    """With --wait and without --log its lines are not shown: it ended with one line."""
    (tmp_path / "train.py").write_text("print('here')\nraise ValueError('bad batch')\n")
    words = ["-s", "detached", "--wait", "dist.ddp", "-j", "2x1", "--start", "cold", "--script", "train.py"]
    done = run(tmp_path, env, *words)
    assert done.returncode == 1, done
    lines, _, report = done.stderr.partition("=" * 70 + "\nJOB FAILED ")
    assert "ValueError: bad batch" in report, done.stderr
    assert "here" not in lines, done.stderr
    assert re.search(r"`muster log --failed train-\w+` those of the root cause\n$", lines), "the report refers to them"


def test_a_program_that_is_no_agent_ends_with_the_reason(tmp_path, env):
    (tmp_path / "app.py").write_text(
        "from torchx import specs\n\n\ndef app() -> specs.AppDef:\n"
        '    """An app."""\n'
        '    return specs.AppDef("a", [specs.Role("r", image="", entrypoint="sh", args=["-c", "exit 3"])])\n'
    )
    done = run(tmp_path, env, "app.py:app")
    assert done.returncode == 1, done
    assert re.search(r"^muster: a-\w+ FAILED: r/0 exited with code 3; ", done.stderr.splitlines()[-1]), done.stderr


def test_it_takes_what_torchx_run_takes(tmp_path, env):
    """A dry run shows the same to the name's random end and the port."""
    (tmp_path / "train.py").write_text("")
    words = ["--dryrun", "-s", "local_cwd", "-cfg", f"log_dir={tmp_path}/logs", "--parent_run_id", "p1"]
    words += ["--workspace", f"file://{tmp_path}", "dist.ddp", "-j", "2x2", "--script", "train.py", "--", "--lr", "1"]
    ours, theirs = (run(tmp_path, env, *words, program=program) for program in ("muster", "torchx"))
    assert (ours.returncode, theirs.returncode) == (0, 0), ours
    random = r"train-[a-z0-9]+|[0-9a-f]{8}-[0-9a-f-]{27}"  # the app's name; on the nightly a session, too
    texts = [re.sub(random, "X", each.stdout) for each in (ours, theirs)]
    assert re.sub(r"port.{0,4}\d+", "", texts[0]) == re.sub(r"port.{0,4}\d+", "", texts[1])
    assert "SCHEDULER REQUEST" in texts[0]


def test_defaults_of_torchxconfig(tmp_path, env):
    (tmp_path / "train.py").write_text("print('here')\n")
    (tmp_path / ".torchxconfig").write_text(
        "[cli:run]\nscheduler = local_cwd\ncomponent = dist.ddp\n\n[component:dist.ddp]\nj = 1x1\nstart = cold\n"
    )
    del env["TORCHX_CONFIG"]
    done = run(tmp_path, env, "--", "--script", "train.py")
    assert (done.returncode, "]:here\n" in done.stderr) == (0, True), done


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["-s", "nowhere", "dist.ddp"], "muster: there is no scheduler 'nowhere'; there are: "),
        (["dist.nothing"], "muster: component dist.nothing: Component `dist.nothing` not found. "),
        (["-cfg", "color=red", "dist.ddp", "--script", "train.py"], "color"),
        (["dist.ddp", "-j", "1x", "--script", "train.py"], "1x"),
        (["dist.ddp", "--script", "missing.py"], "missing.py"),
    ],
)
def test_what_cannot_run_is_one_line(tmp_path, env, words, line):
    (tmp_path / "train.py").write_text("")
    done = run(tmp_path, env, *words)
    assert done.returncode in (1, 2), done
    assert line in done.stderr, done
    assert "Traceback" not in done.stderr, done


def test_bars_are_rows_below_the_lines(tmp_path, env):
    (tmp_path / "train.py").write_text(BARS)
    command = [str(BIN / "muster"), "run", "dist.ddp", "-j", "1x2", "--start", "cold", "--script", "train.py"]
    with TerminalProgram(command, env=env, cwd=tmp_path) as shown:
        text = shown.read_until(None)
    rows = [part for part in text.split("\x1b[K") if "[train0]: " in part and "[train1]: " in part]
    assert rows, text
    screen = render(text.replace("\r\n", "\n"))
    assert sum("100%|##########|" in row for row in screen) == 2, screen
    assert screen[-1 if screen[-1] else -2].startswith("muster: train-"), screen


def test_ctrl_c_stops_politely(tmp_path, env):
    (tmp_path / "train.py").write_text(SLOW)
    command = [str(BIN / "muster"), "run", "dist.ddp", "-j", "1x1", "--start", "cold", "--script", "train.py"]
    with TerminalProgram(command, env=env, cwd=tmp_path, has_keys=True) as shown:
        shown.read_until("up")
        shown.type("\x03")
        text = shown.read_until(None)
        assert shown.wait() == 128 + signal.SIGINT, text
    assert "]:saved" in text, text
    assert "goes on" not in text
    listed = subprocess.run([str(BIN / "muster"), "status", "last"], env=env, capture_output=True, text=True)
    assert (listed.returncode, "CANCELLED" in listed.stdout) == (7, True), listed


def test_a_second_ctrl_c_kills(tmp_path, env):
    (tmp_path / "train.py").write_text(DEAF)
    command = [str(BIN / "muster"), "run", "dist.ddp", "-j", "1x1", "--start", "cold", "--script", "train.py"]
    with TerminalProgram(command, env=env, cwd=tmp_path, has_keys=True) as shown:
        shown.read_until("up")
        shown.type("\x03")
        shown.read_until("Ctrl-C again kills")
        shown.type("\x03")
        text = shown.read_until(None, timeout_s=20)
        assert shown.wait() != 0, text


def test_a_job_that_is_not_the_commands_goes_on_after_ctrl_c(tmp_path, env):
    (tmp_path / "train.py").write_text(SLOW)
    words = ["run", "-s", "detached", "--log", "dist.ddp", "-j", "1x1", "--start", "cold", "--script", "train.py"]
    with TerminalProgram([str(BIN / "muster"), *words], env=env, cwd=tmp_path, has_keys=True) as shown:
        shown.read_until("]:up")
        shown.type("\x03")
        text = shown.read_until(None, timeout_s=60)
        assert shown.wait() == 128 + signal.SIGINT, text
    line = r"the job goes on: `muster log -f train-\w+` follows it, `torchx cancel detached://torchx/train-\w+` ends it"
    assert re.search(line, text), text
    assert text.count("goes on") == 1, text
    status = subprocess.run([str(BIN / "muster"), "status"], env=env, capture_output=True, text=True)
    subprocess.run([str(BIN / "muster"), "delete", "last"], env=env, timeout=60, check=True, capture_output=True)
    assert (status.returncode, "RUNNING" in status.stdout) == (10, True), status
