"""How long a browser takes for pages of `muster timeline`: a week of 64 nodes with 500 restarts, and one restart.

    python benchmarks/timeline_page.py [--count N]

Headless Chromium, from its start until it has run the page's script and printed what the page has become.
"""

import subprocess
import sys
import time
from pathlib import Path

import _launching
from _sampling import build_parser, sample_in_turn, show

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from doubles.job_records import Job, make_week

from muster.cli.history.clocks import place
from muster.cli.history.page import build_page
from muster.cli.history.sources import parse_files
from muster.cli.history.story import tell

LIMIT_S = 60.0
BROWSER = ("chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom")


def write_page(job: Job, path: Path) -> Path:
    """Write the page of a job."""
    path.write_text(build_page(tell("job", place(parse_files(iter(job.list_files()))))))
    return path


def measure_s(page: Path) -> float:
    """Open the page once."""
    started_s = time.monotonic()
    command = [*BROWSER, f"--user-data-dir={page.parent / 'browser'}", page.as_uri()]
    subprocess.run(command, capture_output=True, check=True, timeout=LIMIT_S)
    return time.monotonic() - started_s


def main(count: int) -> None:
    """Compare both pages."""
    with _launching.scratch() as folder:
        pages = {
            "a week": write_page(make_week(), folder / "week.html"),
            "one restart": write_page(make_week(2, 1), folder / "one.html"),
        }
        for name, page in pages.items():
            print(f"{name}: {page.stat().st_size / 1000:.0f} kB")
        samplers = {name: lambda page=page: measure_s(page) for name, page in pages.items()}
        show("the page in Chromium", sample_in_turn(count, samplers))


if __name__ == "__main__":
    main(build_parser(__doc__).parse_args().count)
