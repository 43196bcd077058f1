"""Packs what one node reports to the leader to less than half: at most 1 kB per second leaves a node."""

import base64
import json
import zlib
from typing import Annotated

from muster._shared.codec import encode, salvage
from muster._shared.fields import SPARSE, Count, Limit, Seconds
from muster._shared.job_view import LISTED_RANKS, MOST_SLOW_RANKS, NodeStatus, RankStatus, SlowRank
from muster._shared.records import record

LIMIT_BYTES = 1 << 17
"""Limit before it is packed."""
BYTES_PER_S = 1000
"""What one node may send on average."""
PACKED_LIMIT_BYTES = 32768


@record
class NodeSummary:
    """The status of a node and its ranks."""

    node: NodeStatus
    ranks: Annotated[tuple[RankStatus, ...], Limit(most=LISTED_RANKS)] = ()
    """The ranks; empty in a job of more than `LISTED_RANKS`."""
    slow_ranks: Annotated[tuple[SlowRank, ...], Limit(most=MOST_SLOW_RANKS), SPARSE] = ()
    peak_bytes: Annotated[Count, SPARSE] = 0
    """The most memory that one of its ranks had; 0 if unknown."""
    peak_rank: Annotated[Count, SPARSE] = 0
    """The global rank of that one."""
    first_done: Annotated[Count, SPARSE] = 0
    """How many steps each of its ranks has done at its first one, as the script counts; 0 if one has done none."""
    first_ago_s: Annotated[Seconds, SPARSE] = 0.0
    """How long ago all had done it."""


def pack(summary: NodeSummary) -> str:
    """Pack it as a short text; return "" if there is no room for it."""
    packed = base64.b85encode(zlib.compress(encode(summary, LIMIT_BYTES).encode(), 6)).decode()
    return packed if len(packed) <= PACKED_LIMIT_BYTES else ""


def unpack(text: str) -> NodeSummary | None:
    """Read the result of `pack` from another node; None if it is no summary. Invalid parts are omitted."""
    try:
        plain = zlib.decompressobj().decompress(base64.b85decode(text), LIMIT_BYTES)
        return salvage(NodeSummary, json.loads(plain))
    except (ValueError, RecursionError, zlib.error):
        return None
