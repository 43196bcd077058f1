"""Records behave as frozen keyword-only dataclasses would."""

import pytest

from muster._shared.records import record, replace


@record
class Point:
    """Two numbers."""

    x: int
    y: int = 0


@record
class Other:
    """The same fields."""

    x: int
    y: int = 0


@record
class Nothing:
    """No fields."""


def test_values_make_the_difference() -> None:
    assert Point(x=1) == Point(x=1, y=0)
    assert Point(x=1) != Point(x=2)
    assert Point(x=1) != Other(x=1)
    assert Nothing() == Nothing()
    assert len({Point(x=1), Point(x=1, y=0), Other(x=1)}) == 2
    assert repr(Point(x=1)) == "Point(x=1, y=0)"


def test_a_copy_with_changes() -> None:
    old = Point(x=1, y=2)
    assert replace(old, y=3) == Point(x=1, y=3)
    assert old.y == 2
    with pytest.raises(TypeError, match="no field z"):
        replace(old, z=1)


@pytest.mark.parametrize(
    ("values", "message"), [({}, "Point needs x"), ({"x": 1, "z": 2}, "Point has no field z"), ({"y": 1}, "needs x")]
)
def test_wrong_fields_are_named(values: dict[str, int], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Point(**values)


def test_a_record_cannot_be_changed() -> None:
    with pytest.raises(AttributeError, match="is frozen: x"):
        Point(x=1).x = 2  # type: ignore[misc]
