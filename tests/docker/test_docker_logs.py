"""Logs from a real engine: whole, apart, followed across containers."""

from datetime import datetime, timezone
from pathlib import Path

import pytest
from torchx.schedulers.api import Stream
from torchx.specs import AppState

from muster.schedulers.errors import SchedulerError

pytestmark = pytest.mark.docker

LINES = 100_000
PROGRAM = Path(__file__).parents[1] / "programs" / "logs_two_streams.py"


def test_long_logs_are_whole(apps, app_of):
    app_id = apps.run(app_of(f"seq -f 'line %.0f of replica ${{replica_id}}' {LINES}", replicas=2))
    followed = list(apps.runner.log_lines(f"docker://test/{app_id}", "w", 0, should_tail=True))
    assert apps.wait(app_id).state == AppState.SUCCEEDED
    for replica in range(2):
        expected = [f"line {number} of replica {replica}\n" for number in range(1, LINES + 1)]
        assert apps.logs(app_id, replica=replica) == expected
    assert followed == [f"line {number} of replica 0\n" for number in range(1, LINES + 1)]


def test_streams_separate_and_combined(apps, app_of):
    app_id = apps.run(app_of("for i in 1 2 3; do echo o$i; sleep 0.1; echo e$i >&2; sleep 0.1; done; printf end"))
    apps.wait(app_id)
    assert apps.logs(app_id, streams=Stream.STDOUT) == ["o1\n", "o2\n", "o3\n", "end"]
    assert apps.logs(app_id, streams=Stream.STDERR) == ["e1\n", "e2\n", "e3\n"]
    assert apps.logs(app_id) == ["o1\n", "e1\n", "o2\n", "e2\n", "o3\n", "e3\n", "end"]
    assert apps.logs(app_id, regex="[oe]2") == ["o2\n", "e2\n"]


def test_long_lines_and_bytes_that_are_not_text(apps, app_of):
    program = "import sys; sys.stdout.buffer.write(b'\\xc3\\xa4' * 40000 + b'\\n\\xff\\r50%\\r100%\\n')"
    app_id = apps.run(app_of("", entrypoint="python3", args=["-c", program]))
    apps.wait(app_id)
    expected = ["\u00e4" * 40000 + "\n", "\ufffd\r50%\r100%\n"]
    assert apps.logs(app_id) == expected
    assert apps.logs(app_id, should_tail=True) == expected


def test_since_and_until(apps, app_of):
    app_id = apps.run(app_of("date +%s.%N; sleep 1.5; date +%s.%N"))
    apps.wait(app_id)
    first, second = apps.logs(app_id)
    between = datetime.fromtimestamp((float(first) + float(second)) / 2, tz=timezone.utc)
    assert apps.logs(app_id, since=between) == [second]
    assert apps.logs(app_id, until=between) == [first]


def test_missing_roles_and_replicas_are_one_line(apps, app_of):
    app_id = apps.run(app_of("true"))
    with pytest.raises(SchedulerError, match="no role 'x'; it has: w"):
        apps.logs(app_id, role="x")
    with pytest.raises(SchedulerError, match="replicas 0 to 0, not 7"):
        apps.logs(app_id, replica=7)
    with pytest.raises(SchedulerError, match=r"'\[' is not a valid regex"):
        apps.logs(app_id, regex="[")


@pytest.mark.parametrize(("count", "per_second", "more"), [(10_000, 0, 0), (300, 100, 0), (1000, 0, 40_000)])
def test_every_line_of_both_streams_is_followed_once(apps, app_of, count, per_second, more):
    """At full speed, gently, and with lines that the engine cuts into records of 16 KiB."""
    words = [PROGRAM.read_text(), str(count), str(per_second), str(more)]
    app_id = apps.run(app_of("", entrypoint="python3", args=["-c", *words]))
    followed = list(apps.runner.log_lines(f"docker://test/{app_id}", "w", 0, should_tail=True))
    assert apps.wait(app_id).state == AppState.SUCCEEDED
    for name in ("out", "err"):
        lines = [line for line in followed if line.startswith(name)]
        assert lines == [f"{name} 0 {number:06d} {'.' * more * (number % 10 == 0)}\n" for number in range(count)]
    assert len(followed) == 2 * count
