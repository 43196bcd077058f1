"""Samples of launchers in turn, their medians with spread, one row per figure, and the shared command line.

The machines are shared and noisy: the launchers alternate sample by sample, and the ratio of the medians is what
counts. A sample that fails is counted and left out. Each row ends with the machine's load while sampling. `figures.py`
collects the rows of all files from the file that MUSTER_FIGURES names.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

COUNT = 9
"""Samples of each launcher, unless `--count` says otherwise."""

Sample = TypeVar("Sample")


class SampleFailed(Exception):
    """A run that ended before the measured event."""


@dataclass
class Samples(Generic[Sample]):
    """The samples of one launcher."""

    values: list[Sample] = field(default_factory=list)
    failures: int = 0
    loads: list[float] = field(default_factory=list)
    """Runnable processes of the machine, averaged over the minute before each sample, its own ones included."""

    def of(self, figure: Callable[[Sample], float]) -> "Samples[float]":
        """Return one figure of each sample."""
        return Samples(values=[figure(value) for value in self.values], failures=self.failures, loads=self.loads)


Series = Samples[float]


def median(series: Series) -> float:
    return statistics.median(series.values) if series.values else float("nan")


def describe(series: Series, unit: str) -> str:
    """Median, range, number of samples, and of those that failed."""
    if not series.values:
        return f"none of {series.failures}"
    values = series.values
    text = f"{median(series):.3g} {unit} ({min(values):.3g}..{max(values):.3g}, n={len(values)}"
    return text + (f", {series.failures} failed)" if series.failures else ")")


def sample_in_turn(
    count: int, samplers: Mapping[str, Callable[[], Sample]], *, warmups: int = 1, at_least: int = 0
) -> dict[str, Samples[Sample]]:
    """Call each sampler `count` times, in turn, after uncounted warm-ups; standard error says how each sample went.

    Args:
        count: samples of each, those that fail included.
        samplers: by launcher.
        warmups: samples before, of each.
        at_least: a launcher with fewer good samples gets up to twice as many turns.
    """
    sampled: dict[str, Samples[Sample]] = {name: Samples() for name in samplers}
    for number in range(-warmups, count):
        for name, sample in samplers.items():
            add_sample(sampled[name] if number >= 0 else Samples(), name, sample)
    for name, sample in samplers.items():
        for _ in range(count):
            if len(sampled[name].values) < at_least:
                add_sample(sampled[name], name, sample)
    return sampled


def add_sample(samples: Samples[Sample], name: str, sample: Callable[[], Sample]) -> None:
    """Call a sampler once, and print to standard error how long it took."""
    load, began_s = os.getloadavg()[0], time.monotonic()
    try:
        value = sample()
    except SampleFailed:
        samples.failures += 1
        end = "failed after"
    else:
        samples.values.append(value)
        samples.loads.append(load)
        end = "done in"
    print(f"  {name}: {end} {time.monotonic() - began_s:.1f} s", file=sys.stderr, flush=True)


def show(figure: str, series: Mapping[str, Series], *, unit: str = "s", limit: float | None = None) -> None:
    """Print one row: each launcher's median and spread, the first's ratio to the second, the load.

    Args:
        figure: what was measured.
        series: by launcher.
        unit: of the samples.
        limit: what the ratio, or with one launcher the median, may be at most.
    """
    names = list(series)
    row = "  ".join(f"{name} {describe(series[name], unit)}" for name in names)
    goal = f" (goal {limit})" if limit is not None else ""
    if len(names) > 1 and all(series[name].values for name in names[:2]):
        row += f"  ratio {median(series[names[0]]) / median(series[names[1]]):.3f}"
    loads = [load for each in series.values() for load in each.loads] or [os.getloadavg()[0]]
    print(f"{figure}: {row}{goal}  load {min(loads):.1f}..{max(loads):.1f}", flush=True)
    if path := os.environ.get("MUSTER_FIGURES"):
        found = {name: {"values": each.values, "failed": each.failures} for name, each in series.items()}
        with open(path, "a") as file:
            json.dump({"figure": figure.strip(), "unit": unit, "load": [min(loads), max(loads)], "series": found}, file)
            file.write("\n")


def build_parser(about: str | None) -> argparse.ArgumentParser:
    """Build a command line with `--count`. Makes SIGTERM end the benchmark as Ctrl-C does, with its jobs.

    Args:
        about: the benchmark's docstring.
    """
    signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=COUNT, metavar="N", help=f"samples of each; default {COUNT}")
    return parser


def parse_count(about: str | None) -> int:
    """Parse the command line of a benchmark without other options."""
    count: int = build_parser(about).parse_args().count
    return count
