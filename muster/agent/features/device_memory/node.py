"""The part: remembers what was in use before the first workers, and holds later ones back."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from muster._shared.gpus import Device, Devices, read_devices
from muster._shared.preflight import Need, choose_devices, describe_use, is_free, parse_visible
from muster._shared.processes import find_nvml
from muster.agent.node.round_parts import PartContext, RoundPart, Start
from muster.agent.runtime.loop import run_limited

if TYPE_CHECKING:
    from muster.agent.round import Round
    from muster.agent.workers.pool import WorkerEnd


LIMIT_S: Final = 50.0
"""NVRx waits equally long."""
ANSWER_S: Final = 10.0
_TOLD_S: Final = 5.0
"""A longer wait is reported in a line."""
_POLL_S: Final = 0.25


class DeviceMemory:
    """The memory of the devices of one node's workers. Its methods may block, each in its own thread.

    The driver frees the memory of a killed process some time after its end. A worker that is forked 44 ms later could
    find the device still full, and fail because of that. A device is free when no more memory is in use than before the
    first workers of the job, or than what `preflight` counts as free. Parts of devices (MIG) are not awaited, because
    NVML reports their memory by separate handles.
    """

    def __init__(
        self,
        library: str,
        nproc: int,
        visible: str | None,
        *,
        limit_s: float = LIMIT_S,
        answer_s: float = ANSWER_S,
        sleep: Callable[[float], None] = time.sleep,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open nothing.

        Args:
            library: NVML's.
            nproc: workers.
            visible: CUDA_VISIBLE_DEVICES of the workers; None if it is not set.
            limit_s: the longest wait.
            answer_s: the limit for one answer of the driver.
            sleep: passes the time.
            now_s: the monotonic clock.
        """
        self._library = library
        self._need = Need(nproc=nproc, devices=None, visible=parse_visible(visible))
        self._limit_s = limit_s
        self._answer_s = answer_s
        self._sleep = sleep
        self._now_s = now_s
        self._before: dict[int, int] = {}
        """Bytes in use before the first workers, by device."""

    def remember(self) -> None:
        """Record what is in use now. It is not the workers', which have just been started for the first time."""
        if not self._before:
            self._before = {device.index: device.used_bytes for device in self._read() or ()}

    def wait(self, is_cancelled: Callable[[], bool]) -> tuple[str, ...]:
        """Wait until all devices are free, at most for `limit_s` and until `is_cancelled`; return lines for people."""
        began_s = self._now_s()
        first: tuple[Device, ...] = ()
        while not is_cancelled():
            devices = self._read()
            if devices is None:
                why = f"the NVIDIA driver has not answered within {self._answer_s:g} s"
                return (f"{why}: workers start without a check of the memory of their devices",)
            full = tuple(device for device in devices if not self._is_free(device))
            first = first or full
            took_s = self._now_s() - began_s
            if not full:
                names = ", ".join(str(device.index) for device in first)
                return (f"the memory of device {names} was free after {took_s:.0f} s",) if took_s >= _TOLD_S else ()
            if took_s >= self._limit_s:
                after = f"{took_s:.0f} s after the last workers ended; workers are started anyway"
                return tuple(f"{describe_use(device)} {after}" for device in full)
            self._sleep(_POLL_S)
        return ()

    def _read(self) -> tuple[Device, ...] | None:
        """Return the job's devices; None if the driver does not answer in time, for example because a GPU hangs."""
        if self._need.visible == ():
            return ()
        found: list[Devices | None] = []
        try:
            is_done = run_limited([lambda: found.append(read_devices(self._library))], self._answer_s)
        except RuntimeError:  # no threads left
            return ()
        if not is_done:
            return None
        if not found or found[0] is None:
            return ()
        chosen = choose_devices(found[0], self._need)
        # If unspecified, local rank n uses the n-th.
        return chosen[: self._need.nproc] if self._need.visible is None else chosen

    def _is_free(self, device: Device) -> bool:
        return is_free(device) or device.used_bytes <= self._before.get(device.index, 0)


class DeviceMemoryPart(RoundPart):
    """Holds a start back if workers of the last round failed or were stopped."""

    def __init__(self, context: PartContext) -> None:
        env = context.config.base_env
        self._context = context
        self._memory = DeviceMemory(find_nvml(env) or "", context.config.nproc, env.get("CUDA_VISIBLE_DEVICES"))
        self._is_restart = False

    def begin_round(self, formed: "Round", start: Start | None) -> None:
        """See `RoundPart`."""
        del formed
        is_restart, self._is_restart = self._is_restart, False
        if start is None:
            return
        if not is_restart:
            self._context.loop.call_in_thread(self._memory.remember, lambda _: None, lambda _error: None)
            return
        release = start.hold()

        def finish(lines: tuple[str, ...]) -> None:
            for line in lines:
                self._context.logs.print_line(line)
            release()

        self._context.loop.call_in_thread(
            lambda: self._memory.wait(lambda: start.has_stopped), finish, lambda _error: ()
        )

    def end_worker(self, end: "WorkerEnd") -> None:
        """See `RoundPart`."""
        self._is_restart |= end.code != 0 or end.signalled_s is not None


def create_part(context: PartContext) -> DeviceMemoryPart:
    """Create the part of one agent."""
    return DeviceMemoryPart(context)
