"""The flags: what is checked, and how many GPUs this node must have."""

from typing import Final

from muster._shared.contract import SIZE_LIMIT, parse_digits
from muster._shared.records import record
from muster.agent.cli.command_line import Invocation
from muster.agent.cli.flag_table import Flag
from muster.agent.errors import UsageError
from muster.agent.workers.spec import ProgramKind

_MODES: Final = ("quick", "full", "off")
FLAGS: Final = (
    Flag(
        name="preflight",
        metavar="WHAT",
        default="quick",
        ours=True,
        has_variable=False,
        text="What to check before the workers start. quick checks this machine (GPUs, their free memory, folders, "
        "shared memory, limits) while torch is being imported, runs the executables of "
        "/etc/muster/preflight.d, and compares the nodes. Workers wait at most 0.3 s for it. full adds an "
        "all-reduce within each node and one over all nodes, in the workers before the program starts. off "
        "checks nothing. --on says what follows from an error; all other findings are only printed.",
    ),
    Flag(
        name="devices",
        metavar="N",
        ours=True,
        has_variable=False,
        text="How many GPUs this node must have, for --preflight. Components pass the number with which the job was "
        "submitted.",
    ),
)


@record
class PreflightSettings:
    """What the flags say."""

    mode: str = "quick"
    """quick, full or off."""
    devices: int | None = None
    """How many GPUs this node must have; None if unknown."""


def read(invocation: Invocation) -> PreflightSettings:
    """Read the flags."""
    mode = invocation.values.choice("preflight", _MODES) or "quick"
    if mode == "full" and invocation.program.kind is ProgramKind.COMMAND:
        raise UsageError(
            f"--preflight full measures in Python workers; {invocation.program.target!r} is no Python program "
            "(use quick)"
        )
    text = invocation.values.text("devices")
    devices = None if text is None else parse_digits(text, SIZE_LIMIT)
    if text is not None and devices is None:
        raise invocation.values.build_error("devices", "a number of GPUs")
    return PreflightSettings(mode=mode, devices=devices)
