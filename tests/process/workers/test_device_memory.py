"""A restart waits for its devices' memory: by a library that has NVML's interface and is built here."""

import os
import threading
import time
from pathlib import Path

from harness import AGENT, run_tree, wait_until

GIB = 1 << 30
SCRIPT = """\
echo attempt $TORCHELASTIC_RESTART_COUNT has $(cut -d: -f2 $STAND_IN_FILE)
if [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then
    echo 0:$((61 << 30)):$((80 << 30)) > $STAND_IN_FILE.new; mv $STAND_IN_FILE.new $STAND_IN_FILE
    kill -9 $$
fi
"""


def test_workers_start_again_when_the_memory_of_those_that_were_killed_is_free(nvml: str, tmp_path: Path) -> None:
    gpus = tmp_path / "gpus"
    gpus.write_text(f"0:0:{80 * GIB}\n")
    (tmp_path / "train.sh").write_text(SCRIPT)
    env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    env |= {"MUSTER_NVML": nvml, "STAND_IN_FILE": str(gpus)}

    def free() -> None:
        wait_until(lambda: not gpus.read_text().startswith("0:0:"), what="a worker")
        time.sleep(1.5)  # as a driver that is slow
        (tmp_path / "free").write_text(f"0:0:{80 * GIB}\n")
        os.replace(tmp_path / "free", gpus)

    driver = threading.Thread(target=free)
    driver.start()
    argv = [*AGENT, "--standalone", "--nproc-per-node", "1", "--max-restarts", "1"]
    outcome = run_tree([*argv, "--no-python", "sh", str(tmp_path / "train.sh")], env=env, cwd=tmp_path)
    driver.join()
    assert (outcome.exit_code, outcome.leftovers) == (0, ()), outcome.explain()
    assert "attempt 0 has 0" in outcome.stdout
    assert "attempt 1 has 0" in outcome.stdout, outcome.explain()
