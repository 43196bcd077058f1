"""A mapping and a set that are never changed, and of which the next version costs no copy.

`membership.advance` is pure: every event makes a new state of the job. Copying a dict of all members for each of
thousands of events made the whole quadratic: forming 4,096 members spent most of its time there. Here the versions of
a mapping share one dict. The newest owns it; an older one, should anybody still ask, knows what has changed since and
makes a copy of its own (Baker's trick for persistent arrays, without the way back). Nobody asks on the ordinary path.
"""

from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from collections.abc import Set as AbstractSet
from typing import Any, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

_ABSENT: Any = object()


class PersistentMap(Mapping[K, V], Generic[K, V]):
    """An immutable mapping. Older versions forget the order of what was removed since."""

    __slots__ = ("_items", "_key", "_next", "_old")

    def __init__(self, items: Mapping[K, V] | None = None) -> None:
        self._items: dict[K, V] | None = dict(items or {})
        self._next: PersistentMap[K, V] | None = None
        """The version after this one; it, or one after it, has taken over the dict."""
        self._key: Any = None
        """What differs between this version and the next, and what it was here."""
        self._old: Any = _ABSENT

    def with_item(self, key: K, value: V) -> "PersistentMap[K, V]":
        """The next version, in which `key` has this value."""
        items = self._own()
        if not items:
            return PersistentMap({key: value})  # an empty one keeps its dict: it may be a default that many share
        old = items.get(key, _ABSENT)
        items[key] = value
        return self._hand_over(items, key, old)

    def without(self, key: K) -> "PersistentMap[K, V]":
        """The next version, which has no `key`; this one when there is none."""
        items = self._own()
        if key not in items:
            return self
        return self._hand_over(items, key, items.pop(key))

    def _hand_over(self, items: dict[K, V], key: K, old: Any) -> "PersistentMap[K, V]":
        newer: PersistentMap[K, V] = PersistentMap()
        newer._items = items
        self._items, self._next, self._key, self._old = None, newer, key, old
        return newer

    def _own(self) -> dict[K, V]:
        return self._rebuild() if self._items is None else self._items

    def _rebuild(self) -> dict[K, V]:
        """An old version's content: the newest one's, with every change since taken back."""
        changes: list[tuple[K, V]] = []
        version: PersistentMap[K, V] = self
        while version._next is not None:
            changes.append((version._key, version._old))
            version = version._next
        items = dict(version.items())
        for key, old in reversed(changes):
            if old is _ABSENT:
                items.pop(key, None)
            else:
                items[key] = old
        self._items, self._next, self._key, self._old = items, None, None, _ABSENT
        return items

    def __getitem__(self, key: K) -> V:
        return self._own()[key]

    def __contains__(self, key: object) -> bool:
        return key in self._own()

    def __iter__(self) -> Iterator[K]:
        return iter(self._own())

    def __len__(self) -> int:
        return len(self._own())

    # A dict's own views are several times faster than those of `Mapping`.
    def keys(self) -> KeysView[K]:
        """See `Mapping`."""
        return self._own().keys()

    def values(self) -> ValuesView[V]:
        """See `Mapping`."""
        return self._own().values()

    def items(self) -> ItemsView[K, V]:
        """See `Mapping`."""
        return self._own().items()

    def __repr__(self) -> str:
        return f"Ledger({self._own()!r})"


class PersistentSet(AbstractSet[K], Generic[K]):
    """An immutable set; equal to any other set of the same content."""

    __slots__ = ("_ledger",)

    def __init__(self, content: Iterable[K] = ()) -> None:
        self._ledger: PersistentMap[K, None] = PersistentMap(dict.fromkeys(content))

    def with_one(self, one: K) -> "PersistentSet[K]":
        """The next version, in which this one is."""
        return self if one in self._ledger else self._turn(self._ledger.with_item(one, None))

    def without(self, one: K) -> "PersistentSet[K]":
        """The next version, in which this one is not."""
        return self._turn(self._ledger.without(one))

    def _turn(self, ledger: PersistentMap[K, None]) -> "PersistentSet[K]":
        if ledger is self._ledger:
            return self
        roll: PersistentSet[K] = PersistentSet()
        roll._ledger = ledger
        return roll

    def __contains__(self, one: object) -> bool:
        return one in self._ledger

    def __iter__(self) -> Iterator[K]:
        return iter(self._ledger)

    def __len__(self) -> int:
        return len(self._ledger)

    def __repr__(self) -> str:
        return f"Roll({set(self._ledger)!r})"
