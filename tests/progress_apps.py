"""One app whose roles are scripts without a line for muster: two Trainers, an optimizer's loop, a bar of tqdm."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from harness import wait_until
from torchx.specs import AppDef

from muster.cli.commands import main
from muster.components import dist

EXPECTED = {
    "hf_trainer": (30, 40, None),
    "lightning_fit": (30, 40, None),
    "plain_loop": (None, None, 30),
    "tqdm_loop": (430, 1000, None),
}
"""By role: step, total and the optimizer's steps at which it waits, until the file `end` is in its working folder."""


def copy_scripts(folder: Path) -> Path:
    """Make the app's workspace."""
    for name in EXPECTED:
        shutil.copy(Path(__file__).parent / "programs" / "agent" / f"{name}.py", folder)
    return folder


def build_app(start: str, **more: Any) -> AppDef:
    """One node with one rank for each script."""
    parts = [dist.ddp("end", script=f"{name}.py", name=name, j="1x1", start=start, **more) for name in EXPECTED]
    return AppDef("progress", roles=[role for part in parts for role in part.roles])


def read_progress(
    handle: str, capsys: pytest.CaptureFixture[str]
) -> dict[str, tuple[int | None, int | None, int | None]]:
    """What `muster status --json` says of each role, as in `EXPECTED`."""
    capsys.readouterr()
    main(["status", handle, "--json"])
    jobs = json.loads(capsys.readouterr().out)["jobs"]
    return {name: (job["step"], job["total"], job["optimizer_steps"]) for name, job in jobs.items()}


def wait_for_progress(handle: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Wait until each script is shown where it waits."""
    found: dict[str, Any] = {}

    def is_there() -> bool:
        found.update(read_progress(handle, capsys))
        return found == EXPECTED

    try:
        wait_until(is_there, timeout_s=300)
    except AssertionError as error:
        raise AssertionError(f"{found}, not {EXPECTED}") from error
