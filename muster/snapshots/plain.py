"""The skeleton of a state: its containers and plain values as bytes, with its tensors taken out.

The bytes are a pickle. `decode` looks up only the names that `_Decoder.find_class` lists, which are data, so loading
runs no code of the program that wrote them. What torch's weights-only unpickler accepts beyond that (sparse and
quantized tensors, classes that the script gave to `torch.serialization.add_safe_globals`) travels as torch wrote it. An
`Enum` is found only in a module that is imported already. Everything else is refused at `encode`, by its place.

Pickle's C implementation does the walk, and a dict of tensors is taken out as a whole. That makes 10,000 tensors cheap.
What a state has in two places is shared by both after `decode` as well.
"""

import collections
import datetime as dt
import decimal
import enum
import fractions
import io
import itertools
import operator
import pathlib
import pickle
import sys
import types
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

__all__ = ["Refused", "Sharding", "decode", "encode"]

_ALLOWED: Final[frozenset[object]] = frozenset(
    {
        *(collections.OrderedDict, collections.Counter, collections.deque, collections.defaultdict),
        *(dt.datetime, dt.date, dt.time, dt.timedelta, dt.timezone),
        *(decimal.Decimal, fractions.Fraction, complex, slice, range),
    }
)
"""Types whose values are written as pickle does, and found at `decode`."""

_FACTORIES: Final[frozenset[object]] = frozenset(
    {bool, bytearray, bytes, dict, float, frozenset, int, list, set, str, tuple}
)
"""Builtin types that may stand in a state themselves, such as the factory of a defaultdict."""

_BY_NAME: Final = {(kind.__module__, kind.__qualname__): kind for kind in _ALLOWED | _FACTORIES}  # type: ignore[attr-defined]
_PATHS: Final = ("PurePosixPath", "PureWindowsPath", "PosixPath")


class Refused(TypeError):
    """A value of the state cannot be written in a form that runs no code when it is loaded."""


class Sharding(NamedTuple):
    """Where the local part of a distributed tensor lies in the whole. All sizes are in elements."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    placements: tuple[str, ...]
    mesh: tuple[tuple[int, ...], tuple[str, ...] | None, tuple[int, ...] | None]
    """Shape and names of the mesh's dimensions, and this rank's place in it."""


class _Unknown(Exception):
    """Pickle met a value without a form. The exception carries the value, whose place is looked for afterwards."""

    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value


class Encoded(NamedTuple):
    """A state in two parts."""

    skeleton: bytes
    tensors: list[Any]
    """In the order of their numbers in the skeleton, each object once."""
    is_sharded: bool
    """Some are the local parts of distributed tensors."""
    pointers: list[int]
    """Where the elements of each tensor are."""


class LayoutCache:
    """What was found out at one call of `encode`, for the next one."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self.shardings: dict[object, Sharding] = {}
        self.pointers: dict[int, list[int]] = {}
        """For each dict that was taken out as a whole, in order: where the elements of its tensors were."""

    def describe(self, value: Any) -> Sharding:
        """Say where the local part of a distributed tensor lies."""
        key = (value.shape, value.placements, value.device_mesh)
        if key not in self.shardings:
            mesh = value.device_mesh
            (chunk,) = value.__create_chunk_list__()
            location = mesh.get_coordinate()
            facts = (tuple(mesh.shape), mesh.mesh_dim_names, None if location is None else tuple(location))
            placements = tuple(str(one) for one in value.placements)
            self.shardings[key] = Sharding(tuple(value.shape), tuple(chunk.offsets), placements, facts)
        return self.shardings[key]


def encode(state: object, known: LayoutCache | None = None) -> Encoded:
    """Write containers and plain values, and take out the tensors.

    Args:
        state: nested containers, plain values and tensors.
        known: kept by the caller from one call to the next.

    Returns:
        The skeleton, and the tensors. NumPy arrays are among them as tensors of bytes.

    Raises:
        Refused: names the place of what has no form.
    """
    buffer = io.BytesIO()
    encoder = _Encoder(buffer, known or LayoutCache())
    try:
        with encoder.torch.no_grad():
            encoder.dump(state)
    except _Unknown as unknown:
        value = unknown.value
    except RecursionError:
        raise Refused("save: the state is nested too deeply") from None
    else:
        return Encoded(buffer.getvalue(), encoder.tensors, encoder.is_sharded, encoder.pointers)
    location = next(
        (location for location, found in _walk(state, "state", set()) if found is value), "a value inside the state"
    )
    kind = value if isinstance(value, type) else type(value)
    raise Refused(
        f"save: {location} is {_describe(value)}: {kind.__module__}.{kind.__qualname__} cannot be written in a form "
        "that runs no code when it is loaded. Save what it holds as numbers, strings, dicts, lists or tensors."
    ) from None


def decode(
    skeleton: bytes | bytearray | memoryview,
    make_tensor: Callable[[int], Any],
    make_sharded: Callable[[Any, Sharding], Any],
    make_array: Callable[[Any, Any, tuple[int, ...]], Any] | None = None,
    make_table: Callable[[int, "str | tuple[Any, ...]", Any], Any] | None = None,
) -> Any:
    """Build the state of a skeleton.

    Args:
        skeleton: what `encode` returned.
        make_tensor: gives the tensor of a number.
        make_sharded: gives the distributed tensor for what `make_tensor` gave of its local part.
        make_array: gives the NumPy array for what `make_tensor` gave of its bytes, its dtype and its shape.
        make_table: gives the dict of tensors whose numbers begin with the first argument, of the keys that `join_keys`
            gave, and other attributes.

    Raises:
        pickle.UnpicklingError: the bytes are no skeleton.
        LookupError: an Enum's class is not imported, or has no such member now.
    """

    def build_table(first: int, joined: "str | tuple[Any, ...]", more: Any) -> dict[Any, Any]:
        return build_dict(zip(split_keys(joined), map(make_tensor, itertools.count(first)), strict=False), more)

    forms = {
        "tensor": make_tensor,
        "table": make_table or build_table,
        "sharded": lambda local, *facts: make_sharded(local, Sharding(*facts)),
        "array": make_array or array,
        **{form.__name__: form for form in (blob, dtype, device, enum_member, parameter, path, scalar, size)},
    }
    return _Decoder(skeleton, forms).load()


def _walk(state: object, location: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield each value of a state, and the place where it is. Each container is visited once."""
    yield location, state
    if id(state) in seen:
        return
    seen.add(id(state))
    if isinstance(state, Mapping):
        for key, value in state.items():
            yield f"the key {key!r} of {location}", key
            yield from _walk(value, f"{location}[{key!r}]", seen)
        yield f"the default of {location}", getattr(state, "default_factory", None)
    elif isinstance(state, list | tuple | collections.deque | set | frozenset):
        for number, value in enumerate(state):
            yield from _walk(value, f"{location}[{number}]", seen)
    if isinstance(state, collections.OrderedDict) and state.__dict__:
        yield from _walk(state.__dict__, f"vars({location})", seen)


def find_name(state: object, tensor: Any) -> str:
    """Return the place of a tensor that `encode` has taken out of a state."""
    for location, value in _walk(state, "state", set()):
        if hasattr(value, "data_ptr") and (value.data_ptr(), value.shape) == (tensor.data_ptr(), tensor.shape):
            return location
    return "a tensor of the state"


def join_keys(keys: Iterable[Any]) -> "str | tuple[Any, ...]":
    """Join the keys of a dict to one string where that can be: there may be thousands."""
    keys = tuple(keys)
    if set(map(type, keys)) == {str}:
        joined = "\n".join(keys)
        if joined.count("\n") == len(keys) - 1:
            return joined
    return keys


def split_keys(joined: "str | tuple[Any, ...]") -> Sequence[Any]:
    """Give the keys that `join_keys` has joined."""
    return joined.split("\n") if isinstance(joined, str) else joined


def build_dict(pairs: "Mapping[Any, Any] | Iterable[tuple[Any, Any]]", more: Any) -> dict[Any, Any]:
    """Build a dict of tensors. One with other attributes, if only an empty dict of them, was an OrderedDict."""
    if more is None:
        return dict(pairs)
    made = collections.OrderedDict(pairs)
    vars(made).update(more)
    return made


def dump_simple(value: object) -> bytes:
    """Write tuples, lists and dicts of numbers and strings."""
    return pickle.dumps(value, 5)


def load_simple(data: bytes | memoryview) -> Any:
    """Read what `dump_simple` wrote."""
    return _Decoder(data, {}).load()


# -- writing ----------------------------------------------------------------------------------------------------------


class _Encoder(pickle.Pickler):
    """Pickles what is plain and collects the tensors."""

    def __init__(self, buffer: io.BytesIO, known: LayoutCache) -> None:
        super().__init__(buffer, protocol=5)
        import torch

        self.tensors: list[Any] = []
        self.pointers: list[int] = []
        self.torch = torch
        self.tensor_type = torch.Tensor
        self.parameter_type = torch.nn.Parameter
        self.known = known
        self.tables: dict[int, tuple[int, str | tuple[Any, ...], dict[str, Any] | None]] = {}
        """By their ids, the dicts that were taken out: the number of the first tensor, the keys, other attributes."""
        self.is_sharded = False

    def persistent_id(self, value: Any) -> Any:
        """Take out a dict that has tensors only as a whole, without a call for each of them."""
        kind = type(value)
        if kind is not dict and kind is not collections.OrderedDict:
            return None
        if (table := self.tables.get(id(value))) is None:
            values = value.values()
            if set(map(type, values)) != {self.tensor_type} or not self._are_known(values):
                return None
            more = None if kind is dict else vars(value)
            table = self.tables[id(value)] = len(self.tensors), join_keys(value), more
            self.tensors.extend(values)
            self.pointers += self.known.pointers[len(self.tables) - 1]
        return table

    def _are_known(self, tensors: Collection[Any]) -> bool:
        """Do as `_are_plain`. Tensors that were plain, and whose elements are where they were, still are."""
        try:
            pointers = list(map(self.tensor_type.data_ptr, tensors))
        except RuntimeError:  # such as a sparse one
            return self._are_plain(tensors)
        known, number = self.known.pointers, len(self.tables)
        if known.get(number) == pointers and 0 not in pointers:
            return True
        known[number] = pointers if self._are_plain(tensors) else []
        return known[number] is pointers

    def _are_plain(self, tensors: Iterable[Any]) -> bool:
        """Return whether they are elements in memory and nothing else."""
        return set(map(_get_kind, tensors)) == {(self.torch.strided, False, False, False)}

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind is self.tensor_type:
            return self._write_tensor(value)
        if kind in _ALLOWED or (kind is types.FunctionType and value in _FORMS):
            return NotImplemented
        if isinstance(value, type):
            if value in _ALLOWED or value in _FACTORIES:
                return NotImplemented
            raise _Unknown(value)
        if kind is self.parameter_type:
            return parameter, (value.detach(), value.requires_grad)
        if isinstance(value, enum.Enum):
            return enum_member, (kind.__module__, kind.__qualname__, value.name, value.value)
        if isinstance(value, pathlib.PurePath) and kind.__name__ in _PATHS:
            return path, (kind.__name__, str(value))
        return self._write_of_torch(value) or self._write_of_numpy(value) or self._write_blob(value)

    def _write_tensor(self, value: Any) -> tuple[Any, ...]:
        if not self._are_plain((value,)):
            return self._write_blob(value)
        self.tensors.append(value)
        self.pointers.append(value.data_ptr())
        return tensor, (len(self.tensors) - 1,)

    def _write_of_torch(self, value: Any) -> tuple[Any, ...] | None:
        torch = self.torch
        if isinstance(value, torch.Size):
            return size, (tuple(value),)
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
            return dtype, (str(value).removeprefix("torch."),)
        if isinstance(value, torch.device):
            return device, (str(value),)
        if isinstance(value, self.tensor_type) and hasattr(value, "device_mesh"):
            self.is_sharded = True
            return sharded, (value.to_local(), *self.known.describe(value))
        return None

    def _write_of_numpy(self, value: Any) -> tuple[Any, ...] | None:
        numpy = sys.modules.get("numpy")
        if numpy is None or not isinstance(value, numpy.ndarray | numpy.generic) or value.dtype.hasobject:
            return None
        form = numpy.lib.format.dtype_to_descr(value.dtype)
        if isinstance(value, numpy.generic):
            return scalar, (form, value.tobytes())
        if type(value) is not numpy.ndarray:
            return None
        flat = self.torch.frombuffer(bytearray(value.tobytes()), dtype=self.torch.uint8) if value.nbytes else None
        return array, (flat, form, value.shape)

    def _write_blob(self, value: Any) -> tuple[Any, ...]:
        """Write what torch's weights-only unpickler accepts as torch does."""
        buffer = io.BytesIO()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns of its own storages
                self.torch.save(value, buffer)
                blob(buffer.getvalue())
        except Exception:  # noqa: BLE001  # whatever it says: torch does not take it
            raise _Unknown(value) from None
        return blob, (buffer.getvalue(),)


# -- reading: what stands in the pickle by name -----------------------------------------------------------------------


class _Decoder(pickle.Unpickler):
    """Finds data types and our own forms by name, and nothing else."""

    def __init__(self, data: bytes | bytearray | memoryview, forms: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__(io.BytesIO(data))
        self.forms = forms
        self.tables: dict[int, Any] = {}

    def persistent_load(self, table: Any) -> Any:
        first, keys, more = table
        if first not in self.tables:
            self.tables[first] = self.forms["table"](first, keys, more)
        return self.tables[first]

    def find_class(self, module: str, name: str) -> Any:
        found = self.forms.get(name) if module == __name__ else _BY_NAME.get((module, name))
        if found is None:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a snapshot")
        return found


def tensor(number: int) -> Any:
    """Stand for the tensor of this number."""
    raise NotImplementedError


def sharded(local: Any, *facts: Any) -> Any:
    """Stand for a distributed tensor with this local part."""
    raise NotImplementedError


def parameter(data: Any, requires_grad: bool) -> Any:
    """Build a parameter. What is one, or stands for one, is given back."""
    import torch

    return torch.nn.Parameter(data, requires_grad) if type(data) is torch.Tensor else data


def array(data: Any, form: Any, shape: tuple[int, ...]) -> Any:
    """Build a NumPy array from a tensor of bytes. None: it has no elements."""
    import numpy as np

    kind = np.lib.format.descr_to_dtype(form)
    return np.empty(shape, kind) if data is None else data.numpy().view(kind).reshape(shape)


def scalar(form: Any, data: bytes) -> Any:
    """Build a NumPy scalar."""
    import numpy as np

    return np.ndarray((), np.lib.format.descr_to_dtype(form), data or bytes(8))[()]


def blob(data: bytes) -> Any:
    """Load what torch wrote, by its weights-only unpickler."""
    import torch

    return torch.load(io.BytesIO(data), weights_only=True)


def size(numbers: tuple[int, ...]) -> Any:
    """Build a torch.Size."""
    import torch

    return torch.Size(numbers)


def dtype(name: str) -> Any:
    """Find a dtype, layout or memory format of torch."""
    import torch

    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype | torch.layout | torch.memory_format):
        raise pickle.UnpicklingError(f"torch.{name} is not a dtype, layout or memory format")
    return found


def device(name: str) -> Any:
    """Build a torch.device."""
    import torch

    return torch.device(name)


def path(kind: str, text: str) -> pathlib.PurePath:
    """Build a path."""
    if kind not in _PATHS:
        raise pickle.UnpicklingError(f"{kind} is not a kind of path")
    return getattr(pathlib, kind)(text)  # type: ignore[no-any-return]


def enum_member(module: str, qualname: str, name: str, value: object) -> enum.Enum:
    """Find a member of an Enum whose module is imported already, by name, and check its value."""
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, enum.Enum)):
        raise LookupError(  # noqa: TRY004  # it is not the argument that is wrong
            f"load: the snapshot has {qualname}.{name} of {module}: import {module} before load"
        )
    member = found.__members__.get(name)
    if member is None and issubclass(found, enum.Flag):
        member = found(value)
    if member is None or member.value != value:
        raise LookupError(f"load: {module}.{qualname} has no member {name} with the value {value!r} any more")
    return member


_get_kind = operator.attrgetter("layout", "is_quantized", "is_meta", "is_nested")
_FORMS: Final = (array, blob, device, dtype, enum_member, parameter, path, scalar, sharded, size, tensor)


def _describe(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
