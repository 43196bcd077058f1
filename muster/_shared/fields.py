"""Types of the fields of messages, with the limits that `_shared.codec` enforces.

`count: Count` is the whole declaration: a value that was read needs no further check. Numbers out of range are refused.
A text that is too long is shortened before it is sent. One that arrives too long is refused, like a list.
"""

import sys
from typing import Annotated, Generic, TypeVar

from muster._shared.layouts import StatusPageLayout
from muster._shared.records import record

T = TypeVar("T")


@record
class Range:
    """The least and the greatest number, both allowed."""

    least: float
    most: float


@record
class Limit:
    """How many bytes of UTF-8 a text may have, or how many items a list."""

    most: int
    keeps_end: bool = False
    """What is too long loses its beginning."""


class Shared(Generic[T]):
    """A part that messages to many members have in common: `_shared.codec` encodes it once."""

    def __init__(self, value: T) -> None:
        self.value = value
        self.encoded: str | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shared) and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)

    def __repr__(self) -> str:
        return f"Shared({self.value!r})"


HOST_NAME = "a host name or an address"
"""Marks a text that must be one."""
PACKED = "compressed"
"""Marks an optional record that travels as compressed text, or is left out. Its `list_forms` gives shorter ones."""
AS_OBJECT = "an object"
"""Marks pairs of a name and a value: in JSON they are an object."""
JSON = "JSON"
"""Marks a text that is the JSON of an object. It travels as that object."""
SPARSE = "left out"
"""Marks a field that is not written when it has its default."""
NAME_LIMIT_BYTES = 255
MOST = 2**53 - 1
"""Integers up to here are exact in every JSON implementation."""
MOST_NODES = MOST_PROCESSES = 1 << 20

Count = Annotated[int, Range(least=0, most=MOST)]
Integer = Annotated[int, Range(least=-MOST, most=MOST)]
Size = Annotated[int, Range(least=1, most=MOST)]
Processes = Annotated[int, Range(least=1, most=MOST_PROCESSES)]
"""The processes of one node."""
GroupRank = Annotated[int, Range(least=0, most=MOST_NODES)]
RoundNumber = Annotated[int, Range(least=0, most=1 << 40)]
"""No job has as many rounds. The number only grows, so that one that is far too high could never be undone."""
Port = Annotated[int, Range(least=0, most=65535)]
Step = Annotated[int, Range(least=0, most=StatusPageLayout.MAX_STEP)]
"""A step of training, as a worker counts it."""
Seconds = Annotated[float, Range(least=-1e12, most=1e12)]
Number = Annotated[float, Range(least=-sys.float_info.max, most=sys.float_info.max)]
Name = Annotated[str, Limit(most=NAME_LIMIT_BYTES)]
Host = Annotated[str, Limit(most=NAME_LIMIT_BYTES), HOST_NAME]
Line = Annotated[str, Limit(most=4096)]
Paragraph = Annotated[str, Limit(most=8192)]
Traceback = Annotated[str, Limit(most=65536, keeps_end=True)]
Lines = Annotated[tuple[Line, ...], Limit(most=64, keeps_end=True)]
RoleName = Annotated[Name, SPARSE]
"""Where the answers of several roles were joined, the role that it belongs to. Agents leave it empty."""


@record
class LateRank:
    """A rank that has not done in time what was agreed on. Here, since nodes that need no report say it."""

    global_rank: Count
    step: Step | None
    """The last that it has reported. None: none."""
    silent_s: Seconds | None
    """Since then."""
    role: RoleName = ""


LateRanks = Annotated[tuple[LateRank, ...], Limit(most=64)]
