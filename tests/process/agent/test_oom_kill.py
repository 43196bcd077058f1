"""A real OOM kill in a real cgroup."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from memory_cgroup import join, memory_cgroup

LIMIT_BYTES = 48 << 20
AGENT = """
import json, os, signal, sys
from muster.agent.diagnosis.failures import OomWatch
from muster.agent.workers.memory import MemoryWatch
watch = OomWatch(MemoryWatch())
before = watch.check()
pid = os.fork()
if not pid:
    hog = [bytearray(os.urandom(1 << 20)) for _ in range(200)]
    os._exit(0)
_, status = os.waitpid(pid, 0)
found = watch.check()
print(json.dumps([before is None, os.waitstatus_to_exitcode(status), found and
    [found.certain, found.limit_bytes, found.peak_bytes, found.source]]))
"""


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    with memory_cgroup(LIMIT_BYTES) as folder:
        yield folder


def test_a_kill_for_memory_is_recognised_with_limit_and_peak(small_cgroup: Path) -> None:
    command = join(small_cgroup, sys.executable, "-c", AGENT)
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert outcome.returncode == 0, outcome.stderr
    nothing_before, code, evidence = json.loads(outcome.stdout)
    assert nothing_before
    assert code == -9
    certain, limit_bytes, peak_bytes, source = evidence
    assert certain
    assert limit_bytes == LIMIT_BYTES
    assert peak_bytes is None or peak_bytes > LIMIT_BYTES * 0.9
    assert source.startswith(str(small_cgroup))
