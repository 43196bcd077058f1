"""Frozen, keyword-only records whose definition costs next to nothing, and `assert_never` for unions of them.

`dataclasses` compiles some six functions per class, which takes 0.5 ms, and the agent has over fifty classes of events,
actions and messages. That was a third of its time to the first worker. These records lack default factories, ordering
and slots, which the agent does not need.

The methods of all records take `Any`, because a record may have any type, with fields of any type.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_options: Any) -> Any:
        """Stand in for `typing`'s, which exists from Python 3.11: only type checkers need the real one."""
        return lambda function: function


T = TypeVar("T")

NO_ITEMS: Final[Mapping[Any, Any]] = MappingProxyType({})
"""The default of a field that is a mapping."""

_REQUIRED = object()


@dataclass_transform(frozen_default=True, kw_only_default=True)
def record(cls: type[T]) -> type[T]:
    """Make a class of annotated names a record: built from keywords, compared and hashed by value, never changed.

    A `__repr__` of its own stays.

    Raises:
        TypeError: (from the class, when called) fields are missing or unknown: they are named.
        AttributeError: (from a record) on an assignment.
    """
    fields = {name: getattr(cls, name, _REQUIRED) for name in cls.__annotations__}
    required = frozenset(name for name, value in fields.items() if value is _REQUIRED)
    methods = {"__init__": _init, "__eq__": _eq, "__hash__": _hash, "__repr__": _repr, "__setattr__": _refuse}
    for name, value in {"__record_fields__": (fields, required), **methods}.items():
        if name not in cls.__dict__ or name != "__repr__":
            setattr(cls, name, value)
    return cls


def build(kind: Callable[..., T], values: Mapping[str, object]) -> T:
    """Build a record of values that nothing has checked, such as a file's."""
    return kind(**values)


def replace(old: T, **changes: Any) -> T:
    """Copy a record with some fields changed.

    Raises:
        TypeError: a field is unknown.
    """
    # Faster than `__init__`, for leaders of thousands.
    own = {**old.__dict__, **changes}
    if len(own) > len(old.__dict__):
        raise TypeError(f"{type(old).__name__} has no field {', '.join(own.keys() - old.__dict__.keys())}")
    new: T = object.__new__(type(old))
    object.__setattr__(new, "__dict__", own)
    return new


def assert_never(value: NoReturn) -> NoReturn:
    """End a `match` over a closed union: type checkers refuse the call while a case is missing.

    Like `typing.assert_never`, which came with Python 3.11.

    Raises:
        TypeError: the value is none of the union's.
    """
    raise TypeError(f"unexpected {value!r}")


def _init(self: Any, **values: Any) -> None:
    fields, required = self.__record_fields__
    own = {**fields, **values}
    if len(own) > len(fields):
        raise TypeError(f"{type(self).__name__} has no field {', '.join(own.keys() - fields.keys())}")
    if not required <= values.keys():
        missing = [name for name in fields if name in required - values.keys()]
        raise TypeError(f"{type(self).__name__} needs {', '.join(missing)}")
    object.__setattr__(self, "__dict__", own)


def _eq(self: Any, other: object) -> bool:
    return type(self) is type(other) and self.__dict__ == other.__dict__


def _hash(self: Any) -> int:
    return hash((type(self), *self.__dict__.values()))


def _repr(self: Any) -> str:
    return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__dict__.items())})"


def _refuse(self: Any, name: str, _value: object) -> None:
    raise AttributeError(f"{type(self).__name__} is frozen: {name} cannot be set")
