"""A function and its arguments, pickled for workers that another process starts.

As multiprocessing's spawn and forkserver: by reference, with multiprocessing's own reductions, so that queues, locks,
events, barriers, values and pipes of a "spawn" or "forkserver" context, and torch's tensors, can be arguments; those of
`multiprocess`, dill's copy of multiprocessing, too, which ice-learn's events are. What they refer to by descriptor
travels as an index, as with forkserver. What cannot be pickled by reference (a lambda, a function of a notebook) is
pickled by cloudpickle, where it is installed.

Source: multiprocessing/popen_forkserver.py, popen_spawn_posix.py, reduction.py of CPython.
"""

import io
import os
import pickle
import sys
import tempfile
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import context, process, resource_tracker, spawn
from multiprocessing.popen_forkserver import _DupFd
from multiprocessing.reduction import ForkingPickler
from typing import Any

from muster.agent.errors import UsageError
from muster.elastic.jobs.errors import PickleFault
from muster.elastic.jobs.results import Payload

_FAULTS = (pickle.PicklingError, AttributeError, TypeError, RuntimeError, ValueError, RecursionError)
"""What pickling raises for what cannot be pickled; multiprocessing's objects raise RuntimeError and ValueError."""

_COPY = "multiprocess"
_SHOWN_CHARACTERS = 200


class _Descriptors:
    """Stands in for multiprocessing's Popen while arguments are pickled, and collects the descriptors they refer to."""

    DupFd = _DupFd

    def __init__(self) -> None:
        self.fds: list[int] = []

    def duplicate_for_child(self, fd: int) -> int:
        """Keep a duplicate of `fd`; its index."""
        self.fds.append(os.dup(fd))
        return len(self.fds) - 1

    def close(self) -> None:
        while self.fds:
            os.close(self.fds.pop())


def build_payload(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Payload:
    """Pickle a call for the workers of one job.

    Args:
        function: what every worker calls.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Raises:
        PickleFault: names what cannot be pickled.
        UsageError: this process is a worker, and imports the program that started its job.
    """
    if getattr(process.current_process(), "_inheriting", False):
        raise UsageError(
            "a worker imports the program that started it, and this program starts a job when it is imported: "
            'put that below `if __name__ == "__main__":`'
        )
    descriptors = _Descriptors()
    copy = sys.modules.get(_COPY)
    contexts: tuple[Any, ...] = (context,) if copy is None else (context, copy.context)
    for each in contexts:
        each.set_spawning_popen(descriptors)  # what pickling asks of a Popen
    try:
        preparation = spawn.get_preparation_data("worker")
        preparation["authkey"] = bytes(preparation["authkey"])  # pickled for our own workers only
        call = _pickle_call(function, tuple(args), dict(kwargs), descriptors)
        call_fd = _write_unnamed_file(pickle.dumps(preparation), call)
    except BaseException:  # KeyboardInterrupt too: the duplicates must be closed
        descriptors.close()
        raise
    finally:
        for each in contexts:
            each.set_spawning_popen(None)
    return Payload(call_fd=call_fd, tracker_fd=resource_tracker.getfd() or -1, fds=tuple(descriptors.fds))


def _pickle_call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], descriptors: _Descriptors
) -> memoryview:
    by_value = not _main_can_be_imported()
    try:
        return _pickle((function, args, kwargs), by_value=by_value)
    except _FAULTS as error:
        descriptors.close()
        if not by_value:
            try:
                return _pickle((function, args, kwargs), by_value=True)
            except (ImportError, *_FAULTS):
                descriptors.close()
        raise PickleFault(_describe(function, args, kwargs, error)) from error
    except ImportError as error:
        raise PickleFault(
            f"cannot send {function!r} to workers: it was defined where no worker can import it from; install "
            "cloudpickle, or define it in a module"
        ) from error


def _main_can_be_imported() -> bool:
    """False in a notebook and at a prompt: there functions of `__main__` must be pickled by value."""
    main = sys.modules["__main__"]
    return getattr(main, "__spec__", None) is not None or bool(getattr(main, "__file__", None))


def _pickle(value: Any, *, by_value: bool) -> memoryview:
    """Pickle with multiprocessing's reductions.

    Raises:
        ImportError: `by_value`, and cloudpickle is not installed.
    """
    buffer = io.BytesIO()
    reducers = [ForkingPickler._extra_reducers]  # type: ignore[attr-defined]  # noqa: SLF001
    if (copy := sys.modules.get(_COPY)) is not None:
        reducers.append(copy.reducer.ForkingPickler._extra_reducers)  # noqa: SLF001
    if by_value:
        import cloudpickle

        pickler = cloudpickle.CloudPickler(buffer)
    else:
        pickler = ForkingPickler(buffer)
    pickler.dispatch_table = ChainMap(*reducers, pickler.dispatch_table)
    pickler.dump(value)
    return buffer.getbuffer()


def _describe(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> str:
    """One line that names the part that cannot be pickled."""
    parts = [(f"the function {function!r}", function)]
    parts += [(f"argument {at} of {_name(function)}, {_show(value)}", value) for at, value in enumerate(args)]
    parts += [(f"argument {name!r} of {_name(function)}, {_show(value)}", value) for name, value in kwargs.items()]
    for what, value in parts:
        if (own := _find_fault(value)) is not None:
            return f"cannot send {what} to workers: {own}"
    return f"cannot send {function!r} and its arguments to workers: {error}"


def _find_fault(value: Any) -> Exception | None:
    try:
        ForkingPickler.dumps(value)
    except _FAULTS as error:
        return error
    return None


def _show(value: Any) -> str:
    try:
        return repr(value)[:_SHOWN_CHARACTERS]
    except Exception:  # noqa: BLE001  # __repr__ is user code: it may raise anything
        return f"a {type(value).__qualname__}"


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", function))


def _write_unnamed_file(*parts: bytes | memoryview) -> int:
    """A file without a name, at its start: it goes when the last descriptor does, whatever process is killed."""
    with tempfile.TemporaryFile(buffering=0, prefix="muster_call_") as file:
        for part in parts:
            view = memoryview(part)
            while view:
                view = view[file.write(view) :]
        file.seek(0)
        return os.dup(file.fileno())
