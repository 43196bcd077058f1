"""Colours of workers' prefixes and of a failed job's headline, for `torchx run` and `torchx log` on a terminal.

Programs that read lines through TorchX's runner never get colours, nor do files: only `torchx` prints to people.
"""

import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

_PREFIX: Final = re.compile(r"\[[^\[\]|]*?(?P<local>\d+)(?:\|n\d+\.r(?P<rank>\d+))?\]:")
"""`[main0]:` or `[main0|n1.r2]:`. Source: build_prefix in `muster/agent/logs/lines.py`."""
_HEADLINE: Final = "JOB FAILED "
_RANK_COLOURS: Final = ("36", "33", "35", "32", "34", "96", "93", "95", "92", "94")
"""As the agent's on a terminal."""


def colour_for_people(lines: Iterable[str], environ: Mapping[str, str] = os.environ) -> Iterable[str]:
    """The lines with colours, if TorchX's command line prints them to a terminal that may have any; else unchanged."""
    if environ.get("NO_COLOR") or environ.get("TERM", "dumb") == "dumb" or not _prints_to_terminal():
        return lines
    return _colour(lines)


def _prints_to_terminal() -> bool:
    stack = traceback.walk_stack(None)
    return sys.stdout.isatty() and any(
        str(frame.f_globals.get("__name__")).startswith("torchx.cli.") for frame, _ in stack
    )


def _colour(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        found = _PREFIX.match(line)
        if found is not None:
            code = _RANK_COLOURS[int(found["rank"] or found["local"]) % len(_RANK_COLOURS)]
            yield f"\x1b[{code}m{found[0]}\x1b[0m{line[found.end() :]}"
        elif line.startswith(_HEADLINE):
            yield f"\x1b[1;31m{line.rstrip()}\x1b[0m\n"
        else:
            yield line
