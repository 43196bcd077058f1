"""Logs from a real engine: whole, apart, followed across containers."""

from datetime import datetime, timezone

import pytest
from torchx.schedulers.api import Stream

from muster.schedulers.errors import SchedulerError

pytestmark = pytest.mark.docker


def test_streams_times_long_lines_and_bytes_that_are_not_text(apps, app_of):
    program = "import sys; sys.stdout.buffer.write(b'\\xc3\\xa4' * 40000 + b'\\n\\xff\\r50%\\r100%\\n')"
    words = "for i in 1 2; do echo o$i; sleep 0.1; echo e$i >&2; sleep 0.1; done; date +%s.%N"
    app_id = apps.run(app_of(f'{words}; sleep 1.5; date +%s.%N; python3 -c "{program}"; sleep 0.1; printf end'))
    apps.wait(app_id)
    logs = apps.logs(app_id)
    first, second = logs[4:6]
    long = ["\u00e4" * 40000 + "\n", "\ufffd\r50%\r100%\n"]
    assert logs == ["o1\n", "e1\n", "o2\n", "e2\n", first, second, *long, "end"]
    assert apps.logs(app_id, should_tail=True) == logs
    assert apps.logs(app_id, streams=Stream.STDOUT) == ["o1\n", "o2\n", first, second, *long, "end"]
    assert apps.logs(app_id, streams=Stream.STDERR) == ["e1\n", "e2\n"]
    assert apps.logs(app_id, regex="[oe]2") == ["o2\n", "e2\n"]
    between = datetime.fromtimestamp((float(first) + float(second)) / 2, tz=timezone.utc)
    assert apps.logs(app_id, since=between) == logs[5:]
    assert apps.logs(app_id, until=between) == logs[:5]
    with pytest.raises(SchedulerError, match=r"'\[' is not"):
        apps.logs(app_id, regex="[")
