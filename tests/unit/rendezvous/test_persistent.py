"""Persistent mapping and set against plain copies."""

from hypothesis import given
from hypothesis import strategies as st

from muster.agent.rendezvous.consensus.persistent import PersistentMap, PersistentSet

KEYS = st.integers(0, 5)
CHANGES = st.lists(st.tuples(st.integers(0, 30), KEYS, st.one_of(st.none(), st.integers(0, 3))), max_size=40)


@given(changes=CHANGES, asked=st.lists(st.integers(0, 30)))
def test_every_version_stays_what_it_was(changes, asked) -> None:
    versions: list[tuple[PersistentMap[int, int], dict[int, int]]] = [(PersistentMap(), {})]
    for place, key, value in changes:
        ledger, plain = versions[place % len(versions)]
        if value is None:
            versions.append((ledger.without(key), {k: v for k, v in plain.items() if k != key}))
        else:
            versions.append((ledger.with_item(key, value), {**plain, key: value}))
    for place in asked:
        ledger, plain = versions[place % len(versions)]
        assert ledger == plain
    for ledger, plain in versions:
        assert (dict(ledger.items()), len(ledger), set(ledger)) == (plain, len(plain), set(plain))


@given(changes=st.lists(st.tuples(st.integers(0, 30), KEYS, st.booleans()), max_size=40))
def test_every_version_of_a_roll_stays_what_it_was(changes) -> None:
    versions: list[tuple[PersistentSet[int], frozenset[int]]] = [(PersistentSet(), frozenset())]
    for place, one, comes in changes:
        roll, plain = versions[place % len(versions)]
        versions.append((roll.with_one(one), plain | {one}) if comes else (roll.without(one), plain - {one}))
    assert all(roll == plain and plain == roll for roll, plain in versions)


def test_the_newest_version_keeps_the_order_of_a_dict() -> None:
    ledger = PersistentMap({"a": 1, "b": 2}).with_item("c", 3).with_item("a", 4)
    assert list(ledger.items()) == [("a", 4), ("b", 2), ("c", 3)]


def test_an_empty_one_can_be_shared() -> None:
    empty: PersistentMap[str, int] = PersistentMap()
    one, other = empty.with_item("a", 1), empty.with_item("b", 2)
    assert (dict(one), dict(other), dict(empty)) == ({"a": 1}, {"b": 2}, {})
