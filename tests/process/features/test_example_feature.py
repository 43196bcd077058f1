"""The feature of the examples works in a copy of the package, with its row and without any other change."""

import json
import os
import re
import shutil
from pathlib import Path

from harness import AGENT, ROOT, Tree, wait_until

EXAMPLE = ROOT / "examples" / "peak_memory"
SCRIPT = """
import os, time
from muster import worker
block = b"x" * (100 << 20) if os.environ["RANK"] == "1" else b""
worker.step(1, loss=0.5)
while not os.path.exists("end"):
    time.sleep(0.05)
"""


def test_each_workers_peak_memory_is_in_the_status(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "muster", tmp_path / "muster", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(EXAMPLE, tmp_path / "muster/agent/features/peak_memory")
    (row,) = re.findall(r"^    (PartRow\(.*\),)$", (EXAMPLE / "__init__.py").read_text(), re.MULTILINE)
    table = tmp_path / "muster/agent/features/__init__.py"
    head = "PARTS: Final[tuple[PartRow, ...]] = (\n"
    table.write_text(table.read_text().replace(head, f"{head}    {row}\n"))
    (tmp_path / "main.py").write_text(SCRIPT)
    flags = ["--standalone", "--start", "cold", "--nproc-per-node", "2", "--log-dir", "logs"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def read_values() -> list[dict[str, float]]:
        (path,) = (tmp_path / "logs").glob("*/status.json")
        return [rank["values"] for rank in json.loads(path.read_text())["ranks"]]

    def has_peaks() -> bool:
        try:
            low, high = (values["peak_memory_mib"] for values in read_values())
        except (KeyError, ValueError):
            return False
        return high > low + 80

    with Tree([*AGENT, *flags, "main.py"], cwd=tmp_path, env=env) as tree:
        wait_until(has_peaks, what="both ranks' peaks are shown")
        assert [values["loss"] for values in read_values()] == [0.5, 0.5]
        (tmp_path / "end").touch()
        tree.wait().check()
