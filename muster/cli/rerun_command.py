"""`muster rerun`: runs the last `muster run` of this folder again, with `--watch` whenever a file changes.

The last line of each folder is in the state folder of its user, and concerns that user alone. With `--watch` each run
is a `muster run` of its own, in the foreground of this terminal. Ctrl-C reaches both. A signal that was sent to this
process alone is passed on, which `si_code` tells apart.
"""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from muster._shared import processes
from muster._shared.contract import AskOutcome, describe_exit_code
from muster._shared.control import CommandExit, ControlError, describe_answer
from muster._shared.foreign_files import parse_json, read_whole
from muster.cli import operations
from muster.cli.answers import say
from muster.schedulers.adapter.properties import find_properties
from muster.schedulers.errors import UnsafeFolderError
from muster.schedulers.supervision.app_folder import write_text
from muster.schedulers.supervision.registry import find_state_dir

if TYPE_CHECKING:  # every `muster run` records its line
    from muster.cli.workspace_watch import WorkspaceWatch

_FOLDER: Final = "last-lines"
_LOOK_S: Final = 0.1
_QUIET_S: Final = 0.3
"""After the last of several changes."""
_QUIET_LIMIT_S: Final = 3.0
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def record_line(argv: Sequence[str]) -> None:
    """Keep the words of a `muster` command as the last line of this folder. Without space for it, the one before stays.

    Args:
        argv: what follows `muster`.
    """
    with contextlib.suppress(OSError, ControlError):
        path = _find_path()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_text(path, json.dumps({"folder": os.getcwd(), "words": list(argv)}))


def read_line() -> list[str]:
    """Return the words of the last line of this folder.

    Raises:
        ControlError: there is none.
    """
    try:
        content: Any = parse_json(read_whole(_find_path()))
        return [str(word) for word in content["words"]]
    except FileNotFoundError:
        line = "no `muster run` was started in this folder: there is nothing to run again"
        raise ControlError(line, CommandExit.REFUSED) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ControlError(
            f"the last `muster run` of this folder cannot be read: {error}", CommandExit.REFUSED
        ) from error


def _find_path() -> Path:
    """Raise OSError."""
    try:
        state_dir = find_state_dir(os.environ)
        return state_dir / _FOLDER / f"{hashlib.sha256(os.fsencode(os.getcwd())).hexdigest()[:32]}.json"
    except UnsafeFolderError as error:
        raise ControlError(str(error), CommandExit.REFUSED) from error


def watch(argv: Sequence[str], workspace: str) -> int:
    """Run a line, and again whenever a file of the workspace has changed, until Ctrl-C. The exit code.

    Args:
        argv: of the line.
        workspace: its folder.
    """
    from muster.cli.workspace_watch import WorkspaceWatch, describe_changes

    with WorkspaceWatch(Path(workspace)) as files, _blocked_signals():
        while True:
            files.begin_run()
            run = _Run(argv)
            changes, signum = _wait(run, files)
            if changes:
                say(f"{describe_changes(changes)}: the run starts again")
            signum = run.stop(signum)
            if signum is not None:
                return 128 + abs(signum)
            dropped = files.end_run(changes[0])
            if dropped:
                line = f"{dropped} changes in each run, at the same time: it is no longer watched"
                say(f"{line}; a line in .torchxignore leaves it out for good")


def may_outlive_command(handle: str) -> bool:
    """Return whether the job of a handle may go on when its command ends. On a hold it does if it is told to."""
    return bool(handle) and not find_properties(handle.partition("://")[0]).waits


class _Run:
    """One `muster run` that has been started. It is for one use.

    Args:
        argv: of the line.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        parent = os.getpid()

        def prepare() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # background jobs ignore it
            processes.set_death_signal(signal.SIGTERM)
            if os.getppid() != parent:
                os._exit(1)

        self.handle = ""
        self._process: subprocess.Popen[bytes] = subprocess.Popen(
            [sys.executable, "-m", "muster", *argv],
            stdout=subprocess.PIPE,
            preexec_fn=prepare,  # noqa: PLW1509  # it only makes system calls
        )
        self._copier = threading.Thread(target=self._copy, name="muster-rerun", daemon=True)
        self._copier.start()

    def _copy(self) -> None:
        """Pass on its standard output, on which its handle is the first line."""
        assert self._process.stdout is not None  # noqa: S101  # it is a pipe
        with self._process.stdout as stream:
            for line in stream:
                if not self.handle and b"://" in line:
                    self.handle = line.decode(errors="replace").strip()
                with contextlib.suppress(OSError):
                    os.write(1, line)

    @property
    def outlives_command(self) -> bool:
        """Whether the job goes on when its command ends."""
        options = find_properties(self.handle.partition("://")[0]).run_options
        return may_outlive_command(self.handle) and options.get("detach") != "false"

    def poll(self) -> int | None:
        """Return its exit code. None: it runs."""
        code = self._process.poll()
        return None if code is None else code if code >= 0 else 128 - code

    def stop(self, signum: int | None) -> int | None:
        """Stop it as Ctrl-C does, if it runs, and its job with it. Return the first signal that has come by then.

        Args:
            signum: one that has come, see `wait_signal`. None: a file has changed.
        """
        next_signum: int | None = signal.SIGINT if signum is None else signum
        while self.poll() is None:
            if next_signum is not None and next_signum > 0:
                self._process.send_signal(next_signum)
            next_signum = wait_signal(_LOOK_S)
            signum = signum or next_signum
        self._copier.join(1.0)
        if may_outlive_command(self.handle):
            with contextlib.suppress(ControlError):  # it has ended
                answer = operations.stop(self.handle)
                say(describe_answer(answer))
                if answer.outcome is AskOutcome.UNREACHED:
                    say(describe_answer(operations.stop(self.handle, now=True)))
        return signum


def _wait(run: _Run, files: "WorkspaceWatch") -> tuple[list[str], int | None]:
    """Wait for a change or a signal. Returns the files that have changed, or the signal."""
    has_ended = told = False
    while True:
        signum = wait_signal(0.0)
        if signum is not None:
            return [], signum
        code = run.poll()
        if code is not None and not has_ended:
            has_ended = not run.outlives_command or code != 0
            if has_ended or not told:
                say(f"the run {describe_exit_code(code)}" if has_ended else "the job was submitted")
                told = True
        if files.wait(_LOOK_S):
            changes = _settle(files, is_running=not has_ended)
            if changes:
                return changes, None


def _settle(files: "WorkspaceWatch", *, is_running: bool) -> list[str]:
    """Look at the files once no more of them change."""
    until_s = time.monotonic() + _QUIET_LIMIT_S
    while files.wait(_QUIET_S) and time.monotonic() < until_s:
        pass
    return files.find_changes(is_running=is_running)


def wait_signal(limit_s: float) -> int | None:
    """Return a signal that has come. It is negative if the terminal has sent it, to all that are in the foreground.

    Source: sigaction(2), si_code: SI_KERNEL is above 0, what a process sends is not.
    """
    found = signal.sigtimedwait(_SIGNALS, limit_s)
    if found is None:
        return None
    return -found.si_signo if found.si_code > 0 else found.si_signo


@contextlib.contextmanager
def _blocked_signals() -> Iterator[None]:
    before: Any = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
