"""What the codec leaves out, adds and forgives: the forms that are on disk."""

import json
from typing import Annotated

import pytest

from muster._shared.codec import MalformedMessageError, decode, encode, salvage, to_data
from muster._shared.control import parse_answer
from muster._shared.fields import AS_OBJECT, SPARSE, Count, Limit, Name, Number
from muster._shared.job_view import JobStatus
from muster._shared.records import record
from muster._shared.reports import RankView, Stack
from muster.agent.round import Checkpoint


@record
class Part:
    """Of a list."""

    number: Count


@record
class Sample:
    """A field of each kind that only files have."""

    text: Annotated[str, Limit(most=8)]
    number: Count = 7
    parts: Annotated[tuple[Part, ...], Limit(most=2, keeps_end=True)] = ()
    shown: Annotated[tuple[tuple[Name, Number | Name], ...], Limit(most=2), AS_OBJECT] = ()
    rare: Annotated[Name, SPARSE] = ""


def test_a_field_that_is_left_out_is_not_written() -> None:
    assert to_data(Sample(text="a")) == {"text": "a", "number": 7, "parts": [], "shown": {}}
    assert to_data(Sample(text="a", rare="x"))["rare"] == "x"
    assert decode(Sample, {"text": "a"}) == Sample(text="a")


def test_pairs_are_an_object_and_a_value_is_a_number_or_text() -> None:
    sample = Sample(text="a", shown=(("loss", 0.5), ("lr", "nan")))
    assert to_data(sample)["shown"] == {"loss": 0.5, "lr": "nan"}
    assert decode(Sample, to_data(sample)) == sample


@pytest.mark.parametrize(
    "shown", [1, "x", {"a": None}, {"a": True}, {"a": float("nan")}, {"a": 1e999}, {"a": []}, {"a": 1, "b": 2, "c": 3}]
)
def test_pairs_that_are_none_are_refused(shown: object) -> None:
    with pytest.raises(MalformedMessageError, match="'shown': "):
        decode(Sample, {"text": "a", "shown": shown})


def test_what_is_invalid_is_left_out_of_what_anything_may_have_written() -> None:
    found = {
        "text": "0123456789",
        "number": "seven",
        "parts": [{"number": 1}, {"number": -1}, {"number": 2}, 5, {"number": 3}],
        "shown": {"a": [], "b": 2},
        "rare": {},
        "new": 1,
    }
    with pytest.raises(MalformedMessageError, match=r"'text': .* 8 bytes"):
        decode(Sample, found)
    kept = salvage(Sample, found)
    assert kept == Sample(text="01234567", parts=(Part(number=3),), shown=(("b", 2.0),))


@pytest.mark.parametrize("found", [None, [], 1, {}, {"text": 1}])
def test_a_record_without_what_it_needs_is_none(found: object) -> None:
    with pytest.raises(MalformedMessageError):
        salvage(Sample, found)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Expecting value"),
        ("[]", "not an object"),
        ('{"format": 1, "outcome": "odd", "line": ""}', "'outcome': not one of done"),
        ('{"format": 1, "outcome": "done", "line": 1}', "'line': not text"),
        ('{"format": 2, "outcome": "done", "line": ""}', "the answer is of another version of muster: it has format 2"),
    ],
)
def test_what_is_no_answer(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_answer(text)


def test_a_stack_without_a_view_is_written_as_before() -> None:
    stack = Stack(global_rank=0, node=0, local_rank=0, text="a")
    assert to_data(stack) == {"global_rank": 0, "node": 0, "local_rank": 0, "text": "a"}
    view = RankView(global_rank=0, node=0, host="h")
    assert decode(Stack, to_data(Stack(global_rank=0, node=0, local_rank=0, text="", view=view))).view == view


def test_files_of_the_run_folder_are_read() -> None:
    assert decode(Checkpoint, json.loads('{"number": 3, "step": 40, "path": "/c/40"}')) == Checkpoint(
        number=3, step=40, path="/c/40"
    )
    written = {
        "format": 1,
        "round": 2,
        "attempt": 1,
        "state": "paused",
        "paused_since_s": 1.5,
        "step": 7,
        "total": 9,
        "optimizer_steps": None,
        "rate": 0.5,
        "values": {"loss": 0.25, "lr": "nan"},
        "time_s": 2.5,
    }
    status = decode(JobStatus, written)
    assert to_data(status) == written
    assert encode(status, 1 << 16).startswith('{"format":1,"round":2')
