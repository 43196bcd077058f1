"""A function and its arguments, pickled for workers that another process starts.

They are pickled as multiprocessing's spawn and forkserver do it: by reference, with multiprocessing's own reductions.
So queues, locks, events, barriers, values and pipes of a "spawn" or "forkserver" context can be arguments, and so can
torch's tensors. Those of `multiprocess`, dill's copy of multiprocessing, can be arguments too: ice-learn's events are
such objects. What they refer to by descriptor travels as an index, as with forkserver. What cannot be pickled by
reference (a lambda, a function of a notebook) is pickled by cloudpickle, where it is installed. Errors name types and
never values: an argument may be a secret.

Source: multiprocessing/popen_forkserver.py, popen_spawn_posix.py, reduction.py of CPython.
"""

import io
import os
import pickle
import sys
import tempfile
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import context, process, resource_tracker, spawn
from multiprocessing.popen_forkserver import _DupFd
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import Any

from muster.agent.errors import UsageError
from muster.elastic.jobs.errors import PickleFault
from muster.elastic.jobs.rank_call import RankCall
from muster.elastic.jobs.results import Payload

_FAULTS = (pickle.PicklingError, AttributeError, TypeError, RuntimeError, ValueError, RecursionError)
"""What pickling raises for what cannot be pickled. RuntimeError and ValueError are those of multiprocessing's objects.
"""

_COPY = "multiprocess"


class _Descriptors:
    """Stands in for multiprocessing's Popen while arguments are pickled, and collects the descriptors they refer to."""

    DupFd = _DupFd

    def __init__(self) -> None:
        self.fds: list[int] = []

    def duplicate_for_child(self, fd: int) -> int:
        """Keep a duplicate of `fd`, and return its index."""
        self.fds.append(os.dup(fd))
        return len(self.fds) - 1

    def close(self) -> None:
        while self.fds:
            os.close(self.fds.pop())


def check_no_import() -> None:
    """Refuse to start a job while a worker imports the program that started it.

    Raises:
        UsageError: this process is a worker, and imports that program.
    """
    if getattr(process.current_process(), "_inheriting", False):
        raise UsageError(
            "a worker imports the program that started it, and this program starts a job when it is imported: "
            'put that below `if __name__ == "__main__":`'
        )


def build_payload(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, substitutes_macros: bool = False
) -> Payload:
    """Pickle a call for the workers of one job.

    Args:
        function: what every worker calls.
        args: its positional arguments.
        kwargs: its keyword arguments.
        substitutes_macros: workers replace `${local_rank}` in positional arguments that are strings.

    Raises:
        PickleFault: names what cannot be pickled.
        UsageError: see `check_no_import`.
    """
    check_no_import()
    descriptors = _Descriptors()
    copy = sys.modules.get(_COPY)
    contexts: tuple[Any, ...] = (context,) if copy is None else (context, copy.context)
    for each in contexts:
        each.set_spawning_popen(descriptors)  # pickling asks the Popen
    try:
        preparation = spawn.get_preparation_data("worker")
        if not _main_can_be_imported():
            preparation.pop("init_main_from_path", None)
        preparation["authkey"] = bytes(preparation["authkey"])  # pickled for our own workers only
        preparation["substitutes_macros"] = substitutes_macros
        call = _pickle_call(function, tuple(args), dict(kwargs), descriptors)
        call_fd = _write_unnamed_file(pickle.dumps(preparation), call)
    except BaseException:  # KeyboardInterrupt too: close the duplicates
        descriptors.close()
        raise
    finally:
        for each in contexts:
            each.set_spawning_popen(None)
    return Payload(call_fd=call_fd, tracker_fd=resource_tracker.getfd() or -1, fds=tuple(descriptors.fds))


def _pickle_call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], descriptors: _Descriptors
) -> memoryview:
    pickler_type = ForkingPickler if _main_can_be_imported() else _PicklerWithoutMain
    try:
        return _pickle((function, args, kwargs), pickler_type)
    except _FAULTS as error:
        descriptors.close()
        try:
            import cloudpickle

            return _pickle((function, args, kwargs), cloudpickle.CloudPickler)
        except (ImportError, *_FAULTS):
            descriptors.close()
        raise PickleFault(_describe(function, args, kwargs, error, pickler_type)) from error


def _main_can_be_imported() -> bool:
    """Return whether workers will have this process's `__main__`: `spawn.prepare` imports it there.

    They do not have it in a notebook, at a prompt, where Python reads the program from its input, or where the program
    is the `__main__.py` of a package or a folder (`python -m pytest`). Nor do they in processes that multiprocessing
    has spawned from such a program.
    """
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return str(spec.name).rpartition(".")[2] != "__main__"
    return getattr(main, "__file__", None) not in (None, "", "<stdin>")


class _PicklerWithoutMain(ForkingPickler):
    """Refuses what is defined in `__main__`: a worker could not find it there by reference."""

    def reducer_override(self, value: Any) -> Any:
        """Reduce functions and classes before they are pickled by reference. See `pickle.Pickler`.

        Raises:
            PicklingError: it is defined in `__main__`.
        """
        if isinstance(value, type | FunctionType) and value.__module__ == "__main__":
            raise pickle.PicklingError(
                f"{value.__qualname__} is defined in __main__, which workers cannot import here; install cloudpickle, "
                "or define it in a module"
            )
        return NotImplemented


def _pickle(value: Any, pickler_type: Callable[[io.BytesIO], Any]) -> memoryview:
    """Pickle with multiprocessing's reductions."""
    buffer = io.BytesIO()
    reducers = [ForkingPickler._extra_reducers]  # type: ignore[attr-defined]  # noqa: SLF001
    if (copy := sys.modules.get(_COPY)) is not None:
        reducers.append(copy.reducer.ForkingPickler._extra_reducers)  # noqa: SLF001
    pickler = pickler_type(buffer)
    pickler.dispatch_table = ChainMap(*reducers, pickler.dispatch_table)
    pickler.dump(value)
    return buffer.getbuffer()


def _describe(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    error: Exception,
    pickler_type: Callable[[io.BytesIO], Any],
) -> str:
    """Return one line that names the part that cannot be pickled, and why."""
    for what, value in _list_parts(function, args, kwargs):
        if (own := _find_fault(value, pickler_type)) is not None:
            return f"cannot send {what} to workers: {own}"
    return f"cannot send the function and its arguments to workers: {error}"


def _find_fault(value: Any, pickler_type: Callable[[io.BytesIO], Any]) -> Exception | None:
    try:
        _pickle(value, pickler_type)
    except _FAULTS as error:
        return error
    return None


def _list_parts(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[str, Any]]:
    name = getattr(function, "__qualname__", type(function).__qualname__)
    if isinstance(function, RankCall):
        yield f"the function {name}", function.entrypoint
        for local_rank, own in function.args.items():
            for at, value in enumerate(own):
                yield f"argument {at} of {name} for local rank {local_rank}, a {type(value).__qualname__},", value
        return
    yield f"the function {name}", function
    for at, value in enumerate(args):
        yield f"argument {at} of {name}, a {type(value).__qualname__},", value
    for key, value in kwargs.items():
        yield f"argument {key!r} of {name}, a {type(value).__qualname__},", value


def _write_unnamed_file(*parts: bytes | memoryview) -> int:
    """Return a file without a name, at its start: it goes when the last descriptor does, whatever process is killed."""
    with tempfile.TemporaryFile(prefix="muster_call_") as file:
        file.writelines(parts)
        file.seek(0)  # writes what is left
        return os.dup(file.fileno())
