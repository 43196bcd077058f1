"""Writes a story as a trace that ui.perfetto.dev opens: Perfetto's own protobuf, by hand.

It is handwritten, because the package `perfetto` brings a program that it downloads, and protobuf's runtime. A trace is
only a list of messages with a dozen fields. A node has a track with the phases as slices and marks as instants. The job
has one with its recoveries. Counters show steps and values. Times are nanoseconds since the job's start.

Source: protos/perfetto/trace/perfetto_trace.proto of google/perfetto, for the numbers of the fields.
"""

from collections.abc import Iterator
from typing import Final

from muster.cli.afterwards.story import PHASES, Story

# Fields of Trace, TracePacket, TrackEvent and TrackDescriptor.
_PACKET: Final = 1
_TIMESTAMP, _SEQUENCE, _TRACK_EVENT, _FLAGS, _DESCRIPTOR = 8, 10, 11, 13, 60
_EVENT_TYPE, _EVENT_TRACK, _EVENT_NAME, _DOUBLE_VALUE = 9, 11, 23, 44
_UUID, _NAME, _PARENT, _COUNTER, _ORDERING, _RANK = 1, 2, 5, 8, 11, 12
_BEGIN, _END, _INSTANT, _COUNT = 1, 2, 3, 4
_SEQUENCE_ID: Final = 1
_JOB: Final = 1
_FIRST_NODE: Final = 1000
_FIRST_COUNTER: Final = 10
_EXPLICIT: Final = 3
"""Child tracks in the order of their ranks."""


def build_trace(story: Story) -> bytes:
    """Return the whole trace."""
    return b"".join(_encode_bytes(_PACKET, packet) for packet in _list_packets(story))


def _list_packets(story: Story) -> Iterator[bytes]:
    yield _describe(_JOB, f"job {story.name}", is_first=True)
    for node in story.nodes:
        name = f"node {node.index}" + (f" ({node.host})" if node.host else "")
        yield _describe(_FIRST_NODE + node.index, name, parent=_JOB, rank=node.index + 100)
    counters = [("step", story.steps), *story.values.items()] if story.steps else []
    for number, (name, _) in enumerate(counters):
        yield _describe(_FIRST_COUNTER + number, name, parent=_JOB, rank=number, is_counter=True)
    events = sorted(_list_events(story), key=lambda each: each[:2])
    for at_s, _, kind, track, name in events:
        yield _build_event(story, at_s, kind, track, name)
    for number, (_, points) in enumerate(counters):
        for at_s, value in points:
            yield _build_event(story, at_s, _COUNT, _FIRST_COUNTER + number, "", float(value))


def _list_events(story: Story) -> Iterator[tuple[float, int, int, int, str]]:
    """Return the time, place among those of one time (ends come first), type, track, name."""
    for each in story.recoveries:
        if each.cost_s is not None:
            began_s = each.time_s - sum(part_s for name, part_s in each.parts_s if name in ("detect", "hang"))
            yield began_s, 1, _BEGIN, _JOB, f"recovery: {each.cause}"
            yield began_s + each.cost_s, 0, _END, _JOB, ""
    for node in story.nodes:
        for bar in node.bars:
            yield bar.start_s, 1, _BEGIN, _FIRST_NODE + node.index, PHASES[bar.phase]
            yield bar.end_s, 0, _END, _FIRST_NODE + node.index, ""
    for mark in story.marks:
        track = _JOB if mark.node is None else _FIRST_NODE + mark.node
        yield mark.at_s, 2, _INSTANT, track, f"{mark.kind}: {mark.text}"


def _build_event(story: Story, at_s: float, kind: int, track: int, name: str, value: float | None = None) -> bytes:
    event = _encode_number(_EVENT_TYPE, kind) + _encode_number(_EVENT_TRACK, track)
    if name:
        event += _encode_bytes(_EVENT_NAME, name.encode(errors="replace"))
    if value is not None:
        event += _encode_double(_DOUBLE_VALUE, value)
    at_ns = max(0, round((at_s - story.start_s) * 1e9))
    return (
        _encode_number(_TIMESTAMP, at_ns) + _encode_number(_SEQUENCE, _SEQUENCE_ID) + _encode_bytes(_TRACK_EVENT, event)
    )


def _describe(
    uuid: int, name: str, *, parent: int | None = None, rank: int = 0, is_counter: bool = False, is_first: bool = False
) -> bytes:
    track = _encode_number(_UUID, uuid) + _encode_bytes(_NAME, name.encode(errors="replace"))
    if parent is None:
        track += _encode_number(_ORDERING, _EXPLICIT)
    else:
        track += _encode_number(_PARENT, parent) + _encode_number(_RANK, rank)
    if is_counter:
        track += _encode_bytes(_COUNTER, b"")
    flags = _encode_number(_FLAGS, 1) if is_first else b""  # the sequence begins
    return _encode_number(_SEQUENCE, _SEQUENCE_ID) + flags + _encode_bytes(_DESCRIPTOR, track)


def _encode_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _encode_number(field: int, value: int) -> bytes:
    return _encode_varint(field << 3) + _encode_varint(value)


def _encode_bytes(field: int, data: bytes) -> bytes:
    return _encode_varint(field << 3 | 2) + _encode_varint(len(data)) + data


def _encode_double(field: int, value: float) -> bytes:
    import struct

    return _encode_varint(field << 3 | 1) + struct.pack("<d", value)
