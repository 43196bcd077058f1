"""Runs a probe program plainly, cold and warm, and compares what the runs show."""

import difflib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from harness import PROGRAMS, run_tree

PROBES = PROGRAMS / "fidelity"
DRIVER = Path(__file__).with_name("fidelity_driver.py")


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One program and how to run it."""

    target: str
    kind: str = "script"
    args: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    """Interpreter options, given to the agent's Python."""
    env: Mapping[str, str] = field(default_factory=dict)
    preload: str = "auto"
    prefix: tuple[str, ...] = ()
    """The command that starts the agent, for example a shell."""
    python: str = sys.executable


@dataclass(frozen=True, kw_only=True)
class Shown:
    """The visible results of one worker."""

    code: int
    stdout: str
    stderr: str


@dataclass(frozen=True, kw_only=True)
class Started:
    """What a starter did: `shown[round][local_rank]`, its records and its notices."""

    shown: list[list[Shown]]
    records: list[dict[str, Any]]
    notices: list[str]
    folder: Path

    @property
    def ways(self) -> list[str]:
        """ "warm" or "cold" of each worker that was started."""
        return [record["how"] for record in self.records if record["what"] == "worker_released"]

    def error(self, local_rank: int = 0) -> Any:
        """The error.json of a worker of the first round; None when it wrote none."""
        path = self.folder / f"0.{local_rank}.json"
        return json.loads(path.read_text()) if path.exists() else None


def build_env(extra: Mapping[str, str]) -> dict[str, str]:
    """The test's environment without the variables that make runs differ; stdin is empty everywhere."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "COV_", "PROBE"))}
    return {**env, "RANK": "0", "PROBE_WORD": "word", "COLUMNS": "80", **extra}


def reset_signals() -> None:
    """As `subreaper` does before it starts a command: under nohup pytest itself ignores SIGHUP."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_DFL)


@dataclass(frozen=True, kw_only=True)
class Running:
    """A program that runs in plain Python."""

    process: subprocess.Popen[bytes]
    streams: tuple[IO[bytes], IO[bytes]]

    def wait(self) -> Shown:
        """Wait for its end."""
        code = self.process.wait(timeout=100)
        texts = []
        for file in self.streams:
            with file:
                file.seek(0)
                texts.append(file.read().decode(errors="surrogateescape"))
        return Shown(code=code, stdout=texts[0], stderr=texts[1])


def start_plainly(probe: Probe) -> Running:
    """Start `python -u <flags> script args`, as a session leader."""
    words = ["-m", probe.target] if probe.kind == "module" else [probe.target]
    streams = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115  # `wait` closes them
    process = subprocess.Popen(
        [*probe.prefix, probe.python, "-u", *probe.flags, *words, *probe.args],
        stdin=subprocess.DEVNULL,
        stdout=streams[0],
        stderr=streams[1],
        env=build_env({**probe.env, "PROBE_PARENT": str(os.getpid())}),
        cwd=PROBES,
        start_new_session=True,
        preexec_fn=reset_signals,  # noqa: PLW1509  # no threads here
    )
    return Running(process=process, streams=streams)


def run_plainly(probe: Probe) -> Shown:
    """Run it so to its end."""
    return start_plainly(probe).wait()


def run_started(probe: Probe, how: str, folder: Path, **request: Any) -> Started:
    """Run it through a starter, in `fidelity_driver`."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = {
        "how": how,
        "kind": probe.kind,
        "target": probe.target,
        "args": probe.args,
        "env": build_env(probe.env),
        "preload": probe.preload,
        "folder": str(folder),
        **request,
    }
    file = folder / "request.json"
    file.write_text(json.dumps(whole))
    command = [*probe.prefix, probe.python, *probe.flags, str(DRIVER), str(file)]
    outcome = run_tree(command, env=build_env(probe.env), cwd=PROBES, timeout_s=150).check()
    result = json.loads((folder / "result.json").read_text())
    assert result["failed"] == {}, outcome.explain()
    return Started(
        shown=[
            [read_shown(folder, number, local_rank, code) for local_rank, code in enumerate(codes)]
            for number, codes in enumerate(result["codes"])
        ],
        records=result["records"],
        notices=result["notices"],
        folder=folder,
    )


def read_shown(folder: Path, number: int, local_rank: int, code: int) -> Shown:
    """The files of one worker."""
    texts = [
        path.read_bytes().decode(errors="surrogateescape") if path.exists() else ""
        for path in (folder / f"{number}.{local_rank}.out", folder / f"{number}.{local_rank}.err")
    ]
    return Shown(code=code, stdout=texts[0], stderr=texts[1])


def compare(probe: Probe, folder: Path, *, plain: bool = True) -> None:
    """Assert that plain, cold and warm runs show the same, and that the warm one was warm."""
    cold = run_started(probe, "cold", folder / "cold")
    warm = run_started(probe, "warm", folder / "warm")
    assert set(warm.ways) == {"warm"}, (warm.notices, warm.records)
    expect_same("cold", cold.shown[0][0], "warm", warm.shown[0][0])
    if plain:
        expect_same("plain", run_plainly(probe), "cold", cold.shown[0][0])


def compare_all(probes: Sequence[Probe], folder: Path) -> None:
    """Do what `compare` does for programs that differ in target and arguments only, with one driver for each way."""
    each = [[{"target": probe.target, "args": probe.args} for probe in probes]]
    cold, warm = (run_started(probes[0], how, folder / how, each=each) for how in ("cold", "warm"))
    assert set(warm.ways) == {"warm"}, (warm.notices, warm.records)
    plain = [start_plainly(probe) for probe in probes]
    for number, running in enumerate(plain):
        expect_same("cold", cold.shown[0][number], "warm", warm.shown[0][number])
        expect_same("plain", running.wait(), "cold", cold.shown[0][number])


def expect_same(one_name: str, one: Shown, other_name: str, other: Shown) -> None:
    """Assert that two runs show the same; says which lines differ."""
    differences = [
        line
        for name in ("code", "stdout", "stderr")
        for line in difflib.unified_diff(
            clean(str(getattr(one, name))).split("\n"),
            clean(str(getattr(other, name))).split("\n"),
            f"{one_name} {name}",
            f"{other_name} {name}",
            lineterm="",
            n=0,
        )
    ]
    assert not differences, "\n".join(differences)


def clean(text: str) -> str:
    """Remove what differs between two equal runs.

    That is addresses, and what multiprocessing's tracker sometimes prints about a semaphore that is already gone (seen
    with a cold worker whose DataLoader had spawned).
    """
    text = re.sub(r".*/resource_tracker\.py:\d+: UserWarning: resource_tracker: .*\n +warnings\.warn\(.*\n", "", text)
    return re.sub(r"0x[0-9a-f]{6,}", "0x...", text)
