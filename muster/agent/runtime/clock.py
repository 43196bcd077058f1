"""Time, injected everywhere so that tests control it."""

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds for decisions; wall-clock seconds for records that people read, never compared across hosts."""

    def now_s(self) -> float:
        """Seconds of a monotonic clock that does not run while the machine sleeps."""
        ...

    def boottime_s(self) -> float:
        """Seconds of CLOCK_BOOTTIME, which also counts while the machine sleeps; leases are measured with it."""
        ...

    def wall_s(self) -> float:
        """Seconds since the epoch, for records only."""
        ...


class Suspensions(Protocol):
    """How long the job was stopped: `muster._shared.guard.SuspendedTime`."""

    def read_s(self) -> float:
        """In all."""
        ...

    def read_lease_s(self) -> float:
        """While the lease stood still."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now_s(self) -> float:
        """See `Clock`."""
        return time.monotonic()

    def boottime_s(self) -> float:
        """See `Clock`."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def wall_s(self) -> float:
        """See `Clock`."""
        return time.time()


class JobClock(SystemClock):
    """The machine's clocks, which stand still while the whole job is stopped (Ctrl-Z)."""

    def __init__(self, suspended: Suspensions) -> None:
        self._suspended = suspended

    def now_s(self) -> float:
        """See `Clock`."""
        return super().now_s() - self._suspended.read_s()

    def boottime_s(self) -> float:
        """See `Clock`. It runs on while other nodes may replace this one."""
        return super().boottime_s() - self._suspended.read_lease_s()
