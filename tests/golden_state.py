"""Puts what an earlier version wrote (tests/golden) where today's code finds it.

restore("local_cwd", state_home, work, apps=["running-golden"])
load(cluster, "running")
last_words("failed")
"""

import json
import os
import socket
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

GOLDEN = Path(__file__).with_name("golden")
DATA = GOLDEN / "19df633"
LATER = GOLDEN / "502c44e"
"""Of the first version with `slurm` and `ssh`."""
HOLDS = GOLDEN / "6c89ce3"
"""Of a version with holds."""
ROOT = GOLDEN.parents[1]


def list_marks(state: Path, work: Path) -> dict[str, str]:
    """What the marks in the files stand for here and now."""
    return {
        "@STATE@": str(state),
        "@WORK@": str(work),
        "@PYTHON@": sys.executable,
        "@MUSTER@": str(ROOT),
        "@HOST@": socket.gethostname(),
        "@BOOT@": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "@USER@": f"{os.geteuid()}@{socket.gethostname()}",
    }


def fill(text: str, marks: dict[str, str]) -> str:
    for mark, value in marks.items():
        text = text.replace(mark, value)
    return text


def restore(
    section: str, state: Path, work: Path, *, apps: Collection[str] = (), data: Path = DATA, **marks: str
) -> None:
    """Write a state folder again.

    Args:
        section: "local_cwd" or "docker"; "slurm" or "ssh" of `LATER`; "holds" of `HOLDS`.
        state: becomes XDG_STATE_HOME.
        work: the folder in which the jobs were submitted.
        apps: only these; empty: all.
        data: of which version.
        marks: HOST="elsewhere" and the like, instead of this machine's.
    """
    values = list_marks(state, work) | {f"@{name}@": value for name, value in marks.items()}
    for line in (data / section / "manifest.txt").read_text().splitlines():
        mode, kind, rest = line.split(" ", 2)
        name, _, target = rest.partition(" -> ")
        owner = next((part for part in Path(name).parts if part.endswith("-golden")), None)
        if not apps or owner is None or owner in apps:
            _make(kind, state / name, int(mode, 8), data / section / "files" / name, fill(target, values), values)


def _make(kind: str, path: Path, mode: int, source: Path, target: str, marks: dict[str, str]) -> None:
    if kind == "l":
        path.symlink_to(target)
        return
    if kind == "d":
        path.mkdir(exist_ok=True)
    elif kind == "p":
        os.mkfifo(path)
    elif not source.exists():  # empty, or left out
        path.touch()
    elif source.suffix in (".times", ".gz"):
        path.write_bytes(source.read_bytes())
    else:
        path.write_text(fill(source.read_text(), marks))
    path.chmod(mode)


def edit(path: Path, **changes: Any) -> None:
    """Change fields of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes, indent=1))


def this_process() -> dict[str, Any]:
    """This process as a state folder names one: field 22 of its stat is when it began."""
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return {"pid": os.getpid(), "start_ticks": after_name[22 - 3]}


def read_rows(name: str) -> list[dict[str, Any]]:
    """The objects of a submission, each with its place."""
    rows: list[dict[str, Any]] = yaml.safe_load((DATA / "kubernetes" / f"{name}.yaml").read_text())
    return rows


def load(cluster: Any, name: str) -> str:
    """Give the double of the API server the objects of a submission as they were; returns the app's id."""
    for row in read_rows(name):
        item = json.loads(json.dumps(row["object"]))  # a copy: pods share their spec in the file
        cluster.load_object((row["group"], row["namespace"], row["plural"], row["name"]), item)
    return f"team:{name}-golden"


def last_words(job: str) -> str:
    """What node 0's agent of a job of `reports` left for Kubernetes and Docker."""
    return read_report(job, "message")


def read_report(job: str, name: str) -> str:
    """A file of a job of `reports`."""
    return fill((DATA / "reports" / job / name).read_text(), {"@HOST@": "node-a", "@WORK@": "/work"})


def read_engine() -> dict[str, list[dict[str, Any]]]:
    """The containers, networks and volumes of the Docker jobs."""
    marks = {"@USER@": f"{os.geteuid()}@{socket.gethostname()}"}
    found: dict[str, list[dict[str, Any]]] = json.loads(fill((DATA / "docker/engine.json").read_text(), marks))
    return found
