"""Parses the times that engines and clusters send, RFC 3339 with up to nanoseconds.

`datetime.fromisoformat` does not fit: it takes no nanoseconds, and before Python 3.11 no `Z`.
"""

import re
from datetime import datetime
from typing import Final

_TIME: Final = re.compile(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d)", re.ASCII)

Timestamp = tuple[int, int]
"""(seconds since the epoch, nanoseconds): orders records that a float cannot tell apart."""


def build_timestamp(seconds: float) -> Timestamp:
    """Convert seconds since the epoch, which are exact to the microsecond."""
    return divmod(round(seconds * 1e6) * 1000, 10**9)


def parse_timestamp(text: str) -> Timestamp:
    """Parse a time in any zone.

    Raises:
        ValueError: not a time.
    """
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not an RFC 3339 time")
    zone = "+00:00" if match[4] == "Z" else match[4]
    moment = datetime.fromisoformat(f"{match[1]}T{match[2]}{zone}")
    return int(moment.timestamp()), int((match[3] or "").ljust(9, "0")[:9])


def parse_seconds(text: str) -> float:
    """Parse a time to seconds since the epoch, to the microsecond.

    Raises:
        ValueError: not a time.
    """
    seconds, nanoseconds = parse_timestamp(text)
    return seconds + nanoseconds // 1000 / 1e6
