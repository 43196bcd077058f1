"""Launchers on this machine: their command lines, jobs started and ended, marks that workers write, memory."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _sampling import SampleFailed

BIN = Path(sys.executable).parent
Command = tuple[str, ...]
MUSTER: Command = (sys.executable, "-m", "muster.agent")
MUSTER_COLD: Command = (*MUSTER, "--start", "cold")
TORCHRUN: Command = (str(BIN / "torchrun"),)
LAUNCHERS: Mapping[str, Command] = {"muster": MUSTER, "torchrun": TORCHRUN}

Mark = dict[str, Any]
"""A line of JSON that a worker appended to the file MARKS; "t" is when, by time.monotonic."""

LIMIT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """A launcher that runs."""

    process: "subprocess.Popen[bytes]"
    marks: Path
    began_s: float
    """Just before the launcher's process was started."""

    def wait_marks(self, count: int) -> list[Mark]:
        """Wait until workers have written `count` marks.

        Raises:
            SampleFailed: the limit has passed.
        """
        wait_for(lambda: len(read_marks(self.marks)) >= count, LIMIT_S)
        return read_marks(self.marks)

    def wait_last_s(self, count: int) -> float:
        """Return the seconds from the job's start to the last of `count` marks."""
        return float(max(mark["t"] for mark in self.wait_marks(count))) - self.began_s


@contextmanager
def launched(
    launcher: Command, folder: Path, source: str, flags: Sequence[str], *, args: Sequence[str] = (), **env: str
) -> Iterator[Job]:
    """Start a job; at the end, stop what still runs of it.

    Args:
        launcher: its command line.
        folder: for the script and the marks.
        source: the script.
        flags: the launcher's.
        args: the script's.
        env: added to the environment.
    """
    marks, script = folder / "marks", folder / "script.py"
    marks.unlink(missing_ok=True)
    script.write_text(source)
    began_s = time.monotonic()
    process = start([*launcher, *flags, str(script), *args], MARKS=str(marks), **env)
    try:
        yield Job(process=process, marks=marks, began_s=began_s)
    finally:
        stop(process)


def build_standalone_flags(nproc: int) -> list[str]:
    """Build the flags of a job on one node."""
    return ["--standalone", "--nproc-per-node", str(nproc)]


@contextmanager
def scratch() -> Iterator[Path]:
    """Make a temporary folder, removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="muster-bench-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def clean_env(**extra: str) -> dict[str, str]:
    """Return this environment without the variables that launchers read."""
    left_out = ("PET_", "TORCHELASTIC_", "MUSTER_", "PYTHONDONTWRITEBYTECODE")  # both launchers run compiled code
    env = {k: v for k, v in os.environ.items() if not k.startswith(left_out)}
    return {**env, "PYTHONUNBUFFERED": "1", **extra}


def start(argv: Sequence[str], *, cwd: Path | None = None, **env: str) -> "subprocess.Popen[bytes]":
    """Start a launcher and discard its output."""
    return subprocess.Popen(
        argv,
        cwd=cwd,
        env=clean_env(**env),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def wait_for(holds: Callable[[], bool], limit_s: float, step_s: float = 0.001) -> None:
    """Poll until it holds.

    Raises:
        SampleFailed: the limit has passed.
    """
    began_s = time.monotonic()
    while not holds():
        if time.monotonic() - began_s > limit_s:
            raise SampleFailed
        time.sleep(step_s)


def stop(process: "subprocess.Popen[bytes]", limit_s: float = 20.0) -> None:
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
    """List live descendants of a process."""
    from muster._shared import processes

    return processes.list_descendants(root)


def pss_mb(pids: Sequence[int]) -> float:
    """Proportional set size of processes together, MB (10^6 bytes)."""
    total_kb = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total_kb += int(line.split()[1])
    return total_kb * 1024 / 1e6


def read_marks(path: Path) -> list[Mark]:
    """Read the marks so far, without a line that is being written."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def find_port() -> int:
    """Find a port that is free now."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
