"""The flag."""

import importlib.util
from typing import Final

from muster.agent.cli.command_line import Invocation
from muster.agent.cli.flag_table import Flag
from muster.agent.errors import UsageError
from muster.agent.workers.spec import ProgramKind

FLAGS: Final = (
    Flag(
        name="trainer-callback",
        ours=True,
        has_variable=False,
        text="The Trainer of transformers gets MusterCallback. It may train once, and the script must not name the "
        "callback, which is in muster.integrations.huggingface. With fp16, FSDP or DeepSpeed no step is kept.",
    ),
)


def read(invocation: Invocation) -> bool:
    """Return whether the flag is on."""
    is_on = invocation.values.switch("trainer-callback")
    if is_on and invocation.program.kind is ProgramKind.COMMAND:
        raise UsageError("--trainer-callback needs a Python script or module")
    if is_on and "PYTHON_EXEC" not in invocation.environ and importlib.util.find_spec("transformers") is None:
        raise UsageError("--trainer-callback: transformers is not installed")
    return is_on
