"""A fork of the image becomes a worker, and ends without running anything of the program's.

The program goes on while its workers end. So a worker never leaves through the interpreter, because what the program
has registered (exit handlers, finalizers, `finally` blocks around the launch, temporary folders) is the program's. What
the worker has registered itself runs. Source: BaseProcess._bootstrap in CPython's multiprocessing/process.py.
"""

import atexit
import contextlib
import io
import itertools
import os
import stat
import sys
import threading
import traceback
import weakref
from multiprocessing import process, util
from typing import Any, NoReturn

from muster.agent.workers import program
from muster.agent.workers.spec import WorkerSpec
from muster.agent.workers.warm import forked_worker
from muster.elastic.fork.hazards import ForkedCall
from muster.elastic.jobs import function

muster_frames = True  # see `agent.workers.program`


class _MainProcess(process.BaseProcess):
    """A process like a program's own: the caller may be a daemon, which could not start a DataLoader's processes.

    Source: _MainProcess in CPython's multiprocessing/process.py, which deletes the name.
    """

    def __init__(self, authkey: bytes) -> None:  # an AuthenticationString, which refuses pickling
        self._identity = ()
        self._name = "MainProcess"
        self._parent_pid = None
        self._popen = None
        self._closed = False
        self._config = {"authkey": authkey, "semprefix": "/mp"}

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


def forget_program() -> None:
    """Forget what the program has registered for its own end, and its children."""
    atexit._clear()  # noqa: SLF001
    registry: dict[Any, Any] = getattr(weakref.finalize, "_registry", {})
    registry.clear()
    atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]  # noqa: SLF001  # of the worker's own
    util._finalizer_registry.clear()  # type: ignore[attr-defined]  # noqa: SLF001
    util._run_after_forkers()  # type: ignore[attr-defined]  # noqa: SLF001
    process._current_process = _MainProcess(process.current_process().authkey)  # type: ignore[attr-defined]  # noqa: SLF001
    process._parent_process = None  # type: ignore[attr-defined]  # noqa: SLF001
    process._children = set()  # type: ignore[attr-defined]  # noqa: SLF001
    process._process_counter = itertools.count(1)  # type: ignore[attr-defined]  # noqa: SLF001


def run(call: ForkedCall, spec: WorkerSpec) -> NoReturn:
    """Become the worker, call the function, and end."""
    kept = _become_worker(call, spec)
    program.rename_process(sys.orig_argv)
    program.enable_faulthandler(spec.stack_file, spec.crash_file)
    program.hook_torch()
    code = 1
    try:
        folder, local_rank = spec.program.args
        connection = function.connect(folder, local_rank)
        connection.recv(4096)  # no descriptors: it has them all
        args = tuple(call.args)
        if call.substitutes_macros:
            args = function.substitute_macros(args, local_rank)
        function.call(connection, call.function, args, dict(call.kwargs))
        code = 0
    except SystemExit as stop:
        code = _choose_code(stop, spec.error_file)
    except BaseException as error:  # noqa: BLE001  # the program's own frames must not see it here
        _report(error, spec.error_file)
    finally:
        _end(code)
        del kept


def _become_worker(call: ForkedCall, spec: WorkerSpec) -> list[Any]:
    """Set session, streams, environment and affinity, and return what must not be destroyed before the end."""
    os.setsid()
    os.dup2(spec.stdout_fd, 1)
    os.dup2(spec.stderr_fd, 2)
    if call.joins_streams and all(stat.S_ISFIFO(os.fstat(fd).st_mode) for fd in (1, 2)):
        os.dup2(1, 2)
    for fd in (spec.stdout_fd, spec.stderr_fd):
        os.close(fd)
    old = [sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__]  # they are the program's
    sys.stdin = sys.__stdin__ = open(0, closefd=False, encoding="utf-8")  # type: ignore[misc]  # noqa: SIM115
    sys.stdout = sys.__stdout__ = _open_stream("stdout", 1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _open_stream("stderr", 2)  # type: ignore[misc]
    forked_worker.replace_environment(spec.env)
    if spec.cpus is not None:
        forked_worker.bind_to_cpus(spec.cpus)
    steps = sys.modules.get("muster.worker")
    if steps is not None:
        steps.look_again()
    torch = sys.modules.get("torch")
    if torch is not None and call.torch_threads is not None:
        torch.set_num_threads(call.torch_threads)
    return old


def _open_stream(name: str, fd: int) -> io.TextIOWrapper:
    """Open a stream without a buffer, as -u does, which all workers have: a killed worker loses no output."""
    raw = io.FileIO(fd, "wb", closefd=False)
    raw.name = f"<{name}>"
    errors = "backslashreplace" if name == "stderr" else None
    return io.TextIOWrapper(raw, encoding="utf-8", errors=errors, newline="\n", write_through=True)


def _choose_code(stop: SystemExit, error_file: str) -> int:
    code = program.choose_exit_code(stop)
    if isinstance(stop.code, int | None):
        return 1 if code is None else code
    print(stop.code, file=sys.stderr)
    if error_file:  # sys.exit("text"): the text is the reason
        program.write_error_file(stop, program.find_user_frames(stop.__traceback__), error_file)
    return 1


def _report(error: BaseException, error_file: str) -> None:
    shown = program.find_user_frames(error.__traceback__)
    with contextlib.suppress(Exception):  # __str__ of an exception is user code
        # One write: ranks share a terminal.
        sys.stderr.write("".join(traceback.format_exception(type(error), error, shown)))
    if error_file and not os.path.exists(error_file):  # torch's @record writes more
        program.write_error_file(error, shown, error_file)


def _end(code: int) -> NoReturn:
    """Run what this worker has registered, flush, and leave."""
    try:
        with contextlib.suppress(Exception):
            threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001  # waits for threads that are no daemons
        with contextlib.suppress(Exception):
            atexit._run_exitfuncs()  # noqa: SLF001
        with contextlib.suppress(Exception):
            util._exit_function()  # type: ignore[attr-defined]  # noqa: SLF001
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
    finally:
        os._exit(code)
