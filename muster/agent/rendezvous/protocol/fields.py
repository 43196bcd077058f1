"""Validating the fields of a message, one at a time: type and range.

Any process that can reach the port may write to it. A value that these functions return needs no further check.
Python's JSON parser accepts infinite numbers and NaN, integers of any length, and text that cannot be printed; these
functions reject or replace them.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

MOST = 2**53 - 1
"""Integers up to here are exact in every JSON implementation."""
MOST_SECONDS = 1e12
MOST_PROCESSES = 1 << 20
"""Of one node."""
HOST_LIMIT = 255


class MalformedMessageError(Exception):
    """A field of a message is missing, of a wrong type, or out of range. `str()` says which.

    The only error that a message may cause: its sender is disconnected. Every other error is a bug in muster.
    """


def read_field(message: Mapping[str, Any], key: str, read: Callable[[Any], T]) -> T:
    """Read one field.

    Raises:
        MalformedMessageError: it is missing, or `read` rejects it.
    """
    if key not in message:
        raise MalformedMessageError(f"{key!r} is missing")
    try:
        return read(message[key])
    except MalformedMessageError as error:
        raise MalformedMessageError(f"{key!r}: {error}") from None


def optional(read: Callable[[Any], T]) -> Callable[[Any], T | None]:
    """A reader that also accepts None."""
    return lambda value: None if value is None else read(value)


def list_of(read: Callable[[Any], T]) -> Callable[[Any], tuple[T, ...]]:
    """A reader of lists. Tuples are accepted: messages of a leader to its own node are not encoded as JSON."""

    def read_many(value: Any) -> tuple[T, ...]:
        if not isinstance(value, list | tuple):
            raise MalformedMessageError("not a list")
        return tuple(read(item) for item in value)

    return read_many


def between(least: int, most: int) -> Callable[[Any], int]:
    """A reader of integers from `least` to `most`. Booleans are rejected."""

    def read_whole(value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise MalformedMessageError(f"not an integer from {least} to {most}")
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
    """True or False; no value that is merely truthy or falsy."""
    if not isinstance(value, bool):
        raise MalformedMessageError("not true or false")
    return value


def text(value: Any) -> str:
    """Text that can be printed: a lone surrogate (from a byte of a file name that is not UTF-8) becomes "?"."""
    if not isinstance(value, str):
        raise MalformedMessageError("not text")
    return value if value.isascii() else value.encode(errors="replace").decode()


def host(value: Any) -> str:
    """A host name or address."""
    name = text(value)
    if not name or len(name) > HOST_LIMIT or not name.isprintable() or " " in name:
        raise MalformedMessageError("not a host name or address")
    return name


def address(value: Any) -> tuple[str, int]:
    """Host and port."""
    name, at = items(2)(value)
    return host(name), port(at)


def items(length: int) -> Callable[[Any], Any]:
    """A reader of lists of a given length. Their items are not checked."""

    def read_items(value: Any) -> Any:
        if not isinstance(value, list | tuple) or len(value) != length:
            raise MalformedMessageError(f"not a list of {length}")
        return value

    return read_items


def mapping(value: Any) -> dict[str, Any]:
    """A JSON object. Its fields are not checked."""
    if not isinstance(value, dict):
        raise MalformedMessageError("not an object")
    return value
