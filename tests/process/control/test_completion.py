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
