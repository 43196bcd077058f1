"""Every message of every union arrives as it was sent, and garbage is refused: a new message is covered as it is.

The values are made from the declared types by this module alone, not by the codec that is tested.
"""

import contextlib
import functools
import hashlib
import json
import types
from enum import Enum
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
from doubles.rendezvous_links import encode_and_decode, make_join
from doubles.samples import make_failure
from hypothesis import given, settings
from hypothesis import strategies as st

from muster._shared.codec import MalformedMessageError, MessageUnion, decode, encode, encode_message, to_json
from muster._shared.fields import AS_OBJECT, HOST_NAME, JSON, PACKED, SPARSE, Limit, Range, Shared
from muster._shared.records import record, replace
from muster._shared.reports import Failure, Group, OomEvidence, RankView, Report, Stack
from muster.agent.rendezvous.consensus.actions import JobEnd, RoundBreak
from muster.agent.rendezvous.interface import AllStarted, BreakKind, RoundBroken
from muster.agent.rendezvous.protocol import messages
from muster.agent.rendezvous.protocol import messages as discovery
from muster.agent.rendezvous.protocol.framing import FRAME_LIMIT_BYTES, MAC_BYTES, UNAUTHENTICATED_LIMIT_BYTES
from muster.agent.rendezvous.protocol.messages import Message
from muster.agent.rendezvous.report_messages import Stopped
from muster.agent.rendezvous.torch_handlers import messages as torch_messages

UNIONS: list[MessageUnion] = [
    messages.MEMBER_MESSAGES,
    messages.LEADER_MESSAGES,
    discovery.FIRST_MESSAGES,
    discovery.QUERY_ANSWERS,
    discovery.ANNOUNCEMENT_ANSWERS,
]
"""Between nodes."""
LOCAL_UNIONS: list[MessageUnion] = [torch_messages.COMMANDS, torch_messages.THREAD_FINDINGS]
"""Between the agent and the program that drives it."""
PLACES = [(union, kind) for union in (*UNIONS, *LOCAL_UNIONS) for kind in union.kinds]


def name(place: Any) -> str:
    return place.__name__ if isinstance(place, type) else ""


@functools.cache  # to build strategies takes longer than to draw from them
def build_values(annotation: Any) -> st.SearchStrategy[Any]:
    """Valid values of a declared type."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return build_limited(args[0], args[1:])
    if origin in (Union, types.UnionType):
        return st.one_of(*map(build_values, args))
    if annotation in (None, types.NoneType):
        return st.none()
    if origin is Shared:
        return build_values(args[0]).map(Shared)
    if origin is tuple and args[-1] is ...:
        return st.lists(build_values(args[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(build_values, args))
    if origin is frozenset:
        return st.frozensets(build_values(args[0]), max_size=3)
    if annotation is bool:
        return st.booleans()
    if issubclass(annotation, Enum):
        return st.sampled_from(annotation)
    return build_records(annotation)


def build_limited(base: Any, marks: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    mark = marks[0]
    if mark == PACKED:
        return build_records(base)
    if mark == SPARSE:
        return build_values(base)
    if AS_OBJECT in marks:
        (pair, _) = get_args(base)
        return st.lists(build_values(pair), max_size=3, unique_by=lambda each: each[0]).map(tuple)
    if isinstance(mark, Range) and base is int:
        return st.integers(int(mark.least), int(mark.most))
    if isinstance(mark, Range):
        return st.floats(mark.least, mark.most)
    assert isinstance(mark, Limit)
    if base is not str:
        return build_values(base).filter(lambda value: len(value) <= mark.most)
    if JSON in marks:
        return st.dictionaries(st.text(max_size=9), st.integers() | st.text(max_size=9), max_size=3).map(to_json)
    if HOST_NAME in marks:
        return st.text("abcxyz.-:%ü", min_size=1, max_size=60)
    least = min(60, mark.most // 4)  # characters of four bytes
    texts = st.text(max_size=least) | st.just("x" * mark.most) | st.just("\U0001f40c" * (mark.most // 4))
    return texts.map(lambda text: text.encode(errors="replace").decode())


@functools.cache
def build_records(kind: type) -> st.SearchStrategy[Any]:
    fields = {field: build_values(annotation) for field, annotation in kind.__annotations__.items()}
    return st.fixed_dictionaries(fields).map(align_ranks).map(lambda values: kind(**values)).filter(is_consistent)


def align_ranks(values: dict[str, Any]) -> dict[str, Any]:
    """A member's own ranks, one for each round of the record that is beside them."""
    if "group_ranks" not in values:
        return values
    recovery = values["recovery"] if "recovery" in values else values["facts"].value.recovery
    found = zip(recovery.quorum_rounds, (*values["group_ranks"], *(0 for _ in recovery.quorum_rounds)), strict=False)
    ranks = tuple(None if rank is None else rank % each.size for each, rank in found)
    return {**values, "group_ranks": ranks}


def is_consistent(made: Any) -> bool:
    return not hasattr(made, "find_contradiction") or made.find_contradiction() is None


@pytest.mark.parametrize(("union", "kind"), PLACES, ids=name)
@settings(max_examples=5)
@given(data=st.data())
def test_every_message_arrives_as_it_was_sent(union: MessageUnion, kind: type, data: st.DataObject) -> None:
    sent = data.draw(build_records(kind))
    frame = encode_and_decode(sent)
    assert frame["type"] == kind.__name__
    assert union.read(frame) == sent
    assert union.read(sent) is sent  # within one process it is not encoded


def test_each_message_has_a_name_of_its_own() -> None:
    kinds = set(get_args(Message))
    assert len({kind.__name__ for kind in kinds}) == len(kinds)
    assert kinds == {kind for union in UNIONS for kind in union.kinds}


def test_a_message_of_another_direction_or_a_newer_version_is_none() -> None:
    assert messages.MEMBER_MESSAGES.read({"type": "News", "x": 1}) is None
    assert messages.MEMBER_MESSAGES.read(encode_and_decode(messages.Exit())) is None
    assert messages.MEMBER_MESSAGES.read(messages.Exit()) is None
    assert messages.MEMBER_MESSAGES.read({**encode_and_decode(AllStarted(round_number=1)), "new": [1]}) is not None


# -- garbage ------------------------------------------------------------------------------------------------------

ATOMS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from([-1, 65536, 2**53, 10**400, 1e300, "\ud800", "a\0b", "x" * 300, "\x1b[2J\n", "x" * 10_000]),
)
KEYS = st.text(max_size=5)
JUNK = st.recursive(ATOMS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner), max_leaves=20)


@functools.cache
@st.composite
def garbled(draw: Any, kind: type) -> dict[str, Any]:
    """A message of which one to three places are not what they should be."""
    message: dict[str, Any] = encode_and_decode(draw(build_records(kind)))
    for _ in range(draw(st.integers(1, 3))):
        container: Any = message
        while True:
            keys = list(container) if isinstance(container, dict) else range(len(container))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(container[key], dict | list) and draw(st.booleans()):
                container = container[key]
                continue
            if isinstance(container, dict) and draw(st.booleans()):
                del container[key]
            else:
                container[key] = draw(JUNK)
            break
    return message


@pytest.mark.parametrize(("union", "kind"), PLACES, ids=name)
@settings(max_examples=5)
@given(data=st.data())
def test_garbage_is_read_or_refused_and_what_is_read_can_be_sent(union, kind, data) -> None:
    try:
        received = union.read(data.draw(garbled(kind)))
    except MalformedMessageError:
        return
    if received is not None:
        assert union.read(encode_and_decode(received)) == received


@settings(max_examples=30)
@given(frame=st.dictionaries(KEYS, JUNK) | JUNK.map(lambda junk: {"type": junk}))
def test_any_object_is_read_or_refused(frame: dict[str, Any]) -> None:
    for union in UNIONS:
        with contextlib.suppress(MalformedMessageError):
            assert union.read(frame) is None or frame["type"] in {kind.__name__ for kind in union.kinds}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"port": 65536}, "'port': not an integer from 0 to 65535"),
        ({"nproc": True}, "'nproc': not an integer from 1 to 1048576"),
        ({"id": 5}, "'id': not text"),
        ({"id": "x" * 256}, "'id': longer than 255 bytes"),
        ({"local_addr": "two words"}, "'local_addr': not a host name or address"),
        ({"is_prepared": 1}, "'is_prepared': not true or false"),
        ({"recovery": []}, "'recovery': not an object"),
        ({"recovery": {"round_number": 2**41}}, "'recovery': 'round_number': not an integer from 0 to "),
        ({"rules": {"backend": "other"}}, "'rules': 'backend': not one of muster, static"),
    ],
)
def test_an_error_names_the_field_and_what_is_allowed(changes: dict[str, Any], why: str) -> None:
    join = make_join(decode(discovery.JobRules, RULES), index=None)
    with pytest.raises(MalformedMessageError) as caught:
        messages.MEMBER_MESSAGES.read({**encode_and_decode(join), **changes})
    assert str(caught.value).startswith(why)


RULES = {
    "backend": "muster",
    "min_nodes": 1,
    "max_nodes": 2,
    "max_restarts": 3,
    "join_timeout_s": 1,
    "last_call_s": 0.5,
    "keep_alive_interval_s": 1.0,
    "keep_alive_max_attempt": 5,
    "time_scale": 1.0,
}


def test_a_field_without_a_limit_is_a_mistake_in_the_declaration() -> None:
    @record
    class Careless:
        number: int

    with pytest.raises(TypeError, match="declares no limit"):
        encode(Careless(number=1), 100)


# -- limits -------------------------------------------------------------------------------------------------------


UNACKNOWLEDGED = 8
"""Rounds that not all of their members have acknowledged: the only list without a limit, since none may be left out."""


LONGEST_VIEW = RankView(
    global_rank=0,
    node=0,
    host="",
    groups=tuple(
        Group(
            name=hashlib.shake_256(b"name%d" % n).hexdigest(127),
            description=hashlib.shake_256(b"description%d" % n).hexdigest(127),
            entered=0,
            completed=0,
        )
        for n in range(64)
    ),
)
"""Its names are hardly compressible."""


def build_longest_text(marks: tuple[Any, ...]) -> str:
    (limit,) = (mark.most for mark in marks if isinstance(mark, Limit))
    if JSON in marks:
        return to_json({"x": "x" * (limit - len('{"x":""}'))})
    return ("h" if HOST_NAME in marks else "\x01") * (limit + 100)


def build_longest(annotation: Any, items: int = UNACKNOWLEDGED) -> Any:
    """The value whose JSON is longest: texts that JSON escapes, and more items and bytes than are allowed."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated and isinstance(args[1], Range):
        return int(args[1].most) if args[0] is int else 1 / 3 * args[1].most
    if origin is Annotated and args[0] is str:
        return build_longest_text(args[1:])
    if origin is Annotated and args[1] == PACKED:
        return LONGEST_VIEW if args[0] is RankView else build_longest(args[0])
    if origin is Annotated:
        return build_longest(args[0], items if args[1] == SPARSE else args[1].most + 1)
    if origin in (Union, types.UnionType):
        return build_longest(next(arg for arg in args if arg is not types.NoneType), items)
    if origin is Shared:
        return Shared(build_longest(args[0], items))
    if origin is tuple and args[-1] is ...:
        return (build_longest(args[0]),) * items
    if origin is tuple:
        return tuple(map(build_longest, args))
    if origin is frozenset:
        return frozenset(range(2**20 - items, 2**20))
    if annotation is bool:
        return False
    if issubclass(annotation, Enum):
        return max(annotation, key=lambda member: len(member.value))
    return annotation(**{field: build_longest(kind) for field, kind in annotation.__annotations__.items()})


@pytest.mark.parametrize(("union", "kind"), PLACES, ids=name)
def test_the_longest_message_fits_into_a_frame(union: MessageUnion, kind: type) -> None:
    longest = build_longest(kind)
    if not is_consistent(longest):
        consistent = (
            {"broken": replace(longest.broken, kind=BreakKind.FINAL)}
            if isinstance(longest, RoundBreak)
            else {"rank_offset": 0}
        )
        longest = replace(longest, **consistent)
    limit_bytes = UNAUTHENTICATED_LIMIT_BYTES if union is discovery.FIRST_MESSAGES else FRAME_LIMIT_BYTES - MAC_BYTES
    text = encode_message(longest, limit_bytes)
    assert len(text) <= limit_bytes
    assert union.read(json.loads(text)) is not None


def build_failure(character: str) -> Failure:
    return make_failure(
        node=1,
        node_index=1,
        host=character * 1000,
        local_rank=0,
        global_rank=0,
        pid=77,
        time_s=1.7e9,
        reason=character * 100_000,
        exception=character * 100_000,
        traceback=character * 3_500_000 + "the end",
        stderr_tail=(character * 100_000,) * 99 + ("last line",),
        oom=OomEvidence(certain=True, source=character * 5000),
    )


@pytest.mark.parametrize("character", ["x", "\n", "ü", "\U0001f40c", "\x1b", "\ud800"])
def test_late_failures_with_long_texts_are_shortened_and_the_first_is_nearly_whole(character: str) -> None:
    failure, text = build_failure(character), character * 1_000_000  # once: 64 times they would be a gigabyte
    failures = tuple(replace(failure, local_rank=rank, global_rank=rank) for rank in range(64))
    stacks = tuple(Stack(global_rank=rank, node=1, local_rank=rank, text=text) for rank in range(64))
    stopped = Stopped(round_number=1, port=1, failures=failures, stacks=stacks)
    text = encode_message(stopped, FRAME_LIMIT_BYTES - MAC_BYTES)
    assert len(text) <= FRAME_LIMIT_BYTES - MAC_BYTES
    received = messages.MEMBER_MESSAGES.read(json.loads(text))
    assert isinstance(received, Stopped)
    assert [failure.local_rank for failure in received.failures] == list(range(64))
    assert len(received.stacks) == 64
    first = received.failures[0]
    assert first.traceback.startswith("...")
    assert first.traceback.endswith("the end")
    assert 60_000 < len(first.traceback.encode()) <= 65_536
    assert len(first.stderr_tail) == 64
    assert first.stderr_tail[-1] == "last line"
    assert first.exception.endswith("...")


def test_a_broadcast_is_encoded_once_and_reads_like_any_other_message(monkeypatch: pytest.MonkeyPatch) -> None:
    report = Shared(Report(run_id="run", reason="why", attempt=0, max_restarts=1))
    first = JobEnd(succeeded=False, report=report, printer_id="m0")
    frame = encode_and_decode(first)
    encoded = report.encoded
    assert encoded is not None
    second = JobEnd(succeeded=False, report=report, printer_id=None)
    assert encode_and_decode(second) == {**frame, "printer_id": None}
    assert report.encoded is encoded
    assert messages.LEADER_MESSAGES.read(frame) == first


def test_enums_travel_by_value() -> None:
    broken = RoundBroken(round_number=1, kind=BreakKind.FINAL, reason="r")
    assert encode_and_decode(broken)["kind"] == "final"
