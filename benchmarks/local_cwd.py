"""local_cwd against TorchX's own local scheduler: submission, a line until it is read, cancel, the order of streams.

python benchmarks/local_cwd.py [--count N]
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from _sampling import SampleFailed, parse_count, sample_in_turn, show
from torchx.specs import AppDef, Resource, Role

LINES = 20
PAIRS = 500
PRINT = f"""
import time
for _ in range({LINES}):
    print(time.time(), flush=True)
    time.sleep(0.05)
time.sleep(1000)
"""
ALTERNATE = f"""
import os
for number in range({PAIRS}):
    os.write(1, f"out {{number}}\\n".encode())
    os.write(2, f"err {{number}}\\n".encode())
"""


def create_ours() -> Any:
    from muster.schedulers.local import create_scheduler

    return create_scheduler("bench")


def create_theirs() -> Any:
    from torchx.schedulers.local_scheduler import create_scheduler

    return create_scheduler("bench")


def submit(scheduler: Any, program: str, folder: str) -> tuple[str, float]:
    """Return the app and how long its submission took."""
    role = Role(
        name="r", image="", entrypoint=sys.executable, args=["-c", program], resource=Resource(cpu=1, gpu=0, memMB=1)
    )
    began_s = time.perf_counter()
    app_id = scheduler.submit(AppDef("bench", roles=[role]), {"log_dir": folder})
    return app_id, time.perf_counter() - began_s


def cancel(scheduler: Any, app_id: str) -> float:
    """Cancel, and wait until the app has ended."""
    began_s = time.perf_counter()
    scheduler.cancel(app_id)
    while scheduler.describe(app_id).state.name not in ("CANCELLED", "FAILED", "SUCCEEDED"):
        if time.perf_counter() - began_s > 60:
            raise SampleFailed
        time.sleep(0.002)
    return time.perf_counter() - began_s


def sample_submission(make: Callable[[], Any], folder: str) -> float:
    scheduler = make()
    app_id, took_s = submit(scheduler, PRINT, folder)
    cancel(scheduler, app_id)
    return took_s * 1e3


def sample_line(make: Callable[[], Any], folder: str) -> float:
    """Return the median of one app's lines."""
    scheduler = make()
    app_id, _ = submit(scheduler, PRINT, folder)
    late = []
    for line in scheduler.log_iter(app_id, "r", should_tail=True):
        late.append(time.time() - float(line))
        if len(late) == LINES:
            break
    cancel(scheduler, app_id)
    return sorted(late)[LINES // 2] * 1e3


def sample_cancel(make: Callable[[], Any], folder: str) -> float:
    scheduler = make()
    app_id, _ = submit(scheduler, PRINT, folder)
    next(iter(scheduler.log_iter(app_id, "r", should_tail=True)))
    return cancel(scheduler, app_id) * 1e3


def sample_order(make: Callable[[], Any], folder: str) -> float:
    """Per cent of alternating lines that are out of place."""
    scheduler = make()
    app_id, _ = submit(scheduler, ALTERNATE, folder)
    text = "".join(scheduler.log_iter(app_id, "r", should_tail=True))
    expected = [f"{word} {number}" for number in range(PAIRS) for word in ("out", "err")]
    lines = text.splitlines()
    if len(lines) != len(expected):
        raise SampleFailed
    return 100 * sum(a != b for a, b in zip(lines, expected, strict=True)) / len(expected)


def main(count: int) -> None:
    figures = {
        "submission": (sample_submission, "ms"),
        "a line until it is read": (sample_line, "ms"),
        "cancel": (sample_cancel, "ms"),
        "lines out of order": (sample_order, "%"),
    }
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as folder:
        os.environ["XDG_STATE_HOME"] = os.path.join(folder, "state")
        for name, (sample, unit) in figures.items():
            samplers = {
                "muster": lambda sample=sample: sample(create_ours, folder),
                "torchx": lambda sample=sample: sample(create_theirs, folder),
            }
            show(name, sample_in_turn(count, samplers), unit=unit)


if __name__ == "__main__":
    main(parse_count(__doc__))
