"""Runs the command of a replica where no supervisor of muster starts it: in a pod, or in a container that waits.

    python3 muster-agent.zip --replica '{"restart": "always"}' [FILE] -- COMMAND [ARG ...]

It waits for the role that `Env.AFTER` names, and starts the command again as its role's policy says. Whatever it is
sent, the command gets. After a signal that ends it, nothing is started again. FILE says how often it was.
"""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

from muster._shared import processes
from muster._shared.contract import Env, ExitCode
from muster._shared.role_policy import MOST_BACKOFF_S, Restart, parse_policy
from muster._shared.role_start import wait_for_role

_PASSED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_ENDS: Final = (signal.SIGTERM, signal.SIGINT)
_ROOT: Final = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
"""The folder or zip with this package."""
_GUARD: Final = """import sys
sys.path[:] = [*filter(None, sys.path), sys.argv.pop(1)]
from muster._shared.guard import main
sys.exit(main(sys.argv[1:]))
"""
"""Leaves nothing of a command behind: the next one needs its ports and its GPU."""


class _Runner:
    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._pid = 0
        self.is_stopping = False
        for signum in _PASSED:
            signal.signal(signum, self._pass_on)

    def _pass_on(self, signum: int, _frame: object) -> None:
        self.is_stopping = self.is_stopping or signum in _ENDS
        if self._pid:
            processes.send_signal([self._pid], signum)
        elif self.is_stopping:  # it waits, or is between two runs
            os._exit(128 + signum)

    def run(self) -> int:
        """Run the command once, and return its exit code: 128+n for signal n, 126 or 127 if it cannot be run."""
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED)
        try:
            self._pid = processes.spawn_program(
                self._command, os.environ, os.getcwd(), (0, 1, 2), death_signal=signal.SIGTERM
            )
        except OSError as error:
            processes.write_stderr(f"muster: cannot run {self._command[0]!r}: {error.strerror}\n")
            return 127 if isinstance(error, FileNotFoundError) else 126
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        self._pid = 0
        return code if code >= 0 else 128 - code


def _write_count(path: str, restarts: int) -> None:
    with contextlib.suppress(OSError), open(path, "w", encoding="ascii") as file:  # a full disk
        file.write(str(restarts))


def main(args: Sequence[str], *, pause: Callable[[float], None] = time.sleep) -> int:
    """Run the command, and return its last exit code; 143 for one that its policy would start again, but for a signal.

    Args:
        args: the policy as JSON, perhaps the path of the file for the number of restarts, `--`, the command.
        pause: sleeps.
    """
    end = args.index("--")
    policy, command = parse_policy("", json.loads(args[0])), args[end + 1 :]
    runs_agent = os.environ.get(Env.REQUIRE_TOKEN) == "1"  # it brings its own guard
    runner = _Runner(command if runs_agent else [sys.executable, "-c", _GUARD, _ROOT, "--", *command])
    wait_for_role(os.environ, lambda line: processes.write_stderr(f"muster: {line}\n"), pause=pause)
    os.environ.pop(Env.AFTER, None)
    restarts = quick_ends = 0
    while True:
        begun_s = time.monotonic()
        code = runner.run()
        if runner.is_stopping and not runs_agent and policy.restart not in (None, Restart.NEVER):
            return int(ExitCode.TERMINATED)
        if runner.is_stopping or not policy.restarts(code, restarts, runs_agent=runs_agent):
            return code
        restarts += 1
        quick_ends = quick_ends + 1 if time.monotonic() - begun_s < MOST_BACKOFF_S else 0
        delay_s = policy.find_pause_s(quick_ends)
        most = "" if policy.max_restarts is None else f" of {policy.max_restarts}"
        processes.write_stderr(f"muster: exited with {code}: restart {restarts}{most} in {delay_s:g} s\n")
        for path in args[1:end]:
            _write_count(path, restarts)
        pause(delay_s)
