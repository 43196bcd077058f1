"""Following a log of local_cwd: every line of both streams, once, whole, at any speed."""

import pytest
from harness import PROGRAMS

from muster.components import dist

PROGRAM = str(PROGRAMS / "logs_two_streams.py")


def build_lines(name, rank, count, more):
    return [f"{name} {rank} {number:06d} {'.' * more * (number % 10 == 0)}\n" for number in range(count)]


@pytest.mark.parametrize(
    ("count", "per_second", "more"),
    [
        pytest.param(20_000, 0, 0, marks=pytest.mark.long),
        pytest.param(300, 100, 0, marks=pytest.mark.long),
        (2000, 0, 40_000),
    ],
)
def test_every_line_of_the_workers_of_a_job(scheduler, count, per_second, more):
    """Of each stream, at so many lines a second (0: full speed); every tenth line is longer by `more`."""
    app = dist.ddp(str(count), str(per_second), str(more), script=PROGRAM, j="1x2", start="cold")
    app_id = scheduler.submit(app, {})
    followed = list(scheduler.log_iter(app_id, app.roles[0].name, should_tail=True))
    of_workers = [line.partition("]:") for line in followed if "]:" in line]
    assert len(of_workers) == 4 * count
    for rank in (0, 1):
        for name in ("out", "err"):
            lines = [text for _, _, text in of_workers if text.startswith(f"{name} {rank} ")]
            assert lines == build_lines(name, rank, count, more)
