"""What `muster completion bash` prints, read by bash."""

import subprocess
import sys


def test_bash_completes_commands_and_options():
    printed = subprocess.run(
        [sys.executable, "-m", "muster", "completion", "bash"], capture_output=True, text=True, check=True
    ).stdout
    for words, expected in ((["muster", "pa"], "pause"), (["muster", "stop", "--l"], "--limit")):
        script = (
            f"{printed}\nCOMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _muster; echo ${{COMPREPLY[@]}}"
        )
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
        assert done.stdout == f"{expected}\n"


def test_a_reader_that_goes_is_no_error():
    """As with `muster stacks ... | head`."""
    command = f"{sys.executable} -m muster completion bash"
    done = subprocess.run(
        ["bash", "-c", f"{command} | true; exit ${{PIPESTATUS[0]}}"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) in ((141, ""), (0, ""))  # 0: it was faster
