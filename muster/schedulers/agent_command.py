"""Recognises the command that components write, `python3 -m muster.agent ...`, and rewrites it for a node."""

import posixpath
import re
from collections.abc import Sequence
from typing import Any

from muster._contract import AGENT_BUNDLE_NAME, AGENT_MODULE

_PYTHON = re.compile(r"python(3(\.\d+)?)?")


def is_agent_command(entrypoint: str, args: Sequence[str]) -> bool:
    """Whether a command runs our agent: some Python, then `-m muster.agent`."""
    is_python = _PYTHON.fullmatch(posixpath.basename(entrypoint)) is not None
    return is_python and list(args[:2]) == ["-m", AGENT_MODULE]


def is_agent_role(role: Any) -> bool:
    """Whether a TorchX role runs our agent; others keep TorchX's meaning of exit codes and retries."""
    return is_agent_command(role.entrypoint, role.args)


def rewrite_agent_args(args: Sequence[str], bundle_dir: str) -> list[str]:
    """The arguments of an agent role with `-m muster.agent` replaced by the bundle's path.

    Args:
        args: of a role for which `is_agent_role` holds.
        bundle_dir: absolute path of the folder that holds `muster-agent.zip` on the node.
    """
    return [posixpath.join(bundle_dir, AGENT_BUNDLE_NAME), *args[2:]]
