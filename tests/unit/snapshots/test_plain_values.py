"""Containers and plain values: what is kept, how it comes back, and what is refused."""

import collections
import datetime as dt
import decimal
import enum
import fractions
import io
import pathlib
import pickle
import random
import sys
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.snapshots.plain import Refused, decode, encode

pytestmark = pytest.mark.torch


class Color(enum.Enum):
    RED = "red"


class Mode(enum.Flag):
    A, B = 1, 2


def carry(state: Any) -> Any:
    skeleton, tensors, _, _ = encode(state)
    return decode(skeleton, lambda number: tensors[number].clone(), lambda local, _: local)


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.binary()
    | st.decimals()
    | st.fractions()
    | st.datetimes()
    | st.timedeltas()
    | st.sampled_from([Color.RED, Mode.A | Mode.B, pathlib.PurePosixPath("a/b"), torch.float16, torch.Size([1, 2])])
)
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text())
STATES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(KEYS, inner)
        | st.lists(inner).map(tuple)
        | st.lists(inner).map(lambda values: collections.deque(values, maxlen=9))
        | st.dictionaries(KEYS, inner).map(collections.OrderedDict)
        | st.dictionaries(KEYS, inner).map(lambda values: collections.defaultdict(list, values))
        | st.frozensets(KEYS, max_size=1)
        | st.sets(KEYS, max_size=1)
    ),
    max_leaves=20,
)


@given(STATES)
@settings(max_examples=60)
def test_plain_values_come_back_as_they_were(state: Any) -> None:
    back = carry(state)
    assert type(back) is type(state)
    assert repr(back) == repr(state)  # NaN is not equal to itself
    assert pickle.dumps(back) == pickle.dumps(carry(back))


def test_what_torch_refuses_has_a_form_of_ours() -> None:
    state = {
        "random": random.getstate(),
        "numpy": np.random.get_state(),
        "generator": np.random.default_rng(3).bit_generator.state,
        "scalar": [np.float32(1.5), np.int64(-1), np.bool_(True), np.datetime64("2026-01-02"), np.str_("")],
        "path": pathlib.Path("/data/x"),
        "when": dt.datetime(2026, 1, 2, tzinfo=dt.timezone.utc),
        "money": [decimal.Decimal("0.1"), fractions.Fraction(1, 3)],
        "parts": [slice(1, None), range(3)],
        "torch": [torch.device("cuda", 1), torch.bfloat16, torch.strided, torch.channels_last],
    }
    back = carry(state)
    assert repr(back) == repr(state)
    generator = random.Random()
    generator.setstate(back["random"])
    np.random.RandomState().set_state(back["numpy"])


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).reshape(2, 3),
        np.arange(6).reshape(2, 3).T,
        np.zeros((0, 3), np.float16),
        np.array(2.5),
        np.array(["2026-01-02"], "M8[D]"),
        np.array([(1, 2.5)], [("a", "i4"), ("b", "f8")]),
        np.array(["a", "bc"]),
    ],
)
def test_numpy_arrays_come_back_and_can_be_written(array: Any) -> None:
    back = carry([array])[0]
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert back.tolist() == array.tolist()
    assert back.flags.writeable
    assert not np.shares_memory(back, array)


def test_what_is_mentioned_twice_is_one_thing_afterwards() -> None:
    inner: list[Any] = [1]
    table = {"w": torch.ones(2)}
    back = carry({"a": inner, "b": inner, "c": table, "d": table})
    assert back["a"] is back["b"]
    assert back["c"] is back["d"]
    inner.append(inner)
    around = carry(inner)
    assert around[1] is around


def test_the_versions_of_a_state_dict_are_kept() -> None:
    model = torch.nn.BatchNorm1d(3)
    back = carry(model.state_dict())
    assert back._metadata == model.state_dict()._metadata
    model.load_state_dict(back)


class Custom:
    pass


class Point(NamedTuple):
    x: int
    y: int


@pytest.mark.parametrize(
    ("state", "place", "kind"),
    [
        ({"loader": [{"f": lambda: 1}]}, "state['loader'][0]['f']", "function"),
        ([Custom()], "state[0]", "Custom"),
        ({"a": Custom}, "state['a']", "Custom"),
        ({"p": Point(1, 2)}, "state['p']", "Point"),
        ({"d": collections.defaultdict(lambda: 3, a=1)}, "the default of state['d']", "function"),
        ({"o": np.array([{}, None])}, "state['o']", "ndarray"),
        ({Custom(): 1}, "the key", "Custom"),
        ({"m": sys}, "state['m']", "module"),
        ({"g": torch.Generator()}, "state['g']", "Generator"),
    ],
)
def test_what_has_no_form_is_refused_by_its_place(state: Any, place: str, kind: str) -> None:
    with pytest.raises(Refused) as refused:
        encode(state)
    assert place in str(refused.value)
    assert kind in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_class_that_the_script_calls_safe_is_taken() -> None:
    with torch.serialization.safe_globals([Custom]):
        assert type(carry([Custom()])[0]) is Custom


@pytest.mark.parametrize(
    "call", [b"cos\nsystem\n(S'false'\ntR.", b"cbuiltins\neval\n(S'1'\ntR.", b"cbuiltins\ngetattr\n."]
)
def test_loading_finds_nothing_else_by_name(call: bytes) -> None:
    with pytest.raises(pickle.UnpicklingError, match="not allowed"):
        decode(call, int, lambda local, _: local)


def test_an_enum_is_not_imported_and_its_value_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    skeleton = encode(Color.RED).skeleton
    monkeypatch.setitem(globals(), "Color", enum.Enum("Color", {"RED": "rot"}))
    with pytest.raises(LookupError, match="'red' any more"):
        decode(skeleton, int, lambda local, _: local)
    monkeypatch.delitem(sys.modules, __name__)
    with pytest.raises(LookupError, match="before load"):
        decode(skeleton, int, lambda local, _: local)


def test_a_skeleton_is_a_pickle_of_known_names_only() -> None:
    names = {"collections", "muster.snapshots.plain", "datetime", "builtins", "fractions", "decimal"}
    import pickletools

    skeleton = encode({"a": [torch.ones(1), dt.date(2026, 1, 2), np.float64(1)], "b": {1, 2}}).skeleton
    strings = [argument for code, argument, _ in pickletools.genops(io.BytesIO(skeleton)) if "UNICODE" in code.name]
    assert {text for text in strings if text in sys.modules} <= names
