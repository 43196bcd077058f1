"""Reading what others wrote, one field at a time: each is of the type and in the range it must be, or it is nonsense.

Whoever can reach the port may write to it, and a member may be garbled: what these functions let through can be used
without another look. JSON as Python reads it has numbers that are infinite or none, numbers of any length, and text
that no console can print; none of them get past here.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

MOST = 2**53 - 1
"""Whole numbers are exact in everybody's JSON up to here."""
MOST_SECONDS = 1e12
MOST_PROCESSES = 1 << 20
"""Of one node."""
HOST_LIMIT = 255


class MalformedMessageError(Exception):
    """A letter that nobody of ours writes: a field is missing, of a wrong type, or out of range. `str()` says which.

    The only error that a letter may cause: its sender loses the connection. Everything else is a bug of ours.
    """


def read_field(message: Mapping[str, Any], key: str, read: Callable[[Any], T]) -> T:
    """One field, read.

    Raises:
        NonsenseError: it is missing, or `read` says that it is not what it must be.
    """
    if key not in message:
        raise MalformedMessageError(f"{key!r} is missing")
    try:
        return read(message[key])
    except MalformedMessageError as error:
        raise MalformedMessageError(f"{key!r}: {error}") from None


def optional(read: Callable[[Any], T]) -> Callable[[Any], T | None]:
    """A reader that lets None through."""
    return lambda value: None if value is None else read(value)


def list_of(read: Callable[[Any], T]) -> Callable[[Any], tuple[T, ...]]:
    """A reader of lists. Inside a process they may be tuples: what a member writes to itself makes no trip as JSON."""

    def read_many(value: Any) -> tuple[T, ...]:
        if not isinstance(value, list | tuple):
            raise MalformedMessageError("not a list")
        return tuple(read(item) for item in value)

    return read_many


def between(least: int, most: int) -> Callable[[Any], int]:
    """A reader of whole numbers from `least` to `most`. True is no number here."""

    def read_whole(value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise MalformedMessageError(f"not a whole number from {least} to {most}")
        return value

    return read_whole


count = between(0, MOST)
integer = between(-MOST, MOST)
size = between(1, MOST)
processes = between(1, MOST_PROCESSES)
port = between(0, 65535)


def seconds(value: Any) -> float:
    """A finite number."""
    if type(value) not in (int, float) or not -MOST_SECONDS <= value <= MOST_SECONDS:
        raise MalformedMessageError("not a number of seconds")
    return float(value)


def boolean(value: Any) -> bool:
    """True or False, and nothing that only counts as such."""
    if not isinstance(value, bool):
        raise MalformedMessageError("neither true nor false")
    return value


def text(value: Any) -> str:
    """Text that can be printed: half a pair of surrogates (a byte of a file name that is no UTF-8) becomes "?"."""
    if not isinstance(value, str):
        raise MalformedMessageError("not text")
    return value if value.isascii() else value.encode(errors="replace").decode()


def host(value: Any) -> str:
    """What may be looked up or dialled."""
    name = text(value)
    if not name or len(name) > HOST_LIMIT or not name.isprintable() or " " in name:
        raise MalformedMessageError("not the name or address of a host")
    return name


def address(value: Any) -> tuple[str, int]:
    """Host and port."""
    name, at = items(2)(value)
    return host(name), port(at)


def items(length: int) -> Callable[[Any], Any]:
    """A reader of lists of a given length, whose items are still to be read."""

    def read_items(value: Any) -> Any:
        if not isinstance(value, list | tuple) or len(value) != length:
            raise MalformedMessageError(f"not a list of {length}")
        return value

    return read_items


def mapping(value: Any) -> dict[str, Any]:
    """An object, whose fields are still to be read."""
    if not isinstance(value, dict):
        raise MalformedMessageError("not an object")
    return value
