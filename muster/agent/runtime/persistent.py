"""An immutable mapping and an immutable set whose next version costs no copy.

`decisions.decide` is pure: every event makes a new state of the job. Copying a dict of all members for each of
thousands of events made the cost quadratic: forming a round of 4,096 members spent most of its time there. Here the
versions of a mapping share one dict. The newest version owns it; an older one records what has changed since, and
makes its own copy when it is read (Baker's trick for persistent arrays, without rerooting). The ordinary path never
reads an older version.
"""

from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from collections.abc import Set as AbstractSet
from typing import Any, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

_ABSENT: Any = object()
"""`Any`, because it replaces a value of whatever type a mapping has."""


class PersistentMap(Mapping[K, V], Generic[K, V]):
    """An immutable mapping. Older versions lose the order of items that were removed since."""

    __slots__ = ("_items", "_key", "_next", "_old")

    def __init__(self, items: Mapping[K, V] | None = None) -> None:
        self._items: dict[K, V] | None = dict(items or {})
        self._next: PersistentMap[K, V] | None = None
        """The next version. It, or a later one, owns the dict."""
        self._key: Any = None
        """The key that differs in the next version. `_old` is its value here."""
        self._old: Any = _ABSENT

    def with_item(self, key: K, value: V) -> "PersistentMap[K, V]":
        """Return the next version, in which `key` has this value."""
        items = self._get_items()
        if not items:
            return PersistentMap({key: value})  # an empty map's dict may be a shared default
        old = items.get(key, _ABSENT)
        items[key] = value
        return self._make_next(items, key, old)

    def without(self, key: K) -> "PersistentMap[K, V]":
        """Return the next version, without `key`; return this version if it has no such key."""
        items = self._get_items()
        if key not in items:
            return self
        return self._make_next(items, key, items.pop(key))

    def _make_next(self, items: dict[K, V], key: K, old: Any) -> "PersistentMap[K, V]":
        newer: PersistentMap[K, V] = PersistentMap()
        newer._items = items
        self._items, self._next, self._key, self._old = None, newer, key, old
        return newer

    def _get_items(self) -> dict[K, V]:
        return self._rebuild() if self._items is None else self._items

    def _rebuild(self) -> dict[K, V]:
        """Build an old version's items: take the newest version's, and undo every change since."""
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
        return self._get_items()[key]

    def __contains__(self, key: object) -> bool:
        return key in self._get_items()

    def __iter__(self) -> Iterator[K]:
        return iter(self._get_items())

    def __len__(self) -> int:
        return len(self._get_items())

    # Several times faster than `Mapping`'s views.
    def keys(self) -> KeysView[K]:
        """See `Mapping`."""
        return self._get_items().keys()

    def values(self) -> ValuesView[V]:
        """See `Mapping`."""
        return self._get_items().values()

    def items(self) -> ItemsView[K, V]:
        """See `Mapping`."""
        return self._get_items().items()

    def __repr__(self) -> str:
        return f"PersistentMap({self._get_items()!r})"


class PersistentSet(AbstractSet[K], Generic[K]):
    """An immutable set; equal to any other set of the same content."""

    __slots__ = ("_map",)

    def __init__(self, content: Iterable[K] = ()) -> None:
        self._map: PersistentMap[K, None] = PersistentMap(dict.fromkeys(content))

    def with_item(self, item: K) -> "PersistentSet[K]":
        """Return the next version, which contains `item`; return this version if it already does."""
        return self if item in self._map else self._make_next(self._map.with_item(item, None))

    def without(self, item: K) -> "PersistentSet[K]":
        """Return the next version, without `item`; return this version if it has no such item."""
        return self._make_next(self._map.without(item))

    def _make_next(self, items: PersistentMap[K, None]) -> "PersistentSet[K]":
        if items is self._map:
            return self
        newer: PersistentSet[K] = PersistentSet()
        newer._map = items
        return newer

    def __contains__(self, item: object) -> bool:
        return item in self._map

    def __iter__(self) -> Iterator[K]:
        return iter(self._map)

    def __len__(self) -> int:
        return len(self._map)

    def __repr__(self) -> str:
        return f"PersistentSet({set(self._map)!r})"
