"""srun has a child that has all tasks killed when srun itself is killed. No node could save, or queue the job again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from muster.schedulers.slurm.node import limit_child_of_srun

SRUN = """\
import os, socket
gate, its_end = os.pipe()
if os.fork():
    print(flush=True)
    os.close(gate)
    input()
    os.write(its_end, b"x")
else:
    os.close(its_end)
    if os.read(gate, 1):
        os._exit(0)
    try:
        socket.socket().close()
        os.write(1, b"asks the controller")
    except OSError as error:
        os.write(1, error.strerror.encode())
"""


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    return [str(tmp_path / "node.zip"), str(tmp_path)]


def start_srun(arguments: list[str], name: str = "srun") -> "subprocess.Popen[bytes]":
    """A program that does as srun does. It is called `name`."""
    path = Path(arguments[0]).with_name(name)
    path.symlink_to(os.path.realpath(sys.executable))
    srun = subprocess.Popen([path, "-c", SRUN, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert srun.stdout is not None
    srun.stdout.readline()
    return srun


def test_its_child_asks_for_nothing_after_its_kill(arguments: list[str]) -> None:
    with start_srun(arguments) as srun:
        limit_child_of_srun(arguments)
        srun.kill()
        assert srun.communicate()[0] == b"Too many open files"


def test_its_end_is_as_before(arguments: list[str]) -> None:
    with start_srun(arguments) as srun:
        limit_child_of_srun(arguments)
        assert srun.communicate(b"\n")[0] == b""
        assert srun.returncode == 0


def test_other_programs_are_left_alone(arguments: list[str]) -> None:
    """The srun of another app, and what is no srun."""
    with start_srun([*arguments[:1], "/other"]) as other, start_srun(arguments, "python3") as program:
        limit_child_of_srun(arguments)
        for each in (other, program):
            each.kill()
            assert each.communicate()[0] == b"asks the controller"
