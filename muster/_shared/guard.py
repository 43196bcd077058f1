"""The launched process of every replica: it outlives the process it guards and kills what that leaves behind.

The guard forks the guarded process (the agent, or any command) and then only waits. It is a child subreaper. When the
guarded process ends, for whatever reason, every orphan of the job becomes the guard's child and is killed, even one
that called setsid and emptied its environment. When the guard ends, the guarded process gets a death signal. The guard
holds the fencing lease: the agent sets a timer that both share, and when it expires, the guard kills the workers even
if the agent is stopped.

One file of over 400 lines: the guard of every replica stays small by importing nothing that it does not need, and its
lease and its process are read together.

A guard that is the agent's child was rejected, because it does not see such orphans.

    python -m muster._shared.guard -- COMMAND ARGS     guards any command
    run_guarded(body)                           guards a Python function, which gets the lease
"""

import contextlib
import mmap
import os
import signal
import struct
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NoReturn

from muster._shared import processes
from muster._shared.contract import Env, describe_end

FORWARDED_SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
"""Signals passed on to the guarded process. SIGKILL and SIGSTOP cannot be. All others keep their default."""

_KILL_HINTS: dict[int, str] = {
    signal.SIGKILL: " (by a person, or by the kernel for want of memory)",
    signal.SIGUSR1: " (see --preempt-signal)",
}

STOP_LIMIT_S = 30.0
"""Agent and guard wait this long for killed processes that do not end (uninterruptible sleep), then report them."""

STOP_LIMIT_VARIABLE = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"
"""torch's name of such a limit, in seconds."""

_GIVEN_UP_LIMIT_S = 1.0
"""The last sweep's limit when the agent has waited already."""

_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.25
"""Pauses between two looks at all processes: each is twice as long as the one before."""

_SUSPEND_LIMIT_S = 2.0
"""How long stopping takes at most. A process in uninterruptible sleep stops when that ends."""

_FENCINGS_AT = 0
_GAVE_UP_AT = 4
_IS_LENT_AT = 5
"""Offsets in the shared page: an int32 and two flags."""

_MONOTONIC_AT = 0
_STILL_LEASE_AT = 8
"""Offsets in the page of `SuspendedTime`: two doubles."""


class SuspendedTime:
    """How long a job was stopped, in a page that the guard writes and the agent reads."""

    def __init__(self, fd: int = -1) -> None:
        """Use the memory file `fd` that both sides map. -1: what this process forks shares the page."""
        self._page = mmap.mmap(fd, mmap.PAGESIZE)

    def read_s(self) -> float:
        """Return the stopped time in all, in seconds of the monotonic clock."""
        return float(struct.unpack_from("d", self._page, _MONOTONIC_AT)[0])

    def read_lease_s(self) -> float:
        """Return the time while the lease stood still, in seconds of CLOCK_BOOTTIME."""
        return float(struct.unpack_from("d", self._page, _STILL_LEASE_AT)[0])

    def add(self, seconds: float, lease_s: float) -> None:
        """Record for how long the job was stopped. The guard calls it."""
        struct.pack_into("dd", self._page, _MONOTONIC_AT, self.read_s() + seconds, self.read_lease_s() + lease_s)


class GuardLease:
    """The fencing lease as the agent uses it (see `agent.rendezvous.interface.Lease`), and what else the two share.

    The deadline is a timer on CLOCK_BOOTTIME shared by fork, so a renewal wakes no process, an expiry needs no agent,
    and time that passes while the machine sleeps counts.
    """

    def __init__(self, fds: Sequence[int] | None = None) -> None:
        """Make a new lease, or open the other side's by the descriptors of `make_lease_fds`."""
        timer_fd, page_fd, suspended_fd = fds or (None, -1, -1)
        self.suspended = SuspendedTime(suspended_fd)
        self._timer = processes.BoottimeTimer(timer_fd)
        self._page = mmap.mmap(page_fd, mmap.PAGESIZE)

    @property
    def fd(self) -> int:
        """Guard's side: the descriptor to poll."""
        return self._timer.fd

    def renew(self, until_boottime_s: float) -> None:
        """Let workers run until this time of CLOCK_BOOTTIME (seconds), less the time while the lease stood still."""
        until_boottime_s += self.suspended.read_lease_s()
        self._timer.set(max(until_boottime_s, 1e-9))

    def release(self) -> None:
        """Let workers run without a deadline."""
        self._timer.set(0.0)

    def read_left_s(self) -> float:
        """Return the seconds until the lease expires, or 0 if there is none. The guard calls it."""
        return self._timer.read_left_s()

    def acknowledge_expiry(self) -> bool:
        """Return whether the lease has really expired, and count it for `count_fencings`. The guard calls it."""
        expired = self._timer.acknowledge()
        if expired:
            struct.pack_into("i", self._page, _FENCINGS_AT, self.count_fencings() + 1)
        return expired

    def count_fencings(self) -> int:
        """Return how often the guard has killed the workers because the lease had expired. The agent calls it.

        A count, because a flag that nothing cleared would make a kill in a later round look like fencing.
        """
        (count,) = struct.unpack_from("i", self._page, _FENCINGS_AT)
        return int(count)

    def record_not_ended(self) -> None:
        """Record that processes did not end within the limit, and the agent ends without them. The agent calls it."""
        self._page[_GAVE_UP_AT] = 1

    def read_not_ended(self) -> bool:
        """Return whether `record_not_ended` was called. The guard calls it."""
        return self._page[_GAVE_UP_AT] == 1

    def record_terminal(self, *, is_lent: bool) -> None:
        """Record whether a debugger has the terminal. The agent calls it."""
        self._page[_IS_LENT_AT] = is_lent

    def is_terminal_lent(self) -> bool:
        """Return whether the agent has ended while a debugger had the terminal. The guard calls it."""
        return bool(self._page[_IS_LENT_AT])


def make_lease_fds() -> tuple[int, int, int]:
    """Return what guard and agent need to share a lease if both are made by exec. The caller closes them."""
    timer_fd = processes.BoottimeTimer().fd
    pages = [os.memfd_create(name) for name in ("lease", "suspended")]
    for fd in pages:
        os.ftruncate(fd, mmap.PAGESIZE)
    return timer_fd, pages[0], pages[1]


def parse_stop_limit_s(environ: Mapping[str, str]) -> float | None:
    """Return the limit for killed processes that do not end, in seconds. None: its variable is no number.

    Zero and less mean "never" to torchrun, which only watches for such processes. Here they mean the default, because
    every stop has a limit.
    """
    text = environ.get(STOP_LIMIT_VARIABLE) or "0"
    try:
        limit_s = float(text)
    except ValueError:
        return None
    if limit_s != limit_s:  # NaN
        return None
    return limit_s if limit_s > 0.0 else STOP_LIMIT_S


class _Pauses:
    """When to look again for processes that were killed, and when to give up."""

    def __init__(self, limit_s: float) -> None:
        self._end_s = time.monotonic() + limit_s
        self._pause_s = _FIRST_PAUSE_S

    @property
    def are_over(self) -> bool:
        """True after the limit."""
        return time.monotonic() >= self._end_s

    def take_next_s(self) -> float:
        """Return the next pause."""
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return pause_s


class Guard:
    """Waits for its process, passes signals on, fences, and sweeps at the end. One use."""

    def __init__(self, lease: GuardLease, caller_fd: int | None = None, reported_as: str = "") -> None:
        """Fork nothing yet.

        Args:
            lease: the job's.
            caller_fd: becomes readable when the program that the job belongs to ends. None: there is none.
            reported_as: what the guarded process is in the line that says which signal has killed it. "": no line.
        """
        self._lease = lease
        self._reported_as = reported_as
        self._caller_fd = caller_fd
        self._parent = os.getppid()
        self._ends_with_parent = processes.read_death_signal() != 0
        self._stops_together = os.environ.get(Env.STOPS_TOGETHER) == "1"
        self._waits_suspended = self._stops_together or os.getpid() == 1
        """No shell must see this process stop, so that it waits for SIGCONT, which stays blocked: none is missed."""
        self._stop_limit_s = parse_stop_limit_s(os.environ) or STOP_LIMIT_S
        self._guarded_pid = 0
        self._code: int | None = None
        self._killed_by = 0
        self._fencing: _Pauses | None = None
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        # The last sweep needs two files: fail now.
        for fd in [os.open(os.devnull, os.O_RDONLY) for _ in range(2)]:
            os.close(fd)

    def run(self, body: Callable[[], int]) -> int:
        """Fork, run `body` in the child, and wait for its end. Return the exit code, 128+n if a signal ended it.

        The mask holds back signals that come before the handlers are set, so none is lost and none kills the guard
        between fork and wait.
        """
        processes.become_subreaper()
        # What nohup or a shell ignores stays ignored.
        forwarded = [signum for signum in FORWARDED_SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN]
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*forwarded, signal.SIGCHLD})
        guard_pid = os.getpid()
        try:
            self._guarded_pid = os.fork()
        except OSError as error:
            return _report_shortage(error)
        if self._guarded_pid == 0:
            os.close(self._wake_read)
            os.close(self._wake_write)
            run_guarded_process(guard_pid, old_mask, body)
        return self._run_until_ended(forwarded, old_mask)

    def adopt(self, pid: int) -> int:
        """Guard a child that was forked before this process's exec, and return the exit code.

        All signals are blocked since before that fork, and this process is a subreaper already.
        """
        self._guarded_pid = pid
        return self._run_until_ended(list(FORWARDED_SIGNALS), ())

    def _run_until_ended(self, forwarded: list[signal.Signals], old_mask: Collection[int]) -> int:
        terminal = processes.read_terminal_settings(0)
        stops = [] if signal.getsignal(signal.SIGTSTP) is signal.SIG_IGN else [signal.SIGTSTP]
        for signum in (*forwarded, *stops, signal.SIGCHLD):
            signal.signal(signum, _do_nothing)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.pthread_sigmask(
            signal.SIG_SETMASK, {*old_mask, signal.SIGTTOU, *([signal.SIGCONT] if self._waits_suspended else ())}
        )
        self._wait()
        code = self._sweep()
        if self._killed_by and self._reported_as:
            self._report_killed(self._killed_by)
        if terminal is not None and self._lease.is_terminal_lent():
            processes.restore_terminal(0, terminal)
        for signum in forwarded:
            # After shutdown a signal would replace the exit code.
            signal.signal(signum, signal.SIG_IGN)
        return code

    def _wait(self) -> None:
        self._reap()  # one may have ended before
        while self._code is None:
            self._turn(self._fence())

    def _turn(self, limit_s: float | None) -> None:
        """Wait for a signal, the lease or the caller's end, at most `limit_s` (None: no limit), and handle them."""
        watched = [fd for fd in (self._wake_read, self._lease.fd, self._caller_fd) if fd is not None]
        limit_s = None if limit_s is None else max(0.001, limit_s)
        ready = processes.wait_events(dict.fromkeys(watched, processes.READ), limit_s)
        if self._wake_read in ready:
            for signum in set(os.read(self._wake_read, 4096)):
                self._handle_signal(signum)
        if self._lease.fd in ready and self._lease.acknowledge_expiry():
            self._fencing = _Pauses(self._stop_limit_s)
        if self._caller_fd is not None and self._caller_fd in ready:
            self._caller_fd = None
            if self._code is None:
                # No grace: no process waits for results.
                self._kill_guarded()

    def _handle_signal(self, signum: int) -> None:
        if signum == signal.SIGCHLD:
            self._reap()
        elif self._code is not None:
            return  # collected: the pid may be another process's
        elif signum == signal.SIGTSTP:
            self._suspend()
        elif self._ends_with_parent and os.getppid() != self._parent:
            # Our parent has ended: no grace.
            self._kill_guarded()
        else:
            processes.send_signal([self._guarded_pid], signum)

    def _kill_guarded(self) -> None:
        self._reported_as = ""  # this process kills it
        processes.send_signal([self._guarded_pid], signal.SIGKILL)

    def _report_killed(self, signum: int) -> None:
        hint = _KILL_HINTS.get(signum, "")
        if hint or signum not in FORWARDED_SIGNALS:  # a person has asked for it
            processes.write_stderr(
                f"muster: {self._reported_as} {describe_end(-signum)}{hint}: its workers were killed, too\n"
            )

    def _suspend(self) -> None:
        """Stop the whole job, then this process. After SIGCONT, continue it."""
        left_s = self._lease.read_left_s()
        stops_together = self._stops_together
        if left_s and stops_together:
            self._lease.release()
        elif left_s:
            # A full console must not prevent the stop.
            with contextlib.suppress(OSError):
                print(
                    f"muster: this node stops; in {left_s:.0f} s the job's other nodes go on without it, and its "
                    "workers start again when it continues",
                    file=sys.stderr,
                    flush=True,
                )
        _stop_tree(self._guarded_pid)
        monotonic_s, boottime_s = time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME)
        _stop_self(is_blocked=self._waits_suspended)
        stands_still = stops_together or not left_s
        lease_s = time.clock_gettime(time.CLOCK_BOOTTIME) - boottime_s if stands_still else 0.0
        self._lease.suspended.add(time.monotonic() - monotonic_s, lease_s)
        if left_s and stops_together:
            self._lease.renew(boottime_s + left_s - (self._lease.suspended.read_lease_s() - lease_s))
        elif left_s and self._lease.read_left_s() == 0.0:
            processes.kill_descendants(self._guarded_pid)  # before one runs again
        _continue_tree()

    def _fence(self) -> float | None:
        """Kill the guarded process's descendants, but not itself: it must join again. Returns the next pause.

        Only the guarded process can collect them, and it may be stopped, so no signal reports their ends.
        """
        if self._fencing is None:
            return None
        if processes.kill_descendants(self._guarded_pid) and not self._fencing.are_over:
            return self._fencing.take_next_s()
        self._fencing = None
        return None

    def _reap(self) -> bool:
        """Collect the children that have ended. Return False if no child is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._guarded_pid:
                code = os.waitstatus_to_exitcode(status)
                self._code = code if code >= 0 else 128 - code
                self._killed_by = max(0, -code)

    def _sweep(self) -> int:
        """Kill what is left of the job until nothing is left, or what is left cannot be ended. Return the exit code."""
        pauses = _Pauses(_GIVEN_UP_LIMIT_S if self._lease.read_not_ended() else self._stop_limit_s)
        me = os.getpid()
        while processes.kill_descendants(me) or self._reap():
            if pauses.are_over:
                left = ", ".join(map(str, processes.list_descendants(me)))
                processes.write_stderr(f"muster: left running, because the kernel cannot end them: {left}\n")
                return self._code or 1
            self._turn(pauses.take_next_s())
        assert self._code is not None  # noqa: S101  # _wait returned, so the guarded process has been reaped
        return self._code


def _do_nothing(_signum: int, _frame: object) -> None:
    """Do nothing: with a handler the signal reaches the wake-up descriptor, and `_wait` does all the work."""


def run_guarded_process(guard_pid: int, mask: Collection[int], body: Callable[[], int]) -> NoReturn:
    """Set the death signal, restore default dispositions and run the process. The child calls it."""
    processes.set_death_signal(signal.SIGTERM)
    if os.getppid() != guard_pid:
        os._exit(128 + signal.SIGTERM)
    # A terminal's Ctrl-C then comes once, from the guard. It may write in the background, too (`stty tostop`).
    os.setpgid(0, 0)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, {*mask, signal.SIGTTOU})
    code = 1
    try:
        code = body()
    finally:
        if sys.exc_info()[0] is not None:
            sys.excepthook(*sys.exc_info())
            print("muster: the above is a bug in muster; please report it", file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            # A closed or full console must not change the code.
            with contextlib.suppress(AttributeError, OSError, ValueError):
                stream.flush()
        os._exit(code)


# -- a job that stands still for a while (Ctrl-Z) ---------------------------------------------------------------------
#
# A terminal's Ctrl-Z reaches the guard only: the agent is in a process group of its own, and each worker in a session
# of its own. The guard stops all of them, then itself, so that the shell gets the terminal back. `fg`, or SIGCONT,
# continues them. The agent's clocks stand still until then, because a limit that runs out while no process may run says
# nothing.
#
# The lease stands still only if no other node can go on: a node alone has none, and an adapter says that it stops all
# nodes together. Otherwise the others replace this node, and its workers are killed before they continue.


def _stop_tree(guarded_pid: int) -> None:
    """Stop the guarded process, which then starts no more, and all descendants of this process."""
    end_s = time.monotonic() + _SUSPEND_LIMIT_S
    processes.send_signal([guarded_pid], signal.SIGSTOP)
    while time.monotonic() <= end_s:
        running = [pid for pid in processes.list_descendants(os.getpid()) if not _is_stopped(pid)]
        if not running:
            return
        processes.send_signal(running, signal.SIGSTOP)
        time.sleep(0.002)


def _continue_tree() -> None:
    """Continue all descendants of this process."""
    processes.send_signal(processes.list_descendants(os.getpid()), signal.SIGCONT)


def _is_stopped(pid: int) -> bool:
    stat = processes.read_stat(pid)
    return stat is None or stat[0] in ("T", "t", "Z", "X")


def _stop_self(*, is_blocked: bool) -> None:
    """Stop this process until SIGCONT.

    It does not use SIGTSTP, which the kernel ignores where no shell could continue the process.

    Args:
        is_blocked: SIGCONT is blocked in this process: wait for it. One that came while the others were being stopped
            counts, and the first process of a container, which cannot stop itself, waits, too.
    """
    if is_blocked:
        signal.sigwait({signal.SIGCONT})
    else:
        os.kill(os.getpid(), signal.SIGSTOP)


# -- how it is called -------------------------------------------------------------------------------------------------


def _open_standard_descriptors() -> None:
    """Open closed descriptors 0 to 2: one of our pipes would get the number, and workers would write into it."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def run_guarded(body: Callable[[GuardLease], int], *, caller_fd: int | None = None, reported_as: str = "") -> int:
    """Run `body` under a guard, and return its exit code.

    Call it early and from a single-threaded process: what has been imported stays in the guard's memory.

    Args:
        body: gets the lease, and runs in the guarded process.
        caller_fd: a pidfd of the program that the job belongs to, whose end ends the job. None: there is none.
        reported_as: see `Guard`.
    """
    if not processes.LINUX:
        processes.write_stderr(f"muster: jobs run on Linux, this is {sys.platform}\n")
        return 1
    try:
        _open_standard_descriptors()
        lease = GuardLease()
        guard = Guard(lease, caller_fd, reported_as)
    except OSError as error:
        return _report_shortage(error)
    return guard.run(lambda: body(lease))


def _report_shortage(error: OSError) -> int:
    """Report that the machine has no descriptor, memory or process left. Return the exit code."""
    processes.write_stderr(f"muster: cannot start: {error.strerror}\n")
    return 1


def _exec_command(command: Sequence[str]) -> int:
    if Env.AFTER in os.environ:
        from muster._shared.role_start import wait_for_role

        wait_for_role(os.environ, lambda line: processes.write_stderr(f"muster: {line}\n"))
        del os.environ[Env.AFTER]
    processes.reset_ignored()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTTOU])
    try:
        os.execvp(command[0], list(command))  # noqa: S606  # no shell, on purpose
    except OSError as error:
        processes.write_stderr(f"muster: cannot run {command[0]!r}: {error.strerror}\n")
        return 127 if isinstance(error, FileNotFoundError) else 126


def main(argv: Sequence[str]) -> int:
    """Run `python -m muster._shared.guard -- COMMAND ARGS`, and return the exit code."""
    command = argv[1:] if argv[:1] == ["--"] else argv
    if not command:
        print("muster: usage: python -m muster._shared.guard -- COMMAND [ARG ...]", file=sys.stderr)
        return 2
    return run_guarded(lambda _lease: _exec_command(command))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
