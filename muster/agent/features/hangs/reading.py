"""Turns the answers of a worker's server into records. Pure. It never raises, because each torch has its own format.

Source: torch/csrc/distributed/c10d/FlightRecorderDetail.hpp, format 2.x; gloo writes it from torch 2.8 on. Gloo's
entries stay "scheduled" and are done when `retired`. Its `pg_config` is empty, and `last_started` is -1.
"""

from collections.abc import Mapping, Sequence

from muster._shared.fields import MOST
from muster._shared.foreign_files import parse_json
from muster._shared.records import record
from muster._shared.reports import ENTRY_LIMIT, Collective, Group

_DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64"}
_DTYPES |= {"Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool"}


@record
class KnownGroups:
    """What the file of `workers.hooks.groups` says."""

    is_initialising: bool
    """Whether the worker is inside `init_process_group`."""
    ranks: Mapping[str, tuple[int, ...]]
    """The global ranks of its groups, by name."""
    device_timeout_s: float
    """The shortest timeout of the groups' backends for CUDA devices; 0 if there is none, or if it is unknown."""


def read_groups(text: bytes) -> KnownGroups:
    """Read the file of `workers.hooks.groups`."""
    is_initialising = False
    groups: dict[str, tuple[int, ...]] = {}
    timeouts: set[int] = set()
    for line in text.splitlines():
        data = _load(line)
        if "group" in data:
            is_initialising = False
            groups[str(data["group"])] = tuple(to_int(rank) for rank in to_list(data.get("ranks")))
            timeouts.add(to_int(data.get("device_timeout_s")))
        elif "init" in data:
            is_initialising, groups, timeouts = True, {}, set()
    return KnownGroups(is_initialising=is_initialising, ranks=groups, device_timeout_s=min(timeouts - {0}, default=0))


def _load(text: bytes) -> Mapping[str, object]:
    try:
        return to_dict(parse_json(text))
    except ValueError:  # being written
        return {}


def read_recorder(text: bytes, now_ns: int, members: Mapping[str, tuple[int, ...]]) -> tuple[Group, ...]:
    """Read the flight recorder's JSON.

    Args:
        text: the answer of the handler `fr_trace_json`.
        now_ns: this host's wall clock at the time of the answer. Entries have the time of their call by the same clock.
        members: the known global ranks of each group, by name.

    Returns:
        The groups in which the worker has entered anything, and those that are known to contain it.
    """
    data = _load(text)
    status = to_dict(data.get("pg_status"))
    by_group: dict[str, list[Mapping[str, object]]] = {}
    for entry in map(to_dict, to_list(data.get("entries"))):
        if names := to_list(entry.get("process_group")):
            by_group.setdefault(str(names[0]), []).append(entry)
    found = [_read_group(name, own, status, now_ns, members.get(name, ())) for name, own in by_group.items()]
    rest = [
        Group(name=name, description="default_pg" if name == "0" else "", entered=0, completed=0, ranks=ranks)
        for name, ranks in members.items()
        if name not in by_group
    ]
    return (*found, *rest)


def _read_group(
    name: str, entries: list[Mapping[str, object]], status: Mapping[str, object], now_ns: int, ranks: tuple[int, ...]
) -> Group:
    read = [_read_entry(entry, now_ns) for entry in entries]
    counted = [entry for entry in read if not entry.is_p2p]
    own = to_dict(status.get(str(entries[-1].get("pg_id"))))
    # Of many open ones, the rank waits in the first.
    first = [index for index, entry in enumerate(read) if not entry.is_done][: ENTRY_LIMIT // 2]
    last = range(max(0, len(read) - ENTRY_LIMIT + len(first)), len(read))
    kept = [read[index] for index in sorted({*first, *last})]
    return Group(
        name=name,
        description=_find_description(entries[-1]),
        entered=max([to_int(own.get("last_enqueued_collective")), *(entry.number for entry in counted)], default=0),
        completed=max(
            [to_int(own.get("last_completed_collective")), *(entry.number for entry in counted if entry.is_done)],
            default=0,
        ),
        ranks=ranks,
        entries=tuple(kept),
    )


def _find_description(entry: Mapping[str, object]) -> str:
    names = to_list(entry.get("process_group"))
    return str(names[1])[:80] if len(names) > 1 and names[1] not in (None, "undefined") else ""


def _read_entry(entry: Mapping[str, object], now_ns: int) -> Collective:
    is_p2p = bool(entry.get("is_p2p"))
    created_ns = entry.get("time_created_ns")  # since 1970: too large for a message
    return Collective(
        number=to_int(entry.get("p2p_seq_id" if is_p2p else "collective_seq_id")),
        operation=str(entry.get("profiling_name", "?")).rpartition(":")[2][:80],
        sizes=_describe_sizes(entry.get("input_sizes"), entry.get("input_dtypes")),
        age_s=round(max(0, now_ns - created_ns) / 1e9, 3) if isinstance(created_ns, int) and created_ns > 0 else 0.0,
        is_done=bool(entry.get("retired")) or entry.get("state") == "completed",
        is_p2p=is_p2p,
        timeout_s=to_int(entry.get("timeout_ms")) / 1000,
    )


def _describe_sizes(sizes: object, dtypes: object) -> str:
    """Return a text such as `4 x float32`, `2x3 x float32 and 1 more`; "" if there is nothing to say."""
    all_sizes, kinds = to_list(sizes), to_list(dtypes)
    if not all_sizes or not isinstance(all_sizes[0], list):
        return ""
    kind = str(kinds[0]) if kinds else ""
    shape = "x".join(str(to_int(size)) for size in all_sizes[0]) or "1"
    text = f"{shape} x {_DTYPES.get(kind, kind.lower())}" if kind else shape
    return f"{text} and {len(all_sizes) - 1} more" if len(all_sizes) > 1 else text


def to_dict(value: object) -> Mapping[str, object]:
    """Return a JSON value that another program has written if it is an object, otherwise an empty one."""
    return value if isinstance(value, dict) else {}


def to_list(value: object) -> Sequence[object]:
    """Return a value as `to_dict` does, for an array."""
    return value if isinstance(value, list) else ()


def to_int(value: object) -> int:
    """Return a value as `to_dict` does, for a count within our limits."""
    try:
        return min(max(0, int(value)), MOST)  # type: ignore[call-overload, no-any-return]  # a JSON value of any kind
    except (TypeError, ValueError, OverflowError):
        return 0
