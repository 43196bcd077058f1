"""Persistent mapping and set against plain copies."""

from hypothesis import given
from hypothesis import strategies as st

from muster.agent.runtime.persistent import PersistentMap, PersistentSet

KEYS = st.integers(0, 5)
CHANGES = st.lists(st.tuples(st.integers(0, 30), KEYS, st.one_of(st.none(), st.integers(0, 3))), max_size=40)


@given(changes=CHANGES, read_again=st.lists(st.integers(0, 30)))
def test_every_version_stays_what_it_was(changes, read_again) -> None:
    versions: list[tuple[PersistentMap[int, int], dict[int, int]]] = [(PersistentMap(), {})]
    for place, key, value in changes:
        items, plain = versions[place % len(versions)]
        if value is None:
            versions.append((items.without(key), {k: v for k, v in plain.items() if k != key}))
        else:
            versions.append((items.with_item(key, value), {**plain, key: value}))
    for place in read_again:
        items, plain = versions[place % len(versions)]
        assert items == plain
    for items, plain in versions:
        assert (dict(items.items()), len(items), set(items)) == (plain, len(plain), set(plain))


@given(changes=st.lists(st.tuples(st.integers(0, 30), KEYS, st.booleans()), max_size=40))
def test_every_version_of_a_set_stays_what_it_was(changes) -> None:
    versions: list[tuple[PersistentSet[int], frozenset[int]]] = [(PersistentSet(), frozenset())]
    for place, item, is_added in changes:
        current, plain = versions[place % len(versions)]
        versions.append(
            (current.with_item(item), plain | {item}) if is_added else (current.without(item), plain - {item})
        )
    assert all(current == plain and plain == current for current, plain in versions)


def test_the_newest_version_keeps_the_order_of_a_dict() -> None:
    items = PersistentMap({"a": 1, "b": 2}).with_item("c", 3).with_item("a", 4)
    assert list(items.items()) == [("a", 4), ("b", 2), ("c", 3)]


def test_an_empty_map_can_be_shared() -> None:
    empty: PersistentMap[str, int] = PersistentMap()
    item, other = empty.with_item("a", 1), empty.with_item("b", 2)
    assert (dict(item), dict(other), dict(empty)) == ({"a": 1}, {"b": 2}, {})
