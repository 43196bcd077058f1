"""What is known of each rank of a job that may hang: small enough to travel from every node to the leader.

It travels as text in a `report.Stack`: JSON, compressed, without the entries that do not fit.
"""

import base64
import json
import zlib
from typing import Any

from muster.agent.runtime.records import record

ENTRY_LIMIT = 16
"""Entries that are kept of each group: those that are not done, and the last ones."""
GROUP_LIMIT = 64
VIEW_LIMIT_BYTES = 32768
_PLAIN_LIMIT_BYTES = 1 << 20
"""A text that another node has compressed is not unpacked beyond this."""


@record
class Collective:
    """One call of a collective, or of send or recv, as the flight recorder of a rank has it."""

    number: int
    """Counted by the group, from 1."""
    operation: str
    """"all_reduce"."""
    sizes: str
    """"4 x float32"; "" where the recorder has none."""
    age_s: float
    """Since the rank has entered it."""
    is_done: bool
    is_p2p: bool = False


@record
class Group:
    """A process group, as one rank sees it."""

    name: str
    description: str
    """"default_pg"; what the program has called it."""
    entered: int
    """The number of the last collective that this rank has entered; 0: none."""
    completed: int
    ranks: tuple[int, ...] = ()
    """Global ranks; empty: not known."""
    entries: tuple[Collective, ...] = ()
    """In the order of the calls."""


@record
class RankView:
    """One rank at one moment."""

    global_rank: int
    node: int
    host: str
    state: str = ""
    """The kernel's process state: R, S, D, T (stopped), Z; "": not known."""
    is_answering: bool = False
    """Its server has answered."""
    has_server: bool = False
    is_initialising: bool = False
    """It is inside `init_process_group`."""
    groups: tuple[Group, ...] = ()

    @property
    def progress(self) -> tuple[int, ...] | None:
        """What changes whenever the rank enters or completes a collective; None: it has entered none."""
        counts = tuple(number for group in self.groups for number in (group.entered, group.completed))
        return counts if any(counts) else None


def encode_view(view: RankView) -> str:
    """Encode it in at most `VIEW_LIMIT_BYTES`; "" where not even the shortest form fits."""
    for entries, groups in ((ENTRY_LIMIT, GROUP_LIMIT), (4, GROUP_LIMIT), (2, 16), (1, 4)):
        text = base64.b85encode(zlib.compress(json.dumps(_shorten(view, entries, groups)).encode())).decode()
        if len(text) <= VIEW_LIMIT_BYTES:
            return text
    return ""


def _shorten(view: RankView, entries: int, groups: int) -> dict[str, object]:
    kept = [
        {**vars(group), "entries": [vars(entry) for entry in group.entries[-entries:]]}
        for group in view.groups[-groups:]
    ]
    return {**vars(view), "groups": kept}


def decode_view(text: str) -> RankView | None:
    """The inverse of `encode_view`; None for what is no view (of another version, or damaged)."""
    try:
        unpacker = zlib.decompressobj()
        plain = unpacker.decompress(base64.b85decode(text), _PLAIN_LIMIT_BYTES)
        data = json.loads(plain)
        groups = tuple(
            Group(
                **{
                    **group,
                    "ranks": tuple(group["ranks"]),
                    "entries": tuple(_read_entry(entry) for entry in group["entries"]),
                }
            )
            for group in data["groups"]
        )
        return RankView(**{**data, "groups": groups})
    except (ValueError, TypeError, KeyError, AttributeError, zlib.error):
        return None


def _read_entry(data: dict[str, Any]) -> Collective:
    return Collective(**data)
