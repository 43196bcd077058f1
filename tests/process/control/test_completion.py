"""What `muster completion bash` prints, read by bash."""

import os
import subprocess
import sys

import pytest

from muster.schedulers.supervision.app_folder import AppFolder
from muster.schedulers.supervision.registry import AppRegistry, find_state_dir


@pytest.fixture
def printed():
    command = [sys.executable, "-m", "muster", "completion", "bash"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_bash_completes_commands_and_options(printed):
    for words, expected in ((["muster", "pa"], "pause"), (["muster", "stop", "--l"], "--limit")):
        script = (
            f"{printed}\nCOMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _muster; echo ${{COMPREPLY[@]}}"
        )
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
        assert done.stdout == f"{expected}\n"


def test_bash_completes_names_of_jobs(tmp_path, printed):
    """`muster` itself is asked for them when the shell needs them."""
    app = AppFolder(tmp_path / "train-x7k2")
    app.spec_file.parent.mkdir(parents=True)
    app.spec_file.touch()
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    AppRegistry(find_state_dir(env), "local_cwd").add("train-x7k2", app.path)
    script = f"""{printed}
muster() {{ {sys.executable} -m muster "$@"; }}
COMP_WORDS=(muster stop tr); COMP_CWORD=2; _muster; echo ${{COMPREPLY[@]}}"""
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, env=env)
    assert (done.stdout, done.stderr) == ("train-x7k2\n", "")


def test_a_reader_that_goes_is_no_error():
    """As with `muster stacks ... | head`."""
    command = f"{sys.executable} -m muster completion bash"
    done = subprocess.run(
        ["bash", "-c", f"{command} | true; exit ${{PIPESTATUS[0]}}"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) in ((141, ""), (0, ""))  # 0: it was faster
