"""Records to JSON and back, from their annotated fields alone. `_shared.fields` has the types and their limits.

Any process that can reach the port may write to it, and Python's JSON parser accepts infinite numbers and NaN, integers
of any length, and text that cannot be printed. What `decode` returns needs no further check. Every number is in range,
and no text or list is longer than declared. Lone surrogates (from a byte of a file name that is not UTF-8) are
replaced. A record whose fields may contradict each other has a method `find_contradiction` that returns what is wrong.

A container may have written a file. For such files, `salvage` reads what is valid, and leaves the rest out.

Codecs are made from the annotations when a record is first sent or received, so an agent that is starting pays for
none.
"""

import contextlib
import json
import types
from collections.abc import Callable, Hashable, Iterable, Iterator
from enum import Enum
from functools import cache
from typing import Annotated, Any, Generic, Protocol, TypeVar, Union, get_args, get_origin

from muster._shared.fields import AS_OBJECT, HOST_NAME, JSON, NAME_LIMIT_BYTES, PACKED, SPARSE, Limit, Range, Shared

T = TypeVar("T")

Read = Callable[[object, bool], object]
"""Takes what a JSON parser returned, and whether what is invalid may be left out (see `salvage`)."""
Write = Callable[[Any, "_Budget"], str]
"""A writer takes only what its annotation declares, which no type of a table of writers can say."""

TEXT_BUDGET_BYTES = 8 * 1024 * 1024
"""What the texts of one message may take together. Texts beyond that are cut to `_SHORT_BYTES`."""
SHARED_LIMIT_BYTES = 15 * 1024 * 1024
"""The own parts of each message need the rest of its frame."""
PACKED_LIMIT_BYTES = 32768
"""The limit of a record that travels compressed."""
_UNPACKED_LIMIT_BYTES = 1 << 20
"""What another node has compressed is not unpacked beyond this."""
_SHORT_BYTES = 64
_SHORTEST_BYTES = 8
"""What is kept of each text when the message is too long all the same."""
_CUT = "..."
_REQUIRED = object()

to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode  # `dumps` makes an encoder each time


class MalformedMessageError(ValueError):
    """A field of a message or a file is missing, of a wrong type, or out of range. `str()` says which.

    The only error that a message may cause: its sender is disconnected. Every other error is a bug in muster.
    """


class RecordWithForms(Protocol):
    """A record that is marked as packed."""

    def list_forms(self) -> Iterable[object]:
        """Yield the record itself, then ever shorter forms."""


class _Budget:
    """How much text one message may still hold."""

    def __init__(self, left_bytes: int, short_bytes: int) -> None:
        self.left_bytes = left_bytes
        self.short_bytes = short_bytes

    def write_text(self, text: str, limit: Limit) -> str:
        """Encode a text, shortened to its limit and to what is left."""
        allowed = min(limit.most, max(self.short_bytes, self.left_bytes))
        encoded = to_json(text if len(text) * 4 <= allowed else shorten(text, allowed, keeps_end=limit.keeps_end))
        self.left_bytes -= len(encoded)
        return encoded


def shorten(text: str, limit_bytes: int, *, keeps_end: bool = False) -> str:
    """Cut a text to a number of bytes of UTF-8, marked with dots where there is room for them."""
    part = text[-limit_bytes:] if keeps_end else text[:limit_bytes]  # at least one byte a character
    data = part.encode(errors="replace")
    if len(part) == len(text) and len(data) <= limit_bytes:
        return text
    mark = _CUT if limit_bytes > _SHORTEST_BYTES else ""
    left = limit_bytes - len(mark)
    kept = (data[-left:] if keeps_end else data[:left]).decode(errors="ignore")
    return mark + kept if keeps_end else kept + mark


def clean_name(text: str) -> str:
    """Return a `Name` as the other side will read it, to be compared with what it sends."""
    return shorten(text.encode(errors="replace").decode(), NAME_LIMIT_BYTES)


# -- what is called -----------------------------------------------------------------------------------------------


def encode(value: object, limit_bytes: int) -> str:
    """Encode a record as JSON of at most `limit_bytes`: texts are shortened until it fits."""
    kind: Hashable = type(value)  # type: ignore[assignment]  # mypy takes no class for hashable
    _, write = _build_codec(kind)
    text = ""
    for left_bytes, short_bytes in ((TEXT_BUDGET_BYTES, _SHORT_BYTES), (0, _SHORTEST_BYTES)):
        text = write(value, _Budget(min(left_bytes, limit_bytes // 2), short_bytes))
        if len(text) <= limit_bytes:
            break
    return text


def to_data(value: object) -> dict[str, object]:
    """Return a record as a JSON parser would, for JSON that is laid out otherwise. Check the limits of its fields."""
    data: dict[str, object] = json.loads(encode(value, SHARED_LIMIT_BYTES))
    return data


def encode_message(message: object, limit_bytes: int) -> str:
    """Encode a record with its class's name as `type`."""
    head = f'{{"type":"{type(message).__name__}"'
    fields = encode(message, limit_bytes - len(head))[1:]
    return f"{head},{fields}" if len(fields) > 1 else head + fields


def decode(kind: type[T], data: object) -> T:
    """Read a record from what a JSON parser returned. Unknown fields are ignored. Those with a default may be missing.

    Raises:
        MalformedMessageError: a field is invalid.
    """
    return _read(kind, data, False)


def salvage(kind: type[T], data: object) -> T:
    """Read what is valid of a record that anything may have written.

    A field that is invalid gets its default, an item of a list that is invalid is left out, and what is too long is
    shortened.

    Raises:
        MalformedMessageError: it is no object, or a field that has no default is invalid.
    """
    return _read(kind, data, True)


def _read(kind: type[T], data: object, is_lenient: bool) -> T:
    annotation: Hashable = kind  # type: ignore[assignment]  # as above
    made = _build_codec(annotation)[0](data, is_lenient)
    if not isinstance(made, kind):
        raise TypeError(f"the codec of {kind.__name__} made {made!r}")
    return made


class MessageUnion(Generic[T]):
    """Reads the messages of one direction."""

    def __init__(self, union: object) -> None:
        self.kinds: tuple[type[T], ...] = get_args(union) or (union,)
        self._by_name = {kind.__name__: kind for kind in self.kinds}

    def read(self, frame: object, **known: object) -> T | None:
        """Read what arrived: JSON, or a record from this same process. None for one that is none of these.

        Args:
            frame: the message.
            known: fields that the sender has no say in.

        Raises:
            MalformedMessageError: it is malformed.
        """
        if not isinstance(frame, dict):
            return frame if isinstance(frame, self.kinds) else None
        name = frame.get("type")
        if not isinstance(name, str):
            raise MalformedMessageError("'type' is missing or not text")
        kind = self._by_name.get(name)
        return None if kind is None else decode(kind, {**frame, **known})

    def parse(self, text: str) -> T | None:
        """Read a message from its JSON, as `read` does."""
        return self.read(json.loads(text))


# -- from annotation to codec -------------------------------------------------------------------------------------


@cache
def _build_codec(annotation: Hashable) -> tuple[Read, Write]:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _build_limited(args[0], args[1:])
    if origin in (Union, types.UnionType):
        return _build_union(args)
    if origin is Shared:
        return _build_shared(args[0])
    if origin is tuple and args[-1] is not ...:
        return _build_fixed(args)
    if origin in (tuple, frozenset):
        return _build_many(origin, args[0], Limit(most=1 << 20))
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return _build_enum(annotation)
    if annotation is bool:
        return _read_bool, lambda value, _budget: "true" if value else "false"
    if not isinstance(annotation, type) or annotation.__module__ == "builtins":
        raise TypeError(f"a field of type {annotation!r} declares no limit: use the types of `_shared.fields`")
    return _build_record(annotation)


def _build_limited(base: object, marks: tuple[object, ...]) -> tuple[Read, Write]:
    if PACKED in marks:
        return _build_packed(base)
    if marks == (SPARSE,):
        return _build_codec(base)
    limits = [mark for mark in marks if isinstance(mark, Limit)]
    ranges = [mark for mark in marks if isinstance(mark, Range)]
    if base is str and limits:
        limit = min(limits, key=lambda each: each.most)
        if JSON in marks:
            return lambda value, _: _read_json(value, limit.most), lambda value, _budget: value
        if HOST_NAME in marks:
            return lambda value, _: read_host(value, limit.most), lambda value, budget: budget.write_text(value, limit)
        return _build_text(limit)
    if (base is int or base is float) and ranges:
        return _build_number(base, ranges[0])
    origin = get_origin(base)
    if AS_OBJECT in marks and limits:
        return _build_pairs(get_args(base)[0], limits[0])
    if (origin is tuple or origin is frozenset) and limits:
        return _build_many(origin, get_args(base)[0], limits[0])
    raise TypeError(f"{base!r} is not limited by {marks!r}")


def _build_number(base: type, allowed: Range) -> tuple[Read, Write]:
    accepted = (int,) if base is int else (int, float)
    what = "an integer" if base is int else "a number"

    def read(value: object, _is_lenient: bool) -> object:
        # `type`: a boolean is an int. NaN is in no range.
        if type(value) not in accepted or not allowed.least <= value <= allowed.most:  # type: ignore[operator]
            raise MalformedMessageError(f"not {what} from {allowed.least:.0f} to {allowed.most:.0f}")
        return base(value)

    if base is int:
        return read, lambda value, _budget: int.__repr__(value)  # as the encoder, in a tenth of its time
    return read, lambda value, _budget: to_json(value)


def _build_text(limit: Limit) -> tuple[Read, Write]:
    def read(value: object, is_lenient: bool) -> str:
        if is_lenient and isinstance(value, str):
            value = shorten(value.encode(errors="replace").decode(), limit.most, keeps_end=limit.keeps_end)
        return _read_text(value, limit.most)

    return read, lambda value, budget: budget.write_text(value, limit)


def _read_bool(value: object, _is_lenient: bool) -> bool:
    """Return True or False. Refuse a value that is merely truthy or falsy."""
    if not isinstance(value, bool):
        raise MalformedMessageError("not true or false")
    return value


def _read_text(value: object, limit_bytes: int) -> str:
    if not isinstance(value, str):
        raise MalformedMessageError("not text")
    text = value if value.isascii() else value.encode(errors="replace").decode()
    if len(text) * 4 > limit_bytes and len(text.encode()) > limit_bytes:
        raise MalformedMessageError(f"longer than {limit_bytes} bytes")
    return text


def read_host(value: object, limit_bytes: int = NAME_LIMIT_BYTES) -> str:
    """Read a host name or an address.

    Raises:
        MalformedMessageError: it is neither.
    """
    name = _read_text(value, limit_bytes)
    if not name or not name.isprintable() or " " in name:
        raise MalformedMessageError("not a host name or address")
    return name


def _read_json(value: object, limit_bytes: int) -> str:
    if not isinstance(value, dict):
        raise MalformedMessageError("not an object")
    try:
        text = to_json(value)
    except ValueError as error:  # NaN
        raise MalformedMessageError(str(error)) from None
    if len(text) > limit_bytes:
        raise MalformedMessageError(f"longer than {limit_bytes} bytes")
    return text


def _build_union(args: tuple[Hashable, ...]) -> tuple[Read, Write]:
    """Return a type or None, or a number or text."""
    none: object = types.NoneType
    some = tuple(arg for arg in args if arg is not none)
    if len(some) == 2:
        return _build_number_or_text(*some)
    read, write = _build_codec(some[0])
    return (
        lambda value, is_lenient: None if value is None else read(value, is_lenient),
        lambda value, budget: "null" if value is None else write(value, budget),
    )


def _build_number_or_text(number: Hashable, text: Hashable) -> tuple[Read, Write]:
    (read_number, write_number), (read_text, write_text) = _build_codec(number), _build_codec(text)
    return (
        lambda value, is_lenient: (read_text if isinstance(value, str) else read_number)(value, is_lenient),
        lambda value, budget: (write_text if isinstance(value, str) else write_number)(value, budget),
    )


def _build_shared(kind: Hashable) -> tuple[Read, Write]:
    read, _ = _build_codec(kind)

    def write_once(shared: Shared[object], _budget: _Budget) -> str:
        if shared.encoded is None:
            shared.encoded = encode(shared.value, SHARED_LIMIT_BYTES)
        return shared.encoded

    return lambda value, is_lenient: Shared(read(value, is_lenient)), write_once


def _build_packed(kind: Hashable) -> tuple[Read, Write]:
    read, write = _build_codec(kind)

    def unpack(value: object, is_lenient: bool) -> object:
        import base64
        import zlib  # only for jobs that hang

        text = _read_text(value, PACKED_LIMIT_BYTES)
        try:
            plain = zlib.decompressobj().decompress(base64.b85decode(text), _UNPACKED_LIMIT_BYTES)
            data = json.loads(plain)
        except (ValueError, RecursionError, zlib.error):
            raise MalformedMessageError("not compressed JSON") from None
        return read(data, is_lenient)

    def pack(value: RecordWithForms, budget: _Budget) -> str:
        import base64
        import zlib

        if budget.left_bytes < PACKED_LIMIT_BYTES:
            return "null"
        for form in value.list_forms():
            plain = write(form, _Budget(TEXT_BUDGET_BYTES, _SHORT_BYTES)).encode()
            packed = base64.b85encode(zlib.compress(plain)).decode()  # no quotes or backslashes
            if len(plain) <= _UNPACKED_LIMIT_BYTES and len(packed) <= PACKED_LIMIT_BYTES:
                budget.left_bytes -= len(packed)
                return f'"{packed}"'
        return "null"

    return unpack, pack


def _build_fixed(args: tuple[Hashable, ...]) -> tuple[Read, Write]:
    codecs = [_build_codec(arg) for arg in args]

    def read(value: object, is_lenient: bool) -> tuple[object, ...]:
        if not isinstance(value, list) or len(value) != len(codecs):
            raise MalformedMessageError(f"not a list of {len(codecs)}")
        return tuple(codec[0](item, is_lenient) for codec, item in zip(codecs, value, strict=True))

    def write(value: Iterable[object], budget: _Budget) -> str:
        return f"[{','.join(codec[1](item, budget) for codec, item in zip(codecs, value, strict=True))}]"

    return read, write


def _build_many(build: Callable[[Iterable[object]], object], item: Hashable, limit: Limit) -> tuple[Read, Write]:
    read_item, write_item = _build_codec(item)

    def read(value: object, is_lenient: bool) -> object:
        if not isinstance(value, list):
            raise MalformedMessageError("not a list")
        if is_lenient:
            return build(_read_valid(read_item, value[-limit.most :] if limit.keeps_end else value[: limit.most]))
        if len(value) > limit.most:
            raise MalformedMessageError(f"more than {limit.most} items")
        return build([read_item(item, False) for item in value])

    def write(value: tuple[object, ...] | frozenset[str], budget: _Budget) -> str:
        items = sorted(value) if isinstance(value, frozenset) else value
        if len(items) > limit.most:
            items = items[-limit.most :] if limit.keeps_end else items[: limit.most]
        if budget.left_bytes <= 0 and items and isinstance(items[0], str):
            return "[]"
        return f"[{','.join([write_item(each, budget) for each in items])}]"

    return read, write


def _read_valid(read: Read, items: Iterable[object]) -> Iterator[object]:
    for item in items:
        with contextlib.suppress(MalformedMessageError):
            yield read(item, True)


def _build_pairs(pair: Hashable, limit: Limit) -> tuple[Read, Write]:
    """Return the pairs of a name and a value, as an object."""
    read, _ = _build_many(tuple, pair, limit)
    write_name, write_value = (_build_codec(arg)[1] for arg in get_args(pair))

    def read_object(value: object, is_lenient: bool) -> object:
        if not isinstance(value, dict):
            raise MalformedMessageError("not an object")
        return read(list(map(list, value.items())), is_lenient)

    def write_object(value: Iterable[tuple[object, object]], budget: _Budget) -> str:
        return f"{{{','.join(f'{write_name(name, budget)}:{write_value(each, budget)}' for name, each in value)}}}"

    return read_object, write_object


def _build_enum(kind: type[Enum]) -> tuple[Read, Write]:
    values = {member.value: member for member in kind}

    def read(value: object, _is_lenient: bool) -> Enum:
        member = values.get(value) if isinstance(value, str) else None
        if member is None:
            raise MalformedMessageError(f"not one of {', '.join(values)}")
        return member

    return read, lambda value, _budget: to_json(value.value)


def _build_record(kind: type) -> tuple[Read, Write]:
    fields = [
        (name, getattr(kind, name, _REQUIRED) is _REQUIRED, *_build_codec(annotation))
        for name, annotation in kind.__annotations__.items()
    ]
    find_contradiction: Callable[[object], str | None] | None = getattr(kind, "find_contradiction", None)
    sparse = {name for name, annotation in kind.__annotations__.items() if SPARSE in get_args(annotation)}

    def read(value: object, is_lenient: bool) -> object:
        if not isinstance(value, dict):
            raise MalformedMessageError("not an object")
        found = {}
        for name, is_required, read_field, _ in fields:
            if name in value:
                try:
                    found[name] = read_field(value[name], is_lenient)
                except MalformedMessageError as error:
                    if is_required or not is_lenient:
                        raise MalformedMessageError(f"{name!r}: {error}") from None
            elif is_required:
                raise MalformedMessageError(f"{name!r} is missing")
        made = kind(**found)
        wrong = None if find_contradiction is None else find_contradiction(made)
        if wrong is not None:
            raise MalformedMessageError(wrong)
        return made

    def write(value: object, budget: _Budget) -> str:
        shown = fields
        if sparse:
            own = value.__dict__
            shown = [each for each in fields if each[0] not in sparse or own[each[0]] != getattr(kind, each[0])]
        parts = [f'"{name}":{write_field(getattr(value, name), budget)}' for name, _, _, write_field in shown]
        return f"{{{','.join(parts)}}}"

    return read, write
