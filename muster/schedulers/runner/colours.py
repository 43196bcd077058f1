"""Colours of workers' prefixes and of a failed job's headline, for `torchx run` and `torchx log` on a terminal."""

import re
from collections.abc import Mapping
from typing import Final

PREFIX: Final = re.compile(r"\[[^\[\]|]*?(?P<local>\d+)(?:\|n\d+\.r(?P<rank>\d+))?\]:")
"""`[main0]:` or `[main0|n1.r2]:`. Source: build_prefix in `muster/agent/logs/lines.py`."""
_HEADLINE: Final = "JOB FAILED "
_RANK_COLOURS: Final = ("36", "33", "35", "32", "34", "96", "93", "95", "92", "94")
"""As the agent's on a terminal."""


def allows_colours(environ: Mapping[str, str]) -> bool:
    """Whether the user has not refused colours, on a terminal that may have any. Source: https://no-color.org."""
    return not environ.get("NO_COLOR") and environ.get("TERM", "dumb") != "dumb"


def add_colours(line: str) -> str:
    """The line with its prefix in its rank's colour; the headline of a failed job in red."""
    found = PREFIX.match(line)
    if found is not None:
        code = _RANK_COLOURS[int(found["rank"] or found["local"]) % len(_RANK_COLOURS)]
        return f"\x1b[{code}m{found[0]}\x1b[0m{line[found.end() :]}"
    return f"\x1b[1;31m{line.rstrip()}\x1b[0m\n" if line.startswith(_HEADLINE) else line
