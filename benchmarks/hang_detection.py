"""How long after the last sign of life the page stands on the console, for each hang that the tests know.

The rows are those of `tests/process/agent/test_hangs.py`, cold and warm in turn, with `--hang-timeout 4
--hang-action report`. The last sign of life is the last rank's "ready", which follows its fifth all-reduce. The goal is
the limit plus 2 s.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from _launching import MUSTER, build_standalone_flags, clean_env, stop
from _sampling import SampleFailed, build_parser, sample_in_turn, show

PROGRAM = Path(__file__).parents[1] / "tests" / "programs" / "hangs" / "hang.py"
LIMIT_S = 4
GOAL_S = LIMIT_S + 2.0
WAIT_S = 90.0
ABSENT = "did not enter all_reduce #6 of default_pg"
ROWS = {
    "sleeps": ABSENT,
    "skips": "entered barrier #6 of default_pg",
    "other": "entered broadcast #6 of default_pg",
    "size": "entered all_reduce #6 of default_pg (0 x float32)",
    "leaves": "has ended; rank 0 has waited",
    "spins": ABSENT,
    "native": ABSENT,
    "init": "did not call init_process_group",
    "loads": ABSENT,
    "group": "did not enter barrier #1 of pair",
    "receives": "is elsewhere while rank 0 waits in recv",
    "stops": "is stopped (SIGSTOP)",
}
"""By what the program does: what the page says."""


def measure_s(how: str, start: str) -> float:
    """Return the seconds from the last "ready" to the line that names the rank.

    Raises:
        SampleFailed: there was none.
    """
    flags = ["--hang-timeout", str(LIMIT_S), "--hang-action", "report", "--shutdown-timeout", "1", "--start", start]
    with run([*MUSTER, *build_standalone_flags(2), *flags, str(PROGRAM), how, "1"]) as output:
        until_s, ready_s, text, count = time.monotonic() + WAIT_S, 0.0, "", 0
        while time.monotonic() < until_s:
            try:
                text += os.read(output, 65536).decode(errors="replace")
            except BlockingIOError:
                time.sleep(0.005)
                continue
            if text.count("ready") > count:
                count, ready_s = text.count("ready"), time.monotonic()
            if ROWS[how] in text:
                return time.monotonic() - ready_s
    raise SampleFailed


@contextmanager
def run(argv: list[str]) -> Iterator[int]:
    """Start a job; gives the descriptor, which does not block, that has what it prints."""
    process = subprocess.Popen(
        argv, env=clean_env(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    assert process.stdout is not None
    output = process.stdout.fileno()
    os.set_blocking(output, False)
    try:
        yield output
    finally:
        with suppress(OSError):
            stop(process)
        process.stdout.close()


def main() -> None:
    """Print one row for each hang."""
    parser = build_parser(__doc__)
    parser.set_defaults(count=3)
    parser.add_argument("rows", nargs="*", default=list(ROWS), metavar="ROW", help="all, if not given")
    arguments = parser.parse_args()
    for how in arguments.rows:
        starts = {start: lambda start=start, how=how: measure_s(how, start) for start in ("cold", "warm")}
        for start, samples in sample_in_turn(arguments.count, starts, warmups=0).items():
            show(f"{how}, {start}", {"muster": samples}, limit=GOAL_S)


if __name__ == "__main__":
    sys.exit(main())
