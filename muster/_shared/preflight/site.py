"""What an executable that a site has added says of a node, from what it writes and how it ends. Pure.

It writes lines: `error: TEXT` ends the attempt, `warning: TEXT` is printed, all others are dropped. If it exits with
another code than 0 and has named no error, that is an error itself, with its last line. If it does not end in time, it
is killed, and that is a warning.
"""

from collections.abc import Iterable
from typing import Final

from muster._shared.preflight import SITE, Finding, Level

LIMITS_S: Final = {"quick": 10.0, "full": 60.0}
"""How long each may take, by --preflight."""
_MOST: Final = 32
"""The most findings of each."""


def read_site_check(name: str, lines: Iterable[str], trouble: str, *, is_killed: bool = False) -> tuple[Finding, ...]:
    """Return the findings of one that has ended.

    Args:
        name: of its file.
        lines: what it has written.
        trouble: how it has ended, in one clause. "": with 0.
        is_killed: because it took too long.
    """
    found: list[Finding] = []
    last = ""
    for line in lines:
        last = line.strip() or last
        word, colon, text = line.partition(":")
        if colon and word in ("error", "warning") and len(found) < _MOST:
            found.append(Finding(check=SITE.name, level=Level(word), found=f"{name}: {text.strip()}"))
    if is_killed:
        found.append(Finding(check=SITE.name, level=Level.WARNING, found=trouble))
    elif trouble and not any(finding.level is Level.ERROR for finding in found):
        text = f"{trouble}{': ' if last else ''}{last}"
        found.append(Finding(check=SITE.name, level=Level.ERROR, found=text))
    return tuple(found)
