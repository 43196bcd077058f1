"""How long until the user's first line runs: the agent from its source folder, and from the bundle that travels.

"unpacked" is every start on a node but the first; "first" finds no folder of an earlier start; "zip" may make none.

python benchmarks/bundle.py [--count N]
"""

import sys
from collections.abc import Callable
from pathlib import Path

import _launching
from _launching import MUSTER, Command, build_standalone_flags, launched
from _sampling import parse_count, sample_in_turn, show

from muster.schedulers.bundle import build_agent_bundle

MARK = """
import json, os, time
line = json.dumps({"t": time.monotonic(), "rank": os.environ["RANK"]}) + "\\n"
fd = os.open(os.environ["MARKS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
os.write(fd, line.encode())
"""


def first_line_s(launcher: Command, folder: Path, start: str, **env: str) -> float:
    """Measure the time from the start of the launcher's process to the first line of the last of two workers."""
    flags = [*build_standalone_flags(2), "--start", start]
    with launched(launcher, folder, MARK, flags, **{"TMPDIR": str(folder), **env}) as job:
        return job.wait_last_s(2)


def main(count: int) -> None:
    with _launching.scratch() as folder:
        path = folder / "muster-agent.zip"
        path.write_bytes(build_agent_bundle())
        bundle = (sys.executable, str(path))
        numbers = iter(range(sys.maxsize))

        def first_start_s(start: str) -> float:
            fresh = folder / f"node{next(numbers)}"
            fresh.mkdir()
            return first_line_s(bundle, folder, start, TMPDIR=str(fresh))

        for start in ("cold", "auto"):
            samplers: dict[str, Callable[[], float]] = {
                "unpacked": lambda start=start: first_line_s(bundle, folder, start),
                "source": lambda start=start: first_line_s(MUSTER, folder, start),
                "first": lambda start=start: first_start_s(start),
                "zip": lambda start=start: first_line_s(bundle, folder, start, PYTHONDONTWRITEBYTECODE="1"),
            }
            series = sample_in_turn(count, samplers)
            show(f"first script line, 2 workers, --start {start}", series, limit=1.3)


if __name__ == "__main__":
    main(parse_count(__doc__))
