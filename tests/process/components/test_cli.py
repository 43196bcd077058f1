"""The components through TorchX's own command line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.torchx


def test_builtins_lists_ours_beside_torchxs_own(torchx) -> None:
    code, told, errors = torchx("builtins")
    assert code == 0, errors
    listed = {line.split()[-1] for line in told.splitlines()[1:]}
    assert listed >= {"dist.ddp", "dist.spmd", "dist.torchrun", "utils.echo", "utils.sh"}


def test_help_describes_every_parameter(torchx) -> None:
    for component in ("dist.ddp", "dist.spmd", "dist.torchrun"):
        code, told, errors = torchx("run", component, "--help")
        assert code == 0, errors
        for option in ("--script", "--max_retries", "--start", "--preload", "--hang_timeout"):
            assert option in told
        assert "[[MIN:]NODESx]PROCESSES" in told


def test_importing_the_components_imports_nothing_heavy(tmp_path: Path) -> None:
    code = "import sys, muster.components.dist; print(*sys.modules)"
    environment = {name: value for name, value in os.environ.items() if name != "LOGLEVEL"}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    imported = set(result.stdout.split())
    assert not {module for module in imported if module.partition(".")[0] in {"torch", "docker", "kubernetes", "numpy"}}
    assert not {module for module in imported if module.startswith(("muster.agent", "muster.schedulers"))}
