"""Tells which part of TorchX called an adapter, and lists what else is touched of TorchX that is no public interface.

Neither line tells a scheduler which command or method calls it. Neither has a public hook for the end of a command, for
`Runner.wait` or for what a terminal shows. `torchx.runner.events` records a call when it is over. The entry points
`torchx.cli.cmds` replace a command for all schedulers, and of two packages that replace the same one only one counts:
ours could hide a user's. So the functions here look for TorchX's modules on the stack. In a version that names or nests
them differently every answer is no. Then adapters do what they do for any Python program: errors have tracebacks, lines
no colours, and `wait` polls.

Each entry below is a place in TorchX: its file, the number of the line in 0.7.0 and in the nightly of 2026.10.26 (-: it
has none), a part of that line; what of ours depends on it, and why; a test that fails if TorchX does otherwise.
`tests/unit/schedulers/test_callers.py` looks for each line in the installed release, and for code of ours that touches
what no entry names.

    cli/main.py 117 118 `def main(argv`
        `runs_command_line`, `command_line.print_errors_as_lines`, `command_line.unwind_on_signals`. Commands end by the
        interpreter's traceback, and by SIGTERM or SIGHUP without cleaning up: `sys.excepthook`, `threading.excepthook`
        and two handlers are set, in TorchX's command line only.
        tests/process/local/test_ends.py::test_nothing_outlives_the_command_line
    cli/cmd_log.py 108 84 `status = runner.status(app_handle)`
        `needs_app`, `waiting_line`. 0.7 asks for ever for an app that does not exist. Both do for one that waits.
        tests/process/schedulers/test_unknown_apps.py::test_an_app_that_local_cwd_does_not_have
    cli/cmd_cancel.py 30 20 `runner.cancel(`
        `needs_app`. It says nothing of an app that does not exist.
        tests/process/schedulers/test_unknown_apps.py::test_an_app_that_local_cwd_does_not_have
    cli/cmd_delete.py - 20 `runner.delete(`
        `needs_app`. It says nothing of an app that does not exist.
        tests/process/schedulers/test_unknown_apps.py::test_an_app_that_local_cwd_does_not_have
    cli/cmd_status.py 54 61 `runner.status(`
        `shows_status`. What a person asks for may run a command in a pod; what asks again and again may not.
        tests/unit/schedulers/test_callers.py::test_each_place_of_torchx_is_where_it_was
    runner/api.py 473 709 `def wait(`
        `is_wait`, `supervised.read_app_for_wait`, `waiting_line`. It reads the state, sleeps, and reads it again.
        tests/process/local/test_ends.py::test_nothing_outlives_the_guards
    runner/api.py 525 736 `if status is not None and not status.is_terminal():`
        `is_cancel`. An app that has failed, of which a role still runs on Kubernetes, would not be cancelled.
        tests/unit/kubernetes/test_submission.py::test_the_runners_cancel_stops_the_other_role_of_a_failed_app
    runner/api.py 454 690 `desc = scheduler.describe(app_id)`
        `is_wait`. `wait` calls `status`, which calls this, in one thread.
        tests/process/local/test_ends.py::test_nothing_outlives_the_guards
    cli/cmd_log.py 55 43 `def print_log_lines(`
        `find_printer`. It prints the lines of one replica, in a thread for each, to its argument `file`.
        tests/process/local/test_live_bars.py::test_bars_of_all_ranks_are_rows_below_the_lines
    cli/cmd_run.py 249 370 `except (ComponentValidationException, ComponentNotFoundException)`
        `schedulers.errors`. Only these become a line, so ours derive from the first.
        tests/process/local/test_ends.py::test_wrong_options_are_one_line
    cli/cmd_run.py 223 412 `pformat(asdict(dryrun_info`
        `dry_run.hide_secrets`. It prints the AppDef, secrets too: their `repr` is `***`, and a program's YAML, which
        refuses classes that it does not know, has representers for them.
        tests/process/schedulers/test_dry_run.py::test_what_people_read
    specs/api.py 549 888 `return yaml.dump({"AppStatus"`
        `adapter.status.build_status`. A failed job is dumped as YAML: without a representer a state of a replica reads
        `!!python/object/apply:torchx.specs.api.AppState [5]`. `status.shorten_status` leaves out what is long.
        tests/unit/schedulers/test_callers.py::test_a_failed_app_is_printed_with_the_names_of_its_states
    specs/api.py 585 924 `return replica_status.structured_error_msg`
        `wording.replica_lines`. An error that is no JSON is printed as it is, and one that is missing as a reply file
        that is missing.
        tests/unit/schedulers/test_replica_errors.py::test_what_is_said_without_a_report
"""

import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Final, TextIO

_MAINS: Final = ("torchx.cli.main", "muster.cli.run_command", "muster.cli.rehearse.command")
"""`torchx ...`, and the commands of `muster` that submit as it does."""
_NEED_APP: Final = ("torchx.cli.cmd_log", "torchx.cli.cmd_cancel", "torchx.cli.cmd_delete")
_STATUS: Final = "torchx.cli.cmd_status"
_RUNNER: Final = "torchx.runner.api"
_PRINTER: Final = "print_log_lines"
"""Prints the lines of one replica, in a thread for each: to its caller's `file`, with the prefix `ROLE/REPLICA `."""


def runs_command_line() -> bool:
    """Return whether this process is one of `_MAINS`: its main thread is in that command line. For any thread."""
    main = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001  # documented in spite of its name
    return any(_find_module(frame) in _MAINS for frame in _walk(main))


def needs_app() -> bool:
    """Return whether the caller is a command of `torchx` that does not say by itself that an app does not exist.

    0.7's `torchx log` asks for an unknown app for ever. `cancel` and `delete` do not report one.
    """
    return _is_called_by(*_NEED_APP)


def shows_status() -> bool:
    """Return whether the caller is `torchx status`, which a person reads."""
    return _is_called_by(_STATUS)


def is_wait() -> bool:
    """Return whether the caller is TorchX's `Runner.wait`, which reads the state, sleeps and reads it again."""
    return _is_called_by(_RUNNER, method="wait")


def is_cancel() -> bool:
    """Return whether the caller is TorchX's `Runner.cancel`, which leaves alone what has ended by its state."""
    return _is_called_by(_RUNNER, method="cancel")


def _is_called_by(*modules: str, method: str = "") -> bool:
    frames = _walk(sys._getframe(2))  # noqa: SLF001  # `inspect` would do the same
    return any(_find_module(frame) in modules and method in ("", frame.f_code.co_name) for frame in frames)


def find_printer() -> TextIO | None:
    """Find the stream to which TorchX's command line prints the lines that the caller reads. None: others read them."""
    for frame in _walk(sys._getframe(1)):  # noqa: SLF001
        if frame.f_code.co_name == _PRINTER and _find_module(frame).startswith("torchx."):
            file = frame.f_locals.get("file")
            return file if hasattr(file, "isatty") else None
    return None


def _walk(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _find_module(frame: FrameType) -> str:
    """Return the module's real name, also of `python -m torchx.cli.main`."""
    name, spec = frame.f_globals.get("__name__"), frame.f_globals.get("__spec__")
    return str(spec.name if name == "__main__" and spec is not None else name)
