"""What the benchmarks share: samples taken in turn, medians with spread, one table; launchers' command lines.

The machines are shared and noisy: the launchers take turns sample by sample, and the ratio of the medians is what
counts. A sample that fails is counted and left out.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

BIN = Path(sys.executable).parent
MUSTER = (sys.executable, "-m", "muster.agent")
TORCHRUN = (str(BIN / "torchrun"),)
LAUNCHERS: Mapping[str, tuple[str, ...]] = {"muster": MUSTER, "torchrun": TORCHRUN}


class SampleFailed(Exception):
    """A run that did not get to what is measured."""


@dataclass
class Series:
    """The samples of one launcher for one figure."""

    values: list[float] = field(default_factory=list)
    failures: int = 0

    @property
    def median(self) -> float:
        return statistics.median(self.values) if self.values else float("nan")

    def describe(self, unit: str) -> str:
        if not self.values:
            return f"none of {self.failures}"
        text = f"{self.median:.3g} {unit} ({min(self.values):.3g}..{max(self.values):.3g}, n={len(self.values)}"
        return text + (f", {self.failures} failed)" if self.failures else ")")


def take_turns(runs: int, samplers: Mapping[str, Callable[[], float]], *, warmups: int = 1) -> dict[str, Series]:
    """Call each sampler `runs` times, in turn, after uncounted warm-ups; a sampler returns its figure."""
    series = {name: Series() for name in samplers}
    for number in range(-warmups, runs):
        for name, sample in samplers.items():
            try:
                value = sample()
            except SampleFailed:
                series[name].failures += number >= 0
                continue
            if number >= 0:
                series[name].values.append(value)
    return series


def show(figure: str, series: Mapping[str, Series], *, unit: str = "s", limit: float | None = None) -> None:
    """Print one row: each launcher's median and spread, and the first's ratio to the second."""
    names = list(series)
    row = "  ".join(f"{name} {series[name].describe(unit)}" for name in names)
    if len(names) > 1 and series[names[1]].values:
        ratio = series[names[0]].median / series[names[1]].median
        row += f"  ratio {ratio:.3f}" + (f" (goal {limit})" if limit is not None else "")
    print(f"{figure}: {row}", flush=True)


@contextmanager
def scratch() -> Iterator[Path]:
    """A temporary folder."""
    folder = Path(tempfile.mkdtemp(prefix="muster-bench-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def clean_env(**extra: str) -> dict[str, str]:
    """This environment without what a launcher would take for its own."""
    left_out = ("PET_", "TORCHELASTIC_", "MUSTER_", "PYTHONDONTWRITEBYTECODE")  # both launchers run compiled code
    env = {k: v for k, v in os.environ.items() if not k.startswith(left_out)}
    return {**env, "PYTHONUNBUFFERED": "1", **extra}


def start(argv: Sequence[str], **env: str) -> subprocess.Popen[bytes]:
    """Start a launcher with its output thrown away."""
    return subprocess.Popen(
        argv, env=clean_env(**env), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )


def wait_for(holds: Callable[[], bool], limit_s: float, step_s: float = 0.001) -> float:
    """Poll until it holds; the seconds it took.

    Raises:
        SampleFailed: it did not hold in time.
    """
    began_s = time.monotonic()
    while not holds():
        if time.monotonic() - began_s > limit_s:
            raise SampleFailed
        time.sleep(step_s)
    return time.monotonic() - began_s


def stop(process: subprocess.Popen[bytes], limit_s: float = 20.0) -> None:
    """End a launcher and whatever its session and descendants still run."""
    pids = [process.pid, *list_descendants(process.pid)]
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(limit_s)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, 9)
    process.wait()


def list_descendants(root: int) -> list[int]:
    """Live descendants of a process."""
    from muster import _processes

    return _processes.descendants(root)


def pss_mb(pids: Sequence[int]) -> float:
    """Proportional set size of processes together, MB (10^6 bytes)."""
    total_kb = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total_kb += int(line.split()[1])
    return total_kb * 1024 / 1e6


def read_marks(path: Path) -> list[dict[str, object]]:
    """Lines of JSON that workers appended; a line being written is left out."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
