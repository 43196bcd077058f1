"""The command lines of `ssh`.

They hold no variable and no secret, because programs and orders go over standard input.
"""

import re
import shlex
from collections.abc import Sequence
from typing import Final

from muster.schedulers.node_program.session import WORDS

CONNECT_LIMIT_S: Final = 10
_REASON_BYTES: Final = 2000
_NOISE: Final = re.compile(r"(Warning: Permanently added|Connection to .* closed|\*\*)")


def build_ssh(ssh: Sequence[str], host: str, python: str, words: Sequence[str] = WORDS) -> list[str]:
    """Build the command that runs Python on a host. The program comes first on its standard input.

    The user's configuration counts for all else. What it has for people, a terminal, a command or forwarded ports,
    would be in the way.

    Args:
        ssh: the user's program, with arguments of their own.
        host: as the user names it.
        python: the interpreter there.
        words: its arguments.
    """
    options = ["BatchMode=yes", f"ConnectTimeout={CONNECT_LIMIT_S}", "ClearAllForwardings=yes", "RemoteCommand=none"]
    there = f"exec {shlex.join([python, *words])}"
    return [*ssh, "-T", *(word for each in options for word in ("-o", each)), "--", host, there]


def explain_failure(errors: bytes, code: int | None, python: str) -> str:
    """Return why a connection has ended, in one line.

    Args:
        errors: what it has printed to standard error.
        code: of `ssh`. None: it was ended.
        python: the interpreter that was to run.
    """
    lines = [line.strip() for line in errors[-_REASON_BYTES:].decode(errors="replace").splitlines()]
    lines = [line for line in lines if line and _NOISE.match(line) is None]
    if code in (126, 127):
        return f"no {python} there; name one with -cfg python=PATH" + (f" ({lines[-1]})" if lines else "")
    if lines:
        return lines[-1].removeprefix("ssh: ")
    return "the connection ended" if code is None else f"ssh ended with {code} and said nothing"
