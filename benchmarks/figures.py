"""All figures of the pages in one go, and what became worse between two runs.

    python benchmarks/figures.py run FILE [BENCHMARK ...]
    python benchmarks/figures.py compare OLD NEW

`run` runs the commands below one after the other, for about 45 minutes, or those of the named benchmarks only. It
writes all that they show into FILE, with the machine, the date and the load. The file of the pages is `figures.json`; a
test compares the pages with it.

`compare` names each figure of OLD that is worse in NEW by more than 10 %, or missing, and exits with 1 if there is one.
Less is better for all figures. One that was measured beside another launcher is compared by its ratio to that, because
machines differ. The two files must have been measured in the same way: benchmarks and counts.
"""

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
WORSE = 0.1
COMMANDS = """
start.py --count 5
heal.py --count 5
warm.py import memory --count 5
warm.py crash --count 5
torchx_run.py --peer torchx-nightly==2026.10.26 --count 5
hold.py --count 5
end.py last left crash --count 3
preemption.py --count 3
logs.py --check --count 5
rendezvous_scale.py --members 128 1024 4096 --torch-members 16 32 --count 3
ssh_start.py --count 5
snapshots.py --count 9
snapshot_crash.py --count 7
elastic_launch.py --count 5
fork.py --count 5
hold.py --functions --count 5
hold.py --scheduler local_docker --words "--image muster-test:torch" --cfg keep=none --count 5
hold.py --scheduler slurm --words "--cpu 1 --memMB 64" --count 5
hold.py --scheduler ssh --count 5
hold.py --scheduler kubernetes --words "--image img" --count 5
kept_processes.py --count 5
warm.py cpu --count 3
telemetry.py --count 3
metrics.py --count 3
preflight.py --count 10
hang_overhead.py --count 6
hang_detection.py --count 1
local_cwd.py --count 3
docker_cancel.py --count 3
worker_calls.py --count 5
bundle.py --count 3
kubernetes_dryrun.py --count 5
timeline_page.py --count 5
""".strip().splitlines()

Figures = dict[str, dict[str, Any]]
"""By command and title: unit, load, and what each launcher took; the measured one is first."""


def run(path: Path, names: Sequence[str]) -> int:
    """Run the benchmarks of these names, or all, and write the file; return how many commands have failed."""
    commands = [each for each in COMMANDS if not names or each.split(".py")[0] in names]
    figures: Figures = {}
    failed = []
    found = describe_machine()
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows"
        for command in commands:
            print(f"== {command}", flush=True)
            rows.write_text("")
            words = [sys.executable, *shlex.split(f"{FOLDER}/{command}")]
            if subprocess.run(words, env={**os.environ, "MUSTER_FIGURES": str(rows)}, check=False).returncode != 0:
                failed.append(command)
            figures |= read_rows(command.partition(" --count")[0], rows.read_text().splitlines())
            path.write_text(json.dumps({**found, "failed": failed, "figures": figures}, indent=1) + "\n")
    print(f"{len(figures)} figures in {path}; failed: {'; '.join(failed) or 'none'}")
    return len(failed)


def describe_machine() -> dict[str, object]:
    """Return what the figures depend on."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "cores": len(os.sched_getaffinity(0)),
        "processor": models[0].partition(": ")[2] if models else platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "load": [round(each, 2) for each in os.getloadavg()],
    }


def read_rows(command: str, lines: Iterable[str]) -> Figures:
    """Return the rows that a benchmark has shown, with median and range of each launcher."""
    figures: Figures = {}
    for row in map(json.loads, lines):
        series = {}
        for name, each in row["series"].items():
            values = each["values"]
            summary = {"median": statistics.median(values), "least": min(values), "most": max(values)} if values else {}
            series[name] = {**summary, "count": len(values), "failed": each["failed"]}
        figures[f"{command}: {row['figure']}"] = {"unit": row["unit"], "load": row["load"], "series": series}
    return figures


def find_value(figure: Mapping[str, Any]) -> float | None:
    """Return the ratio of the first launcher's median to the second's, or the first's alone; None if it has failed."""
    medians = [each.get("median") for each in figure["series"].values()][:2]
    if None in medians:
        return None
    return float(medians[0] / medians[1] if len(medians) > 1 and medians[1] else medians[0])


def list_worse(old: Figures, new: Figures) -> list[str]:
    """Return a line for each figure that became worse, or is missing."""
    lines = []
    for name, figure in old.items():
        before, now = find_value(figure), find_value(new[name]) if name in new else None
        if before is not None and (now is None or now - before > WORSE * abs(before)):
            lines.append(f"{name}: missing" if now is None else f"{name}: {before:.3g} before, {now:.3g} now")
    return lines


def main() -> int:
    """Run or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("file", type=Path)
    running.add_argument("names", nargs="*", metavar="BENCHMARK")
    comparing = commands.add_parser("compare")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    args = parser.parse_args()
    if args.command == "run":
        if unknown := {*args.names} - {each.split(".py")[0] for each in COMMANDS}:
            parser.error(f"no such benchmark: {', '.join(unknown)}")
        return min(1, run(args.file, args.names))
    worse = list_worse(*(json.loads(path.read_text())["figures"] for path in (args.old, args.new)))
    print("\n".join(worse) or "no figure is worse")
    return int(bool(worse))


if __name__ == "__main__":
    sys.exit(main())
